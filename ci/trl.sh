#!/usr/bin/env bash
# Runs the tests with TRL's own GRPOTrainer, as it was released, and with PEFT. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
release=1.16.0
get_packages trl-tests
if [[ ! -d $work/trl/$release ]]; then
    echo "Fetching TRL $release ..."
    fill "$work/trl/$release" pip_into --no-deps "trl==$release" || fail "could not fetch TRL $release"
fi
export OMP_NUM_THREADS=1 PYTHONPATH=$work/trl/$release${PYTHONPATH:+:$PYTHONPATH}
echo "== pytest with TRL $release"
python -m pytest -q -rs tests/on_trl tests/compat/test_peft.py "$@"
