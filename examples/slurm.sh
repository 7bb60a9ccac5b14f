#!/bin/bash
# CLIP on two nodes of eight GPUs: sbatch examples/slurm.sh
#SBATCH --job-name=tilewise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32

set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:29500" \
    examples/ddp.py --steps 1000 --batch 8192
