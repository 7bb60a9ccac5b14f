"""Environment of the tests: set before torch is imported."""

import os

# Some virtual machines announce AMX and cannot run it: bf16 products die with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter: to be said before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# Small tensors: a second thread only waits, and parallel test runs share the cores.
torch.set_num_threads(1)


# A shared machine may be slow at any moment; CI draws the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
