"""What a cached step cannot do, said before it is begun, or as soon as it is seen."""

import numbers
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from tilewise.errors import GradError, OptionError, ShapeError
from tilewise.gradsync import Averager, averages
from tilewise.pairs import check_number
from tilewise.randomness import graph_leaves, training_norms
from tilewise.trees import Tree, call, leaves, tensors

LOOKED_AT = 64  # of the samples of a list
# Kinds of hooks on a gradient, and what they would do in a cached step.
AFTER = "_post_accumulate_grad_hooks", "see a part of a gradient"
TWICE = "_backward_hooks", "run twice on a parameter of the loss"


def checked_sizes(micro_batch: int | Sequence[int], slots: int) -> list[int]:
    """One micro-batch for each encoder."""
    sizes: list[Any] = [micro_batch] * slots
    if isinstance(micro_batch, (list, tuple)):
        sizes = list(micro_batch)
    whole = (
        isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) > 0 for n in sizes
    )
    if len(sizes) != slots or not all(whole):
        raise OptionError(
            f"micro_batch must be a number above 0, or one for each of {slots} encoders, got "
            f"{micro_batch!r}"
        )
    return [int(n) for n in sizes]


def check_keep(keep: float | str) -> None:
    """MiB, or what is free."""
    if keep == "auto" or (isinstance(keep, numbers.Real) and keep == float("inf")):
        return
    if isinstance(keep, str) or check_number("keep", keep) < 0:
        raise OptionError(f"keep must be 'auto' or MiB that are not negative, got {keep!r}")


def refuse_unknown_averagers(modules: Sequence[nn.Module]) -> None:
    """Raise on modules that average gradients in every backward and cannot be told not to."""
    for module in modules:
        if hasattr(module, "no_sync") and not averages(module):
            raise OptionError(
                "gradients must be averaged by DDP or fully_shard (FSDP2), which can be told when, "
                f"got a {type(module).__name__}; wrap the encoder in one of those"
            )


def refuse_bypassed(
    name: str, outputs: Sequence[Tensor], modules: Iterable[nn.Module], run: Iterable[Averager]
) -> None:
    """Raise if outputs train DDP modules that were not run: nobody would average those."""
    averaged = {key for owner in run for key in owner.parameters}
    others = [module for module in modules if hasattr(module, "no_sync")]
    known = {id(p) for module in others for p in module.parameters()} - averaged
    if known and any(id(x) in known for x in graph_leaves(outputs)):
        raise OptionError(
            f"{name} must run a DDP module by its own forward, which averages gradients, got one "
            "whose parameters it trains by another way (its .module); call the DDP module itself, "
            "and let its forward choose what to do"
        )


def refuse_batch_norm(modules: Sequence[nn.Module]) -> None:
    """Whose statistics would be of micro-batches, counted twice."""
    norms = training_norms(modules)
    if norms:
        raise OptionError(
            f"{norms[0]} in train mode takes the statistics of a micro-batch, and "
            "takes them twice: no longer those of the batch. Call .eval() on it, use LayerNorm or "
            "GroupNorm, or pass batch_norm=True to accept statistics of micro-batches, counted once"
        )


def refuse_hooks(parameters: Iterable[Tensor], kind: str, what: str) -> None:
    """Raise if some parameter has a hook of this kind, which would do `what`."""
    if any(getattr(p, kind, None) for p in parameters):
        raise OptionError(
            f"a hook on a gradient would {what} in a cached step, got a parameter with one; take "
            "it off, and do its work on .grad after the step"
        )


def refuse_graph(name: str, inputs: Tree) -> None:
    """Raise if inputs were computed with a graph, through which each micro-batch would go back."""
    some = (x for x in islice(leaves(inputs), LOOKED_AT) if isinstance(x, Tensor))
    if any(x.requires_grad and not x.is_leaf for x in some):
        raise GradError(
            f"{name} must not have a graph of its own, got a tensor that was computed from one "
            "with gradients; detach it, or compute it in the encoder"
        )


