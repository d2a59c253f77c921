#!/usr/bin/env bash
# Runs examples/grpo with a live vLLM for CPUs, in an environment of its own (3.5 GB, made once): GRPO on Megatron-core
# 0.12.1 with replay and without, then under FSDP2 with vLLM over HTTP. Small, in five minutes on two cores.
#
#   ci/grpo.sh                  three arms of Megatron and one of FSDP2, a few steps each; checks what they show
#   ci/grpo.sh ARGUMENT ...     what examples/grpo/run.py makes of these; --help says what there is
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
live_environment
export OMP_NUM_THREADS=1 # two runs share the cores

release=0.12.1
if [[ $# != 0 ]]; then
    with_megatron $release python examples/grpo/run.py "$@"
    exit
fi

rm -rf out/grpo/megatron out/grpo/fsdp # what ran there would be gone on with: no step taken, old rows checked
grpo_started=$SECONDS
status=0
try "GRPO on Megatron-core $release, vLLM in its process" \
    with_megatron $release python examples/grpo/run.py --arms none R2 R3 --steps 5 --out out/grpo/megatron
try "GRPO under FSDP2, vLLM over HTTP" \
    python examples/grpo/run.py --trainer fsdp --arms R3 --steps 2 --road store --out out/grpo/fsdp
try "what both show" python ci/check.py grpo out/grpo/{megatron,fsdp}/grpo.json

echo "setup $((grpo_started - setup_started)) s (downloads included), GRPO $((SECONDS - grpo_started)) s"
exit $status
