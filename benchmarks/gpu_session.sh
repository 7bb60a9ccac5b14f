#!/usr/bin/env bash
# What is measured on a GPU before a GPU issue is called resolved, in parts meant for ten minutes each on an H200.
#
#   bash benchmarks/gpu_session.sh packages   with a network: what the GPU machine lacks, into .carry/site
#   bash benchmarks/gpu_session.sh PART       on the GPU machine: tests steps steps-large step-peers
#                                             out-of-core training losses loss-peers sanitize
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}.carry/site:src" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"

case "${1:-}" in
packages) # pure Python; the GPU machine has torch, Triton, timm, transformers, pytest
    pip install -q --no-deps --target .carry/site open_clip_torch webdataset braceexpand tyro docstring_parser \
        shtab typeguard ftfy wcwidth gradcache pytest-xdist execnet liger-kernel cut-cross-entropy inf-cl siglip-kernel
    ;;
tests)
    "$python" -m pytest -q -m gpu -n 8 tests
    ;;
steps)
    "$python" benchmarks/cached_step.py encoders
    ;;
steps-large)
    "$python" benchmarks/cached_step.py encoders --models ViT-L-14 --batches 4096,65536 --keep-batches 256 --micro-batch 128
    ;;
step-peers)
    "$python" benchmarks/cached_step.py peers --repeats 7
    ;;
out-of-core)
    "$python" benchmarks/out_of_core.py loss
    "$python" benchmarks/out_of_core.py pool
    ;;
training)
    "$python" -m tilewise train --model ViT-B-32 --train-data synthetic:65536,size=224,cells=4 --workers 14 \
        --batch-size 32768 --micro-batch 1024 --precision amp_bf16 --steps 4 --log-every 1 --device cuda
    ;;
losses) # ours alone
    "$python" benchmarks/run.py --skip-tests --seconds 2 --repeats 1 --contenders 'tilewise,tilewise graph,tilewise keep graph'
    ;;
loss-peers) # with every peer, in one run
    "$python" benchmarks/run.py --skip-tests --seconds 2 --repeats 1 --cases clip-bf16-65536x768,siglip-bf16-65536x768
    ;;
sanitize)
    compute-sanitizer --tool memcheck "$python" benchmarks/sanitize.py
    compute-sanitizer --tool racecheck "$python" benchmarks/sanitize.py
    ;;
*)
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
