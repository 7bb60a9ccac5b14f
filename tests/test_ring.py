"""Losses over several processes, against one process with the whole batch."""

import itertools
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tilewise as tw
from ranks import run
from tilewise import groups, ring, rounds
from tilewise.backends import fused
from tilewise.measure import peak_bytes

WORLDS = {
    1: [[4]],
    2: [[3, 3], [5, 2]],
    3: [[4, 2, 5], [3, 0, 2]],
    4: [[2, 2, 2, 2], [1, 6, 0, 3]],
    5: [[1, 2, 3, 4, 5], [0, 0, 7, 0, 1]],
    8: [[2] * 8, [1, 0, 4, 2, 3, 0, 1, 5]],
}
TINY = 3 * 8 * 8  # bytes of a slice: three columns of eight float64s


def clip_with(**marks):
    """CLIP with marks of each pair, taken from its place in the whole batch."""
    return lambda a, b, s, at, **how: tw.clip_loss(
        a, b, s, **{name: mark(at) for name, mark in marks.items()}, **how
    )


def negatives(at, d, h=0):
    """Hard negatives of some rows, the same whoever asks."""
    shape = (d,) if h == 0 else (h, d)
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(int(i))) for i in at]
    empty = torch.zeros(0, *shape, dtype=torch.float64)
    return functional.normalize(torch.stack(made).double(), dim=-1) if made else empty


