#!/usr/bin/env bash
# Builds what a release consists of into dist/, and checks it; uploads nothing.
#
#   ci/release.sh ADDRESS           the repository's address, https://...: for the package page's links and pictures
#   ci/release.sh --check ADDRESS   whatever is committed, into a temporary folder; without a tag, a date, a clean tree
#
# The version is npu_replay.__version__. A release has its heading in CHANGELOG.md («## [0.1.0] - 2026-12-01») and a
# tag of its commit (v0.1.0), and nothing in the tree that isn't committed.
set -euo pipefail
cd "$(dirname "$0")/.."
only_check=
if [[ ${1:-} == --check ]]; then only_check=yes && shift; fi
address=${1:?the address of the repository, https://...}
version=$(python3 ci/release_tree.py --version)
refuse() { echo "ci/release.sh: $*" >&2 && exit 1; }

if [[ ! $only_check ]]; then
    [[ -z $(git status --porcelain) ]] || refuse "the tree has changes that aren't committed: git status"
    grep -qE "^## \[$version\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
        refuse "CHANGELOG.md has no heading «## [$version] - DATE»"
    [[ $(git rev-parse -q --verify "v$version^{commit}" || true) == $(git rev-parse HEAD) ]] ||
        refuse "v$version isn't the tag of this commit: git tag v$version"
fi

source ci/environment.sh
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git archive --prefix=tree/ HEAD | tar -x -C "$scratch"
python ci/release_tree.py "$scratch/tree" "$address"
install_release() { python -m pip install -qq build twine; }
make_in "$work/release" install_release
fetched
out=$scratch/dist
python -m build --outdir "$out" "$scratch/tree" >"$scratch/log" 2>&1 || { cat "$scratch/log" && exit 1; }
python -m twine check --strict "$out"/*

# What was built is what the tree has, and works where there is nothing else of it.
python -m venv "$scratch/installed"
"$scratch/installed/bin/python" -m pip install -qq --no-deps "$out"/*.whl
found=$("$scratch/installed/bin/python" -I -c 'import importlib.metadata as of; print(of.version("npu-replay"))')
[[ $found == "$version" ]] || refuse "the wheel says that it is $found, npu_replay $version"
if [[ ! $only_check ]]; then mkdir -p dist && cp "$out"/* dist/; fi
ls -l "$out" | awk 'NR > 1 {print $5, $9}'
