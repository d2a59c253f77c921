#!/usr/bin/env bash
# Runs the tests: all of them with Megatron 0.12.1, then those that need Megatron with 0.16.1.
# Arguments go to pytest, both times: ci/test.sh tests/test_session.py -k recompute
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh

tests_started=$SECONDS
export OMP_NUM_THREADS=1 # two workers share the cores
status=0

# loadfile: the tests of a file share something costly, such as one wheel or one job, and run in one worker.
run_pytest() {
    local release=$1 rc=0
    shift
    echo "== pytest with megatron-core $release"
    # ci/verl.sh runs those with verl, ci/engines.sh those with vLLM and SGLang.
    with_megatron "$release" python -m pytest -n 2 --dist loadfile -rs \
        --ignore tests/on_verl --ignore tests/on_engines "$@" || rc=$?
    # 5: nothing selected. An argument may pick tests of which none needs Megatron.
    if [[ $rc == 5 && $release == 0.16.1 && $# -gt 2 ]]; then rc=0; fi
    if [[ $rc != 0 ]]; then status=1; fi
}

run_pytest 0.12.1 "$@"
run_pytest 0.16.1 -m megatron "$@"

echo "setup $setup_seconds s (downloads included), tests $((SECONDS - tests_started)) s"
exit $status
