#!/usr/bin/env bash
# What is measured on a GPU before a GPU issue is called resolved.
#
#   bash benchmarks/gpu_session.sh packages    with a network: what the GPU machine lacks, into .carry/site
#   bash benchmarks/gpu_session.sh PART ...    on the GPU machine, one after the other: tests bars bars-large peers
#                                              steps steps-large step-peers out-of-core training open-clip sanitize
#
# A part that fails or takes longer than its limit is named in the table at the end and does not cost the others.
# All end within WITHIN seconds (590); what could not begin by then is named, too. OUT, a folder, gets logs and CSV.
# Three calls that fit: "tests bars", "steps step-peers out-of-core", "steps-large training open-clip" (346, 504 and
# 420 s on an H200).
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}.carry/site:src" PYTHONUNBUFFERED=1
python="${PYTHON:-python3}"
results="${OUT:-benchmarks/results}"

# Seconds for each part: what it took, and half of it more.
declare -A limits=(
    [tests]=400 [bars]=300 [bars-large]=300 [peers]=400 [steps]=240 [steps-large]=420 [step-peers]=150
    [out-of-core]=300 [training]=180 [open-clip]=160 [sanitize]=240
)

measure() { # losses, without the tests, which are a part of their own
    "$python" benchmarks/run.py --skip-tests --repeats 1 --seconds 2 --output "$results" "$@"
}

run() { # PART
    case "$1" in
    tests) # a test that hangs costs its own 150 seconds, not all that is left
        "$python" -m pytest -q -m gpu -n 8 --maxfail 20 --timeout 150 --timeout-method thread tests
        ;;
    bars)
        measure --contenders 'tilewise graph' --cases \
            clip-bf16-65536x768,clip-bf16-32768x512,clip-bf16-32768x1024,clip-bf16-8192x768,siglip-bf16-65536x768,clip-fp32-autocast-65536x768 &&
            measure --contenders 'tilewise keep graph' --cases clip-bf16-65536x768 &&
            measure --contenders 'tilewise fused,dense' --cases clip-fp32-32768x768
        ;;
    bars-large) measure --contenders tilewise --cases clip-bf16-262144x768,clip-bf16-1048576x768 ;;
    peers) measure --cases clip-bf16-65536x768,siglip-bf16-65536x768 ;;
    steps) "$python" benchmarks/cached_step.py encoders --output "$results" ;;
    steps-large)
        "$python" benchmarks/cached_step.py encoders --models ViT-L-14 --batches 4096,65536 --keep-batches 256 \
            --micro-batch 128 --output "$results"
        ;;
    step-peers) "$python" benchmarks/cached_step.py peers --repeats 7 --output "$results" ;;
    out-of-core) "$python" benchmarks/out_of_core.py loss && "$python" benchmarks/out_of_core.py pool ;;
    training)
        rm -rf runs/training
        "$python" -m tilewise train --model ViT-B-32 --train-data synthetic:65536,size=224,cells=4 --workers 14 \
            --batch-size 32768 --micro-batch 1024 --precision amp_bf16 --steps 4 --log-every 1 --device cuda \
            --name training && cp runs/training/metrics.jsonl "$results/training.jsonl"
        ;;
    open-clip) # the same model in its own loop, at the largest batch that it holds
        "$python" -m open_clip_train.main --dataset-type synthetic --train-num-samples 53760 --model ViT-B-32 \
            --batch-size 3840 --precision amp_bf16 --epochs 1 --workers 14 --log-every-n-steps 1
        ;;
    sanitize)
        compute-sanitizer --tool memcheck "$python" benchmarks/sanitize.py &&
            compute-sanitizer --tool racecheck "$python" benchmarks/sanitize.py
        ;;
    esac
}

if [ "${1:-}" = packages ]; then # pure Python; the GPU machine has torch, Triton, timm, transformers, pytest
    exec pip install -q --no-deps --target .carry/site open_clip_torch webdataset braceexpand tyro docstring_parser \
        shtab typeguard ftfy wcwidth gradcache pytest-xdist pytest-timeout execnet liger-kernel cut-cross-entropy inf-cl siglip-kernel
fi
if [ "${1:-}" = --part ]; then
    run "$2"
    exit
fi
[ $# -gt 0 ] || set -- none
for part in "$@"; do
    if [ -z "${limits[$part]:-}" ]; then
        sed -n '2,11s/^# \{0,1\}//p' "$0"
        exit 2
    fi
done

table="" failed=0
for part in "$@"; do
    left=$((${WITHIN:-590} - SECONDS)) start=$SECONDS
    limit=$((limits[$part] < left ? limits[$part] : left))
    if [ "$limit" -lt 5 ]; then
        table+="$part: not begun"$'\n' failed=1
        continue
    fi
    log=/dev/null
    [ -z "${OUT:-}" ] || log="$OUT/$part.log"
    echo "== $part, at most $limit s"
    timeout --kill-after 5 "$limit" bash "$0" --part "$part" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    outcome="failed ($status)"
    [ "$status" -ne 124 ] || outcome="out of time"
    [ "$status" -ne 0 ] || outcome=ok
    [ "$status" -eq 0 ] || failed=1
    table+="$part: $outcome, $((SECONDS - start)) s"$'\n'
done
printf '\n%s' "$table"
exit "$failed"
