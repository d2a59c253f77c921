#!/usr/bin/env bash
# Runs the tests with vLLM's and SGLang's own classes, as they were released, one release of each way to hand out
# rows. Arguments go to pytest, each time.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
for release in 0.20.2 0.21.0 0.27.1 0.33.0; do fetch_engine vllm $release; done
for release in 0.5.7 0.5.10 0.5.12 0.5.23; do fetch_engine sglang $release; done

fetched
tests_started=$SECONDS
export OMP_NUM_THREADS=1 NPU_REPLAY_NEEDED=1
status=0

run_with() {
    try "pytest with vLLM $1 and SGLang $2" with_releases "vllm/$1 sglang/$2" python -m pytest -q -rs tests/on_engines "${@:3}"
}

older() {
    run_with 0.20.2 0.5.7 "$@"
    run_with 0.21.0 0.5.10 "$@"
    run_with 0.27.1 0.5.12 "$@"
}

beside older "$@"
run_with 0.33.0 0.5.23 "$@"
join

echo "engines: tests $((SECONDS - tests_started)) s"
exit $status
