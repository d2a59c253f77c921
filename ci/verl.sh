#!/usr/bin/env bash
# Runs the tests with verl, as it was released. Other arguments than --all go to pytest, each time.
#
# 0.9.1 runs all of them but those marked `long` on Megatron-core 0.18.2, which verl's images of today have, and
# MindSpeed's stand-in with TransformerEngineNPU's. 0.7.1 runs its whole engine on 0.12.1, where the replay is lent to
# Megatron (0.9.1 runs a whole job there in ci/live.sh), and the one that it takes on an NPU. Older releases leave out what
# is marked `newest`: our own code, and not verl's of that release. What they run is where releases differ:
# how they pack, narrow, merge and hand on (test_engine.BY_RELEASE, test_fsdp.BY_RELEASE, test_functions), configs,
# agent loops, and of 0.7 its own actor and its external_lib. They have transformers 4, which they want; the newest has
# 5. npu_patches runs each form of verl's own block for an NPU (0.9.1's; 0.7.1's; 0.8.0's patches want a transformers
# that its block doesn't run on), and ms-swift's on both lines of transformers. With --all: what is `long`; 0.7.1's engine
# beside what it is without npu_replay, on 0.16.1, since it can't run on 0.12.1 by itself; 0.9.1 whole on 0.12.1; 0.9.0,
# which narrows routes as 0.8.0 does; Megatron-core 0.13.1 and 0.15.3; and 0.9.1's block on transformers 4.
set -euo pipefail
cd "$(dirname "$0")/.."
all=
if [[ ${1:-} == --all ]]; then
    shift
    all=1
fi
source ci/environment.sh
for release in 0.7.1 0.8.0 0.9.1; do fetch_verl $release; done
fetch megatron 0.18.2
if [[ $all ]]; then
    for release in 0.13.1 0.15.3; do fetch megatron $release; done
    fetch_verl 0.9.0
fi
fetch transformers 4.57.6
datasets=$work/beside/datasets==4.0.0 # verl imports it, and newer ones want a newer huggingface-hub
once "$datasets" datasets pip_into --no-deps datasets==4.0.0
swift=$work/ms-swift-source/4.6.0 # its code alone
once "$swift" ms-swift code_into ms-swift==4.6.0 swift

fetched
tests_started=$SECONDS
export OMP_NUM_THREADS=1 # two workers share the cores
export NPU_REPLAY_NEEDED=1
status=0

# run_with MEGATRON VERL MARKERS ARGUMENT ...
run_with() {
    try "pytest with verl $2 on megatron-core $1" \
        with_releases "megatron/$1 verl/$2" python -m pytest -n "$workers" --dist loadfile -rs -m "$3" "${@:4}"
}

quick="not long"
if [[ $all ]]; then quick=; fi
export PYTHONPATH=$swift${PYTHONPATH:+:$PYTHONPATH}
run_with 0.18.2 0.9.1 "$quick" tests/on_verl tests/npu_patches "$@"
if [[ $all ]]; then
    run_with 0.12.1 0.9.1 "" tests/on_verl "$@"
    run_with 0.18.2 0.9.0 "not newest" tests/on_verl/test_functions.py tests/on_verl/test_engine.py "$@"
    run_with 0.15.3 0.9.1 "not newest" tests/on_verl/test_functions.py tests/on_verl/test_engine.py "$@"
    run_with 0.13.1 0.8.0 "not newest" tests/on_verl/test_functions.py tests/on_verl/test_engine.py "$@"
fi
export PYTHONPATH=$datasets:$work/transformers/4.57.6:$PYTHONPATH
run_with 0.12.1 0.7.1 "not newest${quick:+ and $quick}" tests/on_verl tests/npu_patches "$@"
run_with 0.16.1 0.8.0 "not newest${quick:+ and $quick}" tests/on_verl "$@"
if [[ $all ]]; then
    run_with 0.16.1 0.7.1 "" "tests/on_verl/test_untouched.py::test_an_engine_trains_as_without_the_package[megatron]" "$@"
    block="tests/on_verl/test_fsdp.py::test_verls_own_fsdp_engine_in_two_processes[verl's block for an NPU]"
    run_with 0.12.1 0.9.1 "" tests/npu_patches "$block" "$@"
fi
# Two nodes and four ranks of a real Ray, which the packages for verl bring along.
if [[ $# == 0 ]]; then
    unset PYTHONPATH
    try "routes over a real Ray" python -m pytest -q -rs -p no:xdist tests/delivery/test_ray.py
fi

echo "verl: tests $((SECONDS - tests_started)) s"
exit $status
