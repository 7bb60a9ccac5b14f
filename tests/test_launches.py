"""Every launch of the fused backend, compiled for a device that is not there; nothing runs.

Triton's interpreter runs no Gluon, and takes much that the compiler refuses. A process of its own:
other tests have the interpreter on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "host_time.py"
# Small batches wait for every launch: no more than these, on Hopper.
MOST_KERNELS = {
    "clip-bf16": 17,
    "clip-scale-bf16": 18,
    "clip-anew-bf16": 16,
    "siglip-bf16": 7,
    "info_nce-frozen-bf16": 10,
}


def launched(capability, cases, features):
    """What the script says of each case, in a batch that fills no tile."""
    command = [sys.executable, str(SCRIPT), "--json", "--repeats", "1", "--batch", "77"]
    command += ["--capability", str(capability), "--cases", cases, "--features", str(features)]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found):
    for case in found:
        # Gradients of float32 features are products in parts, all others those of the BLAS.
        assert (case["products"] == 0) == case["case"].endswith("fp32"), case
        assert not case["waits"], case
    return {name for case in found for name in case["compiled"]}


def test_every_launch_compiles():
    found = launched(90, "all", 96)
    compiled = check(found)
    assert {"sums", "dz_of_marked", "marked_sums", "split_product", "dz_of_softplus"} <= compiled
    counts = {case["case"]: case["kernels"] for case in found}
    assert len(counts) == 39
    for name, most in MOST_KERNELS.items():
        assert counts[name] <= most, f"{name}: {counts[name]}"


@pytest.mark.parametrize("capability", [80, 90])
def test_features_that_are_copied(capability):
    """Of an odd number; before Hopper too, where no engine copies tiles."""
    losses = ("clip", "clip-labels", "siglip", "info_nce-frozen", "nt_xent")
    cases = ",".join(f"{loss}-{dtype}" for loss in losses for dtype in ("fp16", "fp32"))
    assert "convert" in check(launched(capability, cases, 33))
