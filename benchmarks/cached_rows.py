"""What `cached_step.py` shows, row by row: contenders in turns, and steps over encoders alone."""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import cached_peers as known
import torch
from cached_peers import Contender, Data, Gradients, Job, Pair, Step, gradients
from torch import Tensor
from torch.nn import functional

import tilewise
from tilewise import StepResult, measure

MIB = 2**20
BAR, BAR_BATCH = 1.10, 32768  # of a step over its encoders alone, and where it holds with keep=0
# Small enough that with keep="auto" a few graphs fit into the memory of one GPU.
MICRO_BATCHES = {"ViT-B-32": 512, "ViT-L-14": 128, "tiny": 16, "small": 128}


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
