#!/bin/bash
# Slurm: each element of the array is a job of its own, with a node of its own, so that Slurm ends
# and queues again only what has died. Each node has a peer for each GPU.
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

# --requeue is for a node that fails, and for a job that makes room for another one. A program that
# fails ends its job: pccl run starts it again, and if that does not help, perhaps another node does.
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
