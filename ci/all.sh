#!/usr/bin/env bash
# Runs what .ci/run leaves out for its time, in hours: before a release. Every way to split a model and every long test, every case of
# the matrix on every release, split models on 0.15.3 and 0.16.1, every random sequence on a live vLLM, all of vllm-ascend's and verl's cases.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
status=0
try "all tests" ci/test.sh --all
fetch megatron 0.15.3
try "parallel training, a choice, on 0.15.3" with_megatron 0.15.3 python -m pytest -q tests/distributed/test_parallel.py -k "$parallel_choice"
try "the demo, on the first release" bash -c "ci/demo.sh && python ci/check.py demo out/demo/demo.json"
try "the whole matrix" ci/matrix.sh --all
try "verl" ci/verl.sh --all
try "live vLLM" ci/live.sh --all
try "the GRPO example, on FSDP2 too" ci/grpo.sh
try "vllm-ascend" ci/vllm_ascend.sh
exit $status
