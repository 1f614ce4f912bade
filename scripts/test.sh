#!/usr/bin/env bash
# Check the project as CI does: ruff, mypy, pytest. Arguments go to pytest: scripts/test.sh tests/test_data.py -k mask
# Without arguments all tests run, files side by side: on 2 cores some minutes. See tests/conftest.py.
# The MPI backend is tested if there is an mpirun; without, Open MPI is installed if you may, else its tests are skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train,test
ensure_mpi

cd "$ROOT"
ruff check .
ruff format --check .
mypy
if [ $# = 0 ]; then set -- -n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder; fi
python -m pytest "$@"
