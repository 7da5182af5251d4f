#!/bin/bash
# torchrun: one for each peer, because it kills and restarts all the processes that it has started
# when one of them dies. So each of them has one process, and the peers find each other by pccl's
# master: the only thing that torchrun does is to start its process again.
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
