"""What is found out before a run trains, and how runs that ended early go on."""

import fcntl
import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ranks
from test_models import make_text_folder
from test_train import ALONE, TINY, config, train
from tilewise import cli
from tilewise.data.loader import join
from tilewise.data.sources import open_source
from tilewise.errors import DataError, OptionError
from tilewise.evaluate import suite
from tilewise.models.image_text import ImageText
from tilewise.models.text_pairs import TextPairs
from tilewise.ranks import Ranks
from tilewise.train import checkpoint, logs, loop, runfolder
from tilewise.train.configfile import read
from tilewise.train.logs import Log
from tilewise.train.loop import RESULTS, Trainer
from tilewise.train.stepping import Stepper


def steps_in(tmp_path, name="run"):
    found = checkpoint.steps_in(tmp_path / name / "checkpoints")
    return [int(each.name.removeprefix("step-")) for each in found]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_branch_from_a_named_checkpoint_is_what_stays(tmp_path, keep):
    """Checkpoints further on are of another branch: they neither stay nor push new ones out."""
    how = {"save_every": 1, "keep_checkpoints": 5}
    train(config(tmp_path, **how))
    second = tmp_path / "run/checkpoints/step-00000002"
    # One step more, as if killed before the next.
    trainer = Trainer(
        config(tmp_path, resume=str(second), save_every=1, keep_checkpoints=keep), ALONE
    )
    assert steps_in(tmp_path) == [1, 2]
    step, _ = next(trainer._steps())
    trainer._save(step)
    assert steps_in(tmp_path) == [1, 2, 3][-keep:]


def test_the_log_is_of_one_branch(tmp_path):
    """Also of steps that the new one does not log, or does not come to."""
    first = train(config(tmp_path, save_every=1, keep_checkpoints=5))
    before = first.folder.joinpath("metrics.jsonl").read_text().splitlines()
    second = first.folder / "checkpoints/step-00000002"
    train(config(tmp_path, resume=str(second), steps=4, log_every=4))
    after = first.folder.joinpath("metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2]
    assert [json.loads(line)["step"] for line in after] == [1, 2, 4]
    assert {row["step"] for row in logs.Log(first.folder).rows()} == {1, 2, 4}
    aside = first.folder.joinpath(".metrics.jsonl.left").read_text().splitlines()
    assert aside == before[2:]


def test_the_log_is_json_whatever_the_numbers(tmp_path, monkeypatch):
    """Which has no NaN; the curves leave them out."""
    drawn = []
    monkeypatch.setattr(loop.plots, "plot_curves", lambda path, curves, **how: drawn.append(curves))
    step = Stepper._step
    monkeypatch.setattr(Stepper, "_step", lambda self, *of: step(self, *of) | (
        {"loss": math.nan, "grad_norm": math.inf} if of[0] == 1 else {}))  # fmt: skip
    folder = train(config(tmp_path, save_every=1)).folder
    lines = folder.joinpath("metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda name: 1 / 0) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[1]["loss"] is None
    assert rows[1]["grad_norm"] is None
    assert [step for step, _ in drawn[0]["loss"]] == [1, 3, 4, 5]
    logs.forget_after(folder, 3)
    assert folder.joinpath("metrics.jsonl").read_text().splitlines() == lines[:3]


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    trainer = Trainer(config(tmp_path), ALONE)
    (tmp_path / "run/metrics.jsonl").unlink()
    (tmp_path / "run/metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        OptionError, match=r"metrics.jsonl could not .* step 1: No space .*--resume"
    ):
        trainer.run()


class FakeWandb:
    """What is asked of the library; a run that is not told its id draws one."""

    def __init__(self, fails=False):
        self.fails, self.asked, self.logged = fails, [], []

    def init(self, **how):
        if self.fails:
            raise RuntimeError("api_key not configured")
        self.asked.append(how)
        return self

    id = "drawn"

    def log(self, numbers, step):
        self.logged.append(step)

    def finish(self):
        pass


def test_a_run_that_goes_on_is_one_run_of_wandb(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(config(tmp_path, steps=2, report_to=["wandb"]))
    train(config(tmp_path, steps=3, report_to=["wandb"], resume="latest"))
    assert [how["id"] for how in fake.asked] == [None, "drawn"]
    assert {how["resume"] for how in fake.asked} == {"allow"}
    assert fake.logged == [1, 2, 3]


def test_a_wandb_that_does_not_begin_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails=True))
    with pytest.raises(OptionError, match=r"api_key not configured; log in .*WANDB_MODE=offline"):
        Trainer(config(tmp_path, report_to=["wandb"]), ALONE)
    Trainer(config(tmp_path), ALONE)  # the folder is free


def test_a_run_that_ended_while_it_was_evaluated_is_evaluated(tmp_path, capsys):
    how = {"retrieval": ["synthetic:9"]}
    wanted = train(config(tmp_path, **how))
    for name in (RESULTS, "loss.png"):
        (wanted.folder / name).unlink()
    again = train(config(tmp_path, resume="latest", **how))
    assert again.metrics == wanted.metrics
    assert json.loads((wanted.folder / RESULTS).read_text())
    assert (wanted.folder / "loss.png").exists()
    assert "nothing is left to do" not in capsys.readouterr().out
    assert train(config(tmp_path, resume="latest", **how)).metrics == {}
    assert "nothing is left to do" in capsys.readouterr().out


def test_results_of_fewer_steps_are_not_taken_for_these(tmp_path, monkeypatch):
    """A finished run that goes on, and is stopped during its last evaluation once more."""
    how = {"retrieval": ["synthetic:9"]}
    train(config(tmp_path, **how))
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "_evaluate", lambda self, step, last: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(tmp_path, resume="latest", steps=7, **how))
    outcome = train(config(tmp_path, resume="latest", steps=7, **how))
    assert outcome.steps == 7
    assert outcome.metrics


