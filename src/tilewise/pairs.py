"""Pairs: features, scale, bias, and which pairs count. Checked once here, trusted below."""

import math
import numbers
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import DeviceError, DtypeError, GradError, OptionError, ShapeError

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# A row whose positive index is this has no positive and is not counted.
NO_POSITIVE = -1

PositiveKind = Literal["aligned", "index", "label", "none"]
Both = tuple[Tensor, Tensor]
Device = torch.device | str | None


class Pairs(NamedTuple):
    """N x M pairs with logits z_ij = scale * rows_i . cols_j + bias.

    A plain tuple of tensors and constants, in the order the custom ops take them.
    """

    rows: Tensor  # (N, D)
    cols: Tensor | None  # (M, D); None: the rows themselves, so z is symmetric
    scale: Tensor  # ()
    bias: Tensor | None  # (); the log-sum-exp shifts by it, so only softplus carries it here
    positives: Tensor | None  # (N,) column index of each row's positive, where kind is "index"
    row_ids: Tensor | None  # (N,) equal ids are left out unless they are the positive
    col_ids: Tensor | None  # (M,)
    row_labels: Tensor | None  # (N,) equal labels are positives, where kind is "label"
    col_labels: Tensor | None  # (M,)
    kind: str  # a PositiveKind: how positives are told
    skip_self: bool  # leave out the pairs (i, i)

    @property
    def symmetric(self) -> bool:
        """Whether the columns are the rows, so that half of the tiles tells everything."""
        return self.cols is None

    @property
    def columns(self) -> Tensor:
        """The column features (M, D), whether or not they are the rows."""
        return self.rows if self.cols is None else self.cols

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, M, D)."""
        return self.rows.shape[0], self.columns.shape[0], self.rows.shape[1]

    @property
    def device(self) -> torch.device:
        """Where to compute; features may be in host memory instead."""
        return self.scale.device

    @property
    def dtype(self) -> torch.dtype:
        """What logits and sums are computed in: float64 for float64 features, else float32."""
        return accumulate_dtype(self.rows)


def make_pairs(
    rows: Tensor,
    cols: Tensor | None,
    scale_bias: tuple[float | Tensor, float | Tensor | None],
    *,
    positives: Tensor | Literal["aligned"] | None,
    ids: Tensor | Both | None,
    labels: Tensor | Both | None,
    skip_self: bool,
    empty: bool = False,
    device: Device = None,
) -> Pairs:
    """Check everything that can be checked without reading a value, and say what is wrong.

    Under autocast the features are cast as a matrix product would cast them. Sides may be `empty`
    where other ranks have more, and in host memory where a `device` to compute on is named.
    """
    check_features("rows", rows, empty=empty)
    if cols is not None:
        check_features("cols", cols, empty=empty)
    like = beside(rows, device)
    rows, cols = autocast(rows, device), None if cols is None else autocast(cols, device)
    check_match("rows", rows, "cols", rows if cols is None else cols, device)
    for name, marks in (("ids", ids), ("labels", labels)):
        if cols is None and marks is not None and not isinstance(marks, Tensor):
            raise OptionError(
                f"{name} must be one tensor where the columns are the rows, got "
                f"{type(marks).__name__}; pass the features as cols too for {name} that differ"
            )
    n, m = rows.shape[0], rows.shape[0] if cols is None else cols.shape[0]
    positives, ids, labels = (_moved(x, like, device) for x in (positives, ids, labels))
    kind, index = _positive_kind(positives, labels, n, like)
    if kind == "aligned" and skip_self:
        raise OptionError(
            "skip_self=True leaves out the pairs (i, i), which are the aligned positives; pass "
            "positives or labels"
        )
    row_ids, col_ids = _both_or_none("ids", ids, (n, m), like)
    row_labels, col_labels = _both_or_none("labels", labels, (n, m), like)
    scale = as_scalar("scale", scale_bias[0], like)
    bias = None if scale_bias[1] is None else as_scalar("bias", scale_bias[1], like)
    return Pairs(
        rows, cols, scale, bias, index, row_ids, col_ids, row_labels, col_labels, kind, skip_self
    )


def _positive_kind(
    positives: Tensor | str | None, labels: Tensor | Both | None, n: int, rows: Tensor
) -> tuple[PositiveKind, Tensor | None]:
    if labels is not None:
        if isinstance(positives, Tensor):
            raise OptionError("positives and labels both say which pairs are positive; pass one")
        return "label", None
    if positives is None:
        return "none", None
    if isinstance(positives, Tensor):
        check_marks("positives", positives, (n,), rows)
        return "index", positives
    if not isinstance(positives, str) or positives != "aligned":
        raise OptionError(
            f"positives must be 'aligned' or an index tensor ({n},), got {positives!r}"
        )
    return "aligned", None


def _both_or_none(
    name: str, marks: Tensor | Both | None, sizes: tuple[int, int], rows: Tensor
) -> Both | tuple[None, None]:
    if marks is None:
        return None, None
    sides = both(name, marks, *sizes)
    for side, size, which in zip(sides, sizes, ("row", "column"), strict=True):
        check_marks(f"{which} {name}", side, (size,), rows)
    return sides


def beside(features: Tensor, device: Device) -> Tensor:
    """What scalars and vectors must be like: the features, or something where they are computed."""
    return features if device is None else features.new_empty(0, device=checked_device(device))


def _moved(marks: Any, like: Tensor, device: Device) -> Any:
    """Marks where the sweep is computed: they may be with the features, in host memory."""
    if device is None or not isinstance(marks, (Tensor, tuple, list)):
        return marks
    if isinstance(marks, Tensor):
        return marks.to(like.device, non_blocking=True)
    return type(marks)(_moved(each, like, device) for each in marks)


def autocast(features: Tensor, device: Device = None) -> Tensor:
    """As a matrix product would take it: in the autocast dtype where autocast is on."""
    kind = features.device.type if device is None else torch.device(device).type
    # Meta tensors know no autocast, and asking whether a device does cannot be traced by all torch.
    if kind == "meta" or not torch.is_autocast_enabled(kind) or features.dtype == torch.float64:
        return features
    return features.to(torch.get_autocast_dtype(kind))


def check_features(name: str, features: Tensor, dims: int = 2, empty: bool = False) -> None:
    """Raise unless `features` is a floating tensor of `dims` dimensions, none of them empty.

    With `empty` the first may be.
    """
    if not isinstance(features, Tensor):
        raise DtypeError(f"{name} must be a tensor, got {type(features).__name__}")
    if features.layout != torch.strided or features.is_nested:
        raise DtypeError(f"{name} must be dense, got a sparse or nested tensor; call .to_dense()")
    if features.dtype not in FLOAT_DTYPES:
        raise DtypeError(
            f"{name} must be float64, float32, bfloat16 or float16, got {features.dtype}; "
            f"cast it with {name}.float()"
        )
    if features.dim() != dims:
        raise ShapeError(
            f"{name} must have {dims} dimensions, got shape {tuple(features.shape)}; "
            "flatten or unsqueeze it so that the last dimension holds the features"
        )
    if 0 in features.shape[1 if empty else 0 :]:
        raise ShapeError(
            f"{name} must not be empty, got shape {tuple(features.shape)}; skip an empty batch"
        )
    _check_tangent(name, features)


def _check_tangent(name: str, x: Tensor) -> None:
    """Raise on a forward-mode derivative, which would be lost: the result would have none."""
    # First what costs nothing: outside of a dual level nothing has one.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise GradError(
            f"the sweep has reverse-mode derivatives only, got {name} with a forward-mode one "
            "(torch.func.jvp, jacfwd, a dual tensor); use backward, or plain PyTorch for a small "
            "batch"
        )


def check_match(
    name: str, features: Tensor, other_name: str, other: Tensor, device: Device = None
) -> None:
    """Raise unless two feature tensors share feature size, dtype and device.

    With a `device` to compute on each may be there or in host memory.
    """
    if features.shape[-1] != other.shape[-1]:
        raise ShapeError(
            f"{name} and {other_name} must share a feature size, got {features.shape[-1]} and "
            f"{other.shape[-1]}; project both towers to one size"
        )
    if features.dtype != other.dtype:
        raise DtypeError(
            f"{name} and {other_name} must share a dtype, got {features.dtype} and "
            f"{other.dtype}; cast one of them, or run under torch.autocast"
        )
    if device is None:
        check_device(other_name, other, name, features)
        return
    for each, tensor in ((name, features), (other_name, other)):
        if tensor.device.type != "cpu" and tensor.device != beside(tensor, device).device:
            raise DeviceError(
                f"{each} must be on {device}, where it is computed on, or in host memory, got "
                f"{tensor.device}; move it, or name its device"
            )


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise unless `tensor` lives where `like` does."""
    if tensor.device != like.device:
        raise DeviceError(
            f"{name} must be on the device of {like_name} ({like.device}), got {tensor.device}; "
            f"move it with .to('{like.device}')"
        )


