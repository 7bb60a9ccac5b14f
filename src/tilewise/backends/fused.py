"""The sweep in Triton kernels, for CUDA and ROCm: half the memory traffic, one exp a pair.

Forward: one pass for rows and columns from a fixed offset (`kernels.sums`), and a second one with
running maxima that exits at once unless a sum came out of range: no host ever waits. Backward: dz
of a panel at a time into a workspace of constant size, and two products of it by the BLAS, which
accumulate in fp32.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.backends.plan import IN_WORKSPACE, Attended, Grads, Needs, Plan, Scaled, Swept
from tilewise.pairs import Pairs
from tilewise.positives import poison
from tilewise.tiles import padded

Result = TypeVar("Result")
MIN_TORCH = (2, 8)
MIN_TRITON = (3, 4)
# The tests run the kernels in Triton's interpreter, on CPU tensors.
INTERPRETED = False
MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
# Rows that are kept together, and that the forward sweeps together.
CHUNK = 8192
# Of the workspace: what rounding a block of gradients and summing a panel's parts takes.
SPARE_BYTES = 2**24
# Features whose exponentials may be kept: dz is no finer then.
KEEPS = (torch.bfloat16,)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run on `device`, most basic reason first."""
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        return f"it needs a CUDA or ROCm device, got {device.type}"
    if dtype not in DTYPES:
        return f"it computes in float32 at most, got {dtype}; use backend='chunked'"
    return _missing() or _too_old(device)


def reservation(dtype: torch.dtype) -> str | None:
    """Why it is not chosen unless it is asked for: `test_hopper.py::test_narrow_cones`."""
    if dtype == torch.float32:
        return (
            "its float32 gradients of nearly parallel features miss the error bar at a large "
            "scale; ask for it by name if that will do"
        )
    return None


def fp8_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why scores cannot be made of e4m3 copies of the features."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16 features, got {dtype}"
    if device.type != "cuda":
        return None if INTERPRETED else f"it needs a CUDA device, got {device.type}"
    if torch.version.hip:
        return "it needs an NVIDIA device, got one of ROCm, whose fp8 is another"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        return f"it needs compute capability {_text(FP8_CAPABILITY)}, got {_text(capability)}"
    return None


@functools.cache
def _missing() -> str | None:
    """What this installation lacks."""
    if _version(torch.__version__) < MIN_TORCH:
        return f"it needs torch >= {_text(MIN_TORCH)}, got {torch.__version__}; upgrade torch"
    if importlib.util.find_spec("triton") is None:
        return "it needs Triton, which is not installed; pip install 'tilewise[fused]'"
    triton = importlib.import_module("triton")
    if _version(triton.__version__) < MIN_TRITON:
        return f"it needs triton >= {_text(MIN_TRITON)}, got {triton.__version__}; upgrade triton"
    return None


@functools.cache
def _too_old(device: torch.device) -> str | None:
    """What a device lacks: before Ampere, Triton makes no products of matrices on tensor cores."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability {_text(MIN_CAPABILITY)}, got {_text(capability)}"
    return None


def _where_they_are(body: Callable[..., Result]) -> Callable[..., Result]:
    """Launch on the device of the features, whichever is current."""

    @functools.wraps(body)
    def run(pairs: Pairs, *args: Any) -> Result:
        with torch.cuda.device_of(pairs.rows):
            return body(pairs, *args)

    return run


@_where_they_are
def reduce(pairs: Pairs, plan: Plan) -> Swept:
    """The stats of rows and columns."""
    from tilewise.backends.fused_forward import Forward
    from tilewise.backends.fused_softplus import Softplus

    if plan.reduction != "softplus":
        return Forward(pairs, plan).run()
    rows, cols = Softplus(pairs, plan, Needs(False, False, False, False)).softplus_sums()
    row_poison, col_poison = poison(pairs)
    packed = (rows + row_poison)[None], (cols + col_poison)[None] if plan.columns else cols
    return Swept(*packed, empty_memo(pairs, plan), empty_kept(pairs, plan))


@_where_they_are
def differentiate(
    pairs: Pairs,
    plan: Plan,
    swept: Swept,
    upstream: tuple[Tensor, Tensor],
    needs: Needs,
    into: Tensor | None = None,
) -> Grads:
    """Gradients of what `reduce` returned, given the gradient of each of its numbers."""
    from tilewise.backends.fused_backward import Backward
    from tilewise.backends.fused_softplus import Softplus

    if plan.reduction == "softplus":
        return Softplus(pairs, plan, needs, into=into).softplus(upstream, values=False)[0]
    return Backward(pairs, plan, needs, into=into).log_sums(swept, upstream)


@_where_they_are
def attend(pairs: Pairs, plan: Plan) -> Attended:
    """Row stats; the mean column (N, D) under each row's softmax; its product with the row."""
    from tilewise.backends.fused_attend import Attending
    from tilewise.backends.fused_backward import Means
    from tilewise.backends.fused_forward import Forward

    if _multiplies_exponentials(pairs, plan):
        return Attending(pairs, plan).attend()
    swept = Forward(pairs, plan._replace(keep_bytes=0)).run()
    upstream = torch.zeros_like(swept.rows)
    upstream[0].fill_(1.0)
    means = Means(pairs, plan)
    means.log_sums(swept, (upstream, swept.cols))
    return Attended(swept.rows, means.mean, means.product)


