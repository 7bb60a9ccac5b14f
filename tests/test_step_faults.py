"""What may go wrong with a cached step: in encoders, losses, inputs, and in the step before."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import ranks
import tilewise as tw
from tilewise.randomness import State

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


def test_buffers_are_copied_only_for_what_is_run_again():
    """And those that were made in inference mode are no reason to fail."""
    module = Counting()
    with torch.inference_mode():
        module.register_buffer("fixed", torch.ones(3))
    kept = []

    def loss(z):
        kept.append(sum(isinstance(x, State) and len(x.values) for x in gc.get_objects()))
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


def compiled_ddp(rank):
    from torch.nn.parallel import DistributedDataParallel as Ddp

    net, other = tower(), tower()
    encoder = torch.compile(Ddp(net), backend="aot_eager")
    tw.CachedStep(encoder, weighted, micro_batch=2)(data(6))
    weighted(other(data(6))).backward()
    return off(grads_of(net), grads_of(other))


def test_compiled_ddp():
    assert max(ranks.run(compiled_ddp, 2)) <= 1e-12
