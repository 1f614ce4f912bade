#!/usr/bin/env bash
# Check the project as CI does: ruff, mypy, pytest. Arguments go to pytest: scripts/test.sh tests/test_data.py -k mask
# Without arguments the short suite runs, files side by side, in some minutes on 2 cores; --all runs all of it. See
# tests/conftest.py.
# The MPI backend is tested if there is an mpirun; without, Open MPI is installed if you may, else its tests are skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train,test
ensure_mpi

cd "$ROOT"
ruff check .
ruff format --check .
mypy
side_by_side=(-n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
case "$*" in
    "") set -- --short "${side_by_side[@]}" ;;
    --all) set -- "${side_by_side[@]}" ;;
esac
python -m pytest "$@"
