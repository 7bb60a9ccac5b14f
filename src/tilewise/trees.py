"""Tensors in tuples, lists and mappings: what encoders take and give."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import DtypeError

# What belongs to all samples.
ALL_SHARE = (str, bytes, bool, int, float, type(None), np.generic, torch.dtype, torch.device)
Tree = Any  # a tensor, a number, None, or a tuple, list or mapping of trees


def leaves(tree: Tree) -> Iterator[Any]:
    """Everything that is no container, in order."""
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        yield tree
        return
    for part in tree:
        yield from leaves(part)


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors in it, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """The same tree with every tensor changed; mappings become plain dicts."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, part) for key, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [map_tensors(change, part) for part in tree]
        if isinstance(tree, list):
            return parts
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def form(tree: Tree) -> str:
    """A tree in words, but for its tensors: keys, their order, what is None."""
    return repr(map_tensors(lambda _: "tensor", tree))


def call(function: Callable[..., Any], tree: Tree) -> Any:
    """Call with a mapping as keywords, a tuple as arguments, anything else as the only one."""
    if isinstance(tree, Mapping):
        return function(**tree)
    several = isinstance(tree, tuple) and not is_list(tree)
    return function(*tree) if several else function(tree)


def length(tree: Tree) -> int | None:
    """How many samples: the first size of its tensors, arrays and lists; None if they differ."""
    found = set(sizes(tree))
    return found.pop() if len(found) == 1 else None


def sizes(tree: Tree) -> Iterator[int]:
    """The first size of each tensor, array and list in it; -1 of what has none."""
    if isinstance(tree, Tensor) or is_list(tree) or _is_array(tree):
        yield len(tree) if not isinstance(tree, Tensor) or tree.dim() else -1
    elif isinstance(tree, (tuple, Mapping)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from sizes(part)


def take(tree: Tree, span: slice) -> Tree:
    """Some of the samples. Numbers, strings and None belong to all of them."""
    if isinstance(tree, Tensor) or is_list(tree):
        return tree if span == slice(None) else tree[span]
    if _is_array(tree):
        return _read(tree[span])
    if isinstance(tree, Mapping):
        return {key: take(part, span) for key, part in tree.items()}
    if isinstance(tree, tuple):
        parts = [take(part, span) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def _read(array: Any) -> Tensor:
    """An array's numbers in memory of their own, in an order that torch takes."""
    array = np.asarray(array)
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    try:
        return torch.tensor(native, device="cpu")
    except TypeError as error:
        raise DtypeError(
            f"an array must hold numbers of a type that torch has, got {array.dtype}; convert it, "
            "or pass a list of samples"
        ) from error


def is_sliceable(tree: Tree) -> bool:
    """Whether `take` knows how to cut it."""
    return next(uncut(tree), None) is None


def uncut(tree: Tree) -> Iterator[str]:
    """What `take` does not know how to cut, in words."""
    if isinstance(tree, (Mapping, tuple)) and not is_list(tree):
        named = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, part in named:
            yield from (f"{kind} in {name!r}" for kind in uncut(part))
    elif isinstance(tree, Tensor):
        yield from () if is_dense(tree) else ("a sparse or nested tensor",)
    elif not (isinstance(tree, ALL_SHARE) or is_list(tree) or _is_array(tree)):
        yield type(tree).__name__


def is_dense(x: Tensor) -> bool:
    """Whether it is neither sparse nor nested."""
    return x.layout == torch.strided and not x.is_nested


def is_list(tree: Tree) -> bool:
    """Whether it is a list of samples; a DataLoader makes a tuple of texts."""
    texts = isinstance(tree, tuple) and tree and all(isinstance(x, (str, bytes)) for x in tree)
    return isinstance(tree, list) or bool(texts)


def _is_array(tree: Tree) -> bool:
    """Whether it is a numpy array, memory-mapped or not, or a file that is cut as one."""
    known = hasattr(tree, "__array_interface__") or (
        hasattr(tree, "__array__") and hasattr(tree, "__getitem__")
    )
    return known and bool(getattr(tree, "shape", ()))
