#!/usr/bin/env bash
# Run the tests of the CPU kernels as 64-bit ARM (NEON), on a machine of another kind: scripts/emulate_neon.sh
# A cross compiler builds the kernels, and a Python for that architecture runs them with torch, under qemu's emulation
# of user mode. For Debian 12 and later: what is missing of the three packages apt-get installs, as root, and the
# emulated system is made of Debian's packages. It takes 1 GB in .emulated, and 10 to 30 minutes on two slow cores.
# Arguments go to pytest, in place of all that concerns the kernels: scripts/emulate_neon.sh tests/test_ops.py -k sign
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

WORK="$ROOT/.emulated"
TREE="$WORK/tree"
# 2.10 is the last torch whose wheel for ARM needs no CUDA
REQUIREMENTS=(torch==2.10.0 numpy pytest pytest-timeout hypothesis setuptools)
TESTS=(tests/test_{ops,integers,bfloat16,floats,top_k,threshold_top_k,compress}.py)

packages=()
command -v qemu-aarch64 >/dev/null || packages+=(qemu-user)
command -v aarch64-linux-gnu-g++ >/dev/null || packages+=(g++-aarch64-linux-gnu)
command -v mmdebstrap >/dev/null || packages+=(mmdebstrap)
if [ ${#packages[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || fail "these packages are missing, and installing them needs root: ${packages[*]}"
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null; } ||
        fail "apt-get failed: the lines above say why"
fi

mkdir -p "$WORK"
cat >"$WORK/python" <<END
#!/bin/bash
# An interpreter to the tests, which start it as sys.executable
export PYTHONPATH="\${PYTHONPATH:+\$PYTHONPATH:}$TREE:$TREE/tests:$WORK/site" PYTHONPYCACHEPREFIX="$WORK/compiled"
exec "$(command -v qemu-aarch64)" -L "$WORK/root" -0 "$WORK/python" "$WORK/root/usr/bin/python3.11" "\$@"
END
chmod +x "$WORK/python"

stamp="$WORK/.installed"
wanted="$(cat "$ROOT/scripts/emulate_neon.sh" "$ROOT/constraints.txt" | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing Python and torch for ARM in $WORK (some minutes)"
    rm -rf "$WORK/root" "$WORK/site"
    mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3,python3-pip,libstdc++6 \
        bookworm "$WORK/root" || # its Python is 3.11, on later systems, too
        fail "Debian's packages for arm64 could not be had: the lines above say why"
    grep -v "^torch==" "$ROOT/constraints.txt" >"$WORK/constraints.txt"
    "$WORK/python" -m pip install --quiet --root-user-action ignore --only-binary :all: --no-compile \
        -c "$WORK/constraints.txt" --target "$WORK/site" "${REQUIREMENTS[@]}" ||
        fail "the requirements could not be installed: the lines above say why"
    echo "$wanted" >"$stamp"
fi

rm -rf "$TREE"
mkdir -p "$TREE"
cd "$ROOT"
cp -p --parents -t "$TREE" -r commopt kernels tests setup.py pyproject.toml README.md LICENSE
rm -f "$TREE"/commopt/ops/*.so # of this machine
cd "$TREE"
CXX=aarch64-linux-gnu-g++ "$WORK/python" setup.py -q build_ext --inplace
[ $# -gt 0 ] || set -- "${TESTS[@]}"
# CI: hypothesis does not mind how slowly examples are drawn
CI=true "$WORK/python" -m pytest -q --timeout 1800 "$@"
