#!/usr/bin/env bash
# Runs the quick tests, and the slow ones of blocks and shims, on another torch, and another Python (3.10 too), with
# Megatron-core 0.12.1, in an environment of its own. Some 5 GB: torch brings what it needs of CUDA. By hand; what came
# of it is in docs/dev/tried.md.
#
#   ci/torch.sh 2.15.0 python3.13          further arguments are pytest's
set -euo pipefail
cd "$(dirname "$0")/.."
release=${1:?which torch?} python=${2:?which Python?}
version=$("$python" -c 'import platform; print(platform.python_version())')
environment=$PWD/.work/torch/$release-$version megatron=$PWD/.work/megatron/0.12.1

"$python" -m venv "$environment"
source "$environment/bin/activate"
# The versions that are tested together; on a Python that some of them aren't made for, what pip finds.
pins=$environment/pins.txt
if [[ $version == 3.10.* ]]; then : >"$pins"; else grep -v '^torch==' ci/constraints.txt >"$pins"; fi
install=(python -m pip install --quiet --constraint "$pins")
"${install[@]}" "torch==$release" 'setuptools>=77'
"${install[@]}" --no-build-isolation --editable '.[demo,dev]'
[[ -d $megatron ]] || python -m pip install --quiet --no-deps --target "$megatron" megatron-core==0.12.1
python -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'

# ci/ wants 3.11, and so do the tests of it; those of single products have scripts of their own.
left_out=(ci docs test_house.py packaging distributed on_verl on_engines on_vllm_ascend live verl_live npu_patches)
run_pytest() { OMP_NUM_THREADS=1 PYTHONPATH=$megatron python -m pytest -n 2 --dist loadfile -rs "$@"; }
run_pytest -m "not slow and not long" "${left_out[@]/#/--ignore=tests/}" "${@:3}"
run_pytest -m "slow and not long" tests/compat tests/sessions "${@:3}"
