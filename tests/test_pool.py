"""Pools of negatives: what they hold, and the loss over it."""

import copy
import errno
import gc
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch
from torch.nn import functional

import ranks
import tilewise as tw

D = 6


def unit(n, seed=0):
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return functional.normalize(x, dim=1)


def pool(size=10, tmp_path=None, **how):
    where = {} if tmp_path is None else {"where": tmp_path / "pool"}
    return tw.Pool(size, D, dtype=torch.float64, **where, **how)


class Plain:
    """The meaning of a pool: a list of (id, put at, feature)."""

    def __init__(self, size, max_age, overwrite):
        self.size, self.max_age, self.overwrite = size, max_age, overwrite
        self.held, self.clock = [], 0

    def put(self, features, ids):
        self.clock += 1
        if self.max_age is not None:
            self.held = [x for x in self.held if x[1] > self.clock - self.max_age]
        new = {}
        for i, f in zip(ids.tolist(), features, strict=True):
            new.pop(i, None)  # the last one counts, in its turn
            new[i] = (i, self.clock, f)
        if self.overwrite:
            self.held = [x for x in self.held if x[0] not in new]
        self.held = (self.held + list(new.values()))[-self.size :]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("max_age", [None, 1, 3])
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_holds_what_a_list_would(where, max_age, overwrite, tmp_path):
    """Ids come again, within a batch too; batches are small, as large as the pool, and larger."""
    place = {"where": tmp_path / "pool" if where == "disk" else where}
    ours = tw.Pool(12, D, dtype=torch.float64, max_age=max_age, overwrite=overwrite, **place)
    plain = Plain(12, max_age, overwrite)
    dice = torch.Generator().manual_seed(0)
    for turn in range(40):
        n = int(torch.randint(0, 7 if turn % 10 else 20, (), generator=dice))
        ids = torch.randint(0, 25, (n,), generator=dice)
        features = unit(n, turn)
        ours.put(features, ids)
        plain.put(features, ids)
        assert len(ours) == len(plain.held)
        born = (ours._clock - ours.ages).tolist()
        held = list(zip(ours.ids.tolist(), born, ours.features.tolist(), strict=True))
        in_turn = [held[i] for i in ours._born[: len(ours)].argsort()]
        assert in_turn == [(i, at, f.tolist()) for i, at, f in plain.held]


def test_a_queue_without_ids():
    queue = pool(4)
    assert queue.negatives() == {}
    for turn in range(5):
        queue.put(unit(2, turn))
    assert sorted(map(tuple, queue.features.tolist())) == sorted(
        map(tuple, torch.cat([unit(2, 3), unit(2, 4)]).tolist())
    )
    assert set(queue.negatives()) == {"negatives"}
    with pytest.raises(tw.OptionError, match="always or never"):
        queue.put(unit(2), torch.arange(2))


def test_first_in_first_out():
    """Also where batches do not divide the size."""
    queue, numbers = tw.Pool(8, 1, dtype=torch.float32), torch.arange(200.0)[:, None]
    stop = 0
    for count in (6, 4, 4, 1, 7, 3, 5, 9, 2, 6):
        queue.put(numbers[stop : stop + count])
        stop += count
        assert sorted(queue.features[:, 0].tolist()) == list(range(max(0, stop - 8), stop))


@pytest.mark.parametrize("where", ["host", "disk"])
def test_the_loss_over_a_pool(where, tmp_path):
    """As if its features were hard negatives, without a query's own stale copies."""
    bank = tw.Pool(
        40, D, dtype=torch.float64, where=tmp_path / "pool" if where == "disk" else where
    )
    bank.put(unit(40, 1), torch.arange(40))
    query, key = unit(8, 2).requires_grad_(), unit(8, 3)
    ids = torch.arange(8) * 3
    loss = tw.info_nce(query, key, 5.0, ids=ids, **bank.negatives())
    loss.backward()
    twin = query.detach().requires_grad_()
    z = 5.0 * twin @ torch.cat([key, bank.features]).T
    own = torch.cat([torch.zeros(8, 8, dtype=torch.bool), ids[:, None] == torch.arange(40)], 1)
    dense = functional.cross_entropy(z.masked_fill(own, -torch.inf), torch.arange(8))
    dense.backward()
    assert abs(loss - dense) < 1e-12
    assert (query.grad - twin.grad).norm() < 1e-12
    bank.put(key, ids)
    assert len(bank) == 40