@_where_they_are
def weigh(
    pairs: Pairs, plan: Plan, weight: Tensor, needs: Needs, into: Tensor | None = None
) -> tuple[Tensor, Scaled]:
    """Sum over i of weight_i times the softplus sum of row i, with its gradients, in one sweep."""
    from tilewise.backends.fused_softplus import Softplus

    gains = weight.new_ones(pairs.shape[0]), weight.new_ones(pairs.shape[1])
    # bf16 has the range of fp32: only fp16 keeps its rows' powers of two apart.
    apart = pairs.rows.dtype == torch.float16 and not plan.wide
    backward = Softplus(pairs, plan, needs, gains if apart else (None, None), into)
    grads, values = backward.softplus((weight[None], weight.new_empty(0)), values=True)
    return (weight * (values + poison(pairs)[0])).sum(), Scaled(grads, *gains)


def entropy(rows: Tensor, cols: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The loss () of packed stats, and what a slot's is divided by; see `fused_entropy`."""
    from tilewise.backends import fused_entropy

    with torch.cuda.device_of(rows):
        return fused_entropy.entropy(rows, cols, *args)


def pull_stats(
    rows: Tensor, cols: Tensor, weight: Tensor | None, divisors: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of packed stats."""
    from tilewise.backends import fused_entropy

    with torch.cuda.device_of(rows):
        return fused_entropy.pull_stats(rows, cols, weight, divisors, upstream)


def merge(total: Tensor, more: Tensor) -> Tensor:
    """Packed stats (k, N) over two sets of pairs as one, in the place of the first."""
    from tilewise.backends import products

    with torch.cuda.device_of(total):
        return products.merge(total, more)


def rescale(grads: Tensor, gain: Tensor) -> None:
    """Multiply each row of a gradient (N, D) without gaps by its gain (N,), in place."""
    from tilewise.backends import products

    with torch.cuda.device_of(grads):
        products.rescale(grads, gain)


def has_offset(pairs: Pairs, plan: Plan) -> bool:
    """Whether a log-sum-exp is tried from one fixed offset, and not only by running maxima.

    Half a symmetric z leaves the pairs (i, i) out: where they count, all of it is swept.
    """
    whole = pairs.symmetric and not pairs.skip_self and pairs.kind != "aligned"
    return pairs.kind != "label" and not plan.sums and not whole


def kept_rows(pairs: Pairs, plan: Plan) -> int:
    """Of how many rows, from the first on, the exponentials fit: all, or whole chunks of them."""
    n, m, d = pairs.shape
    wanted = plan.reduction == "logsumexp" and plan.keep_bytes != 0
    if not wanted or not has_offset(pairs, plan) or pairs.symmetric:
        return 0
    # ROCm's BLAS would want all of it in fp32.
    if pairs.rows.dtype not in KEEPS or torch.version.hip:
        return 0
    row_bytes = 2 * padded(m, 8)
    if plan.keep_bytes == IN_WORKSPACE:
        # Beside them the backward has its rows' gradients, and features that must be converted.
        beside = (4 * n + 2 * (n + m)) * d
        return n if n * row_bytes + beside <= panel_bytes(plan) else 0
    rows = plan.keep_bytes // row_bytes
    return n if rows >= n else rows // CHUNK * CHUNK


def panel_bytes(plan: Plan) -> int:
    """What the workspace has for a panel: all but what is rounded and summed up beside it."""
    return max(plan.workspace_bytes - SPARE_BYTES, plan.workspace_bytes // 2)


def _multiplies_exponentials(pairs: Pairs, plan: Plan) -> bool:
    """Whether exponentials may stand in for weights: they have their range in bf16 only."""
    fits = pairs.rows.dtype in KEEPS and plan.precision == "exact" and not torch.version.hip
    return fits and has_offset(pairs, plan)


def empty_kept(pairs: Pairs, plan: Plan) -> Tensor:
    """Memory for what is kept (rows, M and some 0s): rows begin at multiples of 16 bytes.

    Floats without a sign; see `kernels.stored`.
    """
    rows, m = kept_rows(pairs, plan), pairs.shape[1]
    if rows == 0:
        return pairs.rows.new_empty(0, dtype=torch.int16)
    return pairs.rows.new_empty(rows, padded(m, 8), dtype=torch.int16)


def empty_memo(pairs: Pairs, plan: Plan) -> Tensor:
    """Memory for the fixed offset, whether it failed, and what kept rows and columns pull."""
    if plan.reduction != "logsumexp":
        return pairs.rows.new_empty(0, dtype=torch.float32)
    rows = kept_rows(pairs, plan) if plan.wants_scale else 0
    return pairs.rows.new_empty(2 + rows + (pairs.shape[1] if rows else 0), dtype=torch.float32)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
