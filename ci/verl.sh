#!/usr/bin/env bash
# Runs the tests with verl, as it was released: all of them with two releases, each on one Megatron-core, all but
# its ways in with a third, and verl's own functions on two more Megatron-cores. Arguments go to pytest, each time.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
for release in 0.7.1 0.8.0 0.9.1; do fetch_verl $release; done
for release in 0.13.1 0.15.3; do fetch_megatron $release; done

tests_started=$SECONDS
export OMP_NUM_THREADS=1 # two workers share the cores
status=0

run_with() {
    try "pytest with verl $2 on megatron-core $1" \
        with_verl "$1" "$2" python -m pytest -n 2 --dist loadfile -rs "${@:3}"
}

run_with 0.12.1 0.7.1 tests/on_verl "$@"
run_with 0.16.1 0.8.0 tests/on_verl --ignore tests/on_verl/test_ways_in.py --ignore tests/on_verl/test_install.py "$@"
run_with 0.12.1 0.9.1 tests/on_verl "$@"
run_with 0.13.1 0.9.1 tests/on_verl/test_functions.py "$@"
run_with 0.15.3 0.8.0 tests/on_verl/test_functions.py "$@"

echo "verl: tests $((SECONDS - tests_started)) s"
exit $status
