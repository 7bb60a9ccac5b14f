"""Tiles, scalars and pointers of a kernel that `gluon_on_cpu` runs."""

from types import SimpleNamespace

import torch
import triton.language as tl

DTYPES = {
    tl.int16: torch.int16, tl.int32: torch.int32, tl.int64: torch.int64, tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RaceError(AssertionError):
    """Memory was written while something else read it, or read before it was there."""


class Block(torch.Tensor):
    """A tile or a scalar, of which a kernel asks what Triton's tensors answer."""

    @property
    def type(self):
        return SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if dtype == tl.uint32:
            # PyTorch shifts none of these: an integer with room for all of their bits.
            assert bitcast
            return self.view(torch.int32).to(tl.int64) & 0xFFFFFFFF
        if dtype == tl.int16 and self.dtype == torch.int64:
            return super().to(torch.int32).to(tl.int16)
        return super().to(DTYPES[dtype])

    def __iadd__(self, other):
        return self + other  # a value, that others may hold too


def block(x, dtype=None):
    return torch.as_tensor(x, dtype=dtype).as_subclass(Block)


class Pointer:
    """Somewhere in a tensor's memory, or many such places."""

    def __init__(self, tensor, offset=None):
        self.tensor = tensor
        self.offset = block(tensor.storage_offset()) if offset is None else offset

    def __add__(self, step):
        return Pointer(self.tensor, self.offset + step)

    def memory(self, mask):
        """All that the tensor is a part of, side by side, and where in it; if masked at 0."""
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        at = self.offset.long() if mask is None else torch.where(mask, self.offset.long(), 0)
        wanted = at if mask is None else at[mask.expand(at.shape)]
        first = self.tensor.storage_offset()
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        stop = (
            first + sum((n - 1) * step for n, step in steps) + 1 if self.tensor.numel() else first
        )
        if wanted.numel() and not (wanted.min() >= first and wanted.max() < stop):
            raise RaceError(f"memory beyond [{first}, {stop}): {wanted.min()} to {wanted.max()}")
        return self.tensor.as_strided((size,), (1,), 0), at


def load(pointer, mask=None, other=None):
    if mask is not None and not mask.any():
        return torch.full(mask.shape, other, dtype=pointer.tensor.dtype).as_subclass(Block)
    memory, at = pointer.memory(mask)
    found = memory[at.as_subclass(torch.Tensor)].as_subclass(Block)
    return found if mask is None else torch.where(mask, found, other)
