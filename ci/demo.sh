#!/usr/bin/env bash
# Runs the demo with Megatron 0.12.1; NPU_REPLAY_MEGATRON=0.16.1 picks the other release.
# Arguments go to `python -m examples.demo`; without --out it writes to out/demo, over what it wrote there before.
# With --engine vllm it runs in an environment of its own with vLLM for CPUs (3.5 GB, made once). An active environment
# that lacks what the demo or the tests need is left as it is: the demo makes .venv and runs there.
set -euo pipefail
if [[ -n ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -n $(python "$(dirname "$0")/missing.py" 2>&1) ]]; then
    unset VIRTUAL_ENV CONDA_PREFIX
fi
source "$(dirname "$0")/environment.sh"

release=${NPU_REPLAY_MEGATRON:-0.12.1}
case " $* " in
    *" --engine vllm "* | *" --engine=vllm "*) live_environment ;;
esac
[[ -d $work/megatron/$release ]] || fail "NPU_REPLAY_MEGATRON is $release; there are" $tested
case " $* " in
    *" --out "* | *" --out="* | *" --help "*) ;;
    *) set -- "$@" --out "$repository/out/demo" --force ;;
esac

demo_started=$SECONDS
setup_seconds=$((demo_started - setup_started))
status=0
PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} with_megatron "$release" python -m examples.demo "$@" || status=$?

echo "setup $setup_seconds s (downloads included), demo $((SECONDS - demo_started)) s"
exit $status
