"""A cached step against the plain one: the same gradients, whatever is kept, split or replayed."""

import collections
import copy
import functools
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ranks
import tilewise as tw
from tilewise import measure
from tilewise.embedding import Towers
from tilewise.featurebuffers import Features

D = 8  # features


class Branch(nn.Module):
    """Attention-free block with dropout and stochastic depth; random by sample and by batch."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x):
        if not self.training:
            return x + self.body(x)
        stays = (torch.rand(len(x), *[1] * (x.dim() - 1)) > 0.3).to(x.dtype)
        return x + stays * self.body(x)


class Tower(nn.Module):
    """Patches (n, p, size), of which some are dropped, to unit features (n, D)."""

    def __init__(self, size, patches_left=3, checkpointed=False):
        super().__init__()
        self.stem, self.head = nn.Linear(size, 12), nn.Linear(12, D)
        self.blocks = nn.ModuleList([Branch(12), Branch(12)])
        self.patches_left, self.checkpointed, self.detach = patches_left, checkpointed, False

    def forward(self, x, offset=None):
        if self.training:
            x = x[:, torch.randperm(x.shape[1])[: self.patches_left]]
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = x.mean(1)
        x = functional.normalize(self.head(x if offset is None else x + offset), dim=1)
        return x.detach() if self.detach else x


def data(n=13, size=5, seed=0, dtype=torch.float64):
    return torch.randn(n, 4, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(count, dtype=torch.float64, **options):
    """(encoders, inputs, loss, parameters): one tower, one twice, two, or three of two kinds."""
    torch.manual_seed(5)
    scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))
    image, text = (Tower(size, **options).to(dtype) for size in (5, 6))
    x, y = data(dtype=dtype), data(size=6, seed=1, dtype=dtype)
    hard = data(n=17, size=6, seed=2, dtype=dtype)
    labels = torch.arange(13) % 4
    cases = {
        "one": ([image], [x], lambda a: tw.sup_con(a, labels, scale.exp())),
        "shared": ([image, image], [x, x.flip(0)], lambda a, b: tw.nt_xent(a, b, scale.exp())),
        "two": ([image, text], [x, y], lambda a, b: tw.clip_loss(a, b, scale.exp())),
        "three": (
            [image, text, text],
            [x, y, hard],
            lambda a, b, c: tw.info_nce(a, b, scale.exp(), negatives=c),
        ),
    }
    encoders, inputs, loss = cases[count]
    modules = {id(m): m for m in encoders}.values()
    return encoders, inputs, loss, [scale, *(p for m in modules for p in m.parameters())]


def plain(encoders, inputs, loss, step=4):
    """All micro-batches with their graphs, in the order in which a cached step draws."""
    return loss(
        *(
            torch.cat([e(part) for part in x.split(step)])
            for e, x in zip(encoders, inputs, strict=True)
        )
    )


def grads_of(parameters):
    parameters = list(parameters)
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def close(ours, theirs, bound):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= bound * max(1.0, float(b.norm()))


def compare(count, bound=1e-12, step=4, dtype=torch.float64, options=None, **how):
    encoders, inputs, loss, parameters = make(count, dtype, **(options or {}))
    torch.manual_seed(7)
    truth = plain(encoders, inputs, loss, step)
    truth.backward()
    wanted, after = grads_of(parameters), torch.get_rng_state()
    torch.manual_seed(7)
    result = tw.CachedStep(encoders, loss, micro_batch=step, **how)(*inputs)
    assert torch.equal(torch.get_rng_state(), after)
    close(grads_of(parameters), wanted, bound)
    assert not result.loss.requires_grad
    assert abs(result.loss - truth.detach()) <= bound * abs(truth.detach())
    return result.metrics


KEEPS = {"none": 0, "some": 0.02, "all": float("inf")}


@pytest.mark.parametrize("step", [1, 4, 12, 13, 99])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("count", ["one", "shared", "two", "three"])
def test_equals_the_plain_step(count, keep, step):
    """With dropout, patch dropout and stochastic depth. R19."""
    metrics = compare(count, step=step, keep=KEEPS[keep])
    assert metrics.samples == (17 if count == "three" else 13)
    if keep != "some":
        assert (metrics.kept == 0) == (keep == "none")
        assert (metrics.replayed == 0) == (keep == "all")


def test_some_are_kept():
    metrics = compare("two", step=2, keep=0.02)
    assert metrics.kept
    assert metrics.replayed
    assert compare("two", keep="auto").replayed == 0


@pytest.mark.parametrize("keep", [0, float("inf")])
def test_in_single_precision(keep):
    compare("two", bound=2e-6, dtype=torch.float32, keep=keep)


def test_checkpointing_inside():
    compare("two", keep=0, options={"checkpointed": True})
    compare("two", keep=0.02, options={"checkpointed": True})


@pytest.mark.parametrize("keep", [0, 0.02, float("inf")])
def test_compiled_encoders(keep):
    encoders, inputs, loss, parameters = make("two")
    torch.manual_seed(7)
    plain(encoders, inputs, loss).backward()
    wanted = grads_of(parameters)
    torch.manual_seed(7)
    torch._dynamo.reset()
    # Dropout as eager draws it.
    compiled = [torch.compile(e, backend="aot_eager", dynamic=True) for e in encoders]
    tw.CachedStep(compiled, loss, micro_batch=4, keep=keep)(*inputs)
    close(grads_of(parameters), wanted, 1e-12)


@pytest.mark.slow
def test_compiled_by_inductor():
    """Its random numbers are its own: compared with itself, all graphs kept."""
    encoders, inputs, loss, parameters = make("two")
    torch._dynamo.reset()
    compiled, inputs = [torch.compile(e) for e in encoders], [x[:12] for x in inputs]
    found = []
    for keep in (float("inf"), 0):
        torch.manual_seed(7)
        tw.CachedStep(compiled, loss, micro_batch=4, keep=keep)(*inputs)
        found.append(grads_of(parameters))
    close(*found, 1e-12)


def test_accumulates():
    """A second batch adds to the gradients of the first."""
    encoders, inputs, loss, parameters = make("two")
    step = tw.CachedStep(encoders, loss, micro_batch=4, keep=0)
    torch.manual_seed(1)
    step(*inputs)
    once = [g.clone() for g in (p.grad for p in parameters)]
    torch.manual_seed(1)
    step(*inputs)
    close(grads_of(parameters), [2 * g for g in once], 1e-12)


# What goes in, and what comes out


class Strings(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(128, D).double()

    def forward(self, texts):
        return torch.stack([self.table(torch.tensor(list(t.encode()))).mean(0) for t in texts])


class Bag:
    """Inputs that only their owner can cut."""

    def __init__(self, x):
        self.x = x


def step_on(encoder, inputs, **how):
    """Gradient of a loss of one encoder's features, and the number of micro-batches."""
    torch.manual_seed(3)
    modules = [encoder] if isinstance(encoder, nn.Module) else [encoder.__self__]
    result = tw.CachedStep(
        encoder, lambda a: tw.sup_con(a, torch.arange(len(a)) % 4), micro_batch=4, keep=0, **how
    )(inputs)
    return grads_of(modules[0].parameters()), result.metrics.replayed