def test_an_evaluation_that_fails_leaves_what_there_is(tmp_path, monkeypatch):
    """The loss, and what was measured before; the run can still be evaluated."""
    how = {"retrieval": ["synthetic:9"], "zero_shot": ["synthetic:8"]}
    with monkeypatch.context() as broken:
        broken.setattr(suite, "zero_shot", lambda *of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(tmp_path, **how))
    assert (tmp_path / "run/loss.png").exists()
    assert (tmp_path / "run/recall.png").exists()
    assert not (tmp_path / "run" / RESULTS).exists()
    last = Log(tmp_path / "run").rows()[-1]
    assert "synthetic:9/image_to_text_R@1" in last
    assert "synthetic:8/zeroshot_top1" not in last
    assert "synthetic:8/zeroshot_top1" in train(config(tmp_path, resume="latest", **how)).metrics


def test_a_folder_is_of_one_run_from_its_beginning(tmp_path, monkeypatch):
    """Also before the first line of the log, and of runs that begin in one second."""
    made = config(tmp_path)
    Trainer(made, ALONE)
    with pytest.raises(OptionError, match="is there already; take another --name"):
        Trainer(made, ALONE)
    monkeypatch.setattr(runfolder, "default_name", lambda model: "a-20260101-120000")
    names = [Trainer(config(tmp_path, name=""), ALONE).folder.name for _ in range(3)]
    assert names == [f"a-20260101-120000{end}" for end in ("", "-2", "-3")]


def test_a_run_that_fails_before_it_leaves_anything_gives_its_folder_back(tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "_steps", lambda self: iter([1 / 0]))
        with pytest.raises(ZeroDivisionError):
            Trainer(config(tmp_path), ALONE).run()
    Trainer(config(tmp_path), ALONE).run()


