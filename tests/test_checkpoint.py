"""Checkpoints: whole or not there, and never taken for whole when they are not."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewise.config import OptimConfig
from tilewise.errors import CheckpointError
from tilewise.train import checkpoint
from tilewise.train.optim import make_optimizer, set_options


def shot(step, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    found = checkpoint.collect(model, optimizer)
    found.step, found.samples, found.about = step, 10 * step, {"versions": {"tilewise": "0"}}
    return model, optimizer, found


def write(folder, step, seed=0):
    return checkpoint.save(checkpoint.begin(folder, step), shot(step, seed)[2])


def test_what_was_saved_is_what_is_loaded(tmp_path):
    model, optimizer, _ = shot(7)
    place = write(tmp_path, 7)
    found = checkpoint.load(place)
    assert (found.step, found.samples) == (7, 70)
    other, others, _ = shot(1, seed=5)
    checkpoint.restore(other, others, found)
    assert torch.equal(other.weight, model.weight)
    state, own = others.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(torch.equal(state[i][name], own[i][name]) for i in own for name in own[i])
    assert others.param_groups[0]["lr"] == 0.1
    assert not list(tmp_path.glob(".*"))


def test_every_flip_and_every_cut_is_found(tmp_path):
    place = write(tmp_path, 3)
    for file in sorted(place.iterdir()):
        good = file.read_bytes()
        for damaged in (*_flips(good), good[: len(good) // 2], good[:-1], b"", good + b"x"):
            file.write_bytes(damaged)
            if file.name != checkpoint.MANIFEST or json_or_none(damaged) != json_or_none(good):
                with pytest.raises(CheckpointError):
                    checkpoint.check(place)
        file.unlink()
        with pytest.raises(CheckpointError):
            checkpoint.check(place)
        file.write_bytes(good)
    checkpoint.check(place)


def _flips(data):
    for at in range(0, len(data), max(1, len(data) // 25)):
        yield data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def json_or_none(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_the_newest_that_is_whole_is_taken(tmp_path):
    for step in (1, 2, 10):
        write(tmp_path, step)
    assert checkpoint.latest(tmp_path).name == "step-00000010"
    weights = tmp_path / "step-00000010" / checkpoint.MODEL
    weights.write_bytes(weights.read_bytes()[:-3])
    said = []
    assert checkpoint.latest(tmp_path, said.append).name == "step-00000002"
    why = "model.safetensors is not as it was written"
    assert said == [f"step-00000010 is damaged ({why}), going on from step-00000002"]
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_none_that_is_whole_is_told_from_none(tmp_path):
    for step in (1, 2):
        (write(tmp_path, step) / checkpoint.MANIFEST).write_text("{")
    (tmp_path / "step-00000002" / checkpoint.MANIFEST).unlink()
    said = r"step-00000002 is damaged \(it has no manifest.json\); step-00000001 is damaged"
    with pytest.raises(CheckpointError, match=rf"{said}.*bring one back from a copy"):
        checkpoint.latest(tmp_path)


def test_others_may_read_it_as_the_umask_says(tmp_path):
    """The library of safetensors would let its owner alone."""
    before = os.umask(0o027)
    try:
        place = write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o640}


def test_a_draft_is_not_a_checkpoint(tmp_path):
    write(tmp_path, 1)
    draft = checkpoint.begin(tmp_path, 2)
    checkpoint.write_tensors(draft / checkpoint.MODEL, {"weight": torch.zeros(3)})
    assert checkpoint.latest(tmp_path).name == "step-00000001"
    write(tmp_path, 2)
    assert checkpoint.latest(tmp_path).name == "step-00000002"
    assert not draft.exists()


def test_older_ones_are_removed(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert [path.name for path in checkpoint.steps_in(tmp_path)] == [
        "step-00000004",
        "step-00000005",
    ]


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    weights = tmp_path / "step-00000003" / checkpoint.MODEL
    weights.write_bytes(weights.read_bytes()[:-3])
    checkpoint.prune(tmp_path, 1)
    assert checkpoint.latest(tmp_path).name == "step-00000002"
    assert not (tmp_path / "step-00000001").exists()


def test_a_disk_that_is_full_leaves_the_older_ones(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"No space left.*before it are as they were"):
        write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_library_that_cannot_write_is_told_like_a_disk(tmp_path, monkeypatch):
    from safetensors import SafetensorError

    def full(*_):
        raise SafetensorError("I/O error: File too large")

    draft = checkpoint.begin(tmp_path, 2)
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match="File too large"):
        checkpoint.save(draft, shot(2)[2])
    assert not list(tmp_path.iterdir())


def test_a_pool_that_does_not_fit_the_disk_leaves_the_older_ones(tmp_path, monkeypatch):
    write(tmp_path, 1)
    draft = checkpoint.begin(tmp_path, 2)

    def full(*_, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match=r"step-00000002 could not .*No space left"):
        checkpoint.write_pool(draft, 0, {"born": torch.arange(3)})
    assert draft.exists()  # others may be writing to it
    draft.rmdir()
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(CheckpointError, match=r"step-00000003 could not .*No space left"):
        checkpoint.begin(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("where", ["prune", "save"])
def test_one_that_is_killed_while_it_removes_leaves_no_half(tmp_path, monkeypatch, where):
    """A damaged checkpoint would stay, and be named at every resume."""
    for step in (1, 2):
        write(tmp_path, step)
    draft, rmtree = checkpoint.begin(tmp_path, 1), checkpoint.shutil.rmtree

    def killed(path, **how):
        if path.exists():
            (path / checkpoint.MODEL).unlink()
            raise KeyboardInterrupt
        rmtree(path, **how)

    removing = {
        "prune": lambda: checkpoint.prune(tmp_path, 1),
        "save": lambda: checkpoint.save(draft, shot(1)[2]),
    }
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            removing[where]()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".step-00000001.old", ".step-00000001.draft", "step-00000002"}
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_an_optimizer_of_another_kind_is_told():
    """PyTorch's AdaFactor was once meant by `opt`."""
    model = nn.Linear(32, 32)
    former = torch.optim.Adafactor([{"params": [model.weight]}, {"params": [model.bias]}])
    model(torch.ones(1, 32)).sum().backward()
    former.step()
    found = checkpoint.collect(model, former)
    now = make_optimizer(model, OptimConfig(opt="adafactor"))
    with pytest.raises(CheckpointError, match="of another optimizer, which has 'beta2_decay'"):
        checkpoint.restore(model, now, found)