def turned(sizes):
    """Within each rank the first row's positive is the last column, and so on."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    parts = (torch.arange(a, b).flip(0) for a, b in itertools.pairwise(starts))
    return torch.cat(list(parts))


LOSSES = {
    "clip": lambda a, b, s, at, **how: tw.clip_loss(a, b, s, **how),
    "clip-sum": lambda a, b, s, at, **how: tw.clip_loss(a, b, s, reduction="sum", **how),
    "clip-ids": clip_with(ids=lambda at: at % 4),
    "clip-labels": clip_with(labels=lambda at: at % 3),
    "clip-weight": clip_with(weight=lambda at: 1.0 + at.double()),
    "clip-smooth": clip_with(label_smoothing=lambda at: 0.1),
    "clip-bias": clip_with(bias=lambda at: 0.5),
    "info_nce": lambda a, b, s, at, **how: tw.info_nce(a, b, s, decoupled=True, **how),
    "info_nce-index": lambda a, b, s, at, turns=(), **how: tw.info_nce(
        a, b, s, positives=turned(turns or [len(at)]), **how
    ),
    "info_nce-own": lambda a, b, s, at, **how: tw.info_nce(
        a, b, s, negatives=negatives(at, a.shape[1], 2), **how
    ),
    "info_nce-shared": lambda a, b, s, at, **how: tw.info_nce(
        a, b, s, negatives=negatives(at, a.shape[1]), label_smoothing=0.1, **how
    ),
    "siglip": lambda a, b, s, at, **how: tw.siglip_loss(a, b, s, s - 7.0, **how),
    "siglip-weight": lambda a, b, s, at, **how: tw.siglip_loss(
        a, b, s, weight=1.0 + at.double(), ids=at % 5, **how
    ),
    "nt_xent": lambda a, b, s, at, **how: tw.nt_xent(a, b, s, **how),
    "nt_xent-ids": lambda a, b, s, at, **how: tw.nt_xent(a, b, s, ids=at % 5, **how),
    "sup_con": lambda a, b, s, at, **how: tw.sup_con(a, at % 4, s, ids=at % 6, **how) + 0 * b.sum(),
}


def features(size, d=8, dtype=torch.float64):
    made = torch.randn(2, size, d, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return functional.normalize(made, dim=-1).to(dtype)


def step(name, start, stop, size, dtype=torch.float64, freeze=(), scale=5.0, **how):
    """(loss, gradients of both sides and the scale) of some rows of a batch."""
    a, b = (side[start:stop].clone().requires_grad_() for side in features(size, dtype=dtype))
    for frozen, side in ((0, a), (1, b)):
        side.requires_grad_(frozen not in freeze)
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name](a, b, s, torch.arange(start, stop), **how)
    loss.backward()
    grads = (torch.zeros_like(x) if x.grad is None else x.grad for x in (a, b, s))
    return [loss.detach(), *grads]


def shares(rank, cases, slice_bytes):
    """What each case gives this rank."""
    if slice_bytes:
        ring.SLICE_BYTES = slice_bytes
    world = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = "1" if world % 2 else str(world // 2)
    found = []
    for name, sizes, options in cases:
        start = sum(sizes[:rank])
        how = {"group": dist.group.WORLD, **options}
        found.append(step(name, start, start + sizes[rank], sum(sizes), **how))
    return found


def whole(name, sizes, parts):
    """The averages over ranks that DDP would make: loss, gradients of all rows, of the scale."""
    world = len(sizes)
    return [
        sum(part[0] for part in parts) / world,
        torch.cat([part[1] for part in parts]) / world,
        torch.cat([part[2] for part in parts]) / world,
        sum(part[3] for part in parts) / world,
    ]


@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_process(world):
    """R11: float64, even, uneven and empty ranks."""
    few = ("clip", "clip-labels", "siglip", "nt_xent", "sup_con")
    cases = [
        (name, sizes, {"schedule": schedule})
        for sizes in WORLDS[world]
        for schedule in ("ring", "two-level", "gather")
        for name in (LOSSES if world < 5 and schedule == "ring" else few)
    ]
    cases += [("clip", WORLDS[world][0], {"freeze": freeze}) for freeze in ((0,), (1,))]
    parts = run(shares, world, cases, TINY)
    for i, (name, sizes, options) in enumerate(cases):
        got = whole(name, sizes, [part[i] for part in parts])
        turns = {"turns": sizes} if name == "info_nce-index" else {}
        options.pop("schedule", None)
        alone = step(name, 0, sum(sizes), sum(sizes), **options, **turns)
        for x, y in zip(got, alone, strict=True):
            assert torch.allclose(x, y, rtol=1e-12, atol=1e-13), (name, sizes, options, x - y)


def halves(rank, cases):
    """Losses of half precision features of several sizes."""
    return shares(rank, cases, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_exact_as_one_process(dtype):
    """Four ranks are off by no more than twice what one process is, and a rounding."""
    sizes = [40, 0, 30, 27]
    cases = [
        (name, sizes, {"dtype": dtype, "schedule": schedule, "scale": scale})
        for name in ("clip", "siglip", "nt_xent", "sup_con")
        for schedule in ("ring", "two-level", "gather")
        for scale in (1.0, 14.3, 100.0)
    ]
    parts = run(halves, 4, cases)
    for i, (name, _, options) in enumerate(cases):
        options.pop("schedule")
        # Averaged in double: in bf16 a third of a gradient is not the gradient of a third.
        got = whole(name, sizes, [[x.double() for x in part[i]] for part in parts])
        alone = step(name, 0, 97, 97, **options)
        rounded = [x.to(dtype).double() for x in features(97)]
        truth = _truth(name, rounded, options["scale"])
        for x, y, z in zip(got, alone, truth, strict=True):
            bar = 2 * (y.double() - z).norm() + torch.finfo(dtype).eps * z.norm()
            assert (x - z).norm() <= bar, (name, (x - z).norm(), bar)


def _truth(name, sides, scale):
    a, b = (side.clone().requires_grad_() for side in sides)
    s = torch.tensor(scale, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name](a, b, s, torch.arange(len(a)))
    loss.backward()
    return [loss.detach(), *(torch.zeros(()) if x.grad is None else x.grad for x in (a, b, s))]


def weighted(rank, cases):
    """Gradients of losses that each rank multiplies with a number of its own."""
    found = []
    for name, sizes in cases:
        start = sum(sizes[:rank])
        a, b = (x[start : start + sizes[rank]].clone().requires_grad_()
                for x in features(sum(sizes)))  # fmt: skip
        scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
        at = torch.arange(start, start + sizes[rank])
        loss = LOSSES[name](a, b, scale, at, group=dist.group.WORLD, reduction="sum")
        (loss * (rank + 1)).backward()
        found.append([a.grad, b.grad, scale.grad])
    return found


def test_upstream_gradients_that_differ():
    """SigLIP adds gradients up before it knows them: it notices, and begins anew."""
    cases = [(name, sizes) for name in ("siglip", "clip") for sizes in ([3, 4, 2], [2, 0, 5])]
    parts = run(weighted, 3, cases)
    for i, (name, sizes) in enumerate(cases):
        a, b = (x.clone().requires_grad_() for x in features(sum(sizes)))
        scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
        factor = torch.arange(1.0, 4.0, dtype=torch.float64)
        factor = factor.repeat_interleave(torch.tensor(sizes))
        rows = LOSSES[name](a, b, scale, torch.arange(sum(sizes)), reduction="none")
        (3 * rows * factor).sum().backward()
        got = [torch.cat([part[i][k] for part in parts]) for k in range(2)]
        got.append(sum(part[i][2] for part in parts))
        for x, y in zip(got, (a.grad, b.grad, scale.grad), strict=True):
            assert torch.allclose(x, y, rtol=1e-12, atol=1e-13), name


def watched_shares(rank, cases):
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    return shares(rank, cases, TINY)


def test_under_the_eyes_of_torch(monkeypatch):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares what all ranks do, messages counted."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    cases = [
        (name, sizes, {"schedule": schedule})
        for name in ("clip", "siglip", "sup_con")
        for sizes in ([7, 0, 2], [1, 5, 4])
        for schedule in ("ring", "gather")
    ]
    parts = run(watched_shares, 3, cases)
    for i, (name, sizes, _) in enumerate(cases):
        got = whole(name, sizes, [part[i] for part in parts])
        for x, y in zip(got, step(name, 0, sum(sizes), sum(sizes)), strict=True):
            assert torch.allclose(x, y, rtol=1e-12, atol=1e-13), (name, sizes)


def spoilt_upstream(rank):
    """SigLIP whose upstream gradient is NaN on one rank, and None on one."""
    a, b = (x.requires_grad_() for x in features(6)[:, 2 * rank : 2 * rank + 2])
    found = []
    for who in range(3):
        loss = tw.siglip_loss(a, b, 5.0, group=dist.group.WORLD)
        (loss * (torch.nan if rank == who else 1.0)).backward()
        found.append(bool(b.grad.isnan().any()))
        a.grad = b.grad = None
    loss = tw.siglip_loss(a, b, 5.0, group=dist.group.WORLD)
    (Unused.apply(loss) if rank == 1 else loss).backward()
    return found


class Unused(torch.autograd.Function):
    """A number whose gradient is not passed on at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        return None