@pytest.mark.parametrize("place", [(loop, "resume"), (runfolder, "describe_machine")], ids=str)
def test_a_run_that_cannot_begin_gives_its_folder_back(tmp_path, monkeypatch, place):
    """And lets go of it."""
    with monkeypatch.context() as broken:
        broken.setattr(*place, lambda *of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Trainer(config(tmp_path, resume="latest"), ALONE)
    Trainer(config(tmp_path), ALONE).run()


def test_a_run_that_is_running_is_not_taken_up(tmp_path):
    first = Trainer(config(tmp_path), ALONE)
    next(first._steps())
    first._save(1)
    before = sorted(tmp_path.rglob("*"))
    holder = f"still running, as process {os.getpid()} on {socket.gethostname()}; stop it first"
    with pytest.raises(OptionError, match=holder):
        Trainer(config(tmp_path, resume="latest"), ALONE)
    assert sorted(tmp_path.rglob("*")) == before
    first.close()
    assert train(config(tmp_path, resume="latest")).steps == 5


def test_a_run_is_held_before_its_checkpoint_is_chosen(tmp_path, monkeypatch):
    """Another that goes on meanwhile is refused, and the folder is free if this one fails."""
    train(config(tmp_path, steps=2))
    again, find, said = config(tmp_path, resume="latest"), loop.find, []

    def late(*of, **how):
        with monkeypatch.context() as other:
            other.setattr(loop, "find", find)
            with pytest.raises(OptionError, match="still running") as told:
                Trainer(again, ALONE)
        said.append(told)
        return 1 / 0

    with monkeypatch.context() as slow:
        slow.setattr(loop, "find", late)
        with pytest.raises(ZeroDivisionError):
            Trainer(again, ALONE)
    assert said
    assert train(again).steps == 5


def test_a_trainer_that_nobody_has_lets_go_of_its_folder(tmp_path):
    trainer = Trainer(config(tmp_path), ALONE)
    trainer._save(1)
    gc.disable()
    try:
        del trainer
        assert train(config(tmp_path, resume="latest", steps=2)).steps == 2
    finally:
        gc.enable()


@pytest.mark.parametrize("fate", ["read from elsewhere", "moved", "named otherwise"])
def test_the_configuration_of_a_folder_is_of_the_run_in_it(tmp_path, monkeypatch, fate):
    monkeypatch.chdir(tmp_path)
    train(config("runs", steps=2))
    (tmp_path / "else").mkdir()
    folder, more = tmp_path / "runs/run", []
    if fate == "moved":
        folder = folder.rename(tmp_path / "else/other")
    elif fate == "named otherwise":
        more = ["--runs", "here", "--name", "third"]
    monkeypatch.chdir(tmp_path / "else")
    path = os.path.relpath(folder / "config.toml")
    assert cli.main(["train", path, "--resume", "latest", "--steps", "3", *more]) == 0
    where = tmp_path / "else/here/third" if more else folder
    assert checkpoint.latest(where / "checkpoints").name == "step-00000003"
    assert [row["step"] for row in Log(where).rows() if "loss" in row] == [1, 2, 3]
    assert not (tmp_path / "else/runs").exists()


def test_runs_of_settings_that_are_refused_now_are_evaluated(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(loop, "check_temperature", lambda loss: None)
        train(config(tmp_path, temperature=2.0, steps=1, retrieval=["synthetic:9"]))
    assert cli.main(["eval", str(tmp_path / "run")]) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0


def test_who_loads_data_for_a_run_does_not_hold_its_folder(tmp_path):
    """Once the run is gone, if they are there for longer."""
    held, (begun, begin) = runfolder.hold(tmp_path), os.pipe()
    child = os.fork()
    if not child:
        os.write(begin, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    held.close()
    try:
        runfolder.hold(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_locked_is_used(tmp_path, monkeypatch):
    def without(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without)
    assert train(config(tmp_path, steps=1)).steps == 1


def test_other_settings_are_told_and_the_former_kept(tmp_path, capsys):
    made = {"save_every": 2, "keep_checkpoints": 5}
    train(config(tmp_path, lr=0.01, **made))
    first = (tmp_path / "run/config.toml").read_text()
    place = str(tmp_path / "run/checkpoints/step-00000002")
    again = {"resume": place, "log_every": 3, "workers": 1, "steps": 4, **made}
    train(config(tmp_path, lr=0.02, name="", **again))
    told = "from step-00000002 with other settings: lr = 0.02, was 0.01; steps = 4, was 5\n"
    assert told in capsys.readouterr().out
    assert (tmp_path / "run/.config-until-00000002.toml").read_text() == first
    now = read(str(tmp_path / "run/config.toml"))
    assert (now.optim.lr, now.run.name, now.run.resume) == (0.02, "run", "")
    train(config(tmp_path, lr=0.03, **again))  # from the same step: what was before is the same
    assert (tmp_path / "run/.config-until-00000002.toml").read_text() == first
    assert read(str(tmp_path / "run/config.toml")).optim.lr == 0.03


def test_data_that_have_grown_are_told(tmp_path, capsys):
    """Their order is another one."""
    table = tmp_path / "pairs.jsonl"
    for i in range(40):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [json.dumps({"image": f"{i}.png", "text": f"thing {i}"}) for i in range(40)]
    table.write_text("\n".join(rows[:30]))
    train(config(tmp_path, train_data=str(table), steps=2))
    train(config(tmp_path, train_data=str(table), steps=3, resume="latest"))
    assert "num_samples" not in capsys.readouterr().out
    table.write_text("\n".join(rows))
    train(config(tmp_path, train_data=str(table), steps=4, resume="latest"))
    assert "num_samples = 40, was 30" in capsys.readouterr().out


def test_a_run_goes_on_by_its_folder(tmp_path):
    """In that folder, or in another one that is named; only of --runs, without a name."""
    train(config(tmp_path, steps=2, save_every=1))
    place = str(tmp_path / "run")
    assert train(config(tmp_path, name="", steps=3, resume=place)).folder == tmp_path / "run"
    assert steps_in(tmp_path) == [1, 2, 3]
    other = train(config(tmp_path, name="other", steps=4, resume=place))
    assert [row["step"] for row in Log(other.folder).rows()] == [4]
    with pytest.raises(OptionError, match=r"is of no run in .*; give --name"):
        train(config(tmp_path / "elsewhere", name="", resume=place))


def test_a_checkpoint_that_is_of_no_run_here_needs_a_name(tmp_path):
    train(config(tmp_path, steps=1))
    place = tmp_path / "run/checkpoints/step-00000001"
    for copy in (tmp_path / "step-00000001", tmp_path / "else/run/checkpoints/step-00000001"):
        shutil.copytree(place, copy)
        with pytest.raises(OptionError, match=r"is of no run in .*; give --name"):
            Trainer(config(tmp_path, name="", resume=str(copy)), ALONE)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert Trainer(config(tmp_path, name="", resume=str(place)), ALONE).folder == tmp_path / "run"


def test_tensorboard_shows_one_branch(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = {"save_every": 1, "keep_checkpoints": 5, "report_to": ["tensorboard"]}
    first = train(config(tmp_path, **how))
    time.sleep(1.1)  # its files are named by the second
    second = str(first.folder / "checkpoints/step-00000002")
    train(config(tmp_path, resume=second, steps=4, **how))
    found = EventAccumulator(str(first.folder / "tensorboard")).Reload().Scalars("loss")
    assert [event.step for event in found] == [1, 2, 3, 4]


def folders(rank, made, taken):
    """Of a name that each rank finds, and of one that is taken."""
    runfolder.default_name = lambda model: f"rank-{rank}"
    who = Ranks(rank, 2, torch.device("cpu"))
    names = [Trainer(made, who).folder.name for _ in range(2)]
    with pytest.raises(OptionError, match="is there already"):
        Trainer(taken, who)
    return names


def test_ranks_share_the_folder_that_the_first_has_made(tmp_path):
    Trainer(config(tmp_path), ALONE)
    found = ranks.run(folders, 2, config(tmp_path, name=""), config(tmp_path))
    assert found == [["rank-0", "rank-0-2"]] * 2


def test_nothing_to_resume_is_said(tmp_path, capsys):
    train(config(tmp_path, name="misspelt", resume="latest", steps=1))
    assert "has no checkpoint: from the first step on" in capsys.readouterr().out


@pytest.fixture
def class_folders(tmp_path):
    for name in ("red", "green"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), name).save(tmp_path / "classes" / name / "0.png")
    return str(tmp_path / "classes")


def test_as_many_names_as_classes(tmp_path, class_folders):
    (tmp_path / "names.txt").write_text("red\n")
    made = config(tmp_path, zero_shot=[class_folders], classes=str(tmp_path / "names.txt"))
    with pytest.raises(OptionError, match="each of the data's 2 classes, got 1"):
        Trainer(made, ALONE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sizes", "how", "says"),
    [
        ((77, 77), {"lock_image": True}, r"do not go through the model \(image \(77,\)"),
        ((128, 64), {"lock_image": True}, "features of one size"),
        ((128, 128), {}, "set lock_image = true"),
    ],
    ids=["too many", "mixed", "not locked"],
)
def test_features_that_do_not_fit(tmp_path, sizes, how, says, monkeypatch):
    rows = [
        {"id": k, "features": np.full(size, 0.5), "text": ("a thing",)}
        for k, size in enumerate(sizes)
    ]
    monkeypatch.setattr(loop, "open_source", lambda name, index_folder: rows)
    with pytest.raises(DataError, match=says):
        Trainer(config(tmp_path, batch_size=2, **how), ALONE).run()


def test_images_of_a_size_that_a_tower_refuses(tmp_path):
    """timm asserts where others raise."""
    model = json.loads(Path(TINY).read_text())
    model["vision_cfg"] |= {"timm_model_name": "swin_tiny_patch4_window7_224", "image_size": 64}
    (tmp_path / "swin.json").write_text(json.dumps(model))
    with pytest.raises(DataError, match=r"do not go through the model .*64.*doesn't match model"):
        Trainer(config(tmp_path, model=str(tmp_path / "swin.json")), ALONE)


@pytest.fixture
def queries(tmp_path):
    """Texts with a hard negative each."""
    words = ("red", "green", "blue", "big")
    rows = [{"query": f"a {w}", "positive": f"{w} thing", "negatives": ["small"]} for w in words]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "queries.jsonl")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"loss": "clip"}, "need loss = 'info_nce'"),
        ({"loss": "info_nce", "pool": 8}, "set pool = 0"),
    ],
    ids=str,
)
def test_hard_negatives_that_have_no_place(tmp_path, queries, how, says):
    folder = make_text_folder(tmp_path / "bert")
    made = config(tmp_path, kind="text", model=str(folder), train_data=queries, batch_size=4, **how)
    with pytest.raises(OptionError, match=says):
        Trainer(made, ALONE)
    assert not (tmp_path / "run").exists()


