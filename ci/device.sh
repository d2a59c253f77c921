#!/usr/bin/env bash
# Everything that needs an accelerator, on the machine that this runs on: its tests, doctor, smoke on all its devices and
# the bench, in under ten minutes. Takes no network and installs nothing; npu_replay is taken from this clone.
#
#   bash ci/device.sh                      on CUDA or an NPU; writes out/device.json, which docs/dev/verified/ takes
#   bash ci/device.sh --wheels FOLDER      Megatron-core and what else the environment lacks, from the wheels there
#   bash ci/device.sh --rollout MODEL --tp 2   instead of all that, vLLM with a model: rows, and what they cost
#   bash ci/device.sh --device cpu --quick (or --device simulated, a simulated NPU): tries this script itself
#
# Each part stands alone, with a time limit of its own. Exits 1 if one failed, 2 if there is no such device.
set -euo pipefail

for python in "${PYTHON:-python}" python3; do
    if command -v "$python" >/dev/null; then
        exec "$python" "$(dirname "${BASH_SOURCE[0]}")/device.py" "$@"
    fi
done
echo "ci/device.sh: no python on the path; PYTHON=... names one that has torch" >&2
exit 2
