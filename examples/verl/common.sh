# Sourced by the scripts beside it. Each is one of verl's own examples, and ends in one file of replay/: all that
# is added. Whatever you give a script goes after it, as with verl's own.
#
#   VERL=~/verl bash examples/verl/cuda_megatron_r3.sh trainer.nnodes=2
#
# VERL: a clone of github.com/verl-project/verl, at the tag of the release that is installed. npu_replay has to be
# installed on every node (docs/verl-ascend.md, docs/verl-cuda.md). To see the whole config and start nothing:
# add --cfg job.
#
# shellcheck shell=bash
set -euo pipefail
: "${VERL:?the folder of a clone of verl, at the tag of the release that is installed}"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# run EXAMPLE REPLAY OVERRIDE ...: verl's example, with replay/REPLAY.yaml on top.
run() {
    local example=$VERL/examples/$1
    if [[ ! -f $example ]]; then
        echo "$example isn't there: VERL has to be a clone of verl at a tag that the head of $0 names" >&2
        exit 1
    fi
    bash "$example" "+replay=$2" "${@:3}" --config-dir="$here" # last: Hydra takes no override after an option
}
