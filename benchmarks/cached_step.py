"""Time, memory and gradients of a cached step: against its peers, and against encoders alone.

    python benchmarks/cached_step.py peers [--model small] [--batch 1024] [--micro-batch 128]
        [--repeats 3] [--contenders NAME,...] [--device cpu] [--precision fp32] [--output FOLDER]
    python benchmarks/cached_step.py encoders [--models ViT-B-32,...] [--batches 4096,...]
        [--keep-batches 1024,...] [--micro-batch N] [--repeats 1] [--samples 16] ...

`peers`: one batch, on the device, for everyone, in turns; times are medians. The best peer is the
fastest that bounds memory, so not `plain`. Gradients are compared with a plain step in float64, on
a GPU in float32, on a smaller batch of four micro-batches.

`encoders`: inputs in host memory. Encoders alone are the same forwards and backwards of a sample of
micro-batches that lie on the device, scaled to the batch: with `--batches` (keep=0) two forwards
and a backward of each, with `--keep-batches` (keep="auto") one forward and a backward.

Peak memory is above weights and inputs, gradients included. Models are tiny, small, or names of
open_clip's, with random weights. Without git, TILEWISE_COMMIT may name the commit.
"""

import argparse
import csv
import gc
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cached_peers as known
import torch
from cached_peers import Contender, Data, Gradients, Job, Pair, Step, gradients
from run import provenance
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise import StepResult, measure

MIB = 2**20
BAR, BAR_BATCH = 1.10, 32768  # of a step over its encoders alone, and where it holds with keep=0
# Small enough that with keep="auto" a few graphs fit into the memory of one GPU.
MICRO_BATCHES = {"ViT-B-32": 512, "ViT-L-14": 128, "tiny": 16, "small": 128}
PACKAGES = ("sentence-transformers", "open_clip_torch", "gradcache", "GradCache")


class PeerRow(NamedTuple):
    """A contender; None where nothing was measured."""

    model: str
    batch: int
    micro_batch: int
    autocast: bool
    contender: str
    status: str = "ok"
    time_ms: float | None = None  # median
    time_min_ms: float | None = None
    time_max_ms: float | None = None
    num_repeats: int | None = None
    to_best_peer: float | None = None  # time over that of the fastest peer
    peak_mib: float | None = None
    encoder_error: float | None = None  # norm(got - truth) / norm(truth) of all weights' gradients
    scale_error: float | None = None  # the same of the scale's
    scale_ratio: float | None = None  # gradient of the scale over the truth
    error_batch: int | None = None


class EncoderRow(NamedTuple):
    """Steps of one size; None where nothing was measured."""

    model: str
    keep: str
    batch: int
    micro_batch: int
    autocast: bool
    status: str = "ok"
    kept: int | None = None  # micro-batches, of both encoders, that were run once
    replayed: int | None = None
    step_s: float | None = None  # median
    embed_s: float | None = None  # of the last step, as are the next two
    loss_s: float | None = None
    replay_s: float | None = None
    alone_s: float | None = None  # encoders alone
    ratio: float | None = None
    bar: float | None = None
    pairs_per_s: float | None = None
    peak_mib: float | None = None
    features_mib: float | None = None  # of that: features and gradients, which grow with the batch
    num_repeats: int | None = None


class Observed(NamedTuple):
    """One step."""

    seconds: float
    peak_bytes: int  # above what there was before; 0 on a CPU, where telling it takes time
    result: Any