def test_kinds_of_inputs(tmp_path):
    tower, x = Tower(5).double(), data()
    offset = torch.randn(13, 12, dtype=torch.float64)
    wanted, count = step_on(tower, x)
    assert count == 4
    mapped = np.memmap(tmp_path / "x", dtype="float64", mode="w+", shape=tuple(x.shape))
    mapped[:] = x.numpy()
    cases = [(x,), {"x": x}, {"x": x, "offset": None}, collections.UserDict(x=x), x.numpy(), mapped]
    for inputs in cases:
        close(step_on(tower, inputs)[0], wanted, 0)
    close(step_on(tower.forward, x)[0], wanted, 0)
    bag = step_on(tower, Bag(x), split=lambda bag, n: bag.x.split(n))
    close(bag[0], wanted, 0)
    both, named = step_on(tower, (x, offset))[0], step_on(tower, {"offset": offset, "x": x})[0]
    close(both, named, 0)
    assert not torch.equal(both[0], wanted[0])
    assert step_on(Strings(), [f"text {i}" for i in range(13)])[1] == 4


class Noisy(torch.utils.data.Dataset):
    """Samples that are augmented at random."""

    def __len__(self):
        return 13

    def __getitem__(self, i):
        x = data()[i]
        return x + torch.rand_like(x)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_is_read_twice_alike(workers):
    """Shuffled and augmented: the same samples again, and others in the next step."""
    tower = Tower(5).double()
    loader = torch.utils.data.DataLoader(
        Noisy(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=None
    )
    seen = []

    def encoder(x):
        seen.append(x)
        return tower(x)

    for _ in range(2):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(loader)
    assert len(seen) == 16
    assert all(torch.equal(*pair) for pair in zip(seen[:4], seen[4:8], strict=True))
    assert all(torch.equal(*pair) for pair in zip(seen[8:12], seen[12:], strict=True))
    assert not torch.equal(seen[0], seen[8])


def test_an_iterable_for_two_encoders():
    encoders, inputs, loss, parameters = make("two")
    for module in encoders:
        module.eval()
    tw.CachedStep(encoders, loss, micro_batch=4, keep=0)(*inputs)
    wanted = grads_of(parameters)
    pairs = list(zip(*(x.split(4) for x in inputs), strict=True))
    for source in (lambda: iter(pairs), torch.utils.data.DataLoader(pairs, batch_size=None)):
        for keep in (0, 0.02, float("inf")):
            tw.CachedStep(encoders, loss, micro_batch=4, keep=keep)(source)
            close(grads_of(parameters), wanted, 1e-13)


class Clip(nn.Module):
    """Both towers and the scale in one module, as open_clip has them."""

    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(5).double(), Tower(6).double()
        self.logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, image, text):
        return {
            "image_features": self.image(image),
            "text_features": self.text(text),
            "logit_scale": self.logit_scale.exp(),
        }


def clip_of(model, x, y, step=4):
    parts = [model(a, b) for a, b in zip(x.split(step), y.split(step), strict=True)]
    sides = [torch.cat([part[k] for part in parts]) for k in ("image_features", "text_features")]
    return tw.ClipLoss()(*sides, parts[0]["logit_scale"])


@pytest.mark.parametrize("keep", KEEPS)
def test_one_module_with_several_outputs(keep):
    """The scale comes out of every micro-batch and gets its gradient once."""
    torch.manual_seed(2)
    model, x, y = Clip(), data(), data(size=6, seed=1)
    torch.manual_seed(3)
    clip_of(model, x, y).backward()
    wanted = grads_of(model.parameters())
    torch.manual_seed(3)
    tw.CachedStep(model, tw.ClipLoss(), micro_batch=4, keep=KEEPS[keep])((x, y))
    close(grads_of(model.parameters()), wanted, 1e-12)


def test_names_and_options():
    """Encoders by name are arguments of the loss by name; keywords of a step go to it too."""
    encoders, inputs, _, parameters = make("two")
    step = tw.CachedStep(
        {"text": encoders[1], "image": encoders[0]}, tw.clip_loss, micro_batch=[4, 5], keep=0
    )
    with pytest.raises(tw.StepError, match="scale and temperature"):
        step(inputs[1], inputs[0], scale=2.0, temperature=1.0)
    found = step(inputs[1], inputs[0], scale=parameters[0].exp())
    assert found.metrics.replayed == 4 + 3
    assert all(g is not None for g in grads_of(parameters))


def test_features_are_handed_back():
    encoders, inputs, loss, _ = make("two")
    for module in encoders:
        module.eval()
    step = tw.CachedStep(encoders, loss, micro_batch=4, keep=0, return_features=True)
    found = step(*inputs).features
    assert [x.requires_grad for x in found] == [False, False]
    close(found, [e(x).detach() for e, x in zip(encoders, inputs, strict=True)], 1e-14)


def test_a_frozen_tower_is_run_once():
    """And features may be given instead of an encoder."""
    encoders, inputs, loss, parameters = make("two")
    for module in encoders:
        module.eval()
    encoders[1].requires_grad_(False)
    calls = []
    for e in encoders:
        e.register_forward_pre_hook(lambda module, _: calls.append(module))
    tw.CachedStep(encoders, loss, micro_batch=4, keep=0)(*inputs)
    assert [calls.count(e) for e in encoders] == [8, 4]
    wanted = grads_of(parameters)
    features = encoders[1](inputs[1])
    tw.CachedStep([encoders[0], None], loss, micro_batch=4, keep=0)(inputs[0], features)
    close(grads_of(parameters), wanted, 1e-13)


