#!/usr/bin/env bash
# Runs vllm-ascend 0.18.0, 0.23.0 and 0.30.0rc2 with their vLLM, as released, on this CPU: with npu_replay's plug-in all of
# a step's routes come back. Stand-ins for torch_npu and kernels: tests/on_vllm_ascend.
# --quick: a choice, in some three minutes on two cores. Other arguments go to pytest, each time.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
for release in 0.18.0 0.23.0 0.30.0; do fetch_engine vllm $release; done
fetch transformers 4.57.6 # what vLLM before 0.19 wants
for release in 0.18.0 0.23.0 0.30.0rc2; do # it has source archives only
    once "$work/vllm-ascend/$release" "vllm-ascend $release" code_into "vllm-ascend==$release" vllm_ascend
done

fetched
tests_started=$SECONDS
export OMP_NUM_THREADS=1
status=0
if [[ ${1:-} == --quick ]]; then set -- -m "not slow" "${@:2}"; fi

run_with() {
    local started=$SECONDS
    try "pytest with vllm-ascend $1 and $2" \
        with_releases "vllm-ascend/$1 $2" python -m pytest -q -rs tests/on_vllm_ascend "${@:3}"
    echo "vllm-ascend $1: $((SECONDS - started)) s"
}

first_and_last() {
    run_with 0.18.0 "vllm/0.18.0 transformers/4.57.6" "$@"
    run_with 0.30.0rc2 vllm/0.30.0 "$@"
}

beside first_and_last "$@"
run_with 0.23.0 vllm/0.23.0 "$@"
join

echo "vllm-ascend: tests $((SECONDS - tests_started)) s"
exit $status
