"""What may go wrong with a cached step: in encoders, losses, inputs, and in the step before."""

import collections
import copy
import functools
import gc
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import ranks
import tilewise as tw
from tilewise.randomness import State, graph_leaves

D = 6
KEEPS = [0, 0.001, "auto", float("inf")]


def data(n=12, size=D, seed=0, dtype=torch.float64):
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tower(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, D)).to(dtype)


def weighted(*features):
    """A loss in which every number of its features counts, each otherwise."""
    return sum((x * data(x.numel(), 1, seed=5).view_as(x).to(x)).square().sum() for x in features)


def grads_of(*modules):
    return [p.grad.clone() for module in modules for p in module.parameters()]


def off(ours, theirs):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


# Encoders


@pytest.mark.parametrize("keep", KEEPS)
def test_what_a_gradient_needs_must_not_be_changed(keep):
    """As in a plain step: hooks that measure a graph switch autograd's own look at it off."""
    net = tower()

    def encoder(x):
        z = net(x).exp()
        z += 1
        return z

    with pytest.raises(RuntimeError, match="inplace operation"):
        weighted(encoder(data())).backward()
    net.zero_grad()
    with pytest.raises(tw.StepError, match="inplace operation"):
        tw.CachedStep(encoder, weighted, micro_batch=3, keep=keep)(data())
    assert all(p.grad is None for p in net.parameters())


def spread(how, x):
    """A product with a sparse matrix, as in graph networks, or of ragged rows."""
    if how == "nested":
        ragged = torch.nested.as_nested_tensor([row[None] for row in x], layout=torch.jagged)
        return torch.nested.to_padded_tensor((ragged * ragged).sin(), 0.0)[:, 0]
    links = data(len(x), len(x)).relu()
    return (links.to_sparse() if how == "coo" else links.to_sparse_csr()) @ x


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("how", ["coo", "csr", "nested"])
def test_graphs_that_hold_sparse_or_nested_tensors(how):
    """What they take is measured, though they have no storage of their own."""
    net, other = tower(), tower()
    result = tw.CachedStep(lambda x: spread(how, net(x)), weighted, micro_batch=4, keep=100)(data())
    weighted(torch.cat([spread(how, other(part)) for part in data().split(4)])).backward()
    assert off(grads_of(net), grads_of(other)) <= 1e-12
    assert result.metrics.kept == 3


