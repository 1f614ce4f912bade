#!/usr/bin/env bash
# Pre-train a language model from nothing: scripts/pretrain.sh [CONFIG.yaml] [--section.key=value ...]
#
# Makes the environment, then runs `commopt train` under torchrun: one process per GPU with NCCL where there are GPUs, else
# two processes with Gloo. Without CONFIG it trains configs/gpt_quick.yaml. Relative paths are relative to where you are.
#
#   COMMOPT_PROCESSES   processes to start instead
#   OMP_NUM_THREADS     threads of each, instead of cores / processes
#
# Ctrl-C or SIGTERM: the trainer saves a checkpoint and ends; a second one ends it at once.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train

if [ $# -eq 0 ] || [[ "$1" == --* ]]; then
    set -- "$ROOT/configs/gpt_quick.yaml" "$@"
fi
for word in "$@"; do
    case "$word" in --help | -h | --print_config) exec python -m commopt train "$@" ;; esac
done
# Mistakes in the config end here, with one line, before any process is started.
python -m commopt train "$@" --print_config >/dev/null || exit $?

processes="${COMMOPT_PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}"
cores="$(nproc)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"

# The launcher is torchrun with quieter errors. It answers a signal by giving its workers 30 seconds and failing. So it
# runs in a session of its own, out of reach of the terminal's Ctrl-C, and signals go to the trainers: they end in good
# order, and then so does the launcher.
setsid python -m commopt.train.launch --standalone --nproc-per-node="$processes" -m commopt train "$@" &
launcher=$!

forward() { # SIGNAL: to the trainers, or to torchrun where it has not started them yet
    local children
    children="$(cat "/proc/$launcher/task/$launcher/children" 2>/dev/null || true)"
    # shellcheck disable=SC2086  # a list of process ids
    kill -s "$1" ${children:-$launcher} 2>/dev/null || true
}
trap 'forward INT' INT
trap 'forward TERM' TERM HUP

status=0
while kill -0 "$launcher" 2>/dev/null; do
    status=0
    wait "$launcher" || status=$? # a signal interrupts it: then the launcher is still there
done
exit "$status"