@pytest.mark.parametrize("in_file", [False, True])
def test_state(in_file, tmp_path):
    path = tmp_path if in_file else None
    first, twin = pool(10, path), pool(10)
    for each in (first, twin):
        each.put(unit(6), torch.arange(6))
        each.put(unit(6, 1), torch.arange(3, 9))
    held, state = first.features.clone(), first.state_dict()
    assert ("features" in state) != in_file
    del first, each
    second = pool(10, path)
    second.load_state_dict(state)
    assert torch.equal(second.features, held)
    for each in (twin, second):
        each.put(unit(4, 2), torch.arange(20, 24))
    assert torch.equal(twin.ids, second.ids)
    assert torch.equal(twin.ages, second.ages)
    assert torch.equal(twin.features, second.features)
    with pytest.raises(tw.ShapeError, match="must fit a pool of 3"):
        pool(3).load_state_dict(state)
    if in_file:
        for other in (pool(10), second, tw.Pool(10, D, dtype=torch.float64, where=tmp_path / "b")):
            with pytest.raises(tw.OptionError, match="not as it was then"):
                other.load_state_dict(state)
        del second, each, other
        with pytest.raises(tw.ShapeError, match="must hold a pool of"):
            tw.Pool(10, D, where=tmp_path / "pool")
    else:
        third = tw.Pool(12, D, dtype=torch.float64, where=tmp_path / "c")
        third.load_state_dict(state)
        assert torch.equal(third.features, held)


