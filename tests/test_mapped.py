"""Files mapped as tensors: what is copied out of them, and by which way."""

import gc
import os

import pytest
import torch

import tilewise as tw
from tilewise import ahead, mapped

ROWS, D = 60, 10


@pytest.fixture
def reads(monkeypatch):
    """(offset, bytes) of every read; blocks are shared by threads from 64 bytes each on."""
    found, preadv = [], os.preadv

    def spied(fd, buffers, offset):
        found.append((offset, preadv(fd, buffers, offset)))
        return found[-1][1]

    monkeypatch.setattr(os, "preadv", spied)
    monkeypatch.setattr(mapped, "SHARE_BYTES", 64)
    return found


def opened(path, dtype=torch.float32):
    """A file of random numbers."""
    file = path.open("a+b")
    made = mapped.Mapped(path, file, ROWS * D, dtype)
    made.tensor.copy_(torch.randn(ROWS * D))
    return made


def copied(x):
    """What of `x` came into memory that held NaN, and was given back."""
    out = torch.full_like(x, torch.nan, requires_grad=False)
    assert mapped.copy_into(out, x) is out
    return out


PARTS = {
    "all": lambda x: x,
    "slice": lambda x: x[7:31],
    "odd": lambda x: x.flatten()[3:302],
    "row": lambda x: x[13],
    "number": lambda x: x[13, 4],
    "last": lambda x: x[-1:],
    "empty": lambda x: x[5:5],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_read(part, dtype, reads, tmp_path):
    made = opened(tmp_path / "file", dtype)
    x = PARTS[part](made.tensor.view(ROWS, D))
    assert torch.equal(copied(x), x)
    start = x.storage_offset() * x.itemsize
    assert sum(count for _, count in reads) == x.nbytes
    assert not x.nbytes or min(reads)[0] == start
    assert len(reads) == max(x.nbytes > 0, min(4, x.nbytes // 64))


def test_other_tensors_are_copied(reads, tmp_path):
    made = opened(tmp_path / "file")
    whole = made.tensor.view(ROWS, D)
    mapping = torch.from_file(str(tmp_path / "file"), size=ROWS * D)  # nobody's
    for x in (whole[::2], whole[:, 1:], whole.t(), mapping, torch.randn(ROWS, D)):
        assert torch.equal(copied(x), x)
    out = torch.empty(ROWS, D, dtype=torch.float64)
    assert torch.equal(mapped.copy_into(out, whole), whole.double())
    assert torch.equal(mapped.copy_into(torch.empty(D, ROWS).t(), whole), whole)
    row = mapped.copy_into(torch.empty(ROWS, D), whole[3])
    assert torch.equal(row, whole[3].expand(ROWS, D))
    pairs = whole.view(torch.complex64)
    assert torch.equal(copied(pairs.conj()), pairs.conj())
    assert not reads


def test_a_derivative_goes_through_a_copy(reads, tmp_path):
    made = opened(tmp_path / "file")
    x = made.tensor[5:9].requires_grad_()
    copied(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4))
    assert not reads
    with torch.no_grad():
        assert torch.equal(copied(x), x)
    assert reads


def test_reads_see_what_was_written(reads, tmp_path):
    made = opened(tmp_path / "file")
    for k in range(3):
        made.tensor[20 * k : 20 * k + 20] = k
        assert torch.equal(copied(made.tensor[20 * k :])[:20], torch.full((20,), float(k)))
    assert reads


def test_reads_that_end_early(monkeypatch, tmp_path):
    made, preadv = opened(tmp_path / "file"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, [b[0][:7]], at))
    monkeypatch.setattr(mapped, "SHARE_BYTES", 64)
    assert torch.equal(copied(made.tensor[3:400]), made.tensor[3:400])


def test_more_than_a_read_takes(reads, monkeypatch, tmp_path):
    made = opened(tmp_path / "file")
    monkeypatch.setattr(mapped, "READ_BYTES", 100)
    assert torch.equal(copied(made.tensor), made.tensor)
    assert max(count for _, count in reads) == 100


@pytest.mark.parametrize("part", [slice(None), slice(ROWS * D - 1, None)])
def test_a_file_that_was_cut_short(part, reads, tmp_path):
    made = opened(tmp_path / "file")
    os.truncate(tmp_path / "file", 1000)
    with pytest.raises(tw.DeviceError, match="must have 2,400 bytes, got 1,000: it was cut"):
        copied(made.tensor[part])
    assert len(copied(made.tensor[:250])) == 250


def test_a_file_that_was_replaced(reads, tmp_path):
    """Its name may be another file's before it is mapped: that one is not the one that is open."""
    with (tmp_path / "file").open("a+b") as file:
        (tmp_path / "file").rename(tmp_path / "old")
        (tmp_path / "file").write_bytes(bytes(range(1, 5)) * ROWS)
        made = mapped.Mapped(tmp_path / "file", file, ROWS, torch.float32)
    assert torch.equal(copied(made.tensor), made.tensor)
    assert not reads


def test_without_its_owner(reads, tmp_path):
    made = opened(tmp_path / "file")
    x = made.tensor[5:50]
    del made
    gc.collect()
    assert torch.equal(copied(x), x)
    assert not reads
    assert not mapped._MAPPED


def test_in_a_process_forked_off(tmp_path):
    """It has lost the file, with its lock, and has the mapping."""
    pool = pool_in(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if torch.equal(copied(pool.features), pool.features) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def pool_in(tmp_path):
    pool = tw.Pool(ROWS, D, where=tmp_path / "pool")
    pool.put(torch.randn(ROWS - 7, D), torch.arange(ROWS - 7))
    return pool


@pytest.fixture
def unpinned(monkeypatch):
    """Without a GPU no memory can be pinned."""
    like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory: like(x).fill_(torch.nan))


def test_a_pool_is_read(unpinned, reads, tmp_path):
    pool, reader = pool_in(tmp_path), ahead.Ahead(torch.device("cpu"))
    assert torch.equal(reader._copied(pool.features), pool.features)
    pool.put(torch.randn(20, D), torch.arange(50, 70))
    x = pool.negatives()["negatives"][11:47]
    reads.clear()
    assert torch.equal(reader._copied(x), x)
    assert sum(count for _, count in reads) == x.nbytes
    del pool
    reads.clear()
    assert torch.equal(reader._copied(x), x)
    assert not reads


def test_what_is_pinned_otherwise(unpinned, monkeypatch):
    """Whatever is no plain tensor is left to torch; images keep their order in memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: "by torch")
    assert ahead._pinned(torch.eye(3).to_sparse()) == "by torch"
    assert ahead._pinned(torch.nn.Parameter(torch.ones(3))) == "by torch"
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for x in (images, torch.randn(3).expand(4, 3), torch.randn(6, 4)[::2, 1:]):
        assert torch.equal(ahead._pinned(x), x)
    assert ahead._pinned(images).stride() == images.stride()