def test_an_exported_text_encoder_can_be_evaluated(tmp_path, queries, monkeypatch, capsys):
    TextPairs(str(make_text_folder(tmp_path / "bert"))).export(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "out", "--retrieval", queries]) == 0
    found = json.loads((tmp_path / "runs/eval" / RESULTS).read_text())
    assert found[f"{queries}/queries"] == 4
    assert "drawn at random" not in capsys.readouterr().out
    assert cli.main(["eval", "--model", TINY, "--retrieval", "synthetic:9", "--zero-shot",
                     "--localise"]) == 0  # fmt: skip
    assert "drawn at random" in capsys.readouterr().out


def test_an_exported_backbone_can_be_evaluated(tmp_path, monkeypatch, capsys):
    """With the features of the run that it is of."""
    data = ["synthetic:40,cells=1", "synthetic:20,cells=1,seed=1"]
    how = {"kind": "simclr", "loss": "nt_xent", "projector": [16, 8], "probe": data}
    made = config(tmp_path, model="test_vit", image_size=32, steps=2, **how)
    wanted = train(made).metrics
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "run", "out"]) == 0
    assert cli.main(["eval", "out", "--probe", *data]) == 0
    assert json.loads((tmp_path / "runs/eval" / RESULTS).read_text()) == pytest.approx(wanted)
    assert "drawn at random" not in capsys.readouterr().out
    (tmp_path / "out/config.json").write_text("{}")
    assert cli.main(["eval", "out", "--probe", *data]) == 2
    assert "config.json must tell of a model of timm" in capsys.readouterr().err