def refuse_trained(name: str, features: Tree) -> None:
    """Raise if features that are given are a parameter: what is given is detached."""
    some = (x for x in islice(leaves(features), LOOKED_AT) if isinstance(x, Tensor))
    if any(x.requires_grad and x.is_leaf for x in some):
        raise GradError(
            f"{name} is given instead of an encoder and gets no gradient, got a tensor to train; "
            "detach it, or to train it pass an encoder that returns it, lambda x: x"
        )


def versions(inputs: Tree) -> list[int]:
    """How often each tensor was changed in place; of inference tensors nobody counts."""
    return [0 if x.is_inference() else x._version for x in tensors(inputs)]


def refuse_changed(name: str, inputs: Tree, before: Sequence[int]) -> None:
    """Raise if an encoder changed its inputs and they are no copy: it would meet others again."""
    for x, old, new in zip(tensors(inputs), before, versions(inputs), strict=True):
        if old != new and x._is_view():
            raise OptionError(
                f"{name} must leave its inputs as they are, which are a part of the batch and are "
                "read again, got some that it changed in place; write x = x - y instead of x -= y, "
                "or clone them first"
            )


def refuse_cache() -> None:
    """Raise inside `parametrize.cached()`: weights made without a graph would be used with one."""
    if parametrize._cache_enabled:
        raise OptionError(
            "a cached step runs forwards without and with gradients, which must not share weights, "
            "got one inside of torch.nn.utils.parametrize.cached(); call the step outside of it"
        )


def refuse_inside() -> None:
    """Raise inside a DDP module's forward: what goes back before it returns is not averaged."""
    outer = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if outer is not None:
        raise OptionError(
            "a cached step in the forward of a DDP module leaves its gradients without an average "
            f"over ranks, got one in that of a {type(outer.module).__name__}; wrap the encoders "
            "in DDP, and call the step outside of their forwards"
        )


def refuse_clash(options: Iterable[str], names: Iterable[str], source: str) -> None:
    """Raise if an option of the loss has the name of an encoder or output: a keyword as well."""
    for name in set(options).intersection(names):
        raise OptionError(
            f"the loss gets {name!r} from {source} of that name, got an option of the same "
            "name; call one of them otherwise"
        )


def refuse_scattered(name: str, out: Tree, samples: int | None, counted: bool) -> None:
    """Raise if there is a vector for each sample, which would be taken for outputs of their own.

    If inputs are not `counted`, outputs may have any number of rows.
    """
    if not isinstance(out, (list, tuple)) or len(out) != samples:
        return
    if not all(isinstance(x, Tensor) and x.dim() == 1 for x in out):
        return
    uneven = counted and all(len(x) != samples for x in out)
    if uneven or (isinstance(out, list) and samples > 1):
        raise ShapeError(
            f"{name} must return outputs with a row for each sample, got a {type(out).__name__} of "
            f"{samples} vectors for {samples} samples; stack them, or return a tuple of outputs"
        )


def check_in_loss(owners: Sequence[Averager]) -> None:
    """Raise if the loss ran a module of fully_shard."""
    if any(not owner.by_forward for owner in owners):
        raise OptionError(
            "the loss must not run a module that fully_shard has sharded, whose gradients would be "
            "lost; run it at the end of an encoder"
        )


def call_loss(loss: Callable[..., Any], features: Tree) -> Any:
    """The loss of features, which are leaves to it."""
    try:
        return call(loss, features)
    except RuntimeError as error:
        if "leaf Variable that requires grad" not in str(error):
            raise
        raise OptionError(
            "the loss must leave its features as they are, which are held once for the whole "
            f"batch: {error}; write x = x * y instead of x *= y"
        ) from error


def check_loss(loss: Any) -> None:
    """A number that can be differentiated."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ShapeError(f"the loss must be a tensor with one number, got {got}; reduce it")
    if not loss.requires_grad:
        raise GradError(
            "the loss must depend on something to train, got one without gradient; unfreeze an "
            "encoder, or check that the loss does not detach its features"
        )