def test_features_of_one_number_may_be_near_zero():
    """One that is rounded otherwise without a graph: by as much as the others, not by less."""

    class Rounding(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(D, 1)

        def forward(self, x):
            z = self.net(x)[:, 0]
            return z if torch.is_grad_enabled() else z + 0.004

    torch.manual_seed(0)
    x = data(2048, dtype=torch.float32)
    result = tw.CachedStep(Rounding(), weighted, micro_batch=256, keep=0)(x)
    assert 0 < result.metrics.replay_difference < 0.02


def test_features_that_are_no_numbers_may_stay_so():
    net, x = tower(), data()
    x[3] = torch.nan

    def loss(z):
        return weighted(z[~z.isnan().any(1)])

    assert tw.CachedStep(net, loss, micro_batch=4, keep=0)(x).loss.isfinite()
    # But a row that becomes one is another.
    calls = []

    def encoder(x):
        calls.append(1)
        return net(x) if len(calls) <= 4 else net(x) / 0

    with pytest.raises(tw.StepError, match="differ by nan%"):
        tw.CachedStep(encoder, loss, micro_batch=4, keep=0)(data())


class Counting(nn.Module):
    """Adds up how often it ran, and lets its output depend on it."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.register_buffer("runs", torch.zeros((), dtype=torch.float64))
        self.register_buffer("table", torch.arange(D, dtype=torch.float64))

    def forward(self, x):
        self.runs += 1
        self.table = self.table.roll(1)
        return self.net(x) * (1 + self.runs) + self.table


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*(spectral_norm(nn.Linear(D, D)) for _ in range(2))).double()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("kind", [Counting, Spectral])
def test_buffers_that_forwards_change(kind):
    """They are for each micro-batch what they were the first time, and counted once."""
    found = []
    for keep in (float("inf"), 0, 0.001):
        module = kind().train()
        step = tw.CachedStep(module, weighted, micro_batch=3, keep=keep)
        for _ in range(2):
            module.zero_grad()
            step(data())
        found.append((grads_of(module), [x.clone() for x in module.buffers()]))
    for grads, buffers in found[1:]:
        assert off(grads, found[0][0]) <= 1e-12
        assert all(torch.equal(a, b) for a, b in zip(buffers, found[0][1], strict=True))


def test_buffers_that_change_since_train_was_called():
    found = []
    for keep in (float("inf"), 0):
        module = Spectral().eval()
        step = tw.CachedStep(module, weighted, micro_batch=3, keep=keep)
        step(data())
        module.train().zero_grad()
        step(data())
        found.append(grads_of(module))
    assert off(*found) <= 1e-12


class Unseen(nn.Module):
    """Changes a buffer in a way that autograd does not see."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = tower(), how
        first = None if how == "none" else torch.zeros((), dtype=torch.float64)
        self.register_buffer("runs", first)

    def forward(self, x):
        if self.how == "none":
            one = torch.ones((), dtype=torch.float64)
            self.runs = one if self.runs is None else self.runs + 1
        elif self.how == "data":
            self.runs.data.add_(1)
        elif self.how == "other data":
            self.runs.data = self.runs + 1
        else:
            self.runs.numpy()[...] += 1
        return self.net(x) * self.runs


@pytest.mark.parametrize("how", ["none", "data", "other data", "numpy"])
def test_buffers_that_change_unseen(how):
    """Or are not there at first. A graph that was kept would be wrong, and autograd silent."""
    other = Unseen("none")
    for _ in range(2):
        weighted(torch.cat([other(x) for x in data().split(6)])).backward()
    for keep in ("auto", 0):
        module = Unseen(how)
        step = tw.CachedStep(module, weighted, micro_batch=6, keep=keep)
        for runs in (2, 4):
            step(data())
            assert module.runs == runs
        assert off(grads_of(module), grads_of(other)) <= 1e-12
    step = tw.CachedStep(Unseen(how), weighted, micro_batch=6, keep=float("inf"))
    if how == "none":  # autograd sees that
        assert step(data()).metrics.replayed == 0
    else:
        with pytest.raises(tw.StepError, match=r"got runs, which a forward changes unseen.*keep=0"):
            step(data())


class Lazy(nn.Module):
    """Makes what it needs when it first needs it, and never again."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.register_buffer("bias", None)

    def forward(self, x):
        if self.bias is None:
            self.bias = torch.ones(D, dtype=torch.float64)
        return self.net(x) + self.bias


def test_a_buffer_that_is_made_once_is_not_copied_for_every_micro_batch():
    module = Lazy()
    step = tw.CachedStep(module, weighted, micro_batch=2, keep=0)
    for _ in range(2):
        step(data())
        assert step.towers.changing == {0: []}
    assert module.bias.sum() == D


def test_buffers_that_cannot_be_compared_may_stay():
    module = Counting()
    module.register_buffer("graph", torch.eye(D).to_sparse())
    module.register_buffer("nowhere", torch.ones(D, device="meta"))
    module.register_buffer("bits", torch.ones(D, dtype=torch.uint8).view(torch.bits8))
    tw.CachedStep(module, weighted, micro_batch=6, keep=0)(data())
    assert module.runs == 2


def test_a_buffer_of_nan_is_as_it_was():
    module = tower()
    module.register_buffer("unknown", torch.tensor([1.0, torch.nan]))
    step = tw.CachedStep(module, weighted, micro_batch=6, keep=float("inf"))
    assert step(data()).metrics.replayed == 0


class Normalising(nn.Module):
    """Divides by a buffer that every forward changes in place."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.register_buffer("size", torch.ones(D, dtype=torch.float64))

    def forward(self, x):
        z = self.net(x)
        self.size.mul_(0.9).add_(0.1 * z.detach().std(0))
        return z / self.size


def test_a_buffer_in_a_graph_that_is_kept():
    module = Normalising()
    weighted(module(data())).backward()
    module.zero_grad()
    for keep in (float("inf"), "auto"):
        with pytest.raises(tw.StepError, match=r"OptionError.*size among them.*pass keep=0"):
            tw.CachedStep(module, weighted, micro_batch=4, keep=keep)(data())
    tw.CachedStep(module, weighted, micro_batch=4, keep=0)(data())


def test_weights_that_parametrize_remembers():
    """Those of the first pass have no graph."""
    net = weight_norm(nn.Linear(D, D).double())
    with pytest.raises(tw.OptionError, match="call the step outside"), parametrize.cached():
        tw.CachedStep(net, weighted, micro_batch=4)(data())


def test_buffers_are_copied_only_for_what_is_run_again():
    """And those that were made in inference mode are no reason to fail."""
    module = Counting()
    with torch.inference_mode():
        module.register_buffer("fixed", torch.ones(3))
    kept = []

    def loss(z):
        kept.append(sum(type(x) is State and len(x.values) for x in gc.get_objects()))
        return weighted(z)

    for keep, copies in ((float("inf"), 0), (0, 8)):
        gc.collect()
        tw.CachedStep(module, loss, micro_batch=3, keep=keep)(data())
        assert kept[-1] == copies


def test_buffers_of_what_is_not_run_again():
    module = Counting()
    step = tw.CachedStep([module, module], lambda a, _: weighted(a), micro_batch=3, keep=0)
    step(data(), data(seed=1))
    assert module.runs == 8


def test_scripted_batch_norm_is_refused():
    net = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).double())
    with pytest.raises(tw.OptionError, match="BatchNorm1d in train mode"):
        tw.CachedStep(net, weighted, micro_batch=4)(data())
    tw.CachedStep(net.eval(), weighted, micro_batch=4)(data())