def test_an_evaluation_of_nothing_is_told(tmp_path, monkeypatch, capsys):
    TextPairs(str(make_text_folder(tmp_path / "bert"))).export(tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "out"]) == 2
    assert "name data with --retrieval" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_headline_of_a_small_run(tmp_path, capsys):
    rows = [{"query": "a red", "positive": "red thing"}] * 3
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    how = {"kind": "text", "model": make_text_folder(tmp_path / "bert"), "loss": "info_nce"}
    train(config(tmp_path, train_data=str(tmp_path / "pairs.jsonl"), steps=1, batch_size=1, **how))
    said = ": 3,009 parameters, 3,009 to train; 3 samples; 1 step of 1 pair on 1 x cpu; to "
    assert said in capsys.readouterr().out


def inputs(count, negatives, length=4, width=5):
    ids = torch.ones(count, length, dtype=torch.int64)
    more = {} if not negatives else {"negatives_ids": ids[:, None].expand(count, negatives, length)}
    return {"query_ids": ids, "image": torch.zeros(count, width), **more}


@pytest.mark.parametrize("other", [{"negatives": 0}, {"negatives": 3}, {"width": 6}], ids=str)
def test_chunks_of_other_kinds_do_not_join(other):
    """Neither loses what only one has, nor fills up features as if they were texts."""
    first = inputs(3, 2)
    joined = join([first, inputs(2, 2, length=9)])
    assert joined["negatives_ids"].shape == (5, 2, 9)
    for chunks in ([first, inputs(2, **{"negatives": 2, **other})],) * 2:
        with pytest.raises(DataError, match="all samples must have the same fields"):
            join(chunks)
        chunks.reverse()


