"""Ours and every peer that is installed, case by case, into one CSV; only on green tests.

    python benchmarks/run.py [--cases NAME,...] [--contenders NAME,...] [--seconds 2]
                             [--repeats 3] [--output benchmarks/results] [--skip-tests]

Efficiency is sustained over sustained: the step repeated for `--seconds`, between matrix products
repeated for as long (cuBLAS 8192^3 in bf16; on a CPU 2048^3 in fp32), is FLOP / time / the mean
speed of the products. A row that cannot be measured says why. `PYTHONPATH=src` will do instead of
an installation; where there is no git, TILEWISE_COMMIT may name the commit.
"""

import argparse
import csv
import functools
import gc
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import cases as known
import torch
from cases import MIB, Case, Contender, Step, gradient_error

from tilewise import measure

ROOT = Path(__file__).resolve().parents[1]
GEMMS = {"cuda": (8192, torch.bfloat16), "cpu": (2048, torch.float32)}
ERROR_BATCH = 4096  # at which gradients are compared with float64
PATIENCE_S = 20.0  # a case whose steps, one of each repeat, took so long is not repeated again


class RedTestsError(Exception):
    """The tests fail, so that there is nothing worth measuring."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender at one case; empty where nothing was measured."""

    case: str
    loss: str
    batch: int
    dim: int
    dtype: str
    autocast: bool
    learnable: bool
    contender: str
    status: str = "ok"
    """ok, or why there are no numbers."""
    time_ms: float | None = None
    """Of one step, sustained; mean over the repeats."""
    time_min_ms: float | None = None
    time_max_ms: float | None = None
    num_repeats: int | None = None
    """Runs of at least `seconds` each, between two runs of the products."""
    seconds: float | None = None
    ceiling_tflops: float | None = None
    """Speed of the products, mean over their runs."""
    efficiency: float | None = None
    bar: float | None = None
    """Efficiency that ours must reach on one H200."""
    note: str = ""
    peak_mib: float | None = None
    """Above the inputs, gradients included."""
    limit_mib: float | None = None
    """The contract for `peak_mib`."""
    gradient_error: float | None = None
    """norm(got - truth) / norm(truth) of d_image against float64, at B = `error_batch`."""
    error_batch: int | None = None
    first_call_s: float | None = None
    """Of the first step, with what earlier cases of the run had not compiled yet."""


class Setting(NamedTuple):
    """How to measure."""

    device: torch.device
    seconds: float
    repeats: int


class Timing(NamedTuple):
    """Steps and products, alternated."""

    step_s: list[float]  # of one step, for each repeat
    ceilings: list[float]  # FLOP/s, one more than repeats
    peak_bytes: int  # above the inputs
    first_call_s: float


def row_of(case: Case, contender: Contender, **measured: object) -> Row:
    """The row of a case, with what was measured of it."""
    about = asdict(case)
    limit_mib = case.limit_bytes / MIB
    return Row(case=case.name, contender=contender.name, limit_mib=limit_mib, **about, **measured)  # type: ignore[arg-type]


def measure_row(setting: Setting, case: Case, contender: Contender) -> Row:
    """Measure, or say why not; never raises."""
    status = contender.refusal(case, setting.device)
    if status:
        return row_of(case, contender, status=status)
    try:
        row = _measured(setting, case, contender)
    except Exception as error:  # a peer may fail in any way, and is a row all the same
        row = row_of(case, contender, status=_reason(error))
    # Outside of the except: until here the traceback holds the tensors of the failed step.
    _free(setting.device)
    return row


def _measured(setting: Setting, case: Case, contender: Contender) -> Row:
    timing = _time(setting, case, contender)
    step_s, ceiling = statistics.mean(timing.step_s), statistics.mean(timing.ceilings)
    small = replace(case, batch=min(case.batch, ERROR_BATCH), bar=None, note="")
    return row_of(
        case,
        contender,
        time_ms=1e3 * step_s,
        time_min_ms=1e3 * min(timing.step_s),
        time_max_ms=1e3 * max(timing.step_s),
        num_repeats=len(timing.step_s),
        seconds=setting.seconds,
        ceiling_tflops=ceiling / 1e12,
        efficiency=case.flop / step_s / ceiling,
        peak_mib=timing.peak_bytes / MIB,
        gradient_error=gradient_error(small, contender, setting.device),
        error_batch=small.batch,
        first_call_s=timing.first_call_s,
    )


def _time(setting: Setting, case: Case, contender: Contender) -> Timing:
    device = setting.device
    inputs = case.inputs(device)
    _wait(device)
    start_s = time.perf_counter()
    step = contender.step(case, inputs)
    step()
    _wait(device)
    timing = _alternate(setting, step, time.perf_counter() - start_s)
    if contender.wrap is known.captured:
        # A graph takes its memory when it is recorded, not when it is replayed.
        del step
        again = functools.partial(contender.step, case, inputs)
        return timing._replace(peak_bytes=measure.peak_bytes(again, device))
    return timing


def _alternate(setting: Setting, step: Step, first_call_s: float) -> Timing:
    """Products, step, products, step, ..., products; each for so many seconds."""
    device, seconds, repeats = setting
    product, flop = make_product(device)
    # The GPU's power limit bites after a third of a second: heat it before counting.
    sustained_s(product, seconds / 4, device)
    ceilings = [flop / sustained_s(product, seconds, device)]
    times: list[float] = []
    peak_bytes = 0

    def run() -> None:
        times.append(sustained_s(step, seconds, device))

    while len(times) < repeats and sum(times) < PATIENCE_S:
        if device.type == "cuda":  # reading the peak is free there
            peak_bytes = max(peak_bytes, measure.peak_bytes(run, device))
        else:
            run()
        ceilings.append(flop / sustained_s(product, seconds, device))
    if device.type != "cuda":  # the profiler that sees allocations slows the step down
        peak_bytes = measure.peak_bytes(step, device)
    return Timing(times, ceilings, peak_bytes, first_call_s)


