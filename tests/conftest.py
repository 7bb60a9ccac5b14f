"""Environment of the tests: set before torch is imported."""

import os

# Some virtual machines announce AMX and cannot run it: bf16 products die with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Small tensors: a second thread only waits, and parallel test runs share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
