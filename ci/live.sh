#!/usr/bin/env bash
# Runs the tests with a live engine: vLLM for CPUs serves tiny models, in an environment of its own (3.5 GB, made once).
#
#   ci/live.sh                  a choice of the random sequences, in some five minutes on two cores
#   ci/live.sh --all            all of them, 2,000 at least
#   ci/live.sh ARGUMENT ...     what pytest makes of these: ci/live.sh -k preempt
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
live_environment

if [[ ${1:-} == --all ]]; then
    export NPU_REPLAY_LIVE_ALL=1
    shift
fi
tests_started=$SECONDS
status=0
try "pytest with $vllm_pin, live" python -m pytest -q -rs tests/live "$@"

echo "setup $((tests_started - setup_started)) s (downloads included), tests $((SECONDS - tests_started)) s"
exit $status