OUTPUTS = {
    "prototypes": lambda z: (z, torch.ones(5, D, dtype=z.dtype)),
    "samples last": lambda z: z.T,
    "a mean": lambda z: z.mean(0),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_without_a_row_for_each_sample(name):
    """Put one below the other they would make another loss."""
    net = tower()
    with pytest.raises(tw.StepError, match="a row for each sample"):
        tw.CachedStep(lambda x: OUTPUTS[name](net(x)), weighted, micro_batch=4)(data())


class Changing(nn.Module):
    """Returns something else every second time."""

    def __init__(self, first, second):
        super().__init__()
        self.net, self.ways, self.turn = tower(), (first, second), 0

    def forward(self, x):
        self.turn += 1
        return self.ways[(self.turn - 1) % 2](self.net(x))


FORMS = {
    "other order": (lambda z: {"a": z, "b": -z}, lambda z: {"b": -z, "a": z}),
    "other keys": (lambda z: {"a": z}, lambda z: {"b": z}),
    "None elsewhere": (lambda z: (z, None), lambda z: (None, z)),
    "more": (lambda z: (z,), lambda z: (z, z)),
    "fewer": (lambda z: (z, z), lambda z: (z,)),
}


@pytest.mark.parametrize("name", FORMS)
def test_outputs_in_other_places(name):
    """They are stored by place: the loss would get one for the other."""
    for keep in (0, float("inf")):
        step = tw.CachedStep(Changing(*FORMS[name]), weighted, micro_batch=6, keep=keep)
        with pytest.raises(tw.StepError, match=r"same places every time, got .*tensor.* after "):
            step(data())


def test_outputs_in_other_places_when_they_are_run_again():
    module = Changing(*FORMS["other order"])
    step = tw.CachedStep(module, lambda a, b: weighted(a, b), micro_batch=12, keep=0)
    with pytest.raises(tw.StepError, match="same places every time"):
        step(data())


def test_a_last_sample_without_its_dimension():
    net = tower()
    with pytest.raises(tw.StepError, match=r"same shape and dtype every time, got \[\(\(\)"):
        tw.CachedStep(lambda x: net(x).sum(1, True).squeeze(), weighted, micro_batch=11)(data())


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("inputs", ["tensor", "list"])
def test_a_vector_for_each_sample(kind, inputs):
    """Of which there are as many as samples, not as many as outputs."""
    net, x = tower(), data(8)
    if inputs == "list" and kind is tuple:
        return  # of a list of samples outputs may have any number of rows
    step = tw.CachedStep(lambda x: kind(net(torch.stack(list(x)))), weighted, micro_batch=2)
    with pytest.raises(tw.StepError, match="2 vectors for 2 samples; stack them"):
        step(list(x) if inputs == "list" else x)


def test_numbers_for_each_sample_as_many_as_samples():
    net = tower()
    step = tw.CachedStep(lambda x: (net(x)[:, 0], net(x)[:, 1]), weighted, micro_batch=2)
    assert step(data()).loss.isfinite()


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_are_not_dense(kind):
    def changed(x):
        if kind == "sparse":
            return x.to_sparse()
        return torch.nested.nested_tensor(list(x), layout=torch.jagged)

    net = tower()
    with pytest.raises(tw.StepError, match="must return dense tensors"):
        tw.CachedStep(lambda x: changed(net(x)), weighted, micro_batch=4)(data())
    with pytest.raises(tw.OptionError, match="a sparse or nested tensor; pass split="):
        tw.CachedStep(net, weighted, micro_batch=4)(changed(data()))


class Slots:
    __slots__ = ("net",)

    def __init__(self, net):
        self.net = net

    def __call__(self, x):
        return self.net(x)


def hidden(how, net):
    """An encoder of which one cannot see that it runs a module."""
    if how == "slots":
        return Slots(net)
    if how == "class":
        return type("Holds", (), {"nets": (net,), "__call__": lambda self, x: self.nets[0](x)})()
    if how == "module":
        library = types.ModuleType("library")
        library.net = net
        return lambda x: library.net(x)

    def encoder(x):
        return encoder.net(x)

    encoder.net = net
    return encoder


@pytest.mark.parametrize("how", ["slots", "class", "module", "attribute"])
def test_modules_that_a_function_hides(how):
    norm = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).double()
    with pytest.raises(tw.StepError, match="BatchNorm1d in train mode"):
        tw.CachedStep(hidden(how, norm), weighted, micro_batch=4)(data())
    assert norm[1].num_batches_tracked == 0
    step = tw.CachedStep(hidden(how, norm), weighted, micro_batch=4, keep=0, batch_norm=True)
    step(data())
    assert norm[1].num_batches_tracked == 3
    module, other = Counting(), Counting()
    step = tw.CachedStep(hidden(how, module), weighted, micro_batch=4, keep=0)
    for _ in range(2):
        step(data())
        weighted(torch.cat([other(x) for x in data().split(4)])).backward()
    assert module.runs == 6
    assert off(grads_of(module), grads_of(other)) <= 1e-12


def test_modules_that_a_function_makes_are_not_collected():
    net = tower()
    step = tw.CachedStep(lambda x: nn.LayerNorm(D).double()(net(x)), weighted, micro_batch=4)
    for _ in range(4):
        step(data())
    assert len(step.towers.modules) == 2


def test_compiled_functions_are_compiled_no_more_often():
    """Hooks that look for modules would be a reason to."""
    net, counts = tower(), []
    for inside in (False, True):
        torch._dynamo.reset()
        compiled = []

        def backend(graph, _, compiled=compiled):
            compiled.append(graph)
            return graph.forward

        encoder = torch.compile(net if inside else lambda x: net(x), backend=backend)
        encoder = (lambda x, known=encoder: known(x)) if inside else encoder
        tw.CachedStep(encoder, weighted, micro_batch=4, keep=float("inf"))(data())
        counts.append(len(compiled))
    assert counts == [1, 1]


def test_leaves_that_a_function_makes_are_not_held():
    """As large as activations, one for each micro-batch: transformers' input_require_grads."""
    first, second, seen, most = nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D), [], []

    def encoder(x):
        z = first(x).requires_grad_()
        seen.append(weakref.ref(z))
        most.append(sum(x() is not None for x in seen))
        return second(z)

    tw.CachedStep(encoder, weighted, micro_batch=1, keep=0)(data(dtype=torch.float32))
    assert max(most) <= 2


