"""What an H200 computes, on a CPU: the fused backend with its kernels, tiles and tensor cores.

Triton's kernels run in its interpreter, those in Gluon in `gluon_on_cpu`. Neither knows bf16 or
tensor cores by itself: the interpreter multiplies bit patterns of bf16 and cuts numbers off to it,
and both round every sum to nearest. Here products of matrices are added up as Hopper does it: the
products of 16 features and the sum so far, each cut off two bits below the last one of the
largest, then the new sum cut off to a float32. With features, draws and scales of
`test_gpu.py::test_exactness` this finds what an H200 had measured when float32 was made of
float16 in sums over all features: d_scale off by 7.0e-8 on random features (the H200: 8.5e-8),
6.2e-7 on aligned ones (8.1e-7), d_rows by 4.8e-8 on opposed ones (4.1e-8).
"""

import sys

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import gluon_on_cpu
import gluon_program
from tilewise import backends
from tilewise.backends import fused, fused_attend, fused_backward, products, ready
from tilewise.backends.tuning import Target

AT_ONCE = 16
MORE_BITS = 2


def cut_off(x, top, bits):
    """x without what lies below `bits` bits from the first one of `top`."""
    unit = np.ldexp(1.0, np.frexp(top)[1] - bits)
    return np.trunc(x / unit) * unit


def cut_off_product(a, b, so_far):
    """so_far (n, m) + a (n, k) @ b (k, m), as a tensor core of Hopper adds it up."""
    total = so_far.astype(np.float64)
    for k in range(0, a.shape[1], AT_ONCE):
        step = slice(k, k + AT_ONCE)
        terms = a[:, step, None].astype(np.float64) * b[None, step, :].astype(np.float64)
        top = np.maximum(np.abs(terms).max(1), np.abs(total))
        total = cut_off(total, top, 24 + MORE_BITS)
        total += cut_off(terms, top[:, None, :], 24 + MORE_BITS).sum(1)
        total = cut_off(total, total, 24)
    return total.astype(so_far.dtype)


def multiply(a, b, so_far):
    """The same of tensors in half precision."""
    sides = (x.float().numpy() for x in (a, b))
    return torch.from_numpy(cut_off_product(*sides, so_far.numpy()))


def products_of(rows, cols):
    """Products of features, in fp32."""
    if rows.dtype == torch.float32:
        return rows @ cols.T
    return multiply(rows, cols.T, torch.zeros(len(rows), len(cols)))


# bf16 in Triton's interpreter, which holds it as uint16


def _widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(x):
    bits = torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16)
    return bits.numpy().view(np.uint16)


def _cast(cast_impl):
    def cast(self, source, to):
        kinds = source.dtype.scalar, to.scalar
        if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
            return cast_impl(self, source, to)
        assert tl.float32 in kinds
        change = _widened if kinds[0] == tl.bfloat16 else _rounded
        return interpreter.TensorHandle(change(source.data), to.scalar)

    return cast


def _dot(product):
    def create_dot(self, a, b, so_far, *_):
        a, b = (_widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        total = product(a, b, so_far.data)
        return interpreter.TensorHandle(total, so_far.dtype.scalar)

    return create_dot


def _fma(_, x, y, z):
    """Rounded once."""
    total = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)


def _plain_product(a, b, so_far):
    """Rounded once, as `gluon_program.multiply`: both passes see the same logits."""
    return (np.matmul(a, b, dtype=np.float64) + so_far).astype(so_far.dtype)


def _add_product(acc, a, b, first):
    """`products.add_product` on tensor cores."""
    acc.copy_(multiply(a, b, torch.zeros_like(acc) if first else acc))


def install_tensor_cores(monkeypatch):
    """In Triton's interpreter and PyTorch."""
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_dot", _dot(cut_off_product))
    monkeypatch.setattr(builder, "create_fma", _fma)
    for module in (products, fused_attend, fused_backward):
        monkeypatch.setattr(module, "add_product", _add_product)


def install(monkeypatch, changes=(), tensor_cores=False):
    """All of it, in a test; the names of Gluon's kernels that are launched come in a list.

    `tensor_cores` cost time: without them sums are rounded. `changes`: see `gluon_on_cpu`.
    """
    monkeypatch.setattr(fused, "INTERPRETED", True)
    monkeypatch.setattr(ready, "target_of", lambda _: Target("cuda", 90))
    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "cast_impl", _cast(builder.cast_impl))
    monkeypatch.setattr(builder, "create_dot", _dot(_plain_product))
    monkeypatch.setattr(builder, "create_fma", _fma)
    if tensor_cores:
        install_tensor_cores(monkeypatch)
        monkeypatch.setattr(gluon_program, "multiply", multiply)
    launched = []
    for module in gluon_on_cpu.emulated(changes, launched.append):
        name = module.__name__
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(backends, name.rsplit(".", 1)[1], module, raising=False)
    return launched