def as_scalar(name: str, value: float | Tensor, like: Tensor) -> Tensor:
    """A number or a one-element tensor as a 0-dimensional tensor beside `like`."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > 1:
            raise ShapeError(
                f"{name} must hold one number, shape () or (1,), got {tuple(value.shape)}; "
                "per-row values go into weight"
            )
        if value.dtype not in FLOAT_DTYPES:
            raise DtypeError(f"{name} must be a floating tensor, got {value.dtype}; cast it")
        check_device(name, value, "the features", like)
        _check_tangent(name, value)
        if is_readable(value) and not bool(torch.isfinite(value).all()):
            raise OptionError(
                f"{name} must be finite, got {float(value)}; clamp it or lower the learning rate"
            )
        return value.reshape(())
    return torch.full(
        (),
        check_number(name, value, "a number or a tensor"),
        dtype=accumulate_dtype(like),
        device=like.device,
    )


def is_readable(value: Tensor) -> bool:
    """Whether a value may be read here: on CPU, and not while a compiler traces."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling()


def checked_device(device: Device) -> torch.device:
    """A device that is here, with its index: "cuda" is the current one."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise DeviceError(f"device must be one that is here, got {device!r}: {error}") from error


def check_number(name: str, value: float, wanted: str = "a number") -> float:
    """A finite Python number, as a float."""
    known = (numbers.Real, torch.SymFloat, torch.SymInt)  # a compiler's stand-ins for numbers
    if isinstance(value, bool) or not isinstance(value, known):
        raise DtypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    if not -math.inf < value < math.inf:  # what a compiler can trace, and math.isfinite is not
        raise OptionError(f"{name} must be finite, got {value}")
    return float(value)


def accumulate_dtype(features: Tensor) -> torch.dtype:
    """What sums over `features` are kept in."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def exact_dtype(like: Tensor) -> torch.dtype:
    """What a single number is summed in: float64 where the device has it."""
    return accumulate_dtype(like) if like.device.type == "mps" else torch.float64