class Doubling(torch.autograd.Function):
    """Calls what it keeps as autograd calls leaves."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = x
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_leaves_are_what_autograd_takes_for_them():
    weight = torch.ones(3, requires_grad=True)
    assert [id(x) for x in graph_leaves([Doubling.apply(weight + 1)])] == [id(weight)]


def test_hooks_after_accumulation():
    """Refused on whatever gets its gradient in parts, run once on a parameter of the loss."""
    weight = torch.ones(12, D, dtype=torch.float64, requires_grad=True)
    ran, net = [], tower()
    weight.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad.clone()))
    for keep in (0, "auto"):
        with pytest.raises(tw.StepError, match="see a part of a gradient"):
            tw.CachedStep(lambda x: net(x) * weight[0], weighted, micro_batch=4, keep=keep)(data())
        with pytest.raises(tw.StepError, match="see a part of a gradient"):
            tw.CachedStep(net, weighted, micro_batch=4, keep=keep)(weight)
    assert not ran
    tw.CachedStep(net, lambda z: weighted(z * weight), micro_batch=4)(data())
    assert len(ran) == 1


def test_lists_of_samples_may_have_any_number_of_rows():
    net, other = tower(), tower()
    samples = [data(1 + k % 3, seed=k) for k in range(7)]
    tw.CachedStep(lambda parts: net(torch.cat(parts)), weighted, micro_batch=2)(samples)
    weighted(other(torch.cat(samples))).backward()
    assert off(grads_of(net), grads_of(other)) <= 1e-12


def test_several_rows_for_each_sample():
    net, other = tower(), tower()
    tw.CachedStep(lambda x: torch.cat([net(x), net(-x)], 1).view(-1, D), weighted, micro_batch=5)(
        data()
    )
    weighted(torch.cat([other(data()), other(-data())], 1).view(-1, D)).backward()
    assert off(grads_of(net), grads_of(other)) <= 1e-12


def test_lazy_modules():
    net = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(D)).double()
    tw.CachedStep(net, weighted, micro_batch=4)(data())
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("keep", [0, float("inf")])
def test_transforms_in_an_encoder(keep):
    """torch.func knows no hooks on saved tensors; where nothing is measured there are none."""
    net = tower()

    def encoder(x):
        return net(torch.func.grad(lambda y: y.sin().sum())(x))

    tw.CachedStep(encoder, weighted, micro_batch=4, keep=keep)(data())
    assert all(p.grad is not None for p in net.parameters())


def test_an_output_that_is_a_flag():
    net = tower()
    result = tw.CachedStep(
        lambda x: (net(x), torch.tensor(True)), lambda z, flag: weighted(z) * flag, micro_batch=4
    )(data())
    assert result.loss.isfinite()


# Losses and inputs


def test_losses_that_change_features():
    with pytest.raises(tw.StepError, match=r"must leave its features as they are.*x = x \* y"):
        tw.CachedStep(tower(), lambda z: weighted(z.mul_(2)), micro_batch=4)(data())


def test_options_named_as_an_encoder():
    step = tw.CachedStep({"a": tower(), "b": tower()}, lambda a, b: weighted(a, b), micro_batch=4)
    with pytest.raises(tw.OptionError, match="'a' from the encoder of that name"):
        step(data(), data(), a=1)


def test_options_named_as_an_output():
    """The loss would get the output, and never the option."""
    net = tower()
    step = tw.CachedStep(
        lambda x: {"a": net(x), "w": x[:, 0]}, lambda a, w: weighted(a) * w.sum(), micro_batch=4
    )
    with pytest.raises(tw.StepError, match="'w' from an output of that name"):
        step(data(), w=1)


def test_given_features_that_are_to_be_trained():
    net, x = tower(), data().requires_grad_()
    with pytest.raises(tw.GradError, match=r"input 1 is given.*lambda x: x"):
        tw.CachedStep([net, None], weighted, micro_batch=4)(data(), x)
    tw.CachedStep([net, lambda x: x], weighted, micro_batch=4)(data(), x)
    assert x.grad is not None


class Filed:
    """An array in a file, as h5py and zarr show it."""

    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __len__(self):
        return len(self.x)

    def __getitem__(self, span):
        return self.x[span]

    def __iter__(self):
        return iter(self.x)

    def __array__(self, dtype=None, copy=None):
        return self.x


ARRAYS = {
    "filed": Filed,
    "backwards": lambda x: x[::-1].copy()[::-1],
    "big-endian": lambda x: x.astype(">f8"),
    "transposed": np.asfortranarray,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_all_kinds(name):
    net, other = tower(), tower()
    result = tw.CachedStep(net, weighted, micro_batch=5)(ARRAYS[name](data().numpy()))
    assert result.metrics.samples == 12
    weighted(other(data())).backward()
    assert off(grads_of(net), grads_of(other)) <= 1e-12


@pytest.mark.parametrize("dtype", [object, str, "datetime64[s]", "f8,i4"])
def test_arrays_without_numbers(dtype):
    with pytest.raises(tw.StepError, match="must hold numbers of a type that torch has, got"):
        tw.CachedStep(tower(), weighted, micro_batch=4)(np.zeros(8, dtype))


@pytest.mark.parametrize("inputs", [range(8), {1, 2}, {1: 2}.keys(), collections.deque([data()])])
def test_what_is_neither_samples_nor_micro_batches(inputs):
    with pytest.raises(tw.OptionError, match=f"got {type(inputs).__name__}; pass split="):
        tw.CachedStep(tower(), weighted, micro_batch=4)(inputs)


def test_another_default_device():
    """Where nothing of a step is, if its modules and inputs are elsewhere."""
    net, other = tower(), tower()
    x, parts = data().numpy(), data().split(5)
    torch.set_default_device("meta")
    try:
        step = tw.CachedStep(net, lambda z: z.square().sum(), micro_batch=5, features="host")
        step(x)
        step(functools.partial(iter, parts))
    finally:
        torch.set_default_device(None)
    (2 * other(data()).square().sum()).backward()
    assert off(grads_of(net), grads_of(other)) <= 1e-12


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_infinities_of_all_kinds(kind):
    result = tw.CachedStep(tower(), weighted, micro_batch=4, keep=kind("inf"))(data())
    assert result.metrics.replayed == 0


class Failing(nn.Module):
    """Raises in one of its forwards; trains a tensor that it does not register."""

    def __init__(self, at, error=ValueError):
        super().__init__()
        self.net, self.at, self.error = tower(), at, error
        self.calls, self.hidden = 0, [torch.ones(D, dtype=torch.float64, requires_grad=True)]

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise self.error("boom")
        return self.net(x) * self.hidden[0]


@pytest.mark.parametrize("keep", [0, "auto"])
def test_gradients_of_inputs_and_of_tensors_that_are_no_parameters(keep):
    x, module = data().requires_grad_(), Failing(0)
    step = tw.CachedStep(module, weighted, micro_batch=3, keep=keep)
    step(x)
    got = [x.grad, module.hidden[0].grad]
    x.grad = module.hidden[0].grad = None
    weighted(module(x)).backward()
    assert off(got, [x.grad, module.hidden[0].grad]) <= 1e-12
    for leaf in (x, module.hidden[0], *module.parameters()):
        leaf.grad = None
    module.at = module.calls + 6  # the second that is run again
    x = data(seed=3).requires_grad_()
    if keep == 0:
        with pytest.raises(tw.StepError, match="boom; gradients are as they were"):
            step(x)
        assert all(p.grad is None for p in (x, module.hidden[0], *module.parameters()))


def test_inputs_with_a_graph():
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    for keep in KEEPS:
        with pytest.raises(tw.GradError, match="input 0 must not have a graph"):
            tw.CachedStep(tower(), weighted, micro_batch=4, keep=keep)(data() * weight)
    # Where they are the features they are taken as they are.
    net = tower()
    tw.CachedStep([net, None], weighted, micro_batch=4)(data(), data() * weight)
    assert weight.grad is None


def test_stop_iteration_is_an_error_like_others():
    with pytest.raises(tw.StepError, match="StopIteration: boom"):
        tw.CachedStep(Failing(2, StopIteration), weighted, micro_batch=4)(data())


def test_a_step_holds_nothing_when_it_is_done():
    """Without the help of the garbage collector: inputs and features may be gigabytes."""
    net = tower()
    for keep in KEEPS:
        x = data()
        alive = weakref.ref(x)
        step = tw.CachedStep(net, weighted, micro_batch=3, keep=keep)
        gc.disable()
        try:
            step(x)
            del x
            assert alive() is None
        finally:
            gc.enable()


def test_tensors_in_a_module_change_from_step_to_step():
    """None is held, and none keeps a gradient when the step fails."""
    module = Failing(0)
    step = tw.CachedStep(module, weighted, micro_batch=3, keep=0)
    for turn in range(3):
        module.hidden = [torch.ones(D, dtype=torch.float64, requires_grad=True)]
        module.at = module.calls + 6 if turn == 2 else 0
        if turn == 2:
            with pytest.raises(tw.StepError, match="boom"):
                step(data())
            assert module.hidden[0].grad is None
        else:
            step(data())
            assert module.hidden[0].grad is not None


def test_a_splitter_cuts_tensors_too():
    net, other = tower(), tower()
    x = data(8 * 12).view(8, 12, D)  # time first
    step = tw.CachedStep(
        lambda x: net(x.mean(0)), weighted, micro_batch=5, split=lambda x, n: x.split(n, 1)
    )
    loss = weighted(other(x.mean(0)))
    loss.backward()
    assert step(x).loss == pytest.approx(float(loss.detach()))
    assert off(grads_of(net), grads_of(other)) <= 1e-12


def test_a_splitter_is_not_asked_for_what_can_be_cut_beside():
    class Bag:
        def __init__(self, x):
            self.x = x

    net, other, asked = tower(), tower(1), []

    def split(bag, step):
        asked.append(type(bag))
        return bag.x.split(step)

    step = tw.CachedStep([net, other], weighted, micro_batch=4, split=split)
    step(Bag(data()), data())
    assert asked == [Bag]


# Ranks


def sharded(*modules, mixed=False):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = {"param_dtype": torch.float32, "reduce_dtype": torch.float64} if mixed else {}
    options = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(**dtypes)}
    return [fully_shard(module, **options) for module in modules]


def whole_grads(*modules):
    return [p.grad.full_tensor() for module in modules for p in module.parameters()]


def fsdp_after_a_failure(rank, mixed):
    """The step before was given up while gradients were being added up."""
    nets, others = [tower(0), tower(1)], [tower(0), tower(1)]
    sharded(*nets, mixed=mixed)
    failing = Failing(-1)
    failing.net, failing.hidden = nets[0], [torch.ones((), dtype=torch.float64)]
    step = tw.CachedStep([failing, nets[1]], weighted, micro_batch=2, keep=0)
    x, y = data(6, seed=1), data(6, seed=2)
    failing.at = 5  # three micro-batches, then the second that is run again
    with pytest.raises(tw.StepError, match="boom"):
        step(x, y)
    failing.at = -1
    step(x, y)
    weighted(others[0](x), others[1](y)).backward()
    return off(whole_grads(*nets), grads_of(*others))


@pytest.mark.parametrize("mixed", [False, True])
def test_fsdp2_after_a_step_that_failed(mixed):
    """What it has added up and not yet averaged is in no `.grad` of the module's parameters."""
    assert max(ranks.run(fsdp_after_a_failure, 2, mixed)) <= (1e-5 if mixed else 1e-12)


