#!/usr/bin/env bash
# Runs the tests with verl, as it was released. Other arguments than --all go to pytest, each time.
#
# The newest release runs all of them. Older ones leave out what is marked `newest`: our own code, or Ray's, and not
# verl's of that release. What they run is where releases differ: how they pack, narrow, merge and hand on
# (test_engine.BY_RELEASE, test_functions), configs, agent loops, the engine under MindSpeed, and of 0.7 its own actor
# and its external_lib. test_functions runs on one more release of Megatron-core. npu_patches runs each form of verl's
# own block for an NPU (0.9.1's; 0.7.1's on transformers 4; 0.8.0's patches want a transformers that its block doesn't
# run on), and ms-swift's on both lines of transformers. With --all: every way of FSDP2, Megatron-core 0.13.1, and
# 0.9.1's block on transformers 4.
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == --all ]]; then
    shift
    export NPU_REPLAY_VERL_ALL=1
fi
source ci/environment.sh
for release in 0.7.1 0.8.0 0.9.1; do fetch_verl $release; done
all=${NPU_REPLAY_VERL_ALL:-}
for release in ${all:+0.13.1} 0.15.3; do fetch_megatron $release; done
fetch transformers 4.57.6
datasets=$work/beside/datasets==4.0.0 # verl imports it, and newer ones want a newer huggingface-hub
if [[ ! -d $datasets ]]; then fill "$datasets" pip_into --no-deps datasets==4.0.0 || fail "could not fetch datasets"; fi
swift=$work/ms-swift-source/4.6.0 # its code alone
if [[ ! -d $swift ]]; then fill "$swift" code_into ms-swift==4.6.0 swift || fail "could not fetch ms-swift"; fi

fetched
tests_started=$SECONDS
export OMP_NUM_THREADS=1 # two workers share the cores
export NPU_REPLAY_NEEDED=1
status=0

run_with() {
    try "pytest with verl $2 on megatron-core $1" \
        with_verl "$1" "$2" python -m pytest -n "${NPU_REPLAY_WORKERS:-2}" -rs "${@:3}"
}

older=(--dist loadfile -m "not newest" --ignore tests/on_verl/test_fsdp.py tests/on_verl)
run_with 0.12.1 0.7.1 "${older[@]}" "$@"
run_with 0.16.1 0.8.0 "${older[@]}" "$@"
PYTHONPATH=$swift${PYTHONPATH:+:$PYTHONPATH} \
    run_with 0.12.1 0.9.1 --dist loadfile tests/on_verl tests/npu_patches "$@"
run_with 0.15.3 0.9.1 tests/on_verl/test_functions.py "$@"
if [[ $all ]]; then run_with 0.13.1 0.8.0 tests/on_verl/test_functions.py "$@"; fi
export PYTHONPATH=$swift:$datasets:$work/transformers/4.57.6${PYTHONPATH:+:$PYTHONPATH}
patches="npu_patches or for_an_npu"
fsdp=(--dist loadfile -m "not newest" tests/npu_patches tests/on_verl/test_fsdp.py)
# Of 0.7.1, whose engine is nearly 0.8's, a case of one process and one of two.
of_each=(-k "$patches or alone and packed or two_processes and dynamic and not sp2 and not R3")
if [[ $all ]]; then
    of_each=()
    run_with 0.12.1 0.9.1 --dist loadfile -k "$patches" tests/npu_patches tests/on_verl/test_fsdp.py "$@"
fi
run_with 0.12.1 0.7.1 "${fsdp[@]}" "${of_each[@]}" "$@"
run_with 0.12.1 0.8.0 "${fsdp[@]:0:4}" tests/on_verl/test_fsdp.py "$@"
# Two nodes and eight ranks of a real Ray, which the packages for verl bring along.
if [[ $# == 0 ]]; then
    unset PYTHONPATH
    try "routes over a real Ray" python -m pytest -q -rs -p no:xdist tests/delivery/test_ray.py tests/docs/test_delivery.py
fi

echo "verl: tests $((SECONDS - tests_started)) s"
exit $status
