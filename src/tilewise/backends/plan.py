"""What a backend is asked for and what it gives back: the words the backends share."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.pairs import Pairs, exact_dtype

PRECISIONS = ("exact", "fp8")
IN_WORKSPACE = -1  # of keep_bytes


class Plan(NamedTuple):
    """How to sweep."""

    reduction: str  # "logsumexp" or "softplus"
    columns: bool  # whether the columns' values are wanted too; not where they are the rows
    sums: bool  # whether sums and counts of the negatives are wanted
    backend: str  # "fused", "chunked", "dense", or "auto": the first of the first two that can
    workspace_bytes: int  # most bytes for tiles and blocks at work
    check_values: bool  # read values back to check them, on any device
    precision: str = "exact"  # or "fp8": scores from rounded features, the fused backend only
    # Most bytes for exponentials that need not be recomputed; IN_WORKSPACE: all of them, if the
    # workspace of the backward has room.
    keep_bytes: int = 0
    wants_scale: bool = False  # whether the scale's gradient will be wanted
    wide: bool = False  # leave the features' gradients in the dtype of the sums, to be added up
    group: str = ""  # the name of the process group whose columns are all meant; "" for none
    sizes: Sequence[int] = ()  # columns of each rank of that group
    nodes: Sequence[int] = ()  # which node each is on; none where all columns are gathered

    @property
    def num_stats(self) -> int:
        """How many numbers a sweep tells of each row; see `Stats`."""
        return 1 if self.reduction == "softplus" else 7 if self.sums else 5

    def text(self) -> str:
        """As custom ops take it: torch spends time on each of their arguments, squared."""
        return BETWEEN.join([_text(x, like) for x, like in zip(self, ZERO, strict=True)])

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> "Plan":
        """The plan of which this is the text."""
        return Plan(*[_value(x, like) for x, like in zip(text.split(BETWEEN), ZERO, strict=True)])


BETWEEN = "\x1f"  # in no name of a group
# Of each field's type.
ZERO: tuple[Any, ...] = ("", False, False, "", 0, False, "", 0, False, False, "", (0,), (0,))


def _text(x: Any, like: Any) -> str:
    if isinstance(like, tuple):
        return ",".join([str(k) for k in x])
    # A compiler may not know what a truth value is, and cannot write it down, but can ask.
    return str(x) if not isinstance(like, bool) else "yes" if x else ""


def _value(text: str, like: Any) -> Any:
    if isinstance(like, tuple):
        return tuple(int(k) for k in text.split(",") if k)
    return type(like)(text)


class Needs(NamedTuple):
    """Which gradients are wanted. What is not wanted costs nothing."""

    rows: bool
    cols: bool
    scale: bool
    bias: bool


class Swept(NamedTuple):
    """What a forward leaves to its caller and to its backward."""

    rows: Tensor  # (k, N) packed stats; see `Stats`
    cols: Tensor  # (k, M) likewise, or (0,)
    memo: Tensor  # whatever the backend wants to know again, or (0,)
    kept: Tensor  # exponentials of the first rows (K, M and some 0s), or (0,)


class Grads(NamedTuple):
    """Gradients by input; None where not wanted."""

    rows: Tensor | None  # (N, D)
    cols: Tensor | None  # (M, D); None too where the columns are the rows
    scale: Tensor  # (), as the next of no meaning where not wanted
    bias: Tensor  # ()


class Scaled(NamedTuple):
    """Gradients of a sum whose upstream gradient is not known yet: rows_i * row_gain_i.

    Powers of two as gains let half precision hold rows of any size; multiplying them in is exact.
    """

    grads: Grads
    row_gain: Tensor  # (N,)
    col_gain: Tensor  # (M,)


class Attended(NamedTuple):
    """What a row-only log-sum-exp over frozen columns leaves: no backward need see them again."""

    stats: Tensor  # (5, N) packed stats of the rows
    mean: Tensor  # (N, D) the mean column under each row's softmax, in the dtype of the sums
    product: Tensor  # (N,) of each row with its mean column

    def join(self, other: "Attended", merge: Callable[[Tensor, Tensor], Tensor]) -> "Attended":
        """Over two sets of columns; in the place of this one."""
        before, after = self.log_sums(), other.log_sums()
        stats = merge(self.stats, other.stats)
        total = Attended(stats, self.mean, self.product).log_sums()
        # Without negatives so far a sum is 0, and its share of the mean too.
        own, new = (
            torch.where(sums == -torch.inf, 0.0, torch.exp(sums - total)).to(self.mean.dtype)
            for sums in (before, after)
        )
        self.mean.mul_(own[:, None]).addcmul_(other.mean, new[:, None])
        return Attended(stats, self.mean, self.product * own + other.product * new)

    def log_sums(self) -> Tensor:
        """log of the sum over a row's negatives (N,), in fp64 where there is such."""
        values, offset = self.stats[0], self.stats[4]
        wide = exact_dtype(values)
        return values.to(wide) + offset.to(wide)


class Backend(Protocol):
    """A module with these functions; `dense` is their meaning."""

    def refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run there, or None."""

    def reduce(self, pairs: Pairs, plan: Plan) -> Swept:
        """The stats of rows and columns."""

    def differentiate(
        self,
        pairs: Pairs,
        plan: Plan,
        swept: Swept,
        upstream: tuple[Tensor, Tensor],
        needs: Needs,
        into: Tensor | None = None,
    ) -> Grads:
        """Gradients of what `reduce` returned, given the gradient of each of its numbers.

        Those of the rows are added to `into` (N, D), of the dtype of the sums, where it is given.
        May overwrite what was kept.
        """

    def merge(self, total: Tensor, more: Tensor) -> Tensor:
        """Packed stats (k, N) over two sets of pairs as one, in the place of the first."""

    def attend(self, pairs: Pairs, plan: Plan) -> Attended:
        """The stats of rows, and what their gradients are made of."""

    def weigh(
        self,
        pairs: Pairs,
        plan: Plan,
        weight: Tensor,
        needs: Needs,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Scaled]:
        """Sum over i of weight_i times the softplus sum of row i, and its gradients.

        `into` as for `differentiate`; gradients left in the dtype of the sums have gains of 1.
        """