@pytest.mark.parametrize("opt", ["adafactor", "lion", "lamb"])
def test_timm_may_forget_how_steps_were_computed(opt):
    """1.0.31 has no `foreach` in AdaFactor, checkpoints of 1.0.30 do; types are not in any."""
    model = nn.Linear(32, 32)
    optimizer = make_optimizer(model, OptimConfig(opt=opt))
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    found = checkpoint.collect(model, optimizer)
    for own, saved in zip(optimizer.param_groups, found.optimizer["param_groups"], strict=True):
        own.pop("foreach", None)
        saved["foreach"] = None
        assert not any(isinstance(x, torch.dtype) for x in saved.values())
    checkpoint.restore(model, optimizer, found)
    kinds = {name: x for name, x in optimizer.defaults.items() if isinstance(x, torch.dtype)}
    assert all(kinds.items() <= group.items() for group in optimizer.param_groups)
    assert bool(kinds) == (opt == "adafactor")


@pytest.mark.parametrize("opt", ["adamw", "adafactor", "lion", "lamb"])
def test_an_optimizer_that_has_taken_no_step_has_no_state(tmp_path, opt):
    """Neither by what is saved of it nor by what is loaded: PyTorch makes one up."""
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig(opt=opt))
    known = [dict(group) for group in optimizer.param_groups]
    found = checkpoint.collect(model, optimizer)
    assert not found.optimizer["state"]
    checkpoint.restore(model, optimizer, found)
    set_options(optimizer, model, OptimConfig(opt=opt))
    assert not optimizer.state
    assert [set(group) for group in optimizer.param_groups] == [set(group) for group in known]


def test_another_format_is_told(tmp_path):
    place = write(tmp_path, 1)
    state = json.loads((place / checkpoint.STATE).read_text())
    (place / checkpoint.STATE).write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.load_state(place)


def test_another_model_is_told(tmp_path):
    found = checkpoint.load(write(tmp_path, 1))
    model = nn.Linear(3, 4)
    with pytest.raises(
        CheckpointError, match=r"another model: 2 weights differ.*weight \(6 numbers"
    ):
        checkpoint.restore(model, torch.optim.AdamW(model.parameters()), found)


def test_a_pool_of_a_rank_comes_back(tmp_path):
    draft = checkpoint.begin(tmp_path, 4)
    state = {"born": torch.arange(3), "features": torch.randn(3, 2), "dim": 2, "named": None}
    checkpoint.write_pool(draft, 1, state)
    place = checkpoint.save(draft, shot(4)[2])
    found = checkpoint.load_pool(place, 1)
    assert torch.equal(found.pop("features"), state["features"])
    assert torch.equal(found.pop("born"), state["born"])
    assert found == {"dim": 2, "named": None}
    assert checkpoint.load_pool(place, 0) is None
