#!/usr/bin/env bash
# Runs the tests with a live engine: vLLM for CPUs serves tiny models, and verl's own trainer trains with it, in an
# environment of its own (3.5 GB, made once).
#
#   ci/live.sh                  with a choice of the random sequences and without what is marked `long`, in some four minutes
#   ci/live.sh --all            with all of them, 2,000 at least
#   ci/live.sh ARGUMENT ...     what pytest makes of these: ci/live.sh -k preempt
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
live_environment
fetch_verl 0.9.1

fetched
tests_started=$SECONDS
status=0
depth=(-m "not long")
export NPU_REPLAY_NEEDED=1 # what can't be imported fails, and isn't skipped: tests/needed.py
run_pytest() { try "pytest with $vllm_pin, $1" python -m pytest -q -rs "${depth[@]}" "${@:2}"; }

if [[ ${1:-} == --all ]]; then
    export NPU_REPLAY_LIVE_ALL=1
    depth=()
    shift
fi
if [[ $# == 0 ]]; then
    export OMP_NUM_THREADS=1 # two of them share the cores
    served=tests/live/test_over_http.py
    beside run_pytest "as a server" $served
    with_megatron 0.12.1 run_pytest "in process" tests/live --ignore=$served
    join
    PYTHONPATH=$work/live/beside with_releases "megatron/0.12.1 verl/0.9.1" run_pytest "verl's whole trainer" tests/verl_live
else
    depth=()
    with_megatron 0.12.1 run_pytest "in process and as a server" tests/live "$@"
fi

echo "live: setup $((tests_started - setup_started)) s (downloads included), tests $((SECONDS - tests_started)) s"
exit $status