def refusing(rank, made):
    def refuse(self, inputs):
        raise DataError("these pixels are no image")

    ImageText.precompute = refuse if rank == 0 else ImageText.precompute
    with pytest.raises(DataError, match="no image"):
        Trainer(made, Ranks(rank, 2, torch.device("cpu")))


def test_what_the_first_refuses_to_embed_is_told_on_all(tmp_path):
    """The other would wait for its features until the group gives up."""
    how = {"lock_image": True, "crop_scale": 1.0, "jitter": 0.0, "eval_batch": 16}
    ranks.run(refusing, 2, config(tmp_path, feature_cache=str(tmp_path / "cache"), **how))
    assert not any((tmp_path / "cache").iterdir())


def features_of_all(rank, made, each_s=0.0):
    plain = ImageText.precompute

    def slow(self, inputs):
        time.sleep(each_s)
        return plain(self, inputs)

    ImageText.precompute = slow
    return len(Trainer(made, Ranks(rank, 2, torch.device("cpu"))).source.features)


def test_ranks_wait_for_the_first_ones_features(tmp_path):
    how = {"lock_image": True, "crop_scale": 1.0, "jitter": 0.0, "eval_batch": 16}
    made = config(tmp_path, feature_cache=str(tmp_path / "cache"), **how)
    assert ranks.run(features_of_all, 2, made) == [100, 100]
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert ranks.run(features_of_all, 2, config(
        tmp_path, name="again", feature_cache=str(tmp_path / "cache"), **how
    )) == [100, 100]  # fmt: skip


def test_features_may_take_longer_than_ranks_wait(tmp_path):
    """7 times 1.2 s, and 6 s is as long as a rank waits for another to say something."""
    how = {"lock_image": True, "crop_scale": 1.0, "jitter": 0.0, "eval_batch": 16}
    made = config(tmp_path, feature_cache=str(tmp_path / "cache"), **how)
    assert ranks.run(features_of_all, 2, made, 1.2, timeout=6.0) == [100, 100]


def test_images_of_a_table_may_be_elsewhere(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.full((4, 4, 3), 7, np.uint8)).save(tmp_path / "photos/a.png")
    table = tmp_path / "tables/pairs.csv"
    table.write_text("file,caption\na.png,seven\n")
    name = f"{table}?columns=file:image&images={tmp_path / 'photos'}"
    assert np.asarray(open_source(name)[0]["image"]).max() == 7
    assert open_source(name)[0]["text"] == ("seven",)
    with pytest.raises(DataError, match="must be a file to read"):
        open_source(f"{table}?columns=file:image")[0]
    for wrong in ("folder=x", "images=", "columns=a:b&images"):
        with pytest.raises(OptionError, match=r"a table takes \?columns"):
            open_source(f"{table}?{wrong}")


def test_rows_that_are_wrong_count_as_damaged(tmp_path):
    """A few are replaced by others; many stop the run."""
    for i in range(24):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [f"{i}.png,thing {i}" for i in range(24)]
    rows[3] = "3.png,too,many"
    (tmp_path / "pairs.csv").write_text("\n".join(["image,text", *rows]))
    trainer = Trainer(config(tmp_path, train_data=str(tmp_path / "pairs.csv")), ALONE)
    trainer.run()
    assert trainer.batches.bad == {"field": 5}
    how = {"name": "again", "max_bad_share": 0.001}
    with pytest.raises(DataError, match=r"2 of 48 samples were damaged \(2 field\)"):
        train(config(tmp_path, train_data=str(tmp_path / "pairs.csv"), **how))


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(*of):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_application", interrupted)
    assert cli.main(["train"]) == 130
    assert "--resume latest" in capsys.readouterr().err
