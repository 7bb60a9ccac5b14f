"""Features in host memory and pools of negatives: time and device memory, and what bounds them.

    python benchmarks/out_of_core.py loss [--batch 2097152] [--dim 768]
    python benchmarks/out_of_core.py pool [--batch 16384] [--pool 8388608] [--dim 768]
                                          [--where device,host,disk] [--folder .]

`loss`: CLIP forward and backward with features and gradients in pinned host memory, over the same
with both on the device. `pool`: InfoNCE forward and backward of a batch against a pool read once,
over its floor: 4 * batch * pool * dim FLOP at the speed of a matrix product in the same run, or,
from a disk, the file's bytes at the speed of plain reads in the same run (caches dropped before).
Results are compared with float64 on a part of the pairs. On a CPU take small sizes.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import tilewise as tw
from tilewise import measure

MIB = 2**20
CHUNK = 65536  # rows that are made at a time


class Batch(NamedTuple):
    """What is contrasted with a pool."""

    query: Tensor
    key: Tensor
    ids: Tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Run one part and print its table."""
    args = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(measure.machine(device))
    (_measure_loss if args.part == "loss" else _measure_pool)(args, device)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parts = parser.add_subparsers(dest="part", required=True)
    for name, batch in (("loss", 2097152), ("pool", 16384)):
        part = parts.add_parser(name)
        part.add_argument("--batch", type=int, default=batch)
        part.add_argument("--dim", type=int, default=768)
        part.add_argument("--repeats", type=int, default=1 if name == "loss" else 3)
        if name == "pool":
            part.add_argument("--pool", type=int, default=8388608)
            part.add_argument("--where", default="device,host,disk")
            part.add_argument("--folder", default=".")
    return parser.parse_args(argv)


def _unit_into(out: Tensor, device: torch.device, seed: int) -> Tensor:
    """Fill with random unit rows, made on the device."""
    dice = torch.Generator(device).manual_seed(seed)
    for start in range(0, len(out), CHUNK):
        part = out[start : start + CHUNK]
        x = torch.randn(part.shape, device=device, generator=dice)
        part.copy_(functional.normalize(x, dim=1))
    return out


def _memory(rows: int, dim: int, device: torch.device, host: bool) -> Tensor:
    """Memory for features: bf16, on a CPU fp32, which is what runs well there."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    if host:
        return torch.empty(rows, dim, dtype=kind, pin_memory=device.type == "cuda")
    return torch.empty(rows, dim, dtype=kind, device=device)


def _timed_s(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median seconds of a call, and the peak of device memory above what there was, in MiB."""
    times, peak = [], 0.0
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = max(peak, (torch.cuda.max_memory_allocated() - before) / MIB)
        times.append(time.perf_counter() - start_s)
    return statistics.median(times), peak


def _product_speed(device: torch.device) -> float:
    """FLOP/s of a matrix product, sustained for two seconds on a GPU."""
    if device.type != "cuda":
        return measure.gemm_tflops(device, torch.float32, 1024) * 1e12
    a, b = torch.randn(2, 8192, 8192, device=device).bfloat16()
    out, count, start_s = torch.empty_like(a), 0, time.perf_counter()
    while time.perf_counter() - start_s < 2.0:
        for _ in range(50):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()
        count += 50
    return 2 * 8192**3 * count / (time.perf_counter() - start_s)