def test_later_steps_make_no_graph_to_look_at_and_see_what_is_frozen_or_freed():
    """Where nothing is kept, what trained all its outputs is taken to do so again."""
    encoders, inputs, loss, parameters = make("two")
    for module in encoders:
        module.eval()
    graphs = []
    for e in encoders:
        e.register_forward_hook(lambda module, _, out: graphs.append((module, out.requires_grad)))
    step = tw.CachedStep(encoders, loss, micro_batch=4, keep=0)

    def check(*counts):
        loss(*(e(x) for e, x in zip(encoders, inputs, strict=True))).backward()
        wanted = grads_of(parameters)
        graphs.clear()
        step(*inputs)
        close(grads_of(parameters), wanted, 1e-13)
        assert [(graphs.count((e, True)), graphs.count((e, False))) for e in encoders] == [*counts]

    check((5, 3), (5, 3))
    check((4, 4), (4, 4))
    encoders[1].requires_grad_(False)
    check((5, 3), (0, 4))
    check((4, 4), (0, 4))
    encoders[1].requires_grad_(True)
    check((5, 3), (5, 3))
    encoders[1].detach = True
    check((4, 4), (0, 8))  # run again for nothing, once
    check((4, 4), (0, 4))
    for module in encoders:
        module.requires_grad_(False)
    parameters[0].requires_grad_(False)
    with pytest.raises(tw.StepError, match="GradError: the loss must depend on something"):
        step(*inputs)


def test_features_that_are_remembered_from_the_first_pass_have_no_gradient():
    """The plain program would train them: this must not pass in silence."""
    tower, known = Tower(5).double().eval(), {}

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = tower

        def forward(self, x):
            return known.setdefault(float(x.sum()), self.tower(x))

    with pytest.raises(tw.StepError, match="does not require grad"):
        tw.CachedStep(Remembers(), sup_con, micro_batch=4, keep=0)(data())


def test_outputs_on_two_devices_are_compared_where_they_are():
    features = Features(torch.device("cpu"), False, 1)
    features.learns, features.shared = [True, True], [False, False]
    probes = features.probe([torch.ones(2, 3), torch.ones(2, 3, device="meta")])
    assert [x.product.device.type for x in probes] == ["cpu", "meta"]


def test_only_the_loss_is_trained():
    encoders, inputs, loss, parameters = make("two")
    for module in encoders:
        module.requires_grad_(False)
    tw.CachedStep(encoders, loss, micro_batch=4)(*inputs)
    assert [p.grad is not None for p in parameters] == [True] + [False] * (len(parameters) - 1)