def sustained_s(call: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Seconds a call, repeated for at least so long; CUDA works through long queues of calls."""
    _wait(device)
    start_s, count, chunk = time.perf_counter(), 0, 1
    while count == 0 or time.perf_counter() - start_s < seconds:
        for _ in range(chunk):
            call()
        _wait(device)
        count += chunk
        # Ten queues or so: waiting for each costs nothing then, and the end is not far off.
        chunk = max(1, int(seconds / 10 / ((time.perf_counter() - start_s) / count)))
    return (time.perf_counter() - start_s) / count


def make_product(device: torch.device) -> tuple[Callable[[], object], int]:
    """The matrix product that efficiency is relative to, and its FLOP."""
    size, dtype = GEMMS[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out), 2 * size**3


def _reason(error: Exception) -> str:
    """One line for the table."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "out of memory"
    if isinstance(error, ImportError):
        return f"not installed: {text[:160]}"
    return f"error: {type(error).__name__}: {text[:160]}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tests_command(cuda: bool) -> list[str]:
    """The tests that must be green; pytest-xdist, which pyproject.toml asks for, may be missing."""
    which = (
        ["-m", "gpu", "tests"]
        if cuda
        else ["-m", "not slow and not gpu", "tests/test_semantics.py"]
    )
    options = ["-q", "-o", "addopts=", "-o", "pythonpath=tests"]
    return [sys.executable, "-m", "pytest", *options, *which]


def check_tests(cuda: bool) -> None:
    """Raise `RedTestsError`, with the end of pytest's output, unless the tests pass."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        tests_command(cuda), cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise RedTestsError(f"nothing is measured, the tests are red:\n{tail}")


def provenance(
    device: torch.device, arguments: Sequence[str], tests: str, script: str = "run.py"
) -> dict[str, str]:
    """Where, when and with what the rows were measured."""
    machine = measure.machine()
    return {
        "tests": tests,
        "machine": machine.device,
        "gpu": measure.machine(device).device if device.type == "cuda" else "",
        "torch": machine.torch,
        "triton": _triton_version(),
        "python": machine.python,
        "commit": measure.commit() or os.environ.get("TILEWISE_COMMIT", ""),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{script}", *arguments]),
    }


def _triton_version() -> str:
    try:
        import triton  # noqa: PLC0415
    except ImportError:
        return ""
    return str(triton.__version__)


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Kernels compiled by earlier runs are not found, so that first calls tell what they cost."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        with mock.patch.dict(os.environ, {name: str(Path(folder) / name) for name in names}):
            yield


def save_rows(path: Path, rows: Iterator[Row], about: dict[str, str]) -> Iterator[Row]:
    """Write each row as soon as it is known, so that a run that is cut short leaves its rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*(field.name for field in fields(Row)), *about])
        writer.writeheader()
        for row in rows:
            writer.writerow({**asdict(row), **about})
            file.flush()
            yield row


def show(rows: Iterator[Row], total: int) -> None:
    """A line for each row, with rich also how far the run is."""
    try:
        from rich.progress import Progress  # noqa: PLC0415
    except ImportError:
        for row in rows:
            print(line_of(row), flush=True)
        return
    with Progress() as progress:
        task = progress.add_task("measuring", total=total)
        for row in rows:
            progress.console.print(line_of(row), markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)


def line_of(row: Row) -> str:
    """What a row says, for people."""
    start = f"{row.case:29} {row.contender:24}"
    if row.status != "ok":
        return f"{start} {row.status}"
    return (
        f"{start} {row.time_ms:10.3f} ms  {row.efficiency:5.3f} of {row.ceiling_tflops:.4g} "
        f"TFLOP/s  {row.peak_mib:9.1f} MiB  error {row.gradient_error:.1e}  "
        f"first {row.first_call_s:.2f} s"
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="comma-separated, as clip-bf16-65536x768")
    parser.add_argument(
        "--contenders",
        help="comma-separated: " + ", ".join(contender.name for contender in known.CONTENDERS),
    )
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--skip-tests", action="store_true", help="is told in the results")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or options.repeats < 1:
        parser.error("--seconds must be above 0 and --repeats at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Test, measure, save; the exit code."""
    options = parse(arguments)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    cases, contenders = list(known.CASES if cuda else known.CPU_CASES), list(known.CONTENDERS)
    try:
        if options.cases:
            cases = [known.find_case(name) for name in options.cases.split(",")]
        if options.contenders:
            contenders = [known.find_contender(name) for name in options.contenders.split(",")]
        if not options.skip_tests:
            check_tests(cuda)
    except (ValueError, RedTestsError) as error:
        print(error, file=sys.stderr)
        return 1
    about = provenance(device, arguments, "skipped" if options.skip_tests else "green")
    setting = Setting(device, options.seconds, options.repeats)
    pairs = [(x, y) for x in cases for y in contenders if x.loss in y.losses]
    slug = re.sub(r"\W+", "-", (about["gpu"] or "cpu").lower()).strip("-")
    path = options.output / f"{re.sub(r'[^0-9]', '', about['date'][:19])}-{slug}.csv"
    with fresh_caches():
        rows = (measure_row(setting, case, contender) for case, contender in pairs)
        show(save_rows(path, rows, about), len(pairs))
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
