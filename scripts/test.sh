#!/usr/bin/env bash
# Check the project as CI does: ruff, mypy, pytest. Arguments go to pytest: scripts/test.sh tests/test_data.py -k mask
# The MPI backend is tested if there is an mpirun; without, Open MPI is installed if you may, else its tests are skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train,test
ensure_mpi

cd "$ROOT"
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
