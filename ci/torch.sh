#!/usr/bin/env bash
# Runs the quick tests on another torch, and another Python, in an environment of its own (some 5 GB: torch brings what it
# needs of CUDA). By hand; what came of it is in docs/dev/tried.md.
#
#   ci/torch.sh 2.15.0 python3.13          what further arguments ci/test.sh takes may follow
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:?which torch?} python=${2:?which Python?}
environment=$PWD/.work/torch/$release-$("$python" -c 'import platform; print(platform.python_version())')

"$python" -m venv "$environment"
source "$environment/bin/activate"
pins=$environment/pins.txt
# The versions that are tested together, and on a Python that they aren't made for, what pip finds.
if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    grep -v '^torch==' ci/constraints.txt >"$pins"
else
    : >"$pins"
fi
install=(python -m pip install --quiet --constraint "$pins")
"${install[@]}" "torch==$release" 'setuptools>=77'
"${install[@]}" --no-build-isolation --editable '.[demo,dev]'
python -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'
exec ci/test.sh "${@:3}"