def fsdp_frozen(rank):
    nets, other = [tower(0), tower(1)], tower(0)
    nets[1].requires_grad_(False)
    fixed = copy.deepcopy(nets[1])
    sharded(*nets)
    tw.CachedStep(nets, weighted, micro_batch=2)(data(6), data(6, seed=1))
    weighted(other(data(6)), fixed(data(6, seed=1))).backward()
    return off(whole_grads(nets[0]), grads_of(other))


def test_fsdp2_with_a_frozen_tower_last():
    assert max(ranks.run(fsdp_frozen, 2)) <= 1e-12


class Clipping(nn.Module):
    """Counts outliers, unseen by autograd."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.register_buffer("clipped", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.clipped.data += (x.abs() > 99).sum()
        return self.net(x)


def fsdp_unseen(rank):
    (module,) = sharded(Clipping())
    x = data(6)
    x[0, 0] += 1000.0 * rank
    return tw.CachedStep(module, weighted, micro_batch=2, keep=100)(x).metrics.kept


def test_fsdp2_where_one_rank_changes_a_buffer_unseen():
    """All keep none then: each must run as many forwards as the others."""
    assert ranks.run(fsdp_unseen, 2) == [0, 0]


def whole_of(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def fsdp_in_the_loss(rank, keep):
    """A scale and the weights of sharded modules, which a root leaves whole after its forward."""
    nets, others = [tower(0), tower(1)], [tower(0), tower(1)]
    for net in (nets[0], others[0]):
        net.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    def loss_of(nets):
        def loss(a, b):
            decay = sum(whole_of(p).square().sum() for p in nets[0].parameters())
            return weighted(a, b) * whole_of(nets[0].scale).sum() + decay

        return loss

    sharded(*nets)
    step = tw.CachedStep(nets, loss_of(nets), micro_batch=2, keep=keep)
    errors = []
    for seed in (1, 3):
        x, y = data(6, seed=seed), data(6, seed=seed + 1)
        step(x, y)
        loss_of(others)(others[0](x), others[1](y)).backward()
        errors.append(off(whole_grads(*nets), grads_of(*others)))
        for module in (*nets, *others):
            module.zero_grad()
    nets[0][0].requires_grad_(False)
    nets[0][2].requires_grad_(False)
    with pytest.raises(tw.StepError, match="the loss uses scale of a module that fully_shard"):
        step(x, y)
    return max(errors)


@pytest.mark.parametrize("keep", [0, 0.001, "auto"])
def test_fsdp2_with_its_parameters_in_the_loss(keep):
    """They go along in the module's last backward: after it they would be a step late."""
    assert max(ranks.run(fsdp_in_the_loss, 2, keep)) <= 1e-12


