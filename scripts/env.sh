# Sourced by the other scripts: one virtual environment, .venv, with the pinned requirements and the package itself.
#
#   ensure_env EXTRAS     make or refresh .venv for pyproject.toml's extras, for example train or train,test
#   ensure_mpi            make sure that there is an mpirun, or say that there is none
#   default_config WORD.. the config to train where the words of `commopt train` name none; nothing where they do
#   check_count NAME      fail where it is in the environment, and no whole number >= 1
#   wait_for PID          wait for a child, whatever signals are trapped meanwhile; its exit status
#
# ensure_env installs only when something that decides what is installed has changed. PYTHON chooses the interpreter.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
# What tests use a part of, installed without what it asks for: timm wants torchvision, which comes with a torch of its
# own, and torchtitan the tools of a whole trainer
ALONE=(timm 'torchtitan; python_version >= "3.11"' tyro typeguard spmd-types)

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

is_usable() { # PYTHON: 3.10 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_usable "$PYTHON" || fail "PYTHON=$PYTHON is not allowed: it must be Python 3.10 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 or newer found; install one, or name it: PYTHON=/path/to/python $0"
}

make_venv() {
    local python
    python="$(find_python)" || exit 1
    echo "making $VENV with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || fail "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv"
    # older ones look at every file of every release for a minute; where it cannot be had, they do
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --retries 0 "pip>=24.1" 2>/dev/null || true
}

fingerprint() { # EXTRAS: of everything that decides what is installed
    {
        echo "$1" "$ROOT"
        "$VENV/bin/python" --version
        cd "$ROOT" && find constraints.txt pyproject.toml setup.py kernels -type f -print0 | sort -z | xargs -0 cksum
    } | cksum
}

ensure_env() { # EXTRAS
    local stamp="$VENV/.installed-$1"
    if ! is_usable "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        make_venv
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" != "$(fingerprint "$1")" ]; then
        echo "installing commopt[$1] and its pinned requirements (some minutes the first time)"
        # not compiled: what is imported of these ten thousands of files Python compiles when it is
        "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 2 --no-compile \
            -c "$ROOT/constraints.txt" -e "$ROOT[$1]" ||
            fail "the requirements could not be installed: the lines above say why (is there a network?)"
        case ",$1," in
            *,test,*)
                "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --retries 2 --no-compile --no-deps \
                    -c "$ROOT/constraints.txt" "${ALONE[@]}" || fail "what tests use a part of could not be installed"
                ;;
        esac
        fingerprint "$1" >"$stamp"
    fi
    PATH="$VENV/bin:$PATH"
    export PATH
}

ensure_mpi() { # installs Open MPI from the system's packages if nobody has; goes on without it if that cannot be done
    local packages=openmpi-bin as_root=() skipped="$(basename "$0"): no mpirun: the tests of the MPI backend are skipped"
    command -v mpirun >/dev/null && return
    if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
    if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
        echo "$(basename "$0"): no Open MPI, and installing it needs root or sudo without a password, and apt-get" >&2
        echo "$skipped" >&2
        return
    fi
    echo "installing Open MPI ($packages)"
    local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive timeout 300
        apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20)
    # the second time with a fresh list of packages
    "${install[@]}" install -y --no-install-recommends "$packages" >/dev/null ||
        { "${install[@]}" update && "${install[@]}" install -y --no-install-recommends "$packages" >/dev/null; } ||
        printf '%s\n' "$(basename "$0"): apt-get failed: the lines above say why" "$skipped" >&2
}

default_config() { # WORD...
    while [ $# -gt 0 ]; do
        case "$1" in
            --config | --config=*) return 0 ;;
            --help | --print_config | --*=*) ;;
            --*) shift $(($# > 1)) ;; # its value
            *) return 0 ;;
        esac
        shift
    done
    echo "$ROOT/configs/gpt_quick.yaml"
}

check_count() { # NAME
    local value="${!1:-1}"
    [[ "$value" =~ ^[1-9][0-9]*$ ]] || fail "$1=$value is not allowed: it must be a whole number >= 1"
}

wait_for() { # PID
    local status
    while true; do
        status=0
        wait "$1" || status=$?
        kill -0 "$1" 2>/dev/null || return "$status" # else a signal has interrupted it
    done
}
