#!/usr/bin/env bash
# Runs the tests with Megatron 0.12.1, then those that need Megatron with 0.16.1.
#
#   ci/test.sh                  the quick ones, in 8 to 12 minutes on two cores the first time, downloads included: no
#                               wheels, no smoke jobs, nothing slow, and two of the ways to split a model
#   ci/test.sh --all            all of them with the first release, and with the next what needs Megatron
#                               (neither has tests/matrix/, which ci/matrix.sh runs on every release)
#   ci/test.sh ARGUMENT ...     what pytest makes of these: ci/test.sh tests/sessions/test_session.py -k recompute
#
# Its last line says passed or FAILED, how many tests on which release, and in how many seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh

tests_started=$SECONDS
export OMP_NUM_THREADS=1 # two workers share the cores
parallel=tests/distributed/test_parallel.py smoke=tests/distributed/test_smoke.py
later="megatron and not first_release" # what a later release runs
status=0 runs=0
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# loadfile: the tests of a file share something costly, such as one wheel or one job, and run in one worker. They come
# in the order of tests/conftest.py: xdist's own would have the files with few tests last, and these take the longest.
run_pytest() {
    local release=$1 rc=0
    runs=$((runs + 1))
    shift
    echo "== pytest with megatron-core $release"
    # ci/verl.sh runs those with verl, ci/engines.sh those with vLLM and SGLang, ci/live.sh those with a live vLLM.
    with_megatron "$release" python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs \
        --junit-xml "$results/$release/$runs.xml" \
        --ignore tests/on_verl --ignore tests/on_engines --ignore tests/on_vllm_ascend --ignore tests/live \
        --ignore tests/verl_live --ignore tests/npu_patches "$@" || rc=$?
    # 5: nothing selected. An argument may pick tests of which none needs Megatron.
    if [[ $rc == 5 && ${2:-} == "$later" ]]; then rc=0; fi
    if [[ $rc != 0 ]]; then status=1; fi
}

# What every release runs in each mode; the first runs also what needs no Megatron.
quick() {
    run_pytest "$1" -m "$2not slow and not packaging" --ignore "$parallel" --ignore "$smoke" --ignore tests/matrix
    run_pytest "$1" "$parallel" -k "2-tp2-full or pp2-vp2-full"
}

# The first release runs all; a later one what needs Megatron, and of the parallel cases a choice.
all() {
    if [[ -z $2 ]]; then
        run_pytest "$1" --ignore tests/matrix "${@:3}"
    else
        run_pytest "$1" -m "${2% and }" --ignore tests/matrix --ignore "$parallel" "${@:3}"
        run_pytest "$1" "$parallel" -k "$parallel_choice"
    fi
}

marks=""
releases=$(python ci/matrix.py tier tests) # a loop over what fails would run no test and be content
for release in $releases; do
    case ${1:-} in
        "") quick "$release" "$marks" ;;
        --all) all "$release" "$marks" "${@:2}" ;;
        *) run_pytest "$release" ${marks:+-m "${marks% and }"} "$@" ;;
    esac
    marks="$later and "
done

python ci/last_line.py "$results" "$status" "$((SECONDS - tests_started))" "$setup_seconds"
exit $status