def test_an_upstream_gradient_that_is_no_number():
    """NaN anywhere reaches the columns of all; a loss that one rank did not use is 0 there."""
    assert run(spoilt_upstream, 3, timeout=10.0) == [[True] * 3] * 3


# Groups


def in_subgroups(rank):
    """Two groups at once, neither of them 0..n-1, and the whole one between their calls."""
    groups = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])]
    mine = groups[0] if rank in (1, 3) else groups[1]
    place = dist.get_rank(mine)
    found = step("clip", 5 * place, 5 * place + 5, 10, group=mine)
    everyone = step("clip", 3 * rank, 3 * rank + 3, 12, group=dist.group.WORLD)
    again = step("clip", 5 * place, 5 * place + 5, 10, group=mine, sizes=[5, 5])
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    return place, found, everyone


def test_subgroups():
    parts = run(in_subgroups, 4)
    for ranks in ((1, 3), (0, 2)):
        ordered = sorted((parts[rank][:2] for rank in ranks), key=lambda part: part[0])
        got = whole("clip", [5, 5], [part[1] for part in ordered])
        for x, y in zip(got, step("clip", 0, 10, 10), strict=True):
            assert torch.allclose(x, y, rtol=1e-12)
    got = whole("clip", [3] * 4, [part[2] for part in parts])
    for x, y in zip(got, step("clip", 0, 12, 12), strict=True):
        assert torch.allclose(x, y, rtol=1e-12)


def with_modules(rank):
    """open_clip's constructor arguments, a mesh, and no group at all."""
    a, b = features(6)[:, 3 * rank : 3 * rank + 3]
    s = torch.tensor(5.0, dtype=torch.float64)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    nodes = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "rank"))
    plain = tw.clip_loss(a, b, s, group=dist.group.WORLD)
    module = tw.ClipLoss(rank=rank, world_size=2)(a, b, s)
    assert torch.equal(plain, module)
    assert torch.equal(plain, tw.clip_loss(a, b, s, group=mesh))
    for schedule in ("two-level", "ring"):
        again = tw.clip_loss(a, b, s, group=nodes, schedule=schedule)
        assert torch.allclose(plain, again, rtol=1e-12)
    assert groups.nodes_of(nodes) == [0, 1]
    assert groups.own_node(mesh) == 0
    unnamed = dist.device_mesh.init_device_mesh("cpu", (2, 1))
    with pytest.raises(tw.OptionError, match="must have one dimension, or two with names"):
        tw.clip_loss(a, b, s, group=unnamed)
    assert torch.equal(
        tw.siglip_loss(a, b, s, group=dist.group.WORLD),
        tw.SigLipLoss(rank=rank, world_size=2)(a, b, s, torch.tensor(-10.0).double()),
    )
    views = tw.nt_xent(a, b, temperature=0.5, group=dist.group.WORLD)
    assert torch.allclose(tw.NTXentLoss(gather_distributed=True)(a, b), views)
    with pytest.raises(tw.OptionError, match="world_size must be that of"):
        tw.ClipLoss(rank=rank, world_size=3)(a, b, s)
    return plain, tw.clip_loss(a, b, s)


