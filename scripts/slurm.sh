#!/usr/bin/env bash
# Pre-train on the machines of a Slurm job. Submit it in the repository's folder, which all machines must see:
#
#   sbatch --nodes=4 --gpus-per-node=8 --time=24:00:00 scripts/slurm.sh [CONFIG.yaml] [--section.key=value ...]
#
# Every machine runs scripts/pretrain.sh, and that one process per GPU. Without CONFIG it trains configs/gpt_quick.yaml.
# Five minutes before the time limit the trainers save a checkpoint and the job goes back into the queue. When it starts
# again, after that, a preemption or the loss of a machine, it goes on from the newest checkpoint. scancel, too, lets
# them save one, within Slurm's KillWait.
#
#   MASTER_PORT          a free port of the first machine, instead of 20000 + job number % 10000
#   COMMOPT_PROCESSES, OMP_NUM_THREADS, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, ...   reach the trainers as they are
#
#SBATCH --job-name=commopt
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm.sh: not in a Slurm job: sbatch --nodes=N scripts/slurm.sh ...; without Slurm: docs/recipes.md" >&2
    exit 1
fi
# Slurm runs a copy of this file from somewhere else.
if [ ! -f "$SLURM_SUBMIT_DIR/scripts/pretrain.sh" ]; then
    echo "slurm.sh: submit it in the repository's folder, not in $SLURM_SUBMIT_DIR" >&2
    exit 1
fi
source "$SLURM_SUBMIT_DIR/scripts/env.sh"
check_count COMMOPT_PROCESSES
ensure_env train # here once, and not on all machines at the same time

config="$(default_config "$@")"
set -- ${config:+"$config"} "$@"
# Mistakes in the config end here, with one line, before any process is started.
resolved="$(python -m commopt train "$@" --print_config)" || exit $?
read_folder='import sys, yaml; print(yaml.safe_load(sys.stdin)["train"]["run_dir"])'
folder="$(python -c "$read_folder" <<<"$resolved")"
# What was given counts until the run has a checkpoint of its own: others than those that were there when the job began.
# By inode, as one of the same step may be written anew. Not compgen: the name may have brackets.
found="$(stat --format='%i %n' -- "$folder"/checkpoints/step-* 2>/dev/null || true)"
begun="$folder/.slurm-$SLURM_JOB_ID"
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ ! -e "$begun" ]; then
    mkdir -p -- "$folder" && printf '%s\n' "$found" >"$begun"
elif [ -n "$found" ] && grep -qvxFf "$begun" <<<"$found"; then
    set -- "$@" --resume=auto
fi

machines="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
COMMOPT_MACHINES="$(wc -l <<<"$machines")"
COMMOPT_MASTER="$(head -n 1 <<<"$machines"):${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export COMMOPT_MACHINES COMMOPT_MASTER
echo "$COMMOPT_MACHINES machines, the first is $COMMOPT_MASTER: $*"

# One task per machine, with all of its cores; the first that fails ends the others.
# shellcheck disable=SC2016  # SLURM_NODEID is that of the task
srun --nodes="$COMMOPT_MACHINES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c 'COMMOPT_MACHINE="$SLURM_NODEID" exec "$0" "$@"' "$ROOT/scripts/pretrain.sh" "$@" &
step=$!

stopping=""
trap 'stopping=1; kill -USR1 "$step" 2>/dev/null || true' USR1 # srun hands it on to its tasks

status=0
wait_for "$step" || status=$?
if [ -n "$stopping" ]; then
    echo "out of time: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