def _clip_step(image: Tensor, text: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    sides = [x.detach().requires_grad_() for x in (image, text)]
    loss = tw.clip_loss(*sides, 14.3, device=device)
    loss.backward()
    grads = [x.grad for x in sides]
    assert grads[0] is not None
    assert grads[1] is not None
    return loss.detach(), grads[0], grads[1]


def _clip_timed(
    sides: list[Tensor], args: argparse.Namespace, device: torch.device
) -> tuple[float, float, list[Tensor]]:
    """Seconds, MiB and results (on the host) of a step."""
    # Two blocks and a bit, so that all kinds of blocks are compiled.
    _clip_step(*(x[:300000] for x in sides), device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        # Pinned memory takes seconds to get and is kept by torch: a first step waits for it.
        start_s, rows = time.perf_counter(), len(sides[0])
        kinds = (torch.float32, torch.bfloat16, torch.bfloat16)
        held = [torch.empty(rows, args.dim, dtype=kind, pin_memory=True) for kind in kinds]
        del held
        print(f"pinned memory for gradients: {time.perf_counter() - start_s:.1f} s, once")
    found: list[tuple[Tensor, ...]] = []
    seconds, mib = _timed_s(
        lambda: (found.clear(), found.append(_clip_step(*sides, device))), device, args.repeats
    )
    return seconds, mib, [x.cpu() for x in found[0]]


def _measure_loss(args: argparse.Namespace, device: torch.device) -> None:
    sides = [_unit_into(_memory(args.batch, args.dim, device, True), device, k) for k in (0, 1)]
    here_s, here_mib, here = _clip_timed([x.to(device) for x in sides], args, device)
    there_s, there_mib, there = _clip_timed(sides, args, device)
    print(f"CLIP {args.batch:,} x {args.dim}, forward and backward, {args.repeats} repeats")
    print(f"features on the device   {here_s:8.2f} s  {here_mib:10,.0f} MiB above them")
    print(f"features in host memory  {there_s:8.2f} s  {there_mib:10,.0f} MiB on the device")
    print(f"ratio                    {there_s / here_s:8.3f}    (bar 1.15)")
    print(f"loss {float(there[0]):.7f} and {float(here[0]):.7f}; gradients differ by", end=" ")
    print(", ".join(f"{_difference(a, b):.1e}" for a, b in zip(there[1:], here[1:], strict=True)))


def _difference(a: Tensor, b: Tensor) -> float:
    """Relative norm of a difference, over a part of the rows if there are many."""
    a, b = (x[:: max(1, len(x) // 65536)].double().cpu() for x in (a, b))
    return float((a - b).norm() / b.norm())


def _measure_pool(args: argparse.Namespace, device: torch.device) -> None:
    query, key = (
        _unit_into(_memory(args.batch, args.dim, device, False), device, k) for k in (1, 2)
    )
    # A query's own older copies are all over the pool.
    ids = torch.arange(args.batch, device=device) * (args.pool // args.batch)
    floor_s = 4 * args.batch * args.pool * args.dim / _product_speed(device)
    gib = args.pool * args.dim * key.element_size() / 2**30
    print(f"InfoNCE, a batch of {args.batch:,} and a pool of {args.pool:,} x {args.dim} "
          f"({gib:.1f} GiB); 4 N M D FLOP at a product's speed {floor_s:.3f} s")  # fmt: skip
    batch = Batch(query, key, ids)
    for where in args.where.split(","):
        if where == "disk":
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                _measure_disk(args, device, batch, Path(folder) / "pool", floor_s)
        else:
            _measure_memory(args, device, batch, where, floor_s)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_memory(
    args: argparse.Namespace, device: torch.device, batch: Batch, where: str, floor_s: float
) -> None:
    pool = _filled(_pool(args, device, where), device)
    _check(batch, pool)
    for named in (False, True):
        _step(batch, pool, named)
        seconds, mib = _timed_s(partial(_step, batch, pool, named), device, args.repeats)
        _tell(f"{where:7} {'with ids' if named else 'no ids':9}", seconds, mib, floor_s)


def _measure_disk(
    args: argparse.Namespace, device: torch.device, batch: Batch, path: Path, floor_s: float
) -> None:
    """Plain reads of the file and steps in turns: a disk's speed changes by the second."""
    pool = _filled(_pool(args, device, path), device)
    _check(batch, pool)
    _step(batch, pool, True)  # kernels are compiled
    reads, times, peak = [], [], 0.0
    for _ in range(args.repeats):
        state = pool.state_dict()
        del pool  # what is mapped stays in the system's cache
        reads.append(_read_s(path))
        _drop_cache(path)
        pool = _pool(args, device, path)
        pool.load_state_dict(state)
        seconds, mib = _timed_s(partial(_step, batch, pool, True), device, 1)
        times.append(seconds)
        peak = max(peak, mib)
        print(f"plain reads {reads[-1]:.2f} s ({path.stat().st_size / reads[-1] / 1e9:.2f} GB/s), "
              f"step {seconds:.2f} s", flush=True)  # fmt: skip
    read_s = statistics.median(reads)
    _tell("disk    with ids ", statistics.median(times), peak, max(floor_s, read_s))


def _tell(what: str, seconds: float, mib: float, floor_s: float) -> None:
    bar = {"disk": "1.2", "host": "1.3"}.get(what.split(maxsplit=1)[0], "-")
    print(f"{what} {seconds:7.3f} s  {mib:8,.0f} MiB on the device  {seconds / floor_s:6.3f} of "
          f"{floor_s:.3f} s (bar {bar})", flush=True)  # fmt: skip


def _pool(args: argparse.Namespace, device: torch.device, where: Path | str) -> tw.Pool:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    return tw.Pool(args.pool, args.dim, device=device, where=where, dtype=kind)


def _filled(pool: tw.Pool, device: torch.device) -> tw.Pool:
    part = _memory(CHUNK, pool.dim, device, False)
    for start in range(0, pool.size, CHUNK):
        few = _unit_into(part[: pool.size - start], device, start)
        pool.put(few, torch.arange(start, start + len(few), device=device))
    return pool


def _drop_cache(path: Path) -> None:
    """Let the system forget what it holds of a file."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_s(path: Path) -> float:
    """Seconds to read a file from end to end, 64 MiB at a time, with nothing else to do."""
    _drop_cache(path)
    buffer, start_s = bytearray(64 * MIB), time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start_s


def _step(batch: Batch, pool: tw.Pool, named: bool) -> Tensor:
    twin = batch.query.detach().requires_grad_()
    options = pool.negatives()
    if not named:
        options.pop("negative_ids", None)
    tw.info_nce(twin, batch.key, 14.3, ids=batch.ids if named else None, **options).backward()
    assert twin.grad is not None
    return twin.grad


def _check(batch: Batch, pool: tw.Pool) -> None:
    """A part of the pairs against float64, dense."""
    some, few = slice(0, min(len(pool), 32768)), slice(0, min(len(batch.query), 1024))
    q, k, n = batch.query[few], batch.key[few], pool.features[some]
    twin, truth = q.detach().requires_grad_(), q.detach().double().requires_grad_()
    device = pool.negatives().get("device")
    tw.info_nce(twin, k, 14.3, negatives=n, device=device).backward()
    dense = torch.cat([k.double(), n.to(q.device).double()])
    z = 14.3 * truth @ dense.T
    functional.cross_entropy(z, torch.arange(len(q), device=q.device)).backward()
    assert twin.grad is not None
    assert truth.grad is not None
    error = float((twin.grad.double() - truth.grad).norm() / truth.grad.norm())
    print(f"gradient of {len(q):,} queries over {len(n):,} of the pool: off by {error:.1e}")


if __name__ == "__main__":
    main()
