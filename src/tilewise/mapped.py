"""Files that are mapped as tensors, and read where a part of them is to be copied.

A copy out of the mapping waits for one page fault after the other; reads by several threads keep a
disk busy, and copy faster what is in the system's cache. Both see what was written to the tensor,
on file systems of this machine.
"""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tilewise.errors import DeviceError

NUM_THREADS = 4
SHARE_BYTES = 2**20  # of a thread: less does not pay for its start
READ_BYTES = 2**30  # at a time: macOS refuses 2 GiB


class Mapped:
    """The file at `path` as a tensor (size,): what is written to one is in the other.

    `file` is the same file, open for reading for as long as this is there.
    """

    def __init__(self, path: Path, file: IO[bytes], size: int, dtype: torch.dtype) -> None:
        self.path, self.file = path, file
        self.tensor = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
        # What was opened may have been replaced before it was mapped.
        same = os.path.samestat(os.fstat(file.fileno()), path.stat())
        if same and hasattr(os, "preadv"):
            _MAPPED[self.tensor.untyped_storage().data_ptr()] = self

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill `out`, contiguous, with the file's bytes from `start` on."""
        data = out.detach().flatten().view(torch.uint8).numpy().data
        count = max(1, min(NUM_THREADS, len(data) // SHARE_BYTES))
        cuts = [len(data) * i // count for i in range(count + 1)]
        parts = [data[a:b] for a, b in pairwise(cuts)]
        starts = [start + cut for cut in cuts]
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            others = threads.map(self._read_share, parts[1:], starts[1:-1])
            self._read_share(parts[0], starts[0])
            list(others)  # raises what they raised

    def _read_share(self, out: memoryview, start: int) -> None:
        num_read = 0
        while num_read < len(out):
            rest = out[num_read : num_read + READ_BYTES]
            num_bytes = os.preadv(self.file.fileno(), [rest], start + num_read)
            if num_bytes == 0:
                raise DeviceError(
                    f"the file {self.path} must have {self.tensor.nbytes:,} bytes, got "
                    f"{os.fstat(self.file.fileno()).st_size:,}: it was cut short while it was in "
                    "use; start again with a new one, and let nothing else write to it"
                )
            num_read += num_bytes


# By where their tensors' memory begins, which is no other tensor's while they are there.
_MAPPED = weakref.WeakValueDictionary[int, Mapped]()

# A process that is forked off has no locked file open: see locks.py.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_MAPPED.clear)


def copy_into(out: Tensor, x: Tensor) -> Tensor:
    """`out.copy_(x)`, by reads of the file if `x` is a contiguous part of a `Mapped` tensor."""
    mapped = _file_of(x)
    alike = out.shape == x.shape and out.dtype == x.dtype
    if mapped is None or not alike or not out.is_contiguous() or out.device.type != "cpu":
        return out.copy_(x)
    mapped.read_into(out, x.data_ptr() - mapped.tensor.data_ptr())
    return out


def _file_of(x: Tensor) -> Mapped | None:
    """Where the bytes of `x` lie in a row, if that is in a file."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.layout == torch.strided
    if not plain or not x.is_contiguous() or x.is_conj() or x.is_neg():
        return None
    # A read has no derivative.
    if x.requires_grad and torch.is_grad_enabled():
        return None
    return _MAPPED.get(x.untyped_storage().data_ptr())