def test_modules_and_meshes():
    parts = run(with_modules, 2)
    a, b = features(6)
    s = torch.tensor(5.0, dtype=torch.float64)
    assert torch.allclose((parts[0][0] + parts[1][0]) / 2, tw.clip_loss(a, b, s), rtol=1e-12)
    for rank in range(2):
        alone = tw.clip_loss(a[3 * rank : 3 * rank + 3], b[3 * rank : 3 * rank + 3], s)
        assert torch.equal(parts[rank][1], alone), "without a group a loss is local"


def odd_calls(rank):
    """No rows anywhere, a wrong promise, a compiled loss, uneven nodes."""
    group = {"group": dist.group.WORLD}
    a, b = features(6)[:, 3 * rank : 3 * rank + 3]
    for name, schedule in itertools.product(LOSSES, ("auto", "ring", "gather")):
        loss = step(name, 0, 0, 0, schedule=schedule, **group)[0]
        assert float(loss) == 0, name
    chosen = tw.explain_schedule(a, b, **group)
    assert chosen.name == "gather", "few pairs"
    assert chosen == tw.explain_schedule(a, b, sizes=[3, 3], **group)
    for promised in ({}, {"sizes": [3, 3]}):
        asked = tw.explain_schedule(a, b, schedule="ring", **promised, **group)
        assert str(asked) == "ring: asked for by name"
    assert torch.equal(tw.clip_loss(a, b, 5.0), tw.clip_loss(a, b, 5.0, schedule="auto"))
    with pytest.raises(tw.RingError, match="schedule must be one of"):
        tw.clip_loss(a, b, 5.0, schedule="tree", **group)
    with pytest.raises(tw.OptionError, match="one entry for each of 2 ranks, 3 for rank"):
        tw.clip_loss(a, b, 5.0, sizes=[2, 2], **group)
    plain = tw.clip_loss(a, b, 5.0, **group)
    assert torch.equal(plain, tw.clip_loss(a, b, 5.0, sizes=[3, 3], **group))
    views = tw.nt_xent(a, b, **group)
    assert torch.equal(views, tw.nt_xent(a, b, sizes=[3, 3], **group))
    assert torch.equal(views, tw.nt_xent(a, b, sizes=torch.tensor([3, 3]), **group))
    with pytest.raises(tw.OptionError, match=r"3 for rank \d of the group, got \[2, 2\]"):
        tw.nt_xent(a, b, sizes=[2, 2], **group)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("a sum has no divisor")):
        tw.siglip_loss(a, b, 5.0, -1.0, reduction="sum", sizes=[3, 3], **group)
    compiled = torch.compile(lambda a, b: tw.clip_loss(a * 1.0, b, 5.0, **group) + 1.0)
    assert torch.allclose(compiled(a, b), plain + 1.0)
    # As open_clip's loop compiles them: which ranks there are is found out inside.
    for module, args in (
        (tw.ClipLoss(rank=rank, world_size=2), (a, b, torch.tensor(5.0))),
        (tw.SigLipLoss(rank=rank, world_size=2), (a, b, torch.tensor(5.0), torch.tensor(-1.0))),
        (tw.NTXentLoss(gather_distributed=True), (a, b)),
    ):
        assert torch.allclose(torch.compile(module)(*args), module(*args))


def test_odd_calls():
    run(odd_calls, 2)


def without_keys(rank):
    """Rank 0 has queries and no keys, which are frozen."""
    query, key = features(5)
    query = query[3 * rank : 3 * rank + 3].detach().requires_grad_()
    loss = tw.info_nce(query, key[: 2 * rank], 5.0, reduction="sum", group=dist.group.WORLD)
    loss.backward()
    return query.grad


def test_queries_without_keys():
    query, key = features(5)
    query.requires_grad_()
    none = torch.tensor([-1, -1, -1, 0, 1])
    tw.info_nce(query, key[:2], 5.0, positives=none, reduction="sum").backward()
    assert (torch.cat(run(without_keys, 2)) / 2 - query.grad).norm() < 1e-12


