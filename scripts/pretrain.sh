#!/usr/bin/env bash
# Pre-train a language model from nothing: scripts/pretrain.sh [CONFIG.yaml] [--section.key=value ...]
#
# Makes the environment, then runs `commopt train` under torchrun: one process per GPU with NCCL where there are GPUs, else
# two processes with Gloo. Without CONFIG it trains configs/gpt_quick.yaml. Relative paths are relative to where you are.
#
#   COMMOPT_PROCESSES   processes to start instead
#   OMP_NUM_THREADS     threads of each, instead of cores / processes
#
# On several machines, start it on each with the same words (or leave that to scripts/slurm.sh):
#
#   COMMOPT_MACHINES    how many they are
#   COMMOPT_MACHINE     which one this is: 0, 1, ...
#   COMMOPT_MASTER      HOST:PORT, a free port of machine 0
#
# Ctrl-C, SIGTERM or SIGUSR1: the trainer saves a checkpoint and ends; a second one ends it at once.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
check_count COMMOPT_PROCESSES
check_count COMMOPT_MACHINES
ensure_env train

config="$(default_config "$@")"
set -- ${config:+"$config"} "$@"
where=(--standalone)
if [ "${COMMOPT_MACHINES:-1}" != 1 ]; then
    [ -n "${COMMOPT_MACHINE:-}" ] || fail "COMMOPT_MACHINES=$COMMOPT_MACHINES needs COMMOPT_MACHINE: 0, 1, ..."
    [[ "${COMMOPT_MASTER:-}" == ?*:?* ]] || fail "COMMOPT_MACHINES=$COMMOPT_MACHINES needs COMMOPT_MASTER=HOST:PORT"
    where=(--nnodes="$COMMOPT_MACHINES" --node-rank="$COMMOPT_MACHINE"
        --master-addr="${COMMOPT_MASTER%:*}" --master-port="${COMMOPT_MASTER##*:}")
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
# order, and then so does the launcher. SIGUSR1 is for this script alone: a batch system may send it to all processes of
# a job, and it ends those that do not ignore it.
trap '' USR1
setsid python -m commopt.train.launcher "${where[@]}" --nproc-per-node="$processes" -m commopt train "$@" &
launcher=$!

forward() { # SIGNAL: to the trainers, or to torchrun where it has not started them yet
    local children
    children="$(cat "/proc/$launcher/task/$launcher/children" 2>/dev/null || true)"
    # shellcheck disable=SC2086  # a list of process ids
    kill -s "$1" ${children:-$launcher} 2>/dev/null || true
}
trap 'forward INT' INT
trap 'forward TERM' TERM HUP USR1

wait_for "$launcher"
