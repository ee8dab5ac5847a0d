#!/bin/bash
# Rehearse on a node without GPUs, and queue the training job behind it: it starts only if the rehearsal has shown that the
# script fits. Otherwise SLURM cancels the training job (--kill-on-invalid-dep), and rehearsal.txt has the reason.
#
#   NODES=2 GPU=h100 bash examples/launchers/slurm_rehearse_then_train.sh train.py --rows 8
#
# The arguments are your script and its arguments. Replace the partitions by those of your cluster.
set -eu
NODES=${NODES:-1} GPUS=${GPUS:-8} GPU=${GPU:-h100}

rehearsal=$(sbatch --parsable --partition="${CPU_PARTITION:-cpu}" --cpus-per-task=4 --mem=16G --time=00:30:00 \
    --output=rehearsal.txt --wrap="$(printf '%q ' rehearse --gpu "$GPU" --ranks $((NODES * GPUS)) -- "$@")")
sbatch --dependency=afterok:"$rehearsal" --kill-on-invalid-dep=yes --partition="${GPU_PARTITION:-gpu}" \
    --nodes="$NODES" --gpus-per-node="$GPUS" "$(dirname "$0")/slurm_torchrun.sbatch" "$@"
