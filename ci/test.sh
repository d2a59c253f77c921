#!/usr/bin/env bash
# Runs the tests with Megatron 0.12.1, then those that need Megatron with 0.16.1.
#
#   ci/test.sh                  the quick ones, in 3 minutes on two cores (5 to 8 the first time, downloads included): no
#                               wheels, no smoke jobs, no split model, nothing slow
#   ci/test.sh --rest [...]     what these leave out, except what is marked `long`; further arguments go to pytest
#   ci/test.sh --all            all of them, long ones too (nor here tests/matrix/, which ci/matrix.sh runs on every release)
#   ci/test.sh ARGUMENT ...     what pytest makes of these: ci/test.sh tests/sessions/test_session.py -k recompute
#
# Its last line says passed or FAILED, how many tests on which release, and in how many seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh

tests_started=$SECONDS
export OMP_NUM_THREADS=1 # the workers share the cores
later="megatron and not first_release" # what a later release runs
status=0 runs=0
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# worksteal: each worker has half of the tests, in their order, and takes from the other's end when it has none left. What
# the tests of a file share, such as a wheel or a job of several processes, is hardly ever made twice.
run_pytest() {
    local release=$1 rc=0
    runs=$((runs + 1))
    shift
    echo "== pytest with megatron-core $release"
    # ci/verl.sh runs those with verl, ci/engines.sh those with vLLM and SGLang, ci/live.sh those with a live vLLM.
    with_megatron "$release" python -m pytest -n "$workers" --dist worksteal -q -rs \
        --junit-xml "$results/$release/$runs.xml" \
        --ignore tests/on_verl --ignore tests/on_engines --ignore tests/on_vllm_ascend --ignore tests/live \
        --ignore tests/verl_live --ignore tests/npu_patches "$@" || rc=$?
    # 5: nothing selected. An argument may pick tests of which none needs Megatron.
    if [[ $rc == 5 && ${2:-} == "$later" ]]; then rc=0; fi
    if [[ $rc != 0 ]]; then status=1; fi
}

# What every release runs in each mode; the first runs also what needs no Megatron.
quick() { run_pytest "$1" -m "$2not slow and not packaging and not long" --ignore tests/matrix; }

# ci/verl.sh runs those with Ray.
rest() {
    run_pytest "$1" -m "$2(slow or packaging) and not long" --ignore tests/matrix --ignore tests/delivery/test_ray.py "${@:3}"
}

all() {
    export NPU_REPLAY_TESTS=whole # every case that a test draws by chance (tests/choice.py)
    run_pytest "$1" ${2:+-m "${2% and }"} --ignore tests/matrix "${@:3}"
    # The parallel cases run on the first release, and a choice on later ones; in .ci/run that is on the newest.
    if [[ $2 ]]; then run_pytest "$1" tests/distributed/test_parallel.py -k "$parallel_choice"; fi
}

marks=""
releases=$(python ci/matrix.py tier tests) # a loop over what fails would run no test and be content
for release in $releases; do
    case ${1:-} in
        "") quick "$release" "$marks" ;;
        --rest) rest "$release" "$marks" "${@:2}" ;;
        --all) all "$release" "$marks" "${@:2}" ;;
        *) run_pytest "$release" ${marks:+-m "${marks% and }"} "$@" ;;
    esac
    marks="$later and "
done

# FAILED goes by the exit status: a pytest that was killed leaves no file.
verdict=passed
if [[ $status != 0 ]]; then verdict=FAILED; fi
python - "$results" "$verdict" "$((SECONDS - tests_started))" "$setup_seconds" <<'CODE'
import pathlib, sys
from xml.etree import ElementTree

results, verdict, seconds, setup_seconds = sys.argv[1:]
told = []
for folder in sorted(pathlib.Path(results).iterdir()):
    suites = [suite for file in folder.glob("*.xml") for suite in ElementTree.parse(file).iter("testsuite")]
    names = "tests", "failures", "errors", "skipped"
    tests, failures, errors, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in names)
    counts = {"passed": tests - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name == "passed")
    told.append(f"{words} on Megatron-core {folder.name}")
releases = "; ".join(told) or "pytest left no results"
print(f"{verdict}: {releases}; in {seconds} s, after {setup_seconds} s of setup (downloads included)")
CODE
exit $status