def on_uneven_nodes(rank):
    """Two ranks on one node and one on another, as torchrun tells them."""
    os.environ.update(LOCAL_WORLD_SIZE="2" if rank < 2 else "1", GROUP_RANK=str(rank // 2))
    a, b = features(6)[:, 2 * rank : 2 * rank + 2]
    group = dist.group.WORLD
    assert groups.nodes_of(group) == [0, 0, 1]
    found = [tw.clip_loss(a, b, 5.0, group=group, schedule=x) for x in ("auto", "ring", "gather")]
    promised = tw.clip_loss(a, b, 5.0, group=group, schedule="ring", sizes=[2, 2, 2])
    assert torch.equal(found[1], promised)
    with pytest.raises(tw.OptionError, match=r"as many ranks on every node, got \[1, 2\]"):
        tw.clip_loss(a, b, 5.0, group=group, schedule="two-level")
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        os.environ[name] = ""
    assert groups.own_node(group) == 0
    os.environ["SLURM_NODEID"] = "3"
    assert groups.own_node(group) == 3
    return found


def test_uneven_nodes():
    a, b = features(6)
    for loss in zip(*run(on_uneven_nodes, 3), strict=True):
        assert torch.allclose(sum(loss) / 3, tw.clip_loss(a, b, 5.0).double(), rtol=1e-12)


def slots_made(rank, cases):
    """How many slots a backward makes beside the slices of one's own gradients."""
    return [_slots_made(rank, sizes) for sizes in cases]


def _slots_made(rank, sizes):
    made = []
    plain = ring._Slots.give_back
    ring.SLICE_BYTES = 16 * 8 * 8
    ring._Slots.give_back = lambda self, message: (plain(self, message), made.append(self.known))
    start = sum(sizes[:rank])
    loss = tw.clip_loss(*(x[start : start + sizes[rank]].requires_grad_()
                          for x in features(sum(sizes))), 5.0, group=dist.group.WORLD,
                        schedule="ring")  # fmt: skip
    made.clear()
    loss.backward()
    return len(made[-1]) - -(-sizes[rank] // 16)


def test_slots_do_not_pile_up():
    """Two slices are on their way, however uneven the ranks are; one more for a longer block."""
    even, uneven = zip(*run(slots_made, 5, [[64] * 5, [72, 71, 70, 69, 67]]), strict=True)
    assert max(even) == 2
    assert max(uneven) <= 3


def test_a_group_needs_torch_distributed():
    a, b = features(6)
    with pytest.raises(tw.OptionError, match="which is not initialised"):
        tw.clip_loss(a, b, 5.0, group="world")
    with pytest.raises(tw.OptionError, match="sizes= is about the ranks of a group"):
        tw.clip_loss(a, b, 5.0, sizes=[6])


# Encoders


def encoders(dtype=torch.float64):
    torch.manual_seed(0)
    towers = torch.nn.ModuleDict({"image": torch.nn.Linear(6, 8), "text": torch.nn.Linear(5, 8)})
    towers.scale = torch.nn.Parameter(torch.tensor([1.5]))
    return towers.to(dtype)


class Both(torch.nn.Module):
    """Two towers and their scale."""

    def __init__(self):
        super().__init__()
        self.towers = encoders()

    def forward(self, x, y):
        image, text = self.towers["image"](x), self.towers["text"](y)
        unit = functional.normalize
        return unit(image, dim=-1), unit(text, dim=-1), self.towers.scale.exp()


def inputs(size):
    made = torch.randn(size, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return made[:, :6], made[:, 6:]


def wrapped(rank, kind, sizes, steps):
    """Parameter gradients under DDP or FSDP2 after some steps."""
    model = Both()
    start = sum(sizes[:rank])
    x, y = (side[start : start + sizes[rank]] for side in inputs(sum(sizes)))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (len(sizes),))
        fully_shard(model, mesh=mesh)
    for _ in range(steps):
        model.zero_grad()
        tw.clip_loss(*model(x, y), group=dist.group.WORLD).backward()
    full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in model.parameters()]  # fmt: skip
    return [grad.clone() for grad in full]


@pytest.mark.parametrize(("kind", "sizes"), [("ddp", [4, 3, 1]), ("fsdp", [4, 3])])
def test_encoders(kind, sizes):
    model = Both()
    tw.clip_loss(*model(*inputs(sum(sizes)))).backward()
    for grads in run(wrapped, len(sizes), kind, sizes, 3):
        for got, parameter in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=1e-14)


# What travels


def bytes_sent(rank, sizes, cases):
    """Of each case: by the forward, and by the backward."""
    counts, made = [], []
    for name in ("reduce", "differentiate", "weigh"):
        plain = getattr(rounds, name)
        setattr(rounds, name, lambda *args, plain=plain: (plain(*args), counts[-1].append(
            made[-1].sent_bytes))[0])  # fmt: skip
    plain_ring = rounds.ring_of
    rounds.ring_of = lambda *args: made.append(plain_ring(*args)) or made[-1]
    start = sum(sizes[:rank])
    for loss, options in cases:
        counts.append([])
        step(loss, start, start + sizes[rank], sum(sizes), torch.float32,
             group=dist.group.WORLD, **options)  # fmt: skip
    return counts


def test_bytes():
    """Features in their dtype and 5 numbers a column forward; those, 10 more and fp32 gradients."""
    n, d, world = 6, 8, 3
    around = {"schedule": "ring"}
    cases = [("clip", around), ("clip", {"freeze": (1,), **around}), ("siglip", around),
             ("clip", {"schedule": "gather"})]  # fmt: skip
    features_sent, stats_sent = (world - 1) * n * d * 4, world * n * 5 * 4
    for plain, frozen, siglip, gathered in run(bytes_sent, world, [n] * world, cases):
        again = (world - 1) * n * (d * 4 + 10 * 4)
        assert plain == [features_sent + stats_sent, again + world * n * d * 4]
        assert frozen == [features_sent + stats_sent, again], "a frozen side gets no gradient"
        assert siglip == [features_sent + world * n * d * 4], "all of it in one sweep"
        assert gathered == [(world - 1) * n * (d * 4 + 5 * 4), again + (world - 1) * n * d * 4]


# Memory


def peaks(rank, schedule):
    """Bytes above inputs and gradients that one more number on each side takes."""
    ring.SLICE_BYTES = 2**20
    found, d = [], 8192
    for n in (512, 2048):
        a, b = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0)).bfloat16()
        a, b = a.requires_grad_(), b.requires_grad_()
        how = {"group": dist.group.WORLD, "schedule": schedule, "workspace_mib": 32}

        def step(a=a, b=b, how=how):
            a.grad = b.grad = None
            tw.clip_loss(a, b, 0.01, **how).backward()

        found.append(peak_bytes(step, torch.device("cpu")) - 2 * a.numel() * 2)
    return (found[1] - found[0]) / (d * (2048 - 512))


