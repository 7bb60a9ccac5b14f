"""The kernels compiled for every architecture, without a device: no spills, no traps, MMA used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "compile_kernels.py"
# (kind, version, dtype, bytes of shared memory a program may have)
TARGETS = [
    # All before Hopper run this: the smaller ones have 99 KiB.
    ("cuda", 80, "bfloat16", 99 * 1024),
    ("cuda", 80, "float32", 99 * 1024),
    ("cuda", 90, "bfloat16", 227 * 1024),
    # As bfloat16 but for how numbers are rounded.
    pytest.param("cuda", 90, "float16", 227 * 1024, marks=pytest.mark.slow),
    ("cuda", 90, "float32", 227 * 1024),
    ("cuda", 90, "float8_e4m3fn", 227 * 1024),
    ("cuda", 100, "bfloat16", 227 * 1024),
    ("cuda", 100, "float32", 227 * 1024),
    ("cuda", 100, "float8_e4m3fn", 227 * 1024),
    ("cuda", 120, "bfloat16", 99 * 1024),
    ("hip", 942, "bfloat16", 64 * 1024),
    ("hip", 942, "float32", 64 * 1024),
]

# Bytes: kept exponentials with a learnable scale fold four sums at once, ten registers too many;
# with columns of other ranks, two.
SPILLED = {"gluon-sums-keep-scale": 64, "gluon-dz-scale-foreign": 16}


def compiled(*args):
    """What the script says, run without the interpreter."""
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_edges_have_the_same_tiles():
    """Sums by column tile that `hopper_dz` leaves are overwritten by the run over the edges."""
    from tilewise.backends.tuning import GLUON, HOPPER

    assert GLUON.softplus[:2] == HOPPER.softplus[:2]
    assert GLUON.masked == HOPPER.masked


def test_sizes_of_one_compile():
    """Triton makes constants of arguments that are 1, which then lack a tensor's methods."""
    compiled("cuda", 90, "bfloat16", "ones")


@pytest.mark.parametrize(("kind", "version", "dtype", "shared"), TARGETS)
def test_kernels_compile(kind, version, dtype, shared):
    found = [json.loads(line) for line in compiled(kind, version, dtype).splitlines()]
    gluon = {"bfloat16": 11, "float16": 11, "float32": 8} if (kind, version) == ("cuda", 90) else {}
    assert len(found) == 15 + gluon.get(dtype, 0) + (2 if dtype == "float32" else 0)
    for kernel in found:
        assert kernel["spilled"] <= SPILLED.get(kernel["name"], 0), kernel
        assert kernel["trap"] == 0, kernel
        assert kernel["mma"] > 0, kernel
        assert kernel["narrow"] == 0, kernel
        assert kernel["shared"] <= shared, kernel
        # Triton makes one product of a sum and a product where it can, and tensor cores cut it off.
        assert kernel["sums"] >= 16 or "split_product" not in kernel["name"], kernel
