#!/usr/bin/env bash
# Runs the demo with Megatron 0.12.1; NPU_REPLAY_MEGATRON=0.16.1 picks the other release.
# Arguments go to `npu-replay demo`; without --out it writes to out/demo, over what it wrote there before.
set -euo pipefail
source "$(dirname "$0")/environment.sh"

release=${NPU_REPLAY_MEGATRON:-0.12.1}
[[ -d $work/megatron/$release ]] || fail "NPU_REPLAY_MEGATRON is $release; there are" $tested
case " $* " in
    *" --out "* | *" --out="* | *" --help "*) ;;
    *) set -- "$@" --out "$repository/out/demo" --force ;;
esac

demo_started=$SECONDS
status=0
with_megatron "$release" npu-replay demo "$@" || status=$?

echo "setup $setup_seconds s (downloads included), demo $((SECONDS - demo_started)) s"
exit $status
