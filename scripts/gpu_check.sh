#!/usr/bin/env bash
# Everything that needs a GPU, in one call of about 6 minutes: scripts/gpu_check.sh
#
# Bandwidth and the cost of steps, with nothing beside them, to benchmarks/cuda.json and benchmarks/gpu_step.json. Then,
# side by side: equality with the reference, streams and graphs; the same under compute-sanitizer where there is one;
# every optimizer, compressed gradients and sharded models over NCCL, and over MPI where there is mpiexec; what other
# people's trainers (transformers, accelerate, Lightning, timm) train with them, as far as they are installed.
# Takes the python of the environment it is called in, which needs the extras test and cuda12 or cuda13, or installs
# commopt there with INSTALL=cuda12 or INSTALL=cuda13.
#
# Every part has its time limit, and runs even where one before has failed. Ends with the number of parts that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
failed=0
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

part() { # SECONDS COMMAND...
    local seconds="$1" start="$SECONDS" status=0
    shift
    echo "== $*"
    timeout --kill-after=10 "$seconds" "$@" || status=$?
    echo "== $([ "$status" -eq 0 ] && echo good || echo "FAILED with $status"), $((SECONDS - start)) s"
    [ "$status" -eq 0 ] || failed=$((failed + 1))
    return "$status"
}

names=() pids=()
beside() { # NAME SECONDS COMMAND...
    local name="$1"
    shift
    part "$@" >"$logs/$name" 2>&1 &
    names+=("$name") pids+=($!)
}

if [ -n "${INSTALL:-}" ]; then
    part 70 python -m pip install --quiet -e ".[test,$INSTALL]"
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
part 40 python -c '
import cupy, torch
from commopt import ops
print("torch", torch.__version__, "CuPy", cupy.__version__, ops.report()["sign_compress"])
assert torch.cuda.is_available(), "no CUDA device"
assert ops.report()["sign_compress"]["cuda"] == "cupy", "commopt does not find CuPy"'
part 90 python scripts/bench_cuda.py --json benchmarks/cuda.json
part 120 python scripts/bench_gpu_step.py --json benchmarks/gpu_step.json
part 10 python scripts/cuda_report.py

sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)"
beside kernels 240 python -m pytest -q -m gpu tests/test_gpu.py
beside ranks 240 python tests/gpu_ranks.py
beside frameworks 240 python tests/gpu_doors.py
if [ -n "$sanitizer" ]; then
    # without torch's cache, so that what is read or written outside of a tensor is outside of an allocation
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 beside memory 240 "$sanitizer" --tool memcheck --error-exitcode 9 \
        python -m pytest -q -m gpu tests/test_gpu.py -k "small" -p no:cacheprovider
else
    echo "== no compute-sanitizer here: memcheck is left out"
fi
for i in "${!names[@]}"; do
    wait "${pids[$i]}" || failed=$((failed + 1))
    cat "$logs/${names[$i]}"
done
echo "== $failed parts failed, $SECONDS s in all"
exit "$failed"