class TwoTowers(nn.Module):
    """Two encoders as methods, and a scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = tower(0), tower(1)
        self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))

    def encode_first(self, x):
        return self.first(x)

    def encode_second(self, x):
        return self.second(x)


def fsdp_by_methods(rank, keep):
    """Its methods are forwards to FSDP2, though nobody calls the module."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    net, other = TwoTowers(), TwoTowers()
    sharded(net)
    for name in ("encode_first", "encode_second"):
        register_fsdp_forward_method(net, name)

    def loss_of(net):
        return lambda a, b: weighted(a, b) * whole_of(net.scale).sum()

    # They must keep as many graphs as each other.
    keep = keep if rank == 0 else 0
    encoders = (net.encode_first, lambda x: net.encode_second(x))
    step = tw.CachedStep(encoders, loss_of(net), micro_batch=2, keep=keep)
    errors = []
    for seed in (1, 3):
        x, y = data(6, seed=seed), data(6, seed=seed + 1)
        kept = step(x, y).metrics.kept
        loss_of(other)(other.first(x), other.second(y)).backward()
        errors.append(off(whole_grads(net), grads_of(other)))
        net.zero_grad()
        other.zero_grad()
    with pytest.raises(tw.StepError, match="the loss must not run a module that fully_shard"):
        tw.CachedStep(encoders, lambda a, b: weighted(net.encode_first(a)), micro_batch=2)(x, y)
    return max(errors), kept


@pytest.mark.parametrize("keep", [0, 100])
def test_fsdp2_run_by_registered_methods(keep):
    """It averages once a step, and what the loss takes of it goes along."""
    for error, kept in ranks.run(fsdp_by_methods, 2, keep):
        assert error <= 1e-12
        assert kept == 0


class Checkpointed(nn.Module):
    """Reentrant: a graph does not show what is inside."""

    def __init__(self):
        super().__init__()
        self.stem, self.net, self.extra = (
            nn.Linear(D, D).double(),
            tower(),
            nn.Linear(D, D).double(),
        )

    def forward(self, x):
        z = checkpoint(self.net, self.stem(x), use_reentrant=True)
        return self.extra(z) if x[0, 0] > 0 else z  # not in the last micro-batch


def checkpointed_ddp(rank, keep):
    from torch.nn.parallel import DistributedDataParallel as Ddp

    torch.manual_seed(1)
    net, x = Checkpointed(), data(6)
    other = copy.deepcopy(net)
    x[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 2)
    step = tw.CachedStep(Ddp(net), weighted, micro_batch=2, keep=keep)
    for _ in range(2):
        net.zero_grad()
        other.zero_grad()
        step(x * (1 + rank))
        for r in range(2):
            parts = (x * (1 + r)).split(2)
            (weighted(torch.cat([other(part) for part in parts])) / 2).backward()
    return off(grads_of(net), grads_of(other))


@pytest.mark.parametrize("keep", [0, "auto"])
def test_ddp_with_checkpoints_inside(keep):
    assert max(ranks.run(checkpointed_ddp, 2, keep)) <= 1e-12


def compiled_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel as Ddp

    net, other = tower(), tower()
    encoder = torch.compile(Ddp(net), backend="aot_eager")
    tw.CachedStep(encoder, weighted, micro_batch=2)(data(6))
    weighted(other(data(6))).backward()
    return off(grads_of(net), grads_of(other))