def test_memory():
    """A feature block, and fp32 sums of the rows and of a block, which in the end are gradients."""
    assert run(peaks, 2, "ring")[0] <= 2 + 4 + 4 - 2 * 2 + 0.2


@pytest.mark.slow
def test_memory_of_gathering():
    # All of both, what comes home, and the rows' own; and gloo's copy of all gradients.
    assert run(peaks, 2, "gather")[0] <= 2 * (2 + 4) + 4 + 4 + 2 * 4 - 2 * 2 + 0.2


# Faults. On a busy machine these bounds only say that no rank waited for the group's timeout of a
# minute; the slow tests hold the real ones, on a machine that does nothing else.
SOON = 20.0


def mismatched(rank, kind):
    """An error of one rank, or two that do not fit; what each rank says of it, and how fast."""
    size, d, dtype = 4, 8, torch.float32
    how = {"group": dist.group.WORLD}
    odd = rank == 1
    a, b = (x.requires_grad_() for x in features(size, 6 if kind == "size" and odd else d, dtype))
    if kind == "dtype" and odd:
        a, b = a.detach().bfloat16().requires_grad_(), b.detach().bfloat16().requires_grad_()
    loss = tw.siglip_loss if kind == "loss" and odd else tw.clip_loss
    if kind == "ids" and odd:
        how["ids"] = torch.arange(size)
    if kind == "labels":
        how["labels"] = torch.arange(size, dtype=torch.int32 if odd else torch.int64)
    if kind == "gradient" and odd:
        b = b.detach()
    if kind == "shape" and odd:
        b = b[:2]
    if kind == "option" and odd:
        how["label_smoothing"] = 2.0
    if kind == "reduction" and odd:
        how["reduction"] = "sum"
    if kind == "decoupled" and odd:
        how["decoupled"] = True
    if kind == "weight" and odd:
        how["weight"] = torch.ones(size)
    if kind == "fixed weight":
        how["weight"] = torch.ones(size, requires_grad=odd)
    if kind == "backend":
        how["backend"] = "fused"
    if kind == "device" and odd:
        how["device"] = "cuda:99"
    if kind == "sweep":
        loss = tw.reduce_pairs
        how["positives"] = torch.arange(size - odd)
        how["columns"] = False
    if kind in ("negatives", "bias"):
        loss = tw.info_nce
        if odd:
            how |= (
                {"negatives": a.detach()}
                if kind == "negatives"
                else {"bias": torch.tensor(torch.nan)}
            )
    scale = torch.tensor(5.0, requires_grad=kind == "scale" and odd)
    start = time.perf_counter()
    try:
        loss(a, b, scale, **how)
    except tw.RingError as error:
        return str(error), time.perf_counter() - start
    return "nothing", 0.0