def test_batch_norm():
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D)).double()
    x = torch.randn(12, 5).double()

    def loss(a):
        return tw.sup_con(a, torch.arange(12) % 3, 0.1)

    with pytest.raises(tw.OptionError, match=r"BatchNorm1d in train mode.*\.eval\(\)"):
        tw.CachedStep(tower, loss, micro_batch=4)(x)
    other = copy.deepcopy(tower)
    tw.CachedStep(tower, loss, micro_batch=4, keep=0, batch_norm=True)(x)
    loss(torch.cat([other(part) for part in x.split(4)])).backward()
    close(grads_of(tower.parameters()), grads_of(other.parameters()), 1e-12)
    for a, b in zip(tower.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
    tower.eval()
    tw.CachedStep(tower, loss, micro_batch=4)(x)


# Low precision


@pytest.mark.parametrize("keep", KEEPS)
def test_autocast(keep):
    """Weights that were cast without a graph must not stand in for those with one."""
    encoders, inputs, loss, parameters = make("two", torch.float32)
    found = []
    for run in (
        lambda: plain(encoders, inputs, loss).backward(),
        lambda: tw.CachedStep(encoders, loss, micro_batch=4, keep=KEEPS[keep])(*inputs),
    ):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            run()
        found.append(grads_of(parameters))
    assert all(g is not None for g in found[1])
    close(*found, 2e-2)


@pytest.mark.parametrize("before", [False, True])
def test_autocast_remembers_no_weights_without_a_graph(before):
    """Neither those of a layer that the first micro-batch skips, nor of a forward before."""
    torch.manual_seed(2)
    model, x = Skips().float().eval(), data(dtype=torch.float32)
    x[:4, 0, 0], x[4:, 0, 0] = -1.0, 1.0
    with torch.autocast("cpu", torch.bfloat16):
        sup_con(torch.cat([model(part) for part in x.split(4)])).backward()
    wanted = grads_of(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        if before:
            with torch.no_grad():
                model(x)
        tw.CachedStep(model, sup_con, micro_batch=4, keep=0)(x)
    found = grads_of(model.parameters())
    assert all(g is not None for g in found)
    close(found, wanted, 3e-2)


def test_grad_scaler_skips_an_overflow():
    encoders, inputs, loss, parameters = make("two", torch.float32)
    torch.manual_seed(7)
    plain(encoders, inputs, loss).backward()
    wanted = grads_of(parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    step = tw.CachedStep(encoders, loss, micro_batch=4, keep=0, scaler=scaler)
    torch.manual_seed(7)
    step(*inputs)
    scaler.unscale_(optimizer)
    close([p.grad for p in parameters], wanted, 2e-6)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.update(1e38)
    before = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["lr"] = 1.0
    step.loss = lambda *features: 100 * loss(*features)
    assert step(*inputs).loss.isfinite()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 1e38
    close(parameters, before, 0)


# What goes wrong


class Fragile(nn.Module):
    """Raises at a given call."""

    def __init__(self, at):
        super().__init__()
        self.tower, self.at = Tower(5).double(), at

    def forward(self, x):
        self.at -= 1
        if self.at < 0:
            raise KeyError("broken sample")
        return self.tower(x)


def sup_con(a):
    return tw.sup_con(a, torch.arange(len(a)) % 4)


@pytest.mark.parametrize(("at", "keep"), [(0, 0), (2, 0), (5, 0), (0, 99), (2, 99)])
def test_a_micro_batch_that_raises(at, keep):
    module = Fragile(at)
    where = "micro-batch 1, encoder 0, run again" if at > 3 else f"micro-batch {at}, encoder 0"
    with pytest.raises(tw.StepError, match=f"{where}: KeyError.*as they were") as caught:
        tw.CachedStep(module, sup_con, micro_batch=4, keep=keep)(data())
    assert isinstance(caught.value.__cause__, KeyError)
    assert all(p.grad is None for p in module.parameters())


def test_accumulated_gradients_become_invalid():
    module = Fragile(8 + 5)
    step = tw.CachedStep(module, sup_con, micro_batch=4, keep=0)
    step(data())
    with pytest.raises(tw.StepError, match="being accumulated and are invalid"):
        step(data())
    module.at = 2
    held = [p.grad.clone() for p in module.parameters()]
    with pytest.raises(tw.StepError, match="gradients are as they were"):
        step(data())
    close([p.grad for p in module.parameters()], held, 0)


def test_parameters_that_only_the_graph_shows():
    """An encoder that is a plain function: what it trains is found, and left as it was."""
    weight = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    calls = []

    def encoder(x):
        calls.append(x)
        if len(calls) == 6:
            raise ValueError("sixth")
        return x.mean(1) @ weight

    with pytest.raises(tw.StepError, match="sixth"):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(data())
    assert weight.grad is None
    tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(data())
    assert weight.grad is not None


def interrupted(count, error=None):
    """A source that gives all micro-batches the first time and fewer, or an error, the second."""
    reads = []

    def read():
        reads.append(0)
        for i, part in enumerate(data().split(4)):
            if len(reads) > 1 and i == count:
                if error is not None:
                    raise error
                return
            yield part

    return read


CASES = [
    (interrupted(2), "got 4 the first time and only 2 the second"),
    (interrupted(2, OSError("link lost")), "OSError: link lost"),
    (lambda: iter([]), "must not be empty, got no micro-batch"),
]


@pytest.mark.parametrize(
    ("source", "message"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_interrupted_iterators(source, message):
    tower = Tower(5).double()
    with pytest.raises(tw.StepError, match=message):
        tw.CachedStep(tower, sup_con, micro_batch=4, keep=0)(source)
    assert all(p.grad is None for p in tower.parameters())


def test_contents_that_change():
    reads = []

    def source():
        reads.append(0)
        return iter(data().split(4 if len(reads) == 1 else 5))

    with pytest.raises(tw.StepError, match="same when"):
        tw.CachedStep(Tower(5).double(), sup_con, micro_batch=4, keep=0)(source)


def test_randomness_that_cannot_be_replayed():
    """Drawn elsewhere: noticed, and nothing is left behind."""
    tower, dice = Tower(5).double().eval(), np.random.default_rng(0)

    def encoder(x):
        return tower(x + torch.from_numpy(dice.normal(size=x.shape)))

    with pytest.raises(tw.StepError, match=r"differ by .*keep all graphs.*as they were"):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(data())
    assert all(p.grad is None for p in tower.parameters())
    tw.CachedStep(encoder, sup_con, micro_batch=4, keep=float("inf"))(data())


def test_a_loss_that_is_not_finite():
    tower = Tower(5).double()
    x = data()
    x[3, 0] = torch.nan
    tower.eval()
    with pytest.raises(tw.StepError, match=r"loss must be finite, got nan.*as they were"):
        tw.CachedStep(tower, sup_con, micro_batch=4, keep=0)(x)
    assert all(p.grad is None for p in tower.parameters())


@pytest.mark.parametrize("keep", [0, float("inf")])
def test_a_loss_that_is_not_finite_while_gradients_accumulate(keep):
    """A forward may have been run again by the time it is known; no gradient has been touched."""
    tower = Tower(5).double().eval()
    step = tw.CachedStep(tower, sup_con, micro_batch=4, keep=keep)
    step(data())
    before = [p.grad.clone() for p in tower.parameters()]
    with pytest.raises(tw.StepError, match=r"^the loss: FiniteError: .*gradients are as they were"):
        step(data() * torch.nan)
    assert all(map(torch.equal, before, (p.grad for p in tower.parameters())))


class Skips(nn.Module):
    """A layer that only some micro-batches take."""

    def __init__(self):
        super().__init__()
        self.tower, self.extra = Tower(5).double(), nn.Linear(D, D).double()

    def forward(self, x):
        out = self.tower(x)
        return out + self.extra(out) if x[0, 0, 0] > 0 else out


def test_parameters_of_a_later_micro_batch_only():
    """They are found when they are met, and left as they were."""
    weights = [torch.randn(5, D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    calls = []

    def encoder(x):
        calls.append(x)
        if len(calls) == 8:
            raise ValueError("eighth")
        return x.mean(1) @ weights[0 if len(calls) % 4 == 1 else 1]

    with pytest.raises(tw.StepError, match="eighth"):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(data())
    assert [w.grad for w in weights] == [None, None]


def test_other_random_numbers_in_any_row():
    """Drawn elsewhere, and not for the first sample."""
    tower, dice = Tower(5).double().eval(), np.random.default_rng(0)

    def encoder(x):
        noise = torch.from_numpy(dice.normal(size=x.shape))
        noise[0] = 0
        return tower(x + noise)

    with pytest.raises(tw.StepError, match="differ by"):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0)(data())


@pytest.mark.parametrize("kind", ["tensor", "array", "two"])
def test_an_iterable_that_uses_its_memory_again(kind):
    memory = [torch.empty(4, 4, 5, dtype=torch.float64) for _ in range(2)]

    def source():
        for i, part in enumerate(data()[:12].split(4)):
            here = memory[i % 2 if kind == "two" else 0].copy_(part)
            yield here.numpy() if kind == "array" else here

    with pytest.raises(tw.StepError, match="memory of their own"):
        tw.CachedStep(Tower(5).double(), sup_con, micro_batch=4, keep=0)(source)


def test_what_an_iterable_may_give():
    """The same tensor again if it did not change; a list of arguments; but not None."""
    tower, offset = Tower(5).double().eval(), torch.randn(12, dtype=torch.float64)
    x = data()[:12]
    wanted, _ = step_on(tower, {"x": x, "offset": offset.expand(12, 12)})
    found, _ = step_on(tower, lambda: iter([[part, offset[None]] for part in x.split(4)]))
    close(found, wanted, 1e-13)
    with pytest.raises(tw.StepError, match="got None"):
        step_on(tower, lambda: iter([x[:4], None, x[4:]]))


def test_leaves_of_equal_graphs_come_in_the_same_order():
    """Ranks average them one after the other."""
    from tilewise.randomness import graph_leaves

    orders = set()
    for _ in range(20):
        leaves = [torch.zeros((), requires_grad=True) for _ in range(30)]
        total = sum(x.exp() * y for x, y in zip(leaves, leaves[::-1], strict=True))
        places = {id(x): i for i, x in enumerate(leaves)}
        orders.add(tuple(places[id(x)] for x in graph_leaves([total])))
    assert len(orders) == 1
    assert len(orders.pop()) == 30


def test_hooks_that_would_see_parts():
    encoders, inputs, loss, parameters = make("two")
    handle = parameters[0].register_hook(lambda g: g * 0.5)
    with pytest.raises(tw.StepError, match="run twice on a parameter of the loss"):
        tw.CachedStep(encoders, loss, micro_batch=4)(*inputs)
    handle.remove()
    parameters[1].register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(tw.OptionError, match="see a part of a gradient"):
        tw.CachedStep(encoders, loss, micro_batch=4)(*inputs)


def test_a_budget_for_micro_batches_of_all_sizes():
    """Each graph is charged what it takes."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, D))
    sizes = [64, 1, *[64] * 6]
    pieces = torch.randn(sum(sizes), 64).split(sizes)
    metrics = tw.CachedStep(tower, sup_con, micro_batch=64, keep=3)(lambda: iter(pieces)).metrics
    assert 1 <= metrics.kept <= 4


def test_statistics_of_other_norms_are_counted_once():
    torch.manual_seed(0)
    tower = nn.Sequential(
        nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten(), nn.Linear(20, D)
    )
    tower, x = tower.double(), data()
    other = copy.deepcopy(tower)
    tw.CachedStep(tower, sup_con, micro_batch=4, keep=0)(x)
    for part in x.split(4):
        other(part)
    close([x.double() for x in tower.buffers()], [x.double() for x in other.buffers()], 1e-14)


# Outputs of all kinds


def aside(tower, more):
    """A tower's features with something beside them."""

    def encoder(x):
        features = tower(x)
        return features, more(features, x)

    return encoder


@pytest.mark.parametrize("keep", [0, float("inf")])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_number_for_each_sample(step, keep):
    """(n,) is never taken for one that all share, not of one sample either."""
    tower = Tower(5).double().eval()

    def loss(a, weight):
        assert weight.shape == (13,)
        return tw.sup_con(a, torch.arange(13) % 4, weight=weight)

    weigh = aside(tower, lambda f, x: f.sum(1).sigmoid())
    loss(*weigh(data())).backward()
    wanted = grads_of(tower.parameters())
    tw.CachedStep(weigh, loss, micro_batch=step, keep=keep)(data())
    close(grads_of(tower.parameters()), wanted, 1e-12)


def test_a_single_number_that_is_not_the_same_everywhere():
    tower = Tower(5).double().eval()
    with pytest.raises(tw.StepError, match="same for every micro-batch"):
        tw.CachedStep(
            aside(tower, lambda f, x: 1 + 1e-5 * f.abs().mean()),
            lambda a, aux: sup_con(a) + aux,
            micro_batch=4,
        )(data())
    assert all(p.grad is None for p in tower.parameters())


def test_gradients_output_by_output():
    """Keys without gradient stay so; infinities and no rows at all are no trouble."""
    tower, other = Tower(5).double().eval(), Tower(5).double().eval().requires_grad_(False)
    seen = []

    def loss(a, more):
        seen.append([x.requires_grad for x in (a, *more)])
        return tw.info_nce(a, more[0])

    both = aside(tower, lambda f, x: (other(x), x.mean((1, 2)) / 0.0, x[:, :0, 0]))
    tw.CachedStep(both, loss, micro_batch=4, keep=0)(data())
    assert seen == [[True, False, False, False]]
    wanted = grads_of(tower.parameters())
    loss(*both(data())).backward()
    close(grads_of(tower.parameters()), wanted, 1e-12)


def test_a_tower_that_the_loss_ignores():
    encoders, inputs, _, _ = make("two")
    tw.CachedStep(encoders, lambda a, b: sup_con(a), micro_batch=4, keep=0)(*inputs)
    assert all(p.grad is None for p in encoders[1].parameters())
    assert all(p.grad is not None for p in encoders[0].parameters())


def test_given_features_are_detached():
    encoders, inputs, loss, parameters = make("two")
    features = encoders[1](inputs[1])
    tw.CachedStep([encoders[0], None], loss, micro_batch=4, keep=0)(inputs[0], features)
    own = [id(p) for p in encoders[0].parameters()]
    assert all((p.grad is not None) == (id(p) in own or p is parameters[0]) for p in parameters)


def test_batch_norm_in_a_function_and_after_a_failure():
    tower = nn.Sequential(nn.Linear(5, D), nn.BatchNorm1d(D)).double()
    x, fails = torch.randn(12, 5).double(), [99]

    def encoder(x):
        fails[0] -= 1
        if fails[0] < 0:
            raise ValueError("now")
        return tower(x)

    with pytest.raises(tw.OptionError, match="BatchNorm1d in train mode"):
        tw.CachedStep(encoder, sup_con, micro_batch=4)(x)
    fails[0] = 5
    with pytest.raises(tw.StepError, match="now"):
        tw.CachedStep(encoder, sup_con, micro_batch=4, keep=0, batch_norm=True)(x)
    assert int(tower[1].num_batches_tracked) == 3


def test_what_autocast_shares_is_counted_once():
    """Copies of the weights are in the first graph, and in no other."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, D))
    with torch.autocast("cpu", torch.bfloat16):
        metrics = tw.CachedStep(tower, sup_con, micro_batch=4, keep=1.5)(
            torch.randn(64, 512)
        ).metrics
    assert metrics.kept >= 14


WRONG = {
    "complex": (
        lambda t: tw.CachedStep(lambda x: t(x).to(torch.complex64), sup_con, micro_batch=4)(data()),
        "view_as_real",
    ),
    "names beside features": (
        lambda t: tw.CachedStep(lambda x: (t(x), ["a"]), sup_con, micro_batch=4)(data()),
        "got str",
    ),
    "keep all": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4, keep="all"), "not negative"),
    "keep true": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4, keep=True), "got bool"),
    "micro-batch true": (lambda t: tw.CachedStep(t, sup_con, micro_batch=True), "above 0"),
    "device": (
        lambda t: tw.CachedStep(t, sup_con, micro_batch=4, device="gpu"),
        "one that is here",
    ),
    "empty": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4)(data()[:0]), "must not be empty"),
    "uneven": (
        lambda t: tw.CachedStep(t, sup_con, micro_batch=4)((data(), data()[:3])),
        "same number of samples",
    ),
    "no input": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4)(), "got 0 inputs"),
    "micro-batch": (lambda t: tw.CachedStep(t, sup_con, micro_batch=0), "number above 0"),
    "keep": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4, keep=-1), "not negative"),
    "features": (
        lambda t: tw.CachedStep(t, sup_con, micro_batch=4, features="disk"),
        "'device', 'host'",
    ),
    "generator": (
        lambda t: tw.CachedStep(t, sup_con, micro_batch=4)(iter([data()])),
        "can be read once",
    ),
    "unknown inputs": (lambda t: tw.CachedStep(t, sup_con, micro_batch=4)(Bag(1)), "pass split="),
    "no encoders": (lambda t: tw.CachedStep([], sup_con, micro_batch=4), "at least one"),
    "no named encoders": (lambda t: tw.CachedStep({}, sup_con, micro_batch=4), "at least one"),
    "no features": (
        lambda t: tw.CachedStep(lambda x: "text", sup_con, micro_batch=4)(data()),
        "must return features",
    ),
    "loss": (lambda t: tw.CachedStep(t, lambda a: a, micro_batch=4)(data()), "one number"),
    "nothing to train": (
        lambda t: tw.CachedStep(t.requires_grad_(False), sup_con, micro_batch=4)(data()),
        "unfreeze an encoder",
    ),
    "no_grad": (
        torch.no_grad()(lambda t: tw.CachedStep(t, sup_con, micro_batch=4)(data())),
        "call it outside",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    body, message = WRONG[name]
    tower = Tower(5).double()
    with pytest.raises(tw.TilewiseError, match=message):
        body(tower)
    assert all(p.grad is None for p in tower.parameters())


def test_progress(capsys):
    tower = Tower(5).double()
    tw.CachedStep(tower, sup_con, micro_batch=4, keep=0)(data())
    assert capsys.readouterr().err == ""
    result = tw.CachedStep(tower, sup_con, micro_batch=4, keep=0, progress=True)(data())
    assert "replay" in capsys.readouterr().err
    assert result.metrics.embed_s > 0
    assert "13 samples: embed" in str(result.metrics)


def test_nothing_of_the_first_graph_stays():
    """It is run with a graph to see what that takes: a step has one graph at a time."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 2048), nn.Sigmoid(), nn.Linear(2048, 4))
    step = tw.CachedStep(body, lambda a: a.square().mean(), micro_batch=64, keep=0)
    x, cpu = torch.randn(256, 4), torch.device("cpu")
    gc.disable()
    try:
        ours = measure.peak_bytes(lambda: step(x), cpu)
        alone = measure.peak_bytes(lambda: body(x[:64]).square().mean().backward(), cpu)
    finally:
        gc.enable()
    assert ours <= alone + 0.5 * 64 * 2048 * 4


def test_room_for_features_is_what_they_take():
    x = torch.randn(250, 5)
    tower = nn.Linear(5, D)
    for step in (8, 200, 999):
        taken = []
        tw.CachedStep(
            tower, lambda a, t=taken: (t.append(len(a.untyped_storage()) // 4 // D), a.mean())[1],
            micro_batch=step, keep=0,
        )(x)  # fmt: skip
        assert taken == [250]


def test_memory_does_not_grow_with_the_batch():
    """But for features: above inputs, four times the batch takes the same."""
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 4))
    step = tw.CachedStep(tower, lambda a: a.square().mean(), micro_batch=64, keep=0)
    peaks = []
    for n in (256, 1024):
        x = torch.randn(n, 64)
        step(x)
        peaks.append(measure.peak_bytes(lambda x=x: step(x), torch.device("cpu")))
    # Features and their gradient, and 5,056 bytes of random state for each micro-batch.
    assert peaks[1] - peaks[0] <= 2 * 768 * 16 + 12 * 5200
    plain_peak = measure.peak_bytes(
        lambda: tower(x).square().mean().backward(), torch.device("cpu")
    )
    assert plain_peak > 5 * peaks[1]


# Several ranks


def towers_on_ranks(rank, world):
    """The model, its shard of 12 pairs, and the whole of them."""
    torch.manual_seed(2)
    model, x, y = Clip(), data(12), data(12, size=6, seed=1)
    model.eval()
    mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
    return model, (x[mine], y[mine]), (x, y)


def ddp_step(rank, world, keep, how, steps=1, micro_batch=2):
    """The error of gradients in cached steps with DDP and a ring, and all-reduces in each."""
    from torch.nn.parallel import DistributedDataParallel

    model, mine, whole = towers_on_ranks(rank, world)
    group = torch.distributed.group.WORLD
    if how == "one":
        wrapped = [DistributedDataParallel(model, bucket_cap_mb=100)]
        encoders, inputs, loss = wrapped[0], [mine], group_loss(group)
    else:
        wrapped = [DistributedDataParallel(t, bucket_cap_mb=100) for t in (model.image, model.text)]
        scale = DistributedDataParallel(Scale(model.logit_scale))
        encoders, inputs, loss = wrapped, list(mine), group_loss(group, scale)
    count = []
    for module in wrapped:
        module.register_comm_hook(count, counting_hook)
    step = tw.CachedStep(encoders, loss, micro_batch=micro_batch, keep=keep)
    errors = []
    for _ in range(steps):
        step(*inputs)
        ours = grads_of(model.parameters())
        clip_of(model, *whole, step=12).backward()
        wanted = grads_of(model.parameters())
        errors.append(
            max(float((a - b).norm() / (1 + b.norm())) for a, b in zip(ours, wanted, strict=True))
        )
    return max(errors), len(count) / steps / len(wrapped)


class Scale(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self):
        return self.p.exp()


def group_loss(group, scale=None):
    def loss(image_features, text_features, logit_scale=None):
        factor = logit_scale if scale is None else scale()
        return tw.clip_loss(image_features, text_features, factor, group=group)

    return loss


def counting_hook(count, bucket):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    count.append(1)
    return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize("how", ["one", "two"])
@pytest.mark.parametrize("keep", KEEPS)
def test_ddp(keep, how):
    """Gradients of all pairs in one process; each module averages once a step."""
    for error, reductions in ranks.run(ddp_step, 2, 2, KEEPS[keep], how, 2):
        assert error <= 1e-12
        assert reductions == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ddp_for_long(world):
    """R15: DDP, ring and gradient cache, a hundred steps."""
    for keep in (0, 0.02):
        for error, _ in ranks.run(ddp_step, world, world, keep, "one", 100, timeout=120.0):
            assert error <= 1e-12


def ddp_unlike(rank, keeps, sizes):
    """Two towers of the same shape; ranks that keep unlike numbers of graphs."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(2)
    towers = [Tower(5).double().eval() for _ in range(2)]
    others = copy.deepcopy(towers)
    wrapped = [DistributedDataParallel(t) for t in towers]
    start = sum(sizes[:rank])
    whole = [data(sum(sizes), seed=k) for k in range(2)]
    mine = [x[start : start + sizes[rank]] for x in whole]
    loss = group_loss(torch.distributed.group.WORLD, lambda: 2.0)
    metrics = tw.CachedStep(wrapped, loss, micro_batch=2, keep=keeps[rank])(*mine).metrics
    tw.clip_loss(*(t(x) for t, x in zip(others, whole, strict=True)), 2.0).backward()
    pairs = zip(towers[0].parameters(), others[0].parameters(), strict=True)
    pairs = [*pairs, *zip(towers[1].parameters(), others[1].parameters(), strict=True)]
    return max(float((p.grad - q.grad).norm()) for p, q in pairs), metrics.kept, metrics.replayed


@pytest.mark.parametrize(
    ("keeps", "sizes"),
    [((float("inf"), 0), (6, 6)), ((0, float("inf")), (6, 6)), ((0.02, 0.02), (4, 12))],
)
def test_ddp_where_ranks_keep_unlike_numbers(keeps, sizes):
    """Towers are averaged in the same order everywhere, and not with each other."""
    found = ranks.run(ddp_unlike, 2, keeps, sizes)
    assert max(error for error, _, _ in found) <= 1e-12
    assert found[0][1:] != found[1][1:]


class Sides(nn.Module):
    """Both towers behind one forward."""

    def __init__(self):
        super().__init__()
        self.image, self.text = Tower(5).double(), Tower(5).double()

    def forward(self, x, side):
        return getattr(self, side)(x)


def ddp_half_frozen(rank, keep, closure, micro_batch=2):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(2)
    model = Sides().eval()
    model.text.requires_grad_(False)
    other, whole = copy.deepcopy(model), [data(12, seed=k) for k in range(2)]
    wrapped, count = DistributedDataParallel(model), []
    wrapped.register_comm_hook(count, counting_hook)
    encoders = [functools.partial(wrapped, side=side) for side in ("image", "text")]
    if closure:
        encoders = [lambda x: wrapped(x, "image"), lambda x: wrapped(x, "text")]
    loss = group_loss(torch.distributed.group.WORLD, lambda: 2.0)
    mine = [x[6 * rank : 6 * rank + 6] for x in whole]
    tw.CachedStep(encoders, loss, micro_batch=micro_batch, keep=keep)(*mine)
    tw.clip_loss(other.image(whole[0]), other.text(whole[1]), 2.0).backward()
    pairs = zip(model.image.parameters(), other.image.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm()) for p, q in pairs), len(count)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("keep", [*KEEPS.values(), "auto"])
def test_ddp_with_a_frozen_half(keep, closure):
    """Found in partials and in functions; averaged once, whatever is kept."""
    for error, reductions in ranks.run(ddp_half_frozen, 2, keep, closure):
        assert error <= 1e-12
        assert reductions == 1


@pytest.mark.parametrize("micro_batch", [6, [2, 6], [6, 2]])
def test_ddp_in_a_single_micro_batch(micro_batch):
    """Who averages is known after the first, which may be the last."""
    for error, reductions in ranks.run(ddp_half_frozen, 2, 99, True, micro_batch):
        assert error <= 1e-12
        assert reductions == 1


class Pair:
    """Two modules behind one object."""

    def __init__(self, image, text):
        self.parts = {"image": image, "text": text}

    def encode_image(self, x):
        return self.parts["image"](x)

    def encode_text(self, x):
        return torch.cat([*(self.parts["text"](p) for p in [x])])


class Joined(nn.Module):
    """A shared head on a tower of its own."""

    def __init__(self, head, tower):
        super().__init__()
        self.head, self.tower = head, tower

    def forward(self, x):
        return self.head(self.tower(x))


def wrapped_in(kind, towers, head):
    """Two encoders of two towers and a head, wrapped in one way or another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as Ddp

    if kind == "one module":
        both = Sides()
        both.image, both.text = towers
        both = Ddp(both)
        return [functools.partial(both, side=side) for side in ("image", "text")]
    if kind == "fsdp methods":
        mesh = init_device_mesh("cpu", (2,))
        pair = Pair(*(fully_shard(t, mesh=mesh) for t in towers))
        return [pair.encode_image, pair.encode_text]
    if kind == "methods":
        pair = Pair(*map(Ddp, towers))
        return [pair.encode_image, pair.encode_text]
    shared = Ddp(head)
    first = Ddp(towers[0], find_unused_parameters=True)
    return [Joined(shared, first), Joined(shared, Ddp(towers[1]))]


def wrapped_step(rank, kind, keeps):
    torch.manual_seed(2)
    towers, head = [Tower(5).double().eval() for _ in range(2)], nn.Linear(D, D).double()
    others, other_head = copy.deepcopy(towers), copy.deepcopy(head)
    whole = [data(12, seed=k) for k in range(2)]
    encoders = wrapped_in(kind, towers, head)
    loss = group_loss(torch.distributed.group.WORLD, lambda: 2.0)
    step = tw.CachedStep(encoders, loss, micro_batch=2, keep=keeps[rank])
    ends = other_head if kind == "joined" else nn.Identity()
    tw.clip_loss(*(ends(t(x)) for t, x in zip(others, whole, strict=True)), 2.0).backward()
    errors = []
    for _ in range(2):
        step(*(x[6 * rank : 6 * rank + 6] for x in whole))
        modules = [*towers, head] if kind == "joined" else towers
        twins = [*others, other_head] if kind == "joined" else others
        for module, twin in zip(modules, twins, strict=True):
            for p, q in zip(module.parameters(), twin.parameters(), strict=True):
                got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                errors.append(float((got - q.grad).norm()))
                p.grad = None
    return max(errors)


@pytest.mark.parametrize("keeps", [(0, 0), (99, 99), (0.02, 0.02), (99, 0)])
@pytest.mark.parametrize("kind", ["one module", "methods", "fsdp methods", "joined"])
def test_modules_are_averaged_where_they_run(kind, keeps):
    """Behind methods, both towers in one, a head that two share; ranks keep what they like."""
    if kind == "fsdp methods" and keeps[0] != keeps[1]:
        keeps = ("auto", "auto")
    assert max(ranks.run(wrapped_step, 2, kind, keeps)) <= 1e-12


def loss_only(rank):
    """DDP of which only a parameter of the loss is trained; and FSDP2 inside of a loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as Ddp

    torch.manual_seed(2)
    model = Clip().eval()
    model.image.requires_grad_(False)
    model.text.requires_grad_(False)
    whole = data(12), data(12, size=6, seed=1)
    mine = tuple(x[6 * rank : 6 * rank + 6] for x in whole)
    loss = group_loss(torch.distributed.group.WORLD, lambda: model.logit_scale.exp())
    tw.CachedStep(Ddp(model), loss, micro_batch=2)(mine)
    got = model.logit_scale.grad.clone()
    model.logit_scale.grad = None
    clip_of(model, *whole, step=12).backward()
    head = fully_shard(nn.Linear(D, D).double(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(tw.StepError, match="must not run a module that fully_shard"):
        tw.CachedStep(Tower(5).double(), lambda a: sup_con(head(a)), micro_batch=2)(mine[0])
    return float((got - model.logit_scale.grad).abs())


def test_what_only_the_loss_trains_is_averaged():
    assert max(ranks.run(loss_only, 2)) <= 1e-12


def after_a_failure(rank):
    """A loss that is not finite, then steps with unlike budgets: no hook was left armed."""
    from torch.nn.parallel import DistributedDataParallel as Ddp

    torch.manual_seed(2)
    tower = Ddp(Tower(5).double().eval())
    group, bad = torch.distributed.group.WORLD, data()
    bad[0] = torch.nan

    def loss(a):
        return tw.sup_con(a, torch.arange(len(a)) % 4, group=group)

    with pytest.raises(tw.StepError, match="finite"):
        tw.CachedStep(tower, loss, micro_batch=4, keep=99)(bad)
    tw.CachedStep(tower, loss, micro_batch=4, keep=99 * rank)(data())
    return [p.grad for p in tower.parameters()]


def test_ddp_after_a_failure():
    found = ranks.run(after_a_failure, 2)
    close(*found, 0)


def ddp_options(rank, keep):
    """DDP that looks for unused parameters, of which the last micro-batch has some."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(2)
    model = Skips().eval()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    x = data(32)[16 * rank : 16 * rank + 16]
    x[:12, 0, 0], x[12:, 0, 0] = 1.0, -1.0
    group = torch.distributed.group.WORLD

    def loss(a):
        return tw.sup_con(a, torch.arange(16) % 4, group=group)

    if keep == "static":
        with pytest.raises(tw.OptionError, match="static_graph=True"):
            tw.CachedStep(
                DistributedDataParallel(model, static_graph=True), loss, micro_batch=4
            )(x)  # fmt: skip
        return [torch.zeros(1)]
    tw.CachedStep(wrapped, loss, micro_batch=4, keep=keep)(x)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("keep", [*KEEPS.values(), "static"])
def test_ddp_options(keep):
    found = ranks.run(ddp_options, 2, keep)
    close(found[0], found[1], 0)
    if keep != "static":
        close(found[0], ranks.run(ddp_options, 2, 0)[0], 1e-12)


def fsdp_nan(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    tower = Tower(5).double().eval()
    fully_shard(tower, mesh=init_device_mesh("cpu", (2,)))
    x = data()
    if rank == 1:
        x[0] = torch.nan
    with pytest.raises(tw.StepError, match="on some rank one that is not"):
        tw.CachedStep(tower, sup_con, micro_batch=4, keep=0)(x)
    return True


def test_fsdp2_with_one_rank_without_a_finite_loss():
    assert all(ranks.run(fsdp_nan, 2))


def ddp_scale_outside(rank, unused):
    """The loss takes a parameter of a DDP module that the module's forward does not use."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(2)
    model = Clip().eval()
    model.forward = lambda image, text: (model.image(image), model.text(text))
    wrapped = DistributedDataParallel(model, find_unused_parameters=unused)
    x, y = (t[6 * rank : 6 * rank + 6] for t in (data(12), data(12, size=6, seed=1)))
    group = torch.distributed.group.WORLD
    loss = group_loss(group, lambda: model.logit_scale.exp())
    step = tw.CachedStep(wrapped, loss, micro_batch=2, keep=0)
    if unused:
        with pytest.raises(tw.StepError, match=r"logit_scale outside.*find_unused_parameters"):
            step((x, y))
        return 0.0
    errors = []
    for _ in range(2):
        step((x, y))
        ours = grads_of(model.parameters())
        alone = tw.clip_loss(
            model.image(data(12)), model.text(data(12, size=6, seed=1)), model.logit_scale.exp()
        )
        alone.backward()
        wanted = grads_of(model.parameters())
        errors += [float((a - b).norm()) for a, b in zip(ours, wanted, strict=True)]
    return max(errors)


@pytest.mark.parametrize("unused", [False, True])
def test_ddp_with_its_scale_in_the_loss(unused):
    assert max(ranks.run(ddp_scale_outside, 2, unused)) <= 1e-12


def fsdp_step(rank, keep, counts=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    counts = [] if counts is None else counts
    mesh = init_device_mesh("cpu", (2,))
    model, mine, whole = towers_on_ranks(rank, 2)
    other = copy.deepcopy(model)
    for tower in (model.image, model.text):
        for block in tower.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(tower, mesh=mesh)
    group = torch.distributed.group.WORLD
    loss = group_loss(group, lambda: model.logit_scale.exp())
    step = tw.CachedStep([model.image, model.text], loss, micro_batch=2, keep=keep)
    clip_of(other, *whole, step=12).backward()
    errors = []
    for _ in range(2):
        counts.append(step(*mine).metrics.kept)
        torch.distributed.all_reduce(model.logit_scale.grad, op=torch.distributed.ReduceOp.SUM)
        model.logit_scale.grad /= 2
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            errors.append(float((got - q.grad).norm() / (1 + q.grad.norm())))
            p.grad = None
    return max(errors)


@pytest.mark.parametrize("keep", [*KEEPS.values(), "auto"])
def test_fsdp2(keep):
    assert max(ranks.run(fsdp_step, 2, keep)) <= 1e-12


def unlike_room(rank):
    """Ranks with room for unlike numbers of graphs keep the least of them: else they would hang."""
    from tilewise import measure

    counts, room = [], 2**28 + (2**25 if rank else 2**15)
    measure.free_bytes = lambda device: room / 0.9
    return fsdp_step(rank, "auto", counts), counts[0]


def test_fsdp2_with_unlike_room():
    (error, kept), (other_error, other_kept) = ranks.run(unlike_room, 2)
    assert max(error, other_error) <= 1e-12
    assert 0 < kept == other_kept < 6


def nan_on_one(rank):
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(2)
    tower = Tower(5).double().eval()
    wrapped = DistributedDataParallel(tower)
    x = data()
    if rank == 1:
        x[0] = torch.nan
    with pytest.raises(tw.StepError, match="on some rank one that is not"):
        tw.CachedStep(wrapped, sup_con, micro_batch=4, keep=0)(x)
    return all(p.grad is None for p in tower.parameters())


def test_one_rank_without_a_finite_loss():
    """No rank waits: all raise."""
    assert all(ranks.run(nan_on_one, 2))


def test_modules_are_walked_through_as_torch_does():
    """Shared ones once, in the same order; those that are None not at all."""
    shared = nn.Linear(2, 2)
    inner = nn.Sequential(nn.ReLU(), shared, nn.Sequential(nn.Linear(2, 1)))
    inner.register_module("none", None)
    outer = nn.ModuleList([shared, inner])
    towers = Towers([outer, inner], ["a", "b"])
    towers.look()
    assert towers.parts == list(outer.modules())
    assert [id(p) for p in towers.parameters] == [id(p) for p in outer.parameters()]