def test_compiled_ddp():
    assert max(ranks.run(compiled_ddp, 2)) <= 1e-12


class Centred(nn.Module):
    """Takes off a running mean, which every rank moves by what it sees itself."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.register_buffer("centre", torch.zeros(D, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.centre.lerp_(x.mean(0), 0.3)
        return self.net(x - self.centre)


def centred_ddp(rank, keep, hidden):
    """DDP makes every rank's buffers the first one's in a step's first forward."""
    from torch.nn.parallel import DistributedDataParallel as Ddp

    net, other = Centred(), Centred()
    ddp = Ddp(net)
    step = tw.CachedStep((lambda x: ddp(x)) if hidden else ddp, weighted, micro_batch=3, keep=keep)
    errors = []
    for seed in range(4):
        if seed == 2:  # what changes is looked for again
            net.eval()
            step(data(6))
            net.train()
        ddp.zero_grad()
        other.zero_grad()
        x = data(6, seed=seed) + rank
        result = step(x)
        torch.distributed.broadcast(other.centre, 0)
        weighted(torch.cat([other(part) for part in x.split(3)])).backward()
        for p in other.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= 2
        errors += [off(grads_of(net), grads_of(other)), result.metrics.replay_difference]
        errors.append(float((net.centre - other.centre).abs().max()))
    return max(errors), result.metrics.kept


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("keep", [0, float("inf")])
def test_ddp_shares_buffers_before_they_are_remembered(keep, hidden):
    """What is run again began with those of before, and graphs were not kept for a change."""
    for error, kept in ranks.run(centred_ddp, 2, keep, hidden):
        assert error <= 1e-12
        assert kept == (1 if keep else 0)


def said(encoders):
    """The error of a step with two encoders, if there is one."""
    try:
        tw.CachedStep(encoders, weighted, micro_batch=2)(data(6), data(6))
    except tw.StepError as error:
        return str(error)
    return ""


def bypassed_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel as Ddp

    ddp = Ddp(TwoTowers(), find_unused_parameters=True)
    ddp.module.forward = ddp.module.encode_first
    around = [
        (lambda x: ddp.module.encode_first(x), None),
        (ddp, lambda x: ddp.module.second(x)),
    ]
    return [said(encoders) for encoders in (*around, (ddp, lambda x: ddp(x)))]


def test_a_ddp_module_that_is_not_run_itself():
    """What goes through its `.module` is averaged by nobody."""
    for *around, fine in ranks.run(bypassed_ddp, 2):
        assert all("must run a DDP module by its own forward" in text for text in around)
        assert not fine


class Inside(nn.Module):
    """Takes its step in its forward, as Lightning's modules do."""

    def __init__(self):
        super().__init__()
        self.net = tower()
        self.forward = tw.CachedStep(self.net, weighted, micro_batch=2)


def step_in_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel as Ddp

    module = Ddp(Inside())
    try:
        module(data(6))
    except tw.OptionError as error:
        module.module(data(6))
        return str(error)
    return ""


def test_a_step_in_the_forward_of_ddp():
    """Nobody would average its gradients, and ranks would go apart."""
    for text in ranks.run(step_in_ddp, 2):
        assert "without an average" in text
        assert "in that of a Inside; wrap" in text


def test_modules_of_other_threads_are_left_alone():
    """The hook by which a function's modules are met is called for everybody's."""
    module, foreign, norm = tower(), Counting(), nn.BatchNorm1d(D).double()
    begin, done, fine = threading.Event(), threading.Event(), []

    def elsewhere():
        begin.wait(20)
        fine.append((foreign(data()), norm(data())))
        done.set()

    def encoder(x):
        begin.set()
        done.wait(20)
        return module(x)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    tw.CachedStep(encoder, weighted, micro_batch=6, keep=0)(data())
    thread.join()
    assert len(fine) == 1
    assert foreign.runs == 1


def test_a_last_micro_batch_of_as_many_samples_as_outputs():
    module = tower()
    encoder = lambda x: list(module(x)[:, :2].unbind(1))  # noqa: E731
    loss = lambda both: (both[0] * both[1]).sum()  # noqa: E731
    x = data(10)
    found = tw.CachedStep(encoder, loss, micro_batch=4, keep=0)(x).loss
    assert torch.allclose(found, loss(encoder(x)).detach())


# What a review by use found: each silent, or an error that named another cause


def test_an_output_is_compared_with_its_own_rows():
    """Those of another output, or of another encoder, may be so long that no change shows."""
    net, long = tower(dtype=torch.float32), nn.Linear(D, 32)

    def dropped(x):
        return nn.functional.normalize(net(x * torch.from_numpy(np.random.rand(*x.shape)).to(x)))

    def both(x):
        return {"features": dropped(x), "hidden": 1e4 * long(x)}

    x = data(dtype=torch.float32)
    for encoders, inputs in ((both, [x]), ((dropped, lambda x: 1e4 * long(x)), [x, x])):
        step = tw.CachedStep(encoders, lambda *f, **k: weighted(*f, *k.values()), micro_batch=3,
                             keep=0)  # fmt: skip
        with pytest.raises(tw.StepError, match="features must be the same"):
            step(*inputs)


CAPTIONS = tuple(f"{'a' * k} caption" for k in range(12))


def read(net, texts):
    assert isinstance(texts, (list, tuple))
    return net(torch.tensor([[len(t)] * D for t in texts], dtype=torch.float64))


