#!/usr/bin/env bash
# Runs mypy over the package as it is installed, with compat/ as npu_replay.compat. Needs mypy in the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -Rp npu_replay "$tree/npu_replay"
cp -Rp compat "$tree/npu_replay/compat"
cp -Rp npu_replay_autoload "$tree/npu_replay_autoload"

# The copy comes before an installed npu_replay, and messages name the files of the repository.
repository=$PWD
cd "$tree"
MYPYPATH=$tree python -m mypy --config-file "$repository/pyproject.toml" --cache-dir "$repository/.mypy_cache" \
    --package npu_replay --package npu_replay_autoload "$@" | sed 's#^npu_replay/compat/#compat/#'