def check_marks(name: str, marks: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `marks` (ids, labels or positive indices) are integers of that shape."""
    if not isinstance(marks, Tensor):
        raise DtypeError(f"{name} must be an integer tensor, got {type(marks).__name__}")
    if marks.dtype not in INTEGER_DTYPES:
        raise DtypeError(f"{name} must be an integer tensor, got {marks.dtype}; cast with .long()")
    if marks.shape != shape:
        raise ShapeError(
            f"{name} must have one entry for each feature vector, shape {shape}, got "
            f"{tuple(marks.shape)}; index or repeat it to match"
        )
    check_device(name, marks, "the features", like)


def both(name: str, marks: Tensor | Both, n: int, m: int) -> Both:
    """One mark per pair, or one tensor for each side, as (row marks, column marks)."""
    if isinstance(marks, Tensor):
        if n != m:
            raise ShapeError(
                f"{name} as one tensor needs as many rows as columns, got {n} and {m}; "
                f"pass a tuple (row {name}, column {name})"
            )
        return marks, marks
    if not isinstance(marks, (tuple, list)) or len(marks) != 2:
        raise DtypeError(
            f"{name} must be a tensor or a tuple of two, got {type(marks).__name__}; "
            f"pass (row {name}, column {name})"
        )
    return marks[0], marks[1]


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_fraction(name: str, value: float) -> float:
    """A number in [0, 1)."""
    if not 0 <= check_number(name, value) < 1:
        raise OptionError(f"{name} must be at least 0 and below 1, got {value}")
    return float(value)


def check_weight(weight: Tensor, size: int, like: Tensor) -> Tensor:
    """A weight (size,) in the dtype of the sums."""
    check_features("weight", weight, dims=1, empty=size == 0)
    if weight.shape != (size,):
        raise ShapeError(
            f"weight must have shape ({size},), one per row, got {tuple(weight.shape)}; expand it"
        )
    check_device("weight", weight, "the features", like)
    return weight.to(accumulate_dtype(like))


def check_values(pairs: Pairs) -> None:
    """Read values back and raise on those that cannot be right. Free on CPU, a sync elsewhere."""
    for name, value in (("scale", pairs.scale), ("bias", pairs.bias)):
        if value is not None and not bool(torch.isfinite(value)):
            raise OptionError(
                f"{name} must be finite, got {float(value)}; lower the learning rate or clamp it"
            )
    if pairs.positives is None:
        return
    wrong = impossible_positives(pairs)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        mutual = ", in mutual pairs since the columns are the rows" if pairs.symmetric else ""
        raise OptionError(
            f"positives must lie in [0, {pairs.shape[1]}) or be {NO_POSITIVE} for none{mutual}; "
            f"got {int(pairs.positives[row])} at row {row}"
        )


def impossible_positives(pairs: Pairs) -> Tensor:
    """Rows (N,) whose positive index cannot be: their loss is NaN.

    It is no column and not NO_POSITIVE, or, where the columns are the rows, not mutual.
    """
    n, m, _ = pairs.shape
    if pairs.positives is None:
        return torch.zeros(n, dtype=torch.bool, device=pairs.device)
    index = pairs.positives.long()
    wrong = (index < NO_POSITIVE) | (index >= m)
    if pairs.symmetric:
        back = index[index.clamp(0, n - 1)]
        wrong |= (index >= 0) & (back != torch.arange(n, device=index.device))
    return wrong
