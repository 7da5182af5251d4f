#!/bin/bash
# Slurm: each element of the array is a separate job on its own node, so that Slurm ends and requeues
# only what has died. Each node has a peer for each GPU.
#
#     sbatch --export=ALL,PCCL_MASTER=the-masters-host examples/launch/slurm.sh train.py --steps 1000
#
#SBATCH --job-name=pccl
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=pccl-%A-%a.log

# --requeue is for a node that fails, and for a job that is preempted. A program that fails is
# restarted by pccl run; if that does not help, its job ends and is requeued, perhaps on another node.
ATTEMPTS=${PCCL_ATTEMPTS:-10}

export PCCL_CONNECT_TIMEOUT_S=${PCCL_CONNECT_TIMEOUT_S:-300} # a job may start before the master
copies=${SLURM_GPUS_ON_NODE:-1}

srun --kill-on-bad-exit=0 pccl run -n "$copies" --master "$PCCL_MASTER" -- python "$@"
status=$?
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$ATTEMPTS" ]; then
    echo "ended with status $status on $SLURMD_NODENAME: queued again" >&2
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$status"