@pytest.mark.parametrize("keep", [0, float("inf")])
@pytest.mark.parametrize("kind", ["mapping", "input", "loader", "loader of one"])
def test_a_tuple_of_texts_is_a_list_of_samples(kind, keep):
    """What a DataLoader makes of texts; whole, it would go to every micro-batch."""
    image, text, x = tower(0), tower(1), data()
    weighted(image(x), read(text, CAPTIONS)).backward()
    truth = grads_of(image, text)
    image.zero_grad()
    text.zero_grad()
    one = lambda x, captions: (image(x), read(text, captions))  # noqa: E731
    two = (image, lambda captions: read(text, captions))
    loader = torch.utils.data.DataLoader(list(zip(x, CAPTIONS, strict=True)), batch_size=4)
    encoders, inputs = {
        "mapping": (one, [{"x": x, "captions": CAPTIONS}]),
        "input": (two, [x, CAPTIONS]),
        "loader": (two, [loader]),
        "loader of one": (one, [loader]),
    }[kind]
    tw.CachedStep(encoders, weighted, micro_batch=4, keep=keep)(*inputs)
    assert off(grads_of(image, text), truth) < 1e-12


def test_what_an_encoder_leaves_behind_for_the_loss():
    """It is that of one micro-batch; a graph that was kept would be gone through twice."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x):
            z = self.net(x)
            self.rest = z.mean()
            return z

    net = Mixture()
    step = tw.CachedStep(net, lambda z: weighted(z) + net.rest, micro_batch=4, keep=float("inf"))
    with pytest.raises(tw.StepError, match="got a tensor that the encoder left elsewhere"):
        step(data())


@pytest.mark.parametrize("keep", [0, "auto", float("inf")])
def test_encoders_that_change_their_inputs(keep):
    """A part of the batch would be changed again in the second pass; a copy may be changed."""
    net = tower()

    def encoder(x):
        return net(x.sub_(0.5))

    x = data()
    with pytest.raises(tw.StepError, match="encoder 0 must leave its inputs as they are"):
        tw.CachedStep(encoder, weighted, micro_batch=4, keep=keep)(x)
    assert all(p.grad is None for p in net.parameters())
    x = data()
    weighted(net(x - 0.5)).backward()
    truth = grads_of(net)
    net.zero_grad()
    tw.CachedStep(encoder, weighted, micro_batch=4, keep=keep)(
        lambda: (part.clone() for part in x.split(4))
    )
    assert off(grads_of(net), truth) < 1e-12


def test_modules_that_average_and_cannot_be_told_when():
    """FullyShardedDataParallel has DDP's way to be told, and not what it is told by."""

    class FullySharded(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tower()

        def forward(self, x):
            return self.net(x)

        def no_sync(self):
            raise NotImplementedError

    with pytest.raises(tw.OptionError, match=r"by DDP or fully_shard .* got a FullySharded"):
        tw.CachedStep(FullySharded(), weighted, micro_batch=4)(data())


class TalkingNorm(nn.SyncBatchNorm):
    """On a CPU, which PyTorch's own does not run on."""

    def forward(self, x):
        mean = x.detach().mean(0)
        torch.distributed.all_reduce(mean)
        return x - mean / torch.distributed.get_world_size()


def talking(rank):
    net = nn.Sequential(tower(), TalkingNorm(D).double())
    keep = (0, float("inf"))[rank]
    step = tw.CachedStep(net, weighted, micro_batch=4, keep=keep, batch_norm=True)
    return [step(data(seed=rank)).metrics.kept for _ in range(2)]


def test_forwards_that_talk_to_other_ranks_run_equally_often():
    assert ranks.run(talking, 2, timeout=20) == [[0, 0], [0, 0]]


def fsdp_of_some(rank, keep):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = torch.distributed.new_group([0, 1])
    if rank == 2:
        return None
    plain, net = tower(), tower()
    weighted(plain(data(seed=rank))).backward()
    fully_shard(net, mesh=DeviceMesh.from_group(group, "cpu"))
    tw.CachedStep(net, weighted, micro_batch=4, keep=keep)(data(seed=rank))
    found = [p.grad.full_tensor() for p in net.parameters()]
    for p in plain.parameters():
        torch.distributed.all_reduce(p.grad, group=group)
    return off(found, [p.grad / 2 for p in plain.parameters()])


@pytest.mark.parametrize("keep", [0, "auto"])
def test_fsdp2_on_some_of_the_ranks(keep):
    """The others have nothing to say, and would not be there."""
    found = ranks.run(fsdp_of_some, 3, keep, timeout=20)
    assert max(found[:2]) < 1e-12


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_iterable_that_fails_is_said_to(broken):
    """One is read ahead: the micro-batch at work is a good one."""

    def source():
        for k in range(4):
            if k == broken:
                raise OSError("no such disk")
            yield data(4, seed=k)

    with pytest.raises(tw.StepError, match=f"^reading micro-batch {broken} of the iterable: OSErr"):
        tw.CachedStep(tower(), weighted, micro_batch=4)(source)


def test_what_all_samples_share():
    """Numbers of numpy, dtypes and devices among the arguments; anything else is named."""
    net, x = tower(), data()
    encoder = lambda x, power, dtype: net(x.to(dtype)) ** int(power)  # noqa: E731
    step = tw.CachedStep(encoder, weighted, micro_batch=4)
    step({"x": x, "power": np.int64(2), "dtype": torch.float64})
    with pytest.raises(tw.OptionError, match="got object in 'power'"):
        step({"x": x, "power": object(), "dtype": torch.float64})
    with pytest.raises(tw.ShapeError, match=r"got \[12, 1, 'none'\]"):
        step({"x": x, "power": torch.ones(1, 3), "dtype": torch.tensor(1.0)})