def observe(step: Step, device: torch.device) -> Observed:
    """Time of one call, and its memory where a counter tells it."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        result = step()
        return Observed(time.perf_counter() - start_s, 0, result)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, start_s = torch.cuda.memory_allocated(device), time.perf_counter()
    result = step()
    torch.cuda.synchronize(device)
    seconds, peak = time.perf_counter() - start_s, torch.cuda.max_memory_allocated(device)
    if isinstance(result, StepResult):
        # It has started the counter anew with each of its phases.
        phases = (getattr(result.metrics, f"{x}_peak_mib") for x in ("embed", "loss", "replay"))
        peak = max(peak, *(int(x * MIB) for x in phases))
    return Observed(seconds, peak - before, result)


def peak_bytes(step: Step, device: torch.device) -> int:
    """Of one call."""
    if device.type == "cuda":
        return observe(step, device).peak_bytes
    return measure.peak_bytes(step, device)


def attempt(call: Callable[[], Any], device: torch.device) -> Any:
    """What it returns, or why it failed as the status of a row."""
    try:
        return call()
    except Exception as error:  # a peer may fail in any way, and is a row all the same
        text = " ".join(f"{type(error).__name__}: {error}".split())
    # Outside of the except: until here the traceback holds the tensors of the failed step.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    full = "out of memory" in text or "can't allocate memory" in text
    return {"status": "out of memory" if full else f"error: {text[:160]}"}


def first_step(contender: Contender, job: Job, truth: Gradients) -> dict[str, Any]:
    """The step, its memory and the errors of its gradients."""
    got, step = gradients(contender.make, job), contender.make(job)
    job.pair.zero_grad(set_to_none=True)
    return {
        "step": step,
        "peak_mib": peak_bytes(step, job.data.images.device) / MIB,
        "encoder_error": float((got.encoders - truth.encoders).norm() / truth.encoders.norm()),
        "scale_error": abs(got.scale / truth.scale - 1),
        "scale_ratio": got.scale / truth.scale,
        "error_batch": min(known.ERROR_BATCH, len(job.data.images)),
    }


def peer_rows(options: argparse.Namespace) -> Iterator[PeerRow]:
    """All contenders, in turns; known when all are."""
    device = options.device
    pair, shape = known.make_pair(options.model, device, options.autocast)
    data = known.make_data(shape, options.batch, device).to(device)
    job = Job(pair, data, options.micro_batch)
    truth = gradients(known.plain, job._replace(pair=pair.exact()))
    found, steps, times = dict[str, dict[str, Any]](), dict[str, Step](), dict[str, list[float]]()
    for contender in options.contenders:
        refusal, name = contender.refusal(), contender.name
        call = partial(first_step, contender, job, truth)
        found[name] = {"status": refusal} if refusal else attempt(call, device)
        if "step" in found[name]:
            steps[name], times[name] = found[name].pop("step"), []
        print(f"{name}: {found[name].get('status', 'ok')}", flush=True)
    for _ in range(options.repeats):
        for name, step in steps.items():
            pair.zero_grad(set_to_none=True)
            seen = observe(step, device)
            times[name].append(1e3 * seen.seconds)
            found[name]["peak_mib"] = max(found[name]["peak_mib"], seen.peak_bytes / MIB)
    peers = [x.name for x in options.contenders if x.peer and x.name in times]
    best_ms = min((statistics.median(times[name]) for name in peers), default=None)
    for name, own in times.items():
        middle_ms = statistics.median(own)
        found[name] |= {"time_ms": middle_ms, "time_min_ms": min(own), "time_max_ms": max(own)}
        found[name] |= {"num_repeats": len(own), "to_best_peer": best_ms and middle_ms / best_ms}
    about = options.model, options.batch, options.micro_batch, options.autocast
    yield from (PeerRow(*about, name, **row) for name, row in found.items())


class Alone(NamedTuple):
    """Seconds for a micro-batch of both encoders."""

    forward_s: float  # without a graph
    both_s: float  # forward with a graph, and backward


def time_alone(pair: Pair, data: Data, micro_batch: int) -> Alone:
    """Of all of these, which lie on the device; in the order of a step."""
    sides = list(zip((pair.image, pair.text), (x.split(micro_batch) for x in data), strict=True))
    with torch.no_grad():
        # Of zeros a GPU would take less power, and run faster.
        grads = [torch.randn_like(tower(own[0])) / micro_batch for tower, own in sides]

    def forward() -> None:
        with torch.no_grad():
            for tower, own in sides:
                for x in own:
                    tower(x)

    def both() -> None:
        for (tower, own), grad in zip(sides, grads, strict=True):
            for x in own:
                tower(x).backward(grad)

    count, device = len(sides[0][1]), data.images.device
    return Alone(*(observe(call, device).seconds / count for call in (forward, both)))


def warm_loss(pair: Pair, batch: int, feature: Tensor) -> None:
    """Compile what the loss of so many features like this one (1, D) needs."""
    made = (functional.normalize(feature.new_empty(batch, feature.shape[1]).normal_(), dim=1)
            for _ in range(2))  # fmt: skip
    pair.loss(*(x.requires_grad_() for x in made), tilewise.clip_loss).backward()
    pair.zero_grad(set_to_none=True)


def measure_batch(job: Job, keep: float | str, options: argparse.Namespace) -> dict[str, Any]:
    """Steps with their encoders alone before each; the data is in host memory."""
    (pair, data, _), device = job, options.device
    batch = len(data.images)
    micro_batch = min(job.micro_batch, batch)
    sampled = data.first(min(options.samples, batch // micro_batch) * micro_batch)
    step = known.ours(job, keep)
    with torch.no_grad():
        feature = pair.image(data.images[:1].to(device))
    warm_loss(pair, batch, feature)
    if keep == "auto":
        step()  # which waits for its memory, once
        pair.zero_grad(set_to_none=True)
    alone, seen = list[Alone](), list[Observed]()
    for _ in range(options.repeats):
        alone.append(time_alone(pair, sampled.to(device), micro_batch))
        pair.zero_grad(set_to_none=True)
        seen.append(observe(step, device))
        pair.zero_grad(set_to_none=True)
    found = seen[-1].result.metrics
    again = found.replayed / (found.kept + found.replayed)
    forward_s, both_s = map(statistics.median, zip(*alone, strict=True))
    alone_s = (again * forward_s + both_s) * batch / micro_batch
    step_s = statistics.median(x.seconds for x in seen)
    peak = max(x.peak_bytes for x in seen) or peak_bytes(step, device)
    barred = device.type == "cuda" and (again == 0 or (again == 1 and batch == BAR_BATCH))
    return {
        **{x: getattr(found, x) for x in ("kept", "replayed", "embed_s", "loss_s", "replay_s")},
        "step_s": step_s, "alone_s": alone_s, "ratio": step_s / alone_s,
        "bar": BAR if barred else None, "pairs_per_s": batch / step_s, "peak_mib": peak / MIB,
        "features_mib": 4 * batch * feature.numel() * feature.element_size() / MIB,
        "num_repeats": len(seen),
    }  # fmt: skip


def encoder_rows(options: argparse.Namespace) -> Iterator[EncoderRow]:
    """Each as soon as it is measured."""
    device, made = options.device, dict[known.Shape, Data]()
    cases = [("0", n) for n in options.batches] + [("auto", n) for n in options.keep_batches]
    for name in options.models:
        micro_batch = options.micro_batch or MICRO_BATCHES.get(name, 256)
        pair, shape = known.make_pair(name, device, options.autocast)
        if shape not in made:
            made[shape] = known.make_data(shape, max(n for _, n in cases), device)
        warm = known.ours(Job(pair, made[shape].first(2 * micro_batch), micro_batch), 0)
        attempt(warm, device)
        for keep, batch in cases:
            job = Job(pair, made[shape].first(batch), micro_batch)
            kept = keep if keep == "auto" else 0
            row = attempt(partial(measure_batch, job, kept, options), device)
            yield EncoderRow(name, keep, batch, micro_batch, options.autocast, **row)


def peer_cells(row: PeerRow) -> dict[str, str]:
    """A line of the table."""
    if row.time_ms is None or row.scale_error is None:
        return {"contender": row.contender, "remark": row.status}
    off = row.scale_error > 0.5
    return {
        "contender": row.contender,
        "ms": f"{row.time_ms:,.4g}" if row.time_ms < 1e4 else f"{row.time_ms:,.0f}",
        "min..max": f"{row.time_min_ms:,.0f}..{row.time_max_ms:,.0f}",
        "/ best peer": f"{row.to_best_peer:.2f}" if row.to_best_peer else "",
        "peak MiB": f"{row.peak_mib:,.1f}",
        "encoder error": f"{row.encoder_error:.1e}",
        "scale error": f"{row.scale_error:.1e}",
        "remark": f"gradient of the scale {row.scale_ratio:.2f} x the truth" if off else "",
    }


def encoder_cells(row: EncoderRow) -> dict[str, str]:
    """A line of the table."""
    start = {"model": row.model, "keep": row.keep, "batch": f"{row.batch:,}"}
    if row.step_s is None or row.ratio is None or row.kept is None or row.replayed is None:
        return {**start, "remark": row.status}
    met = "" if row.bar is None else "met" if row.ratio <= row.bar else "missed"
    return {
        **start,
        "kept": f"{row.kept} of {row.kept + row.replayed}",
        "step s": f"{row.step_s:.3f}",
        "embed, loss, replay": f"{row.embed_s:.3f}, {row.loss_s:.3f}, {row.replay_s:.3f}",
        "alone s": f"{row.alone_s:.3f}",
        "ratio": f"{row.ratio:.3f}",
        "pairs/s": f"{row.pairs_per_s:,.0f}",
        "peak MiB": f"{row.peak_mib:,.1f}",
        "of features": f"{row.features_mib:,.1f}",
        "remark": met and f"bar {row.bar:.2f} {met}",
    }


def show(title: str, lines: Sequence[dict[str, str]]) -> None:
    """A table, with rich where it is installed."""
    headings = list(max(lines, key=len))
    cells = [[line.get(heading, "") for heading in headings] for line in lines]
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(title, *("  ".join(line) for line in [headings, *cells]), sep="\n")
        return
    shown = Table(title=title, title_justify="left")
    for heading in headings:
        words = heading in ("contender", "model", "remark")
        shown.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for line in cells:
        shown.add_row(*line)
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 150).print(shown, markup=False)


def save(path: Path, rows: Iterable[Any], about: dict[str, str]) -> Iterator[Any]:
    """Append each row as soon as it is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        for row in rows:
            writer = csv.DictWriter(file, [*row._fields, *about])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({**row._asdict(), **about})
            file.flush()
            yield row


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _contenders(text: str) -> list[Contender]:
    by_name = {contender.name: contender for contender in known.CONTENDERS}
    names = text.split(",")
    if not set(names) <= set(by_name):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(by_name)}, got {text!r}")
    return [by_name[name] for name in names]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, with defaults that depend on the device."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--device", choices=("cpu", "cuda"))
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = (first.parse_known_args(arguments)[0].device or usual) == "cuda"
    first.add_argument("--micro-batch", type=int)
    first.add_argument("--precision", choices=("fp32", "bf16"), default="bf16" if cuda else "fp32")
    first.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    peers = parts.add_parser("peers", parents=[first])
    peers.add_argument("--model", default="ViT-B-32" if cuda else "small")
    peers.add_argument("--batch", type=int, default=8192 if cuda else 1024)
    peers.add_argument("--repeats", type=int, default=3)
    peers.add_argument("--contenders", type=_contenders, default=list(known.CONTENDERS))
    encoders = parts.add_parser("encoders", parents=[first])
    encoders.add_argument("--models", default="ViT-B-32" if cuda else "tiny")
    batches = "4096,8192,16384,32768,65536" if cuda else "64,128,256"
    encoders.add_argument("--batches", type=_numbers, default=batches)
    encoders.add_argument("--keep-batches", type=_numbers, default="1024,2048" if cuda else "128")
    encoders.add_argument("--repeats", type=int, default=1)
    encoders.add_argument("--samples", type=int, default=16, help="micro-batches of encoders alone")
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda:0" if cuda else "cpu")
    options.autocast = options.precision == "bf16"
    if options.part == "peers":
        options.micro_batch = options.micro_batch or (512 if cuda else 128)
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print, save."""
    options = parse(arguments)
    about = provenance(options.device, arguments, "", script="cached_step.py")
    installed = importlib.metadata.distributions()
    about["packages"] = ", ".join(f"{x.name} {x.version}" for x in installed if x.name in PACKAGES)
    path = options.output / f"cached-{options.part}-{about['date'][:10]}-{options.device.type}.csv"
    how = f"{options.precision}; {about['gpu'] or about['machine']}, PyTorch {about['torch']}"
    if options.part == "peers":
        title = f"{options.model}, B = {options.batch:,}, micro-batch {options.micro_batch:,}"
        lines = [peer_cells(row) for row in save(path, peer_rows(options), about)]
    else:
        title, lines, options.models = "Steps over encoders alone", [], options.models.split(",")
        for row in save(path, encoder_rows(options), about):
            lines.append(encoder_cells(row))
            print(*filter(None, lines[-1].values()), sep="  ", flush=True)
    show(f"{title}, {how}", lines)
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