MISMATCHES = {
    "size": "same feature size, got 8 on rank 0 and 6 on rank 1",
    "dtype": "same dtype, got torch.float32 on rank 0 and torch.bfloat16 on rank 1",
    "loss": "same loss, got clip_loss on rank 0 and siglip_loss on rank 1",
    "ids": "same ids, got None on rank 0 and torch.int64 on rank 1",
    "labels": "same labels, got torch.int64 on rank 0 and torch.int32 on rank 1",
    "gradient": "need of gradients",
    "shape": "rank 1 refused: ShapeError: image and text must come in pairs, got 4 and 2 rows",
    "reduction": "same reduction, got mean on rank 0 and sum on rank 1",
    "decoupled": "same decoupled, got False on rank 0 and True on rank 1",
    "weight": "same weight, got none on rank 0 and given on rank 1",
    "fixed weight": "rank 1 refused: OptionError: weight must not require a gradient",
    "device": "rank 1 refused: DeviceError: device must be one that is here, got 'cuda:99'",
    "backend": "refused: BackendError: backend 'fused' cannot run",
    "negatives": "same negatives, got none on rank 0 and 2 dimensions on rank 1",
    "bias": "rank 1 refused: OptionError: bias must be finite, got nan",
    "sweep": "rank 1 refused: ShapeError: positives must have one entry for each feature vector",
    "scale": "same learnable numbers, got [] on rank 0 and ['scale'] on rank 1",
    "option": "rank 1 refused: OptionError: label_smoothing must be at least 0 and below 1, got 2",
}


def all_mismatched(rank):
    return {kind: mismatched(rank, kind) for kind in MISMATCHES}


def test_mismatch_raises_everywhere():
    """R14: the same named error on every rank, and the group works on."""
    check_mismatches(SOON)


@pytest.mark.slow
def test_mismatch_raises_in_two_seconds():
    check_mismatches(2.0)


def check_mismatches(seconds):
    parts = run(all_mismatched, 3)
    for kind, text in MISMATCHES.items():
        said = {part[kind][0] for part in parts}
        assert len(said) == 1, said
        assert text in said.pop(), kind
        assert max(part[kind][1] for part in parts) < seconds, kind


def dying(rank, hop, backward, how, schedule="ring"):
    """Rank 1 is killed or stopped at a hop. What the others say, and how long they waited."""
    hops = 0
    send = "collect" if schedule == "gather" else "exchange"
    plain = getattr(ring.Ring, send)

    def exchange(self, *args):
        nonlocal hops
        hops += 1
        if rank == 1 and hops > hop:
            time.sleep(0.2)
            os.kill(os.getpid(), how)
        return plain(self, *args)

    a, b = (x.requires_grad_() for x in features(12)[:, 3 * rank : 3 * rank + 3])
    how_sent = {"group": dist.group.WORLD, "schedule": schedule}
    tw.clip_loss(a, b, 5.0, **how_sent).backward()  # imports and connections
    if not backward:
        setattr(ring.Ring, send, exchange)
    start = time.perf_counter()
    try:
        loss = tw.clip_loss(a, b, 5.0, **how_sent)
        setattr(ring.Ring, send, exchange)
        start = time.perf_counter()
        loss.backward()
    except tw.RingError as error:
        waited = time.perf_counter() - start
        time.sleep(2)  # the others must not need this process to end
        return str(error), waited
    return "nothing", 0.0


def check_survivors(parts, seconds):
    """Ranks 0 and 2 name rank 1 beside them; rank 3 one of these, who hung up."""
    for said, waited in parts[:2]:
        assert "did not answer" in said
        assert "rank 1 and" in said or "rank 1," in said
        assert waited <= seconds, (said, waited)
    said, waited = parts[2]
    # At the last hops it has all that it needs from the others: it waits for the sum, or is done.
    named = "rank 3 sent to rank 0 and waited for rank 2" in said
    assert named or "rank 3 waited for the sum" in said or said == "nothing", said
    assert waited <= seconds, (said, waited)


HOPS = 7  # of four ranks, either way: three of features, four of what follows them


