#!/usr/bin/env bash
# Runs the tests with trainers of Hugging Face models, as they were released.
#
#   ci/trainers.sh trl [ARGUMENT ...]         TRL's GRPOTrainer, PEFT, and DeepSpeed's ZeRO
#   ci/trainers.sh ms-swift [ARGUMENT ...]    ms-swift's, in an environment of its own (2 GB, made once): it wants older packages
#
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
trl=1.16.0
swift_pin=ms-swift==4.6.0
deepspeed=0.19.8

# Of what it needs the parts that are imported; its operators are built when they are used, and none is on a CPU.
deepspeed_into() {
    pip_into --no-deps --constraint ci/constraints.txt hjson==3.1.0 ninja==1.13.2 py-cpuinfo==9.0.0 \
        annotated-types einops msgpack psutil pydantic pydantic-core typing-inspection "$1" &&
        DS_BUILD_OPS=0 pip_into --no-deps --no-build-isolation "deepspeed==$deepspeed" "$1"
}

install_swift() {
    python -m pip install "$torch_pin" setuptools==77.0.3 || fail "could not install $torch_pin for $(python -V)"
    # msgspec: ms-swift imports it, and doesn't say so.
    python -m pip install "$swift_pin" msgspec --no-build-isolation --editable "$repository[dev]" ||
        fail "could not install $swift_pin; $work/ms-swift is unfinished and goes on with the next run"
    python -m pip uninstall -qq -y torchvision torchaudio # for CUDA, where torch is for CPUs
}

case ${1:-} in
    trl)
        get_packages trl-tests
        once "$work/trl/$trl" "TRL $trl" pip_into --no-deps "trl==$trl"
        once "$work/deepspeed/$deepspeed" "DeepSpeed $deepspeed" deepspeed_into
        export PYTHONPATH=$work/trl/$trl${PYTHONPATH:+:$PYTHONPATH}:$work/deepspeed/$deepspeed
        tests="tests/on_trl tests/compat/test_peft.py tests/on_deepspeed"
        ;;
    ms-swift)
        make_in "$work/ms-swift" install_swift
        export VIRTUAL_ENV=$work/ms-swift HF_HUB_OFFLINE=1
        unset CONDA_PREFIX
        tests=tests/on_swift
        ;;
    *) fail "ci/trainers.sh takes trl or ms-swift" ;;
esac
fetched
export OMP_NUM_THREADS=1
echo "== pytest with $1"
# shellcheck disable=SC2086  # one word a path
python -m pytest -q -rs $tests "${@:2}"
