#!/bin/bash
# torchrun: one for each peer, because torchrun kills and restarts all the processes that it has
# started when one of them dies. The peers find each other through pccl's master, and each torchrun
# only restarts its one process.
#
#     PCCL_MASTER=the-masters-host:48148 examples/launch/torchrun.sh 8 train.py --steps 1000

copies=$1
shift
peers=()
trap 'kill "${peers[@]}"' INT TERM
for ((i = 0; i < copies; i++)); do
    CUDA_VISIBLE_DEVICES=$i torchrun --standalone --nproc-per-node 1 --max-restarts 100 "$@" &
    peers+=($!)
done
status=0
for peer in "${peers[@]}"; do
    wait "$peer" || status=$?
done
exit "$status"
