"""Peak memory is exact, time is a median after a warm-up, the machine has a name."""

import math
import subprocess

import pytest
import torch

from tilewise import measure

CPU = torch.device("cpu")
N = 10_000_000


def allocate(num_bytes=N):
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_peak_of_one_after_the_other():
    def call():
        first = allocate()
        del first
        allocate()

    assert measure.peak_bytes(call, CPU) == N


def test_peak_of_both_at_once():
    def call():
        first = allocate()
        second = allocate()
        del first, second
        allocate(N // 2)

    assert measure.peak_bytes(call, CPU) == 2 * N


def test_peak_counts_what_is_returned_and_what_the_backward_makes():
    x = torch.randn(1000, 1000, requires_grad=True)
    # Kept by exp for its backward, the gradient itself, and a few scalars.
    peak = measure.peak_bytes(lambda: torch.autograd.grad(x.exp().sum(), x), CPU)
    assert 2 * x.nbytes <= peak < 2 * x.nbytes + 1000


def test_peak_is_above_the_start():
    kept = allocate()
    assert measure.peak_bytes(lambda: allocate(N // 2), CPU) == N // 2
    assert measure.peak_bytes(lambda: None, CPU) == 0
    assert kept.nbytes == N


def test_peak_is_repeatable():
    a, b = torch.randn(2, 300, 40)
    call = lambda: torch.logsumexp(a @ b.T, 1)  # noqa: E731
    assert len({measure.peak_bytes(call, CPU) for _ in range(3)}) == 1


def test_median_is_of_the_calls_after_the_first(monkeypatch):
    durations = iter([100.0, 3.0, 1.0, 2.0])
    clock = iter(t for d in durations for t in (0.0, d))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    calls = []
    assert measure.median_s(lambda: calls.append(None), 3) == 2.0
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemm_speed_is_a_speed(dtype):
    speed = measure.gemm_tflops(CPU, dtype, 64)
    assert math.isfinite(speed)
    assert speed > 0


def test_machine_is_described():
    here = measure.machine()
    assert f"{torch.get_num_threads()} threads" in here.device
    assert here.torch == torch.__version__
    assert here.python in str(here)


def test_free_memory_is_counted_in_bytes():
    assert measure.free_bytes(CPU) > 2**24


def test_free_memory_off_linux_is_assumed(monkeypatch):
    monkeypatch.setattr(measure, "_proc_field", lambda file, key: "")
    assert measure.free_bytes(CPU) == measure.ASSUMED_FREE_BYTES
    assert "threads" in measure.machine().device


def test_the_commit_is_that_of_our_own_checkout(tmp_path, monkeypatch):
    """Not that of a repository that an installed package lies in."""
    installed = tmp_path / "venv/lib/site-packages/tilewise/measure.py"
    installed.parent.mkdir(parents=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    monkeypatch.setattr(measure, "__file__", str(installed))
    assert measure.commit() == ""
