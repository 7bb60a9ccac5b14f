"""The kernel that makes gradients of float32 features: dz and features come in two parts each."""

import triton
import triton.language as tl

from tilewise.backends.convert import REST
from tilewise.backends.dz import halves
from tilewise.backends.kernels import opened, whole, wide


@triton.jit
def split_product(
    high, rest, upper, lower, out, n, k, D, width,
    TURNED: tl.constexpr, ADD: tl.constexpr, TN: tl.constexpr, TD: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """dz @ features, or added to what there is: out (n, D), in fp32.

    dz = high + rest / REST is (n, k), with TURNED (k, n); features = upper + lower / REST are
    (k, D), stored with some zeros up to `width`. The product of both small parts is left out. Past
    the edge dz may be any finite number, up to a multiple of 8 columns.
    """
    if TURNED:
        high, rest = opened(high, whole(n), TK, TN), opened(rest, whole(n), TK, TN)
    else:
        high, rest = opened(high, whole(k), TN, TK), opened(rest, whole(k), TN, TK)
    upper, lower = opened(upper, width, TK, TD), opened(lower, width, TK, TD)
    blocks = tl.cdiv(D, TD)
    i, j = tl.program_id(0) // blocks * TN, tl.program_id(0) % blocks * TD
    total = tl.zeros((TN, TD), tl.float32)
    for pair in range(0, k, TK):
        if TURNED:
            large, little = high.load([pair, i]).T, rest.load([pair, i]).T
        else:
            large, little = high.load([i, pair]), rest.load([i, pair])
        near, far = upper.load([pair, j]), lower.load([pair, j])
        # A tensor core cuts off what it adds up: over all pairs a hundred roundings to one side. It
        # begins anew with every TK of them, and here their sum is rounded to nearest.
        small = tl.dot(large, far, tl.dot(little, near))
        total += tl.dot(large, near, small * (1 / REST))
    row = i + tl.arange(0, TN)
    out += row.to(tl.int64)[:, None] * wide(D)
    pieces = halves(total)  # the addresses of a whole tile do not fit into registers
    for h in tl.static_range(2):
        feature = j + h * (TD // 2) + tl.arange(0, TD // 2)[None, :]
        inside = (row < n)[:, None] & (feature < D)
        x = pieces[h]
        if ADD:
            x += tl.load(out + feature, inside, other=0.0)
        tl.store(out + feature, x, inside)