def test_a_file_belongs_to_one_state(tmp_path, monkeypatch):
    """Another pool's file with as many puts, an interrupted put, a file that is no pool."""
    first, second = pool(4, tmp_path), tw.Pool(4, D, dtype=torch.float64, where=tmp_path / "other")
    for each in (first, second):
        each.put(unit(2), torch.arange(2))
    state = first.state_dict()
    with pytest.raises(tw.OptionError, match="not as it was then"):
        second.load_state_dict(state)
    monkeypatch.setattr(tw.Pool, "_places", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.put(unit(2), torch.arange(2))
    monkeypatch.undo()
    first.load_state_dict(state)  # nothing was written
    monkeypatch.setattr("secrets.token_hex", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.put(unit(2, 1), torch.arange(2))
    monkeypatch.undo()
    del first, each
    with pytest.raises(tw.OptionError, match="not as it was then"):
        pool(4, tmp_path).load_state_dict(state)
    (tmp_path / "precious").write_bytes(b"data")
    with pytest.raises(tw.DeviceError, match="is no pool"):
        tw.Pool(4, D, where=tmp_path / "precious")
    assert (tmp_path / "precious").read_bytes() == b"data"
    with pytest.raises(tw.DeviceError, match="'device', 'host' or a path"):
        tw.Pool(4, D, where="cpu")


def noted(path):
    return path.with_name(path.name + ".json")


@pytest.mark.parametrize("size", [3, 100])
def test_a_refused_file_is_left_as_it_is(size, tmp_path):
    first = pool(8, tmp_path)
    first.put(unit(5), torch.arange(5))
    state, held = first.state_dict(), first.features.clone()
    del first
    before = (tmp_path / "pool").read_bytes()
    with pytest.raises(tw.ShapeError, match="must hold a pool of"):
        pool(size, tmp_path)
    assert (tmp_path / "pool").read_bytes() == before
    again = pool(8, tmp_path)
    again.load_state_dict(state)
    assert torch.equal(again.features, held)


@pytest.mark.parametrize("left", [None, 16])
def test_a_file_that_was_deleted_or_cut_short(left, tmp_path):
    """What is beside it speaks of another one: its features would be 0."""
    first = pool(8, tmp_path)
    first.put(unit(5), torch.arange(5))
    state = first.state_dict()
    del first
    if left is None:
        (tmp_path / "pool").unlink()
    else:
        os.truncate(tmp_path / "pool", left)
    second = pool(8, tmp_path)
    with pytest.raises(tw.OptionError, match="not as it was then"):
        second.load_state_dict(state)
    del second
    with pytest.raises(tw.OptionError, match="not as it was then"):
        pool(8, tmp_path).load_state_dict(state)


def test_a_disk_without_room(tmp_path, monkeypatch):
    """Refused when the pool is made: later the system would end the process."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(tw.DeviceError, match=f"wants {10**6 * D * 8:,} bytes in .*No space left"):
        pool(10**6, tmp_path)
    assert (tmp_path / "pool").stat().st_size == 0
    monkeypatch.undo()
    assert len(pool(10, tmp_path)) == 0  # a smaller one, as it says
    bank = tw.Pool(100, D, dtype=torch.float64, where=tmp_path / "other")
    assert (tmp_path / "other").stat().st_blocks * 512 >= 100 * D * 8
    assert len(bank) == 0


@pytest.mark.parametrize("text", ["{bad", "[1]", "{}", '{"token": "a"}'])
def test_a_damaged_note(text, tmp_path):
    pool(4, tmp_path)
    gc.collect()
    noted(tmp_path / "pool").write_text(text)
    with pytest.raises(tw.DeviceError, match="is damaged; delete both"):
        pool(4, tmp_path)


def test_a_damaged_state_is_refused():
    bank = pool(6)
    bank.put(unit(4), torch.arange(4))
    held, state = bank.features.clone(), bank.state_dict()
    damages = {
        "without 'born'": {},
        "without 'token'": {name: x for name, x in state.items() if name != "token"},
        r"shape \(4,\), got \(2,\)": {**state, "ids": state["ids"][:2]},
        r"shape \(4, 6\), got \(4, 1\)": {**state, "features": state["features"][:, :1]},
        "born of the state must be an integer tensor, got list": {**state, "born": [1, 2]},
        "of puts up to its clock, 1": {**state, "born": state["born"] * 2},
        "of another version": {**state, "born": torch.zeros(4, dtype=torch.int64)},
        "up to its clock, None": {**state, "clock": None},
    }
    for message, damaged in damages.items():
        with pytest.raises(tw.TilewiseError, match=message):
            bank.load_state_dict(damaged)
        assert torch.equal(bank.features, held)
    fresh = pool(6)
    fresh.load_state_dict(pool(6).state_dict())
    assert len(fresh) == 0


@pytest.mark.parametrize("in_file", [False, True])
def test_an_overwriting_pool_takes_the_newest_of_copies(in_file, tmp_path):
    path = tmp_path if in_file else None
    old = pool(6, path, overwrite=False)
    for turn in range(3):
        old.put(unit(2, turn), torch.tensor([7, 8 + turn]))
    state = old.state_dict()
    del old
    new = pool(6, path)
    new.load_state_dict(state)
    assert sorted(zip(new.ids.tolist(), new.ages.tolist(), strict=True)) == [
        (7, 0), (8, 2), (9, 1), (10, 0)
    ]  # fmt: skip
    assert torch.equal(new.features[new.ids == 7], unit(2, 2)[:1])
    if in_file:
        with pytest.raises(tw.OptionError, match="not as it was then"):
            new.load_state_dict(state)


def test_a_file_is_one_pools(tmp_path):
    """Ranks that name the same file would hold each other's features under their own ids."""
    first = pool(4, tmp_path)
    with pytest.raises(tw.DeviceError, match="another pool's"):
        pool(4, tmp_path)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(tw.OptionError, match="cannot be copied"):
            copied(first)
    del first
    gc.collect()
    pool(4, tmp_path)
    bank = pool(4)
    bank.put(unit(3), torch.arange(3))
    assert torch.equal(copy.deepcopy(bank).features, bank.features)


def test_a_lock_is_not_that_of_processes_forked_off(tmp_path):
    """Such as load data: they may live on for seconds when a run was killed."""
    first = pool(4, tmp_path)
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(0)
    try:
        time.sleep(0.2)
        del first
        gc.collect()
        pool(4, tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def exit_code(body):
    """Of a process forked off to run it."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_forked_off_keeps_its_own_files(tmp_path):
    """The number of the lock is not free there: whoever closes it must not close another file."""
    held = [pool(4, tmp_path)]

    def write(log):
        log.write("x")
        log.flush()

    def body():
        with (tmp_path / "log").open("w") as log:
            assert exit_code(lambda: write(log)) == 0
            held.clear()
            gc.collect()
            write(log)

    assert exit_code(body) == 0


def test_where_there_are_no_locks(tmp_path, monkeypatch):
    """Some file systems of clusters have none: nobody is kept out, and nobody is refused."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    pool(4, tmp_path)


def test_interrupted_while_old_samples_are_dropped(tmp_path, monkeypatch):
    """Those that stay may have moved: the file is no longer that of the last state."""
    bank = pool(4, tmp_path, max_age=2)
    for turn in range(2):
        bank.put(unit(2, turn), torch.arange(2) + 2 * turn)
    state = bank.state_dict()
    monkeypatch.setattr(tw.Pool, "_places", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bank.put(unit(2, 2), torch.arange(2))
    del bank
    with pytest.raises(tw.OptionError, match="not as it was then"):
        pool(4, tmp_path, max_age=2).load_state_dict(state)


def test_a_put_that_is_refused_changes_nothing():
    bank = pool(4, max_age=2)
    bank.put(unit(3), torch.arange(3))
    for _ in range(3):
        with pytest.raises(tw.ShapeError):
            bank.put(unit(3), torch.arange(2))
    assert len(bank) == 3
    assert bank.ages.tolist() == [0, 0, 0]


def empty_on_one(rank):
    bank = pool(10)
    bank.put(unit(4 * rank), torch.arange(4 * rank) + 50)
    query, key = unit(3, rank).requires_grad_(), unit(3, 7 + rank)
    group = torch.distributed.group.WORLD
    ids = torch.arange(3) + 3 * rank
    tw.info_nce(query, key, 5.0, ids=ids, group=group, **bank.negatives()).backward()
    return query.grad


def test_a_pool_that_is_empty_on_one_rank():
    found = torch.cat(ranks.run(empty_on_one, 2)) / 2
    query = torch.cat([unit(3, 0), unit(3, 1)]).requires_grad_()
    key = torch.cat([unit(3, 7), unit(3, 8)])
    tw.info_nce(query, key, 5.0, negatives=unit(4)).backward()
    assert (found - query.grad).norm() <= 1e-12
    tw.info_nce(query, key, 5.0, negatives=unit(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pool(0), "above 0"),
        (lambda: pool(4, max_age=0), "above 0"),
        (lambda: pool(4, max_age=1.5), "integer above 0, got 1.5"),
        (lambda: pool(1e3), "size must be an integer"),
        (lambda: pool(True), "size must be an integer above 0, got True"),
        (lambda: tw.Pool(4, D, where="/"), "path in a folder"),
        (lambda: pool(np.int64(0)), "size must be an integer above 0"),
        (lambda: tw.Pool(4, 4.0), "dim must be an integer"),
        (lambda: tw.Pool(4, D, device="gpu"), "device must be one that is here, got 'gpu'"),
        (lambda: tw.Pool(4, D, where="Host"), "'host' or a path in a folder .*, got 'Host'"),
        (lambda: tw.Pool(4, D, where=None), "got None"),
        (lambda: tw.Pool(4, D, dtype=torch.int64), "floating"),
        (lambda: tw.Pool(4, D, where="nowhere/at/all"), "path in a folder"),
        (lambda: pool().put(torch.ones(3, D + 1)), f"size {D}, got {D + 1}"),
        (lambda: pool().put(torch.ones(3, D), torch.arange(4)), r"shape \(3,\)"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(tw.TilewiseError, match=message):
        make()


def test_another_default_device():
    torch.set_default_device("meta")
    try:
        bank = tw.Pool(4, D, where="host")
    finally:
        torch.set_default_device(None)
    assert bank.features.device.type == "cpu"


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    """What is noted of a change must lie beside the file, wherever the process has gone since."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pool = tw.Pool(4, 3, where="./pool.bin")
    pool.put(torch.zeros(4, 3), torch.arange(4))
    before = pool.state_dict()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pool.put(torch.ones(4, 3), torch.arange(4) + 100)
    del pool
    gc.collect()
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tw.TilewiseError, match="pool"):
        tw.Pool(4, 3, where="./pool.bin").load_state_dict(before)
