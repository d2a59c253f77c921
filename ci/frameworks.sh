#!/usr/bin/env bash
# Runs a framework's own tests of routing replay with npu_replay imported, and without:
#
#     ci/frameworks.sh verl|nemo-rl|skyrl FOLDER [MEGATRON ...]
#     ci/frameworks.sh roll|slime FOLDER [MEGATRON]     # our tests of these (tests/on_roll, tests/on_slime)
#
# FOLDER holds the framework's source; the releases of Megatron-core are 0.12.1 and 0.16.1 where none is named,
# 0.12.1 for ROLL, and 0.13.1 for slime, whose own code fails on 0.12. In the place of a release may stand a folder
# with a source tree of Megatron-LM, for a commit.
# What the framework imports has to be in the active environment, in the versions that it wants, and the Python
# too. Each test file has a process of its own, since some put stand-ins in the place of modules.
set -euo pipefail
if [[ $# -lt 2 || ! -d $2 ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
framework=$1
folder=$(cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/.."
source ci/environment.sh

if [[ $framework == roll || $framework == slime ]]; then
    if [[ $framework == roll ]]; then megatron=0.12.1; else megatron=0.13.1; fi
    megatron=${1:-$megatron}
    if [[ ! -d $megatron ]]; then
        fetch megatron "$megatron"
        megatron=$work/megatron/$megatron
    fi
    export OMP_NUM_THREADS=1 NPU_REPLAY_NEEDED=1 PYTHONPATH=$folder:$(cd "$megatron" && pwd)${PYTHONPATH:+:$PYTHONPATH}
    python -m pytest -rs "tests/on_$framework"
    if [[ $framework == roll ]]; then
        fetch transformers 4.57.6 # whose block ROLL changes
        PYTHONPATH=$work/transformers/4.57.6:$PYTHONPATH python -m pytest -rs tests/npu_patches -k roll
    fi
    exit
fi

case $framework in
    verl) files=(tests/utils/megatron/test_router_replay_model_walk_on_cpu.py
        tests/utils/test_megatron_router_replay_dcp.py) ;;
    nemo-rl) files=(tests/unit/models/megatron/test_router_replay.py) ;;
    skyrl) files=(tests/backends/skyrl_train/utils/test_replay_utils.py) ;;
    *) fail "knows verl, nemo-rl, skyrl, roll and slime, not $framework" ;;
esac
releases=("$@")
if [[ ${#releases[@]} == 0 ]]; then releases=(0.12.1 0.16.1); fi
export OMP_NUM_THREADS=1

for release in "${releases[@]}"; do
    fetch megatron "$release"
    for file in "${files[@]}"; do
        for disabled in 0 1; do
            if [[ $disabled == 1 ]]; then with=without; else with=with; fi
            echo "== $file on Megatron-core $release $with npu_replay"
            # A failure is a figure here: what is expected is in docs/dev/tried.md.
            (
                cd "$folder"
                export NPU_REPLAY_DISABLE=$disabled PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
                # Its own conftest may start a cluster, and its options may name plug-ins that aren't here.
                with_megatron "$release" python -m pytest -q -p npu_replay -p no:cacheprovider --noconftest \
                    -o addopts= -W ignore --tb no "$file"
            ) || true
        done
    done
done
