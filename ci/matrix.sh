#!/usr/bin/env bash
# Runs tests/matrix/ on each release of ci/matrix.toml beside this one environment, as many at once as there are
# cores, and writes docs/dev/matrix.md.
#
#   ci/matrix.sh                  a choice of the cases on every release, other ones on each: eight minutes
#   ci/matrix.sh --all            every case on every release, two hours on two cores: before a release
#   ci/matrix.sh 0.15.3 ...       these alone: 0.15.3, megatron-0.15.3, transformers-4.57.6
#   ci/matrix.sh --check ...      writes nothing, and fails where docs/dev/matrix.md says something else; releases that are
#                                 the same code share a run, but with --all
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh

names=() options=()
for word in "$@"; do
    if [[ $word == --* ]]; then options+=("$word"); else names+=("$word"); fi
done
releases=$(python ci/matrix.py names ${names[@]+"${names[@]}"})
while read -r product release; do fetch "$product" "$release"; done <<<"$releases"
fetched

python ci/matrix_run.py ${options[@]+"${options[@]}"} ${names[@]+"${names[@]}"}