@pytest.mark.parametrize(("hop", "backward"), [(1, False), (3, True)])
def test_a_killed_rank(hop, backward):
    """Everyone raises and says whom it waited for."""
    check_survivors(run(dying, 4, hop, backward, signal.SIGKILL, lost=(1,)), SOON)


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_killed_while_all_gather(backward):
    parts = run(dying, 4, 0, backward, signal.SIGKILL, "gather", lost=(1,))
    for said, waited in parts:
        assert "waited for all ranks, and one did not answer" in said
        assert waited <= SOON


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("hop", range(HOPS))
def test_a_rank_killed_anywhere(hop, backward):
    """R12: all others raise within a second."""
    check_survivors(run(dying, 4, hop, backward, signal.SIGKILL, lost=(1,)), 0.2 + 1.0)


@pytest.mark.parametrize("extra", [SOON, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_stopped_rank(extra):
    """R13: everyone raises within the group's timeout and two seconds."""
    parts = run(dying, 4, 2, False, signal.SIGSTOP, timeout=3.0, lost=(1,))
    check_survivors(parts, 0.2 + 3.0 + extra)


# The fused backend, in Triton's interpreter


def skip_unless_interpreted():
    if fused._missing():
        pytest.skip(fused._missing())
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, where test_gpu.py runs the kernels")


def opposed(start, stop, dtype, backend, **how):
    """NT-Xent at scale 100 of four samples, one of them opposite to the others."""
    maker = torch.Generator().manual_seed(0)
    base = torch.zeros(4, 16, dtype=torch.float64)
    base[:, 0] = torch.tensor([1.0, 1.0, 1.0, -1.0])
    made = [functional.normalize(base + 0.02 * torch.randn(4, 16, generator=maker), dim=1)
            for _ in range(2)]  # fmt: skip
    a, b = (x.half().to(dtype)[start:stop].requires_grad_() for x in made)
    scale = torch.tensor(100.0, requires_grad=True)
    loss = tw.nt_xent(a, b, scale, backend=backend, decoupled=True, **how)
    loss.backward()
    return [loss.detach(), a.grad, b.grad, scale.grad]


def fused_in_turn(rank):
    os.environ["TRITON_INTERPRET"] = "1"
    fused.INTERPRETED = True
    found = opposed(2 * rank, 2 * rank + 2, torch.float16, "fused", group=dist.group.WORLD)
    a, b = features(7, 16, torch.float16)[:, 4 * rank : 4 * rank + 4].requires_grad_()
    more = tw.clip_loss(a, b, 5.0, backend="fused", group=dist.group.WORLD)
    return found, more.detach(), torch.autograd.grad(more, [a, b])


CLOSED = (tw.clip_loss, tw.info_nce, tw.nt_xent)


def alone_and_not(_, backend):
    """The same losses without a group and with one that nobody else is in."""
    if backend == "fused":
        os.environ["TRITON_INTERPRET"] = "1"
        fused.INTERPRETED = True
    # More than one block of the kernels that close a loss; the interpreter takes its time.
    n, losses = (260, (tw.info_nce,)) if backend == "fused" else (30, CLOSED)
    weight, found = torch.rand(n, generator=torch.Generator().manual_seed(1)), []
    for how in ({}, {"weight": weight}, {"weight": weight, "reduction": "sum"}):
        for loss in losses:
            for group in (None, dist.group.WORLD):
                a, b = (x.requires_grad_() for x in features(n, 16, torch.float16))
                value = loss(a, b, 5.0, backend=backend, group=group, **how)
                found.append([value.detach(), *torch.autograd.grad(value, [a, b])])
    return found


@pytest.mark.parametrize("backend", ["chunked", "fused"])
def test_a_group_of_one_is_no_group(backend):
    if backend == "fused":
        skip_unless_interpreted()
    (found,) = run(alone_and_not, 1, backend)
    for alone, together in zip(found[::2], found[1::2], strict=True):
        for x, y in zip(alone, together, strict=True):
            assert torch.equal(x, y)


def test_the_fused_backend():
    """A fixed offset that holds for one rank's rows may not hold for the columns that pass by."""
    skip_unless_interpreted()
    parts = run(fused_in_turn, 2)
    got = whole("nt_xent", [2, 2], [[x.double() for x in part[0]] for part in parts])
    for x, y in zip(got, opposed(0, 4, torch.float64, "chunked"), strict=True):
        assert (x - y).norm() <= 3e-3 * y.norm(), (x, y)
    a, b = (x.double().requires_grad_() for x in features(7, 16, torch.float16))
    loss = tw.clip_loss(a, b, 5.0)
    assert torch.allclose((parts[0][1] + parts[1][1]).double() / 2, loss, rtol=1e-5)
    for k, truth in enumerate(torch.autograd.grad(loss, [a, b])):
        grads = torch.cat([part[2][k] for part in parts]).double() / 2
        assert (grads - truth).norm() <= 3e-3 * truth.norm()
