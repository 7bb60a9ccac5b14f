"""Training from a configuration: the same run again, in parts, on ranks, with any loss."""

import json
import math
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ranks
from test_models import VIT, make_text_folder
from tilewise import measure
from tilewise.config import Config, OptimConfig
from tilewise.data.loader import load
from tilewise.data.views import View
from tilewise.errors import (
    CheckpointError,
    DataError,
    DeviceError,
    FiniteError,
    OptionError,
    StepError,
)
from tilewise.evaluate.embed import Embedder
from tilewise.models.base import evaluating
from tilewise.ranks import Ranks
from tilewise.train import build, checkpoint, objective
from tilewise.train.build import model_of
from tilewise.train.commands import eval_command, export_command
from tilewise.train.configfile import from_tables
from tilewise.train.logs import Log
from tilewise.train.loop import Trainer
from tilewise.train.optim import clip_gradients, lr_at, make_optimizer, peak_lr
from tilewise.train.screen import Screen
from tilewise.train.stepping import Stepper

TINY = str(Path(__file__).parent / "tiny.json")
ALONE = Ranks(0, 1, torch.device("cpu"))
SIMCLR = {"kind": "simclr", "loss": "nt_xent", "projector": [16, 8]}


def config(tmp_path, **fields):
    """A run of seconds: 5 steps of 24 pairs; fields as flags."""
    tables = {
        "model": {"model": TINY},
        "data": {"train_data": "synthetic:100,cells=2", "crop_scale": 0.8, "jitter": 0.2},
        "step": {"batch_size": 24, "micro_batch": 24},
        "optim": {"warmup": 2},
        "eval": {"retrieval": [], "zero_shot": []},
        "run": {"steps": 5, "name": "run", "runs": str(tmp_path), "report_to": [], "log_every": 1},
    }
    where = {name: table for table, names in FIELDS.items() for name in names}
    for name, value in fields.items():
        tables.setdefault(where[name], {})[name] = value
    return from_tables(tables, "the test")


FIELDS = {
    name: list(Config.__dataclass_fields__[name].default_factory.__dataclass_fields__)
    for name in Config.__dataclass_fields__
}


def train(made, who=ALONE):
    return Trainer(made, who).run()


def losses(outcome):
    return [row["loss"] for row in Log(outcome.folder).rows() if "loss" in row]


def weights(outcome, name="model"):
    newest = checkpoint.latest(outcome.folder / "checkpoints")
    return load_file(newest / f"{name}.safetensors")


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in {**first, **second})


def test_a_run_leaves_all_that_is_promised(tmp_path):
    data = ["synthetic:30,cells=2,seed=1"]
    more = {"eval_every": 2, "report_to": ["tensorboard"], "ema": 0.9, "localise": data}
    outcome = train(config(tmp_path, retrieval=data, zero_shot=data, **more))
    names = {path.name for path in outcome.folder.iterdir()}
    assert names >= {"config.toml", "versions.json", "metrics.jsonl", "metrics.json", "loss.png",
                     "recall.png", "tensorboard", "checkpoints", "localise.png"}  # fmt: skip
    assert any(name.startswith("retrieval-") for name in names)
    assert any(name.startswith("similarities-") for name in names)
    assert list((outcome.folder / "tensorboard").iterdir())
    metrics = json.loads((outcome.folder / "metrics.json").read_text())
    assert metrics == outcome.metrics
    for part in ("image_to_text_R@1", "zeroshot_top1", "pointing_accuracy"):
        assert any(name.endswith(part) for name in metrics)
    state = json.loads(
        (checkpoint.latest(outcome.folder / "checkpoints") / "state.json").read_text()
    )
    assert state["step"] == 5
    assert state["samples"] == 120
    assert state["versions"]["torch"] == torch.__version__


def test_training_learns(tmp_path):
    found = losses(train(config(tmp_path, steps=30, lr=3e-3, train_data="synthetic:48,cells=1")))
    assert found[-1] < 0.7 * found[0]


def test_two_runs_of_a_seed_are_equal_bit_for_bit(tmp_path):
    first, second, other = (
        train(config(tmp_path, name=name, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert losses(first) == losses(second)
    assert same(weights(first), weights(second))
    assert losses(first) != losses(other)


@pytest.mark.parametrize(
    "how",
    [
        {"backend": "dense"},
        {"micro_batch": 7, "keep": 0},
        {"micro_batch": 7, "keep": 1},
        {"features": "host"},
        {"workers": 1},
    ],
    ids=str,
)
def test_how_a_step_is_computed_changes_nothing(tmp_path, how):
    plain = losses(train(config(tmp_path)))
    other = losses(train(config(tmp_path, name="other", **how)))
    torch.testing.assert_close(torch.tensor(other), torch.tensor(plain), rtol=2e-4, atol=0)


def held(trainer):
    """Bytes that the graph of a batch holds, its loss, and a gradient of it."""
    batch = next(trainer.batches.since(0))
    with measure.held_bytes(torch.device("cpu")) as found:
        out = trainer.model(**batch.inputs)
    loss = (out["rows"] @ out["cols"].T).square().sum()
    grad = torch.autograd.grad(loss, trainer.model.net.visual.trunk.stem[0].weight)[0]
    return found.bytes, grad


def test_grad_checkpointing_holds_less_and_changes_nothing(tmp_path):
    plain, plain_grad = held(Trainer(config(tmp_path), ALONE))
    less, grad = held(Trainer(config(tmp_path, name="b", grad_checkpointing=True), ALONE))
    assert less < 0.7 * plain
    torch.testing.assert_close(grad, plain_grad)


def stopped(made, after=3):
    """A run that ends early, as if it had been stopped: its schedule is that of the whole."""
    first = Trainer(made, ALONE)
    steps = first._steps()
    for _ in range(after):
        step, numbers = next(steps)
        first.log.add(step, **numbers)
    first._save(after)
    steps.close()
    first.close()
    return first


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"opt": "lion", "ema": 0.5},
        {"opt": "lamb"},
        {"opt": "adafactor"},
        # A token (1, 1, D), whose variance by rows is one number.
        {"opt": "adafactor", "kind": "simclr", "model": "test_vit", "image_size": 32,
         "loss": "nt_xent", "projector": [16, 8]},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_in_two_parts_is_the_run(tmp_path, more):
    whole = train(config(tmp_path, name="whole", **more))
    stopped(config(tmp_path, name="parts", **more))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')  # killed while it wrote
    second = train(config(tmp_path, name="parts", resume="latest", **more))
    assert losses(second) == losses(whole)
    assert same(weights(second), weights(whole))
    assert same(weights(second, "optimizer"), weights(whole, "optimizer"))
    if "ema" in more:
        assert same(weights(second, "ema"), weights(whole, "ema"))


@pytest.mark.parametrize("opt", ["adamw", "lamb"])
@pytest.mark.parametrize("what", ["norm", "loss"])
def test_a_run_goes_on_from_before_its_first_accepted_step(tmp_path, monkeypatch, opt, what):
    """As fp16 begins, whose first steps find its factor; and saving changes nothing of it."""
    made = {"opt": opt, "save_every": 2, "keep_checkpoints": 9}
    clip, differentiate = Stepper._clip, Stepper._differentiate

    def not_finite(self):
        return clip(self) * (math.nan if self.skipped < 2 else 1.0)

    def broken(self, batch, ids):
        if self.skipped < 2:
            raise StepError("") from FiniteError("")
        return differentiate(self, batch, ids)

    name, wrong = {"norm": ("_clip", not_finite), "loss": ("_differentiate", broken)}[what]
    monkeypatch.setattr(Stepper, name, wrong)
    plain = train(config(tmp_path, name="plain", opt=opt))
    whole = train(config(tmp_path, name="whole", **made))
    place = str(tmp_path / "whole/checkpoints/step-00000002")
    again = train(config(tmp_path, name="again", resume=place, **made))
    assert json.loads(Path(place, "state.json").read_text())["stepper"]["skipped"] == 2
    for other in (plain, again):
        assert same(weights(other), weights(whole))
        assert same(weights(other, "optimizer"), weights(whole, "optimizer"))


@pytest.mark.parametrize("opt", ["adamw", "lamb", "lion", "adafactor"])
def test_a_run_goes_on_with_the_options_it_is_given(tmp_path, opt):
    """Weight decay too where there was none, which does not tell matrices from vectors."""
    stopped(config(tmp_path, opt=opt, wd=0.0))
    now = config(tmp_path, opt=opt, wd=0.1, beta1=0.8, beta2=0.7, eps=1e-3, resume="latest")
    groups = Trainer(now, ALONE).stepper.optimizer.param_groups
    fresh = Trainer(replace(now, run=replace(now.run, resume="", name="b")), ALONE)
    wanted = fresh.stepper.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for name in ("weight_decay", "betas", "eps", "momentum", "beta2_cap", "momentum_dtype"):
        assert [group.get(name) for group in groups] == [group.get(name) for group in wanted]


def test_a_pool_is_saved_and_resumed(tmp_path):
    more = {"loss": "info_nce", "pool": 64, "pool_where": "device", "train_data": "synthetic:400"}
    whole = train(config(tmp_path, name="whole", **more))
    without = train(config(tmp_path, name="without", **{**more, "pool": 0}))
    assert losses(whole)[0] == losses(without)[0]
    assert losses(whole)[1] > losses(without)[1]
    stopped(config(tmp_path, name="parts", **more))
    second = train(config(tmp_path, name="parts", resume="latest", **more))
    assert losses(second) == losses(whole)


POOL = {"loss": "info_nce", "pool": 64, "train_data": "synthetic:400"}


@pytest.mark.parametrize("saved", [True, False])
def test_a_pool_in_a_file_goes_on_after_a_kill(tmp_path, monkeypatch, capsys, saved):
    """A step beyond the checkpoint has changed the file; features may be too many to save."""
    if not saved:
        monkeypatch.setattr(objective, "SAVED_BYTES", 0)
    whole = train(config(tmp_path, name="whole", pool_where=str(tmp_path / "a"), **POOL))
    more = {"name": "parts", "pool_where": str(tmp_path / "b"), **POOL}
    first = stopped(config(tmp_path, **more))
    first.stepper.step(3, 5, next(first.batches.since(3)))
    del first
    second = train(config(tmp_path, resume="latest", **more))
    assert (losses(second) == losses(whole)) == saved
    assert ("begin with an empty pool" in capsys.readouterr().out) != saved


def test_only_features_that_are_missing_leave_a_pool_empty(tmp_path, monkeypatch):
    """What else is wrong with one is told, as is a checkpoint that is gone with it."""
    stopped(config(tmp_path, **POOL))
    made, load_pool = config(tmp_path, resume="latest", **POOL), checkpoint.load_pool
    with monkeypatch.context() as damaged:
        damaged.setattr(checkpoint, "load_pool", lambda *of: {**load_pool(*of), "clock": -1})
        with pytest.raises(OptionError, match="of puts up to its clock, -1"):
            Trainer(made, ALONE)
    model = build.make_model

    def late(*of):
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
        return model(*of)

    monkeypatch.setattr(build, "make_model", late)
    with pytest.raises(CheckpointError, match="step-00000003 is gone since it was chosen"):
        Trainer(made, ALONE)


def with_pools(rank, made):
    trainer = Trainer(made, Ranks(rank, 2, torch.device("cpu")))
    steps = trainer._steps()
    next(steps)
    trainer._save(1)
    steps.close()


def test_pools_of_other_ranks_are_not_lost_in_silence(tmp_path, capsys):
    ranks.run(with_pools, 2, config(tmp_path, pool_where="device", **POOL))
    made = config(tmp_path, pool_where="device", resume="latest", **POOL)
    own = Trainer(made, ALONE).stepper.objective.pool
    assert len(own) == 12
    told = "has pools of 2 rank(s), and this run has 1: those of ranks [1] are left out"
    assert told in capsys.readouterr().out


def test_a_run_that_is_done_is_left_alone(tmp_path):
    first = train(config(tmp_path, retrieval=["synthetic:9"]))
    before = (first.folder / "metrics.json").read_text()
    again = train(config(tmp_path, retrieval=["synthetic:9"], resume="latest"))
    assert again.steps == 5
    assert (first.folder / "metrics.json").read_text() == before


@pytest.mark.parametrize(
    "other",
    [{"batch_size": 12}, {"opt": "lion"}, {"seed": 4}, {"train_data": "synthetic:90"}],
    ids=str,
)
def test_a_run_does_not_go_on_as_another(tmp_path, other):
    stopped(config(tmp_path))
    with pytest.raises(OptionError, match="is of a run with"):
        Trainer(config(tmp_path, resume="latest", **other), ALONE)


def test_the_weights_of_a_run_begin_another(tmp_path):
    """As the error says that tells a run not to go on; also with a loss that has no bias."""
    stopped(config(tmp_path, loss="siglip"))
    for more in ({"batch_size": 12, "loss": "siglip"}, {"loss": "clip"}):
        with pytest.raises(OptionError, match="begin a run of its own with another --name") as told:
            Trainer(config(tmp_path, resume="latest", **more), ALONE)
        file = str(told.value).rsplit("--pretrained ", 1)[1]
        other = Trainer(config(tmp_path, name=more["loss"], pretrained=file, **more), ALONE)
        found = load_file(file)
        assert ("net.logit_bias" in other.model.state_dict()) == (more["loss"] == "siglip")
        assert all(torch.equal(x, found[name]) for name, x in other.model.state_dict().items())
        other.run()


def test_a_run_that_trains_other_kinds_of_weights_is_told(tmp_path):
    """Of two locked towers a projection is left to train, and no weight without decay."""
    locked = {"lock_image": True, "lock_text": True}
    stopped(config(tmp_path, learn_temperature=False, **locked))
    says = "other weights are trained .* 2 groups of them .* where it has 1; resume with its lock"
    with pytest.raises(CheckpointError, match=says):
        Trainer(config(tmp_path, resume="latest", **locked), ALONE)


def test_weights_that_would_not_fit_are_not_advised(tmp_path):
    stopped(config(tmp_path))
    with pytest.raises(OptionError, match=r"image_size = 0, got 64.*with another --name$"):
        Trainer(config(tmp_path, resume="latest", image_size=64), ALONE)


def test_a_smaller_pool_is_told(tmp_path):
    stopped(config(tmp_path, pool_where="device", **POOL))
    made = config(tmp_path, pool_where="device", resume="latest", **{**POOL, "pool": 16})
    with pytest.raises(OptionError, match="resume with --pool of at least 64"):
        Trainer(made, ALONE)


def full_on_one(rank, made, which):
    """Its disk is full: of the first, or of the other's pool."""
    trainer = Trainer(made, Ranks(rank, 2, torch.device("cpu")))
    steps = trainer._steps()
    next(steps)
    write = checkpoint.write_tensors

    def full(path, tensors):
        if path.name == which:
            raise OSError(28, "No space left on device")
        write(path, tensors)

    checkpoint.write_tensors = full
    with pytest.raises(CheckpointError, match=r"step-00000001 could not be written: .*No space"):
        trainer._save(1)
    checkpoint.write_tensors = write
    left = list((trainer.folder / "checkpoints").iterdir())
    trainer.ranks.wait()
    trainer._save(1)
    return [path.name for path in left]


@pytest.mark.parametrize("which", ["pool-00001.safetensors", "model.safetensors"])
def test_what_one_rank_cannot_write_is_told_on_all(tmp_path, which):
    made = config(tmp_path, pool_where="device", **POOL)
    assert ranks.run(full_on_one, 2, made, which, timeout=20.0) == [[], []]
    assert checkpoint.latest(tmp_path / "run/checkpoints").name == "step-00000001"


def test_the_weights_of_a_text_run_begin_another(tmp_path):
    more = text_data(tmp_path)
    stopped(config(tmp_path, **more))
    with pytest.raises(OptionError, match="after tilewise export") as told:
        Trainer(config(tmp_path, resume="latest", **{**more, "batch_size": 12}), ALONE)
    place = str(told.value).rsplit("export ", 1)[1].split()[0]
    assert export_command([place, str(tmp_path / "out")]) == 0
    more["model"] = str(tmp_path / "out")
    other = Trainer(config(tmp_path, name="other", batch_size=12, **more), ALONE)
    found = load_file(Path(place) / "model.safetensors")
    assert same({n: x for n, x in other.model.state_dict().items() if n != "logit_scale"},
                {n: x for n, x in found.items() if n != "logit_scale"})  # fmt: skip


def own_config(tmp_path, heads=2):
    """A JSON file of the config that is the tests'."""
    found = json.loads(Path(TINY).read_text())
    found["text_cfg"]["heads"] = heads  # the weights are of the same shapes with any number
    (tmp_path / "model.json").write_text(json.dumps(found))
    return str(tmp_path / "model.json")


@pytest.mark.parametrize("fate", ["deleted", "edited", "broken"])
def test_a_run_knows_its_model_whatever_becomes_of_the_config(tmp_path, fate):
    """It is evaluated, exported and, unless the file tells of another model, resumed."""
    made = {"model": own_config(tmp_path), "retrieval": ["synthetic:9"]}
    whole = losses(train(config(tmp_path, name="whole", **made)))
    trainer = stopped(config(tmp_path, **made))
    wanted = trainer._evaluate(3, last=False)
    file = Path(made["model"])
    if fate == "deleted":
        file.unlink()
    elif fate == "edited":
        own_config(tmp_path, heads=4)
    else:
        file.write_text("{")
    run = str(tmp_path / "run")
    assert eval_command([run]) == 0
    place = tmp_path / "run" / "eval-step-00000003" / "metrics.json"
    assert json.loads(place.read_text()) == pytest.approx(wanted)
    assert export_command([run, str(tmp_path / "out")]) == 0
    again = config(tmp_path, resume="latest", **made)
    if fate == "deleted":
        assert losses(train(again)) == whole
        return
    says = r"text_cfg.heads = 2, and .*model.json has 4 now; put it back"
    with pytest.raises(OptionError, match=says if fate == "edited" else "is not: Expecting"):
        Trainer(again, ALONE)


def test_a_run_that_began_with_weights_goes_on_without_the_file(tmp_path):
    """And computes the same features with its locked tower."""
    how = {"lock_image": True, "crop_scale": 1.0, "jitter": 0.0}
    torch.save(Trainer(config(tmp_path, name="first"), ALONE).model.net.state_dict(),
               tmp_path / "weights.pt")  # fmt: skip
    how |= {"pretrained": str(tmp_path / "weights.pt"), "seed": 1}
    whole = losses(train(config(tmp_path, name="whole", feature_cache=str(tmp_path / "a"), **how)))
    stopped(config(tmp_path, feature_cache=str(tmp_path / "b"), **how))
    (tmp_path / "weights.pt").unlink()
    shutil.rmtree(tmp_path / "b")
    again = config(tmp_path, resume="latest", feature_cache=str(tmp_path / "b"), **how)
    assert losses(train(again)) == whole


def test_a_checkpoint_without_the_models_config_is_loaded(tmp_path):
    """As they were before: by what the name stands for now."""
    trainer = Trainer(config(tmp_path), ALONE)
    trainer.model.facts = dict
    trainer.run()
    found = checkpoint.load(checkpoint.latest(tmp_path / "run" / "checkpoints"))
    assert not found.about["model"]
    del found.about["model"]
    assert same(model_of(config(tmp_path), found, average=True).state_dict(), found.model)
    assert eval_command([str(tmp_path / "run"), "--retrieval", "synthetic:9"]) == 0
    assert train(config(tmp_path, steps=6, resume="latest")).steps == 6


def test_damaged_checkpoints_neither_stay_nor_push_good_ones_out(tmp_path, capsys):
    made = {"save_every": 1, "keep_checkpoints": 1}
    stopped(config(tmp_path, **made), after=2)
    place = tmp_path / "run" / "checkpoints"
    good = place / "step-00000002"
    bad = place / "step-00000004"
    shutil.copytree(good, bad)
    (bad / "model.safetensors").write_bytes(b"cut off")
    outcome = train(config(tmp_path, resume="latest", **made))
    assert "step-00000004 is damaged (model.safetensors is" in capsys.readouterr().out
    assert checkpoint.latest(place).name == "step-00000005"
    assert [path.name for path in checkpoint.steps_in(place)] == ["step-00000005"]
    assert len(losses(outcome)) == 5


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path):
    stopped(config(tmp_path))
    (tmp_path / "run/checkpoints/step-00000003/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="with another --name"):
        Trainer(config(tmp_path, resume="latest"), ALONE)


def test_a_setting_of_an_evaluation_that_fails_late_loses_nothing(tmp_path):
    trainer = Trainer(config(tmp_path, retrieval=["synthetic:9"]), ALONE)
    trainer.suite.run = lambda *args, **more: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.run()
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == "step-00000005"


def test_half_precision_goes_on_with_its_factor(tmp_path):
    first = Trainer(config(tmp_path, precision="amp_fp16"), ALONE)
    first.stepper.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    first.stepper.cached.scaler = first.stepper.scaler
    steps = first._steps()
    next(steps)
    first._save(1)
    steps.close()
    first.close()
    again = Trainer(config(tmp_path, precision="amp_fp16", resume="latest"), ALONE)
    assert again.stepper.scaler.get_scale() == first.stepper.scaler.get_scale()
    with torch.no_grad():
        again.model.net.visual.head.proj.weight.fill_(math.nan)
    before = again.stepper.scaler.get_scale()
    assert next(again._steps())[1]["skipped"] == 1.0
    assert again.stepper.scaler.get_scale() == before / 2


def on_ranks(rank, made, world):
    outcome = train(made, Ranks(rank, world, torch.device("cpu")))
    return losses(outcome) if rank == 0 else None


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (2, {}),
        (3, {}),
        (2, {"dist": "fsdp", "ema": 0.9, "retrieval": ["synthetic:9"], "eval_batch": 2}),
        (2, {"dist": "fsdp", "opt": "adafactor"}),
    ],
    ids=str,
)
def test_ranks_train_as_one_does(tmp_path, world, how):
    # 25 pairs on 2 or 3 ranks: not the same number on each.
    size, opt = 24 if how else 25, how.get("opt", "adamw")
    alone = losses(train(config(tmp_path, name="alone", batch_size=size, opt=opt)))
    made = config(tmp_path, name="ranks", batch_size=size, micro_batch=9 if not how else 12, **how)
    together = ranks.run(on_ranks, world, made, world)[0]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=2e-4, atol=0)


def warned(rank, made):
    with warnings.catch_warnings(record=True) as caught:
        train(made, Ranks(rank, 2, torch.device("cpu")))
    return [str(each.message) for each in caught]


def test_strides_of_gradients_are_no_news(tmp_path):
    """PyTorch warns of those of convolutions, on every rank."""
    for said in ranks.run(warned, 2, config(tmp_path, steps=1)):
        assert not [each for each in said if "strides" in each]


def resumed(rank, made):
    trainer = Trainer(made, Ranks(rank, 2, torch.device("cpu")))
    step, numbers = next(trainer._steps())
    return step, numbers["loss"]


def saved_again(rank, made):
    """A checkpoint of what was loaded from one, without a step between."""
    trainer = Trainer(made, Ranks(rank, 2, torch.device("cpu")))
    trainer._save(3)
    trainer.close()


@pytest.mark.parametrize("opt", ["adamw", "adafactor"])
def test_one_process_and_shards_read_each_others_checkpoints(tmp_path, opt):
    more = {"ema": 0.5, "steps": 5, "opt": opt}
    trainer = stopped(config(tmp_path, **more))
    place = tmp_path / "run/checkpoints/step-00000003"
    before = [load_file(place / f"{name}.safetensors") for name in ("model", "optimizer")]
    wanted = trainer.stepper.step(3, 5, next(trainer.batches.since(3)))["loss"]
    made = config(tmp_path, resume="latest", dist="fsdp", **more)
    for step, loss in ranks.run(resumed, 2, made):
        assert step == 4
        assert loss == pytest.approx(wanted, rel=1e-4)
    ranks.run(saved_again, 2, made)
    for name, held in zip(("model", "optimizer"), before, strict=True):
        again = load_file(place / f"{name}.safetensors")
        assert again.keys() == held.keys()
        assert all(torch.equal(again[key].reshape(x.shape), x) for key, x in held.items())
    assert Trainer(config(tmp_path, resume="latest", **more), ALONE).first_step == 3


def not_stepped(rank, made):
    """How much state the optimizer has after a checkpoint, and after it is loaded."""
    who = Ranks(rank, 2, torch.device("cpu"))
    first = Trainer(made, who)
    first._save(1)
    first.close()
    who.wait()
    again = Trainer(replace(made, run=replace(made.run, resume="latest")), who)
    return len(first.stepper.optimizer.state), len(again.stepper.optimizer.state)


def test_shards_of_an_optimizer_that_has_taken_no_step(tmp_path):
    assert ranks.run(not_stepped, 2, config(tmp_path, dist="fsdp")) == [(0, 0)] * 2


def test_features_in_host_memory_are_of_one_process(tmp_path):
    with pytest.raises(OptionError, match="for one process, got 2 ranks; set --features device"):
        Trainer(config(tmp_path, features="host"), Ranks(0, 2, torch.device("cuda")))
    assert not (tmp_path / "run").exists()


def test_shards_need_equal_numbers_of_micro_batches(tmp_path):
    made = config(tmp_path, dist="fsdp", batch_size=25, micro_batch=12)
    with pytest.raises(OptionError, match="make batch_size a multiple of 2"):
        Trainer(made, Ranks(0, 2, torch.device("cpu")))


def nan_on_one(rank, made):
    trainer = Trainer(made, Ranks(rank, 2, torch.device("cpu")))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    forward = trainer.model.forward

    def broken(**inputs):
        out = forward(**inputs)
        return {**out, "rows": out["rows"] * (math.nan if rank == 1 else 1.0)}

    trainer.model.forward = broken
    steps = trainer._steps()
    told = [next(steps)[1].get("skipped") for _ in range(2)]
    unchanged = all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    trainer.model.forward = forward
    after = next(steps)[1]
    return told, unchanged, math.isfinite(after["loss"])


def test_a_step_that_is_not_finite_on_one_rank_is_taken_by_none(tmp_path):
    for told, unchanged, goes_on in ranks.run(nan_on_one, 2, config(tmp_path)):
        assert told == [1.0, 2.0]
        assert unchanged
        assert goes_on


def test_skipped_steps_are_counted_and_told(tmp_path, monkeypatch, capsys):
    """Over all parts of a run."""
    plain, calls = Stepper._clip, []
    monkeypatch.setattr(Stepper, "_clip", lambda self: plain(self) * (
        math.nan if len(calls) in (1, 3) else 1.0) * (calls.append(0) or 1.0))  # fmt: skip
    stopped(config(tmp_path), after=2)
    monkeypatch.setattr(Screen, "QUIET_S", -1.0)
    outcome = train(config(tmp_path, resume="latest"))
    rows = [row.get("skipped") for row in Log(outcome.folder).rows() if "loss" in row]
    assert rows == [None, 1.0, 1.0, 2.0, 2.0]
    told = capsys.readouterr().out
    assert "1 skipped" in told
    assert "skipped, their loss or gradient not being finite: 2 of 5 steps" in told


def test_too_many_skipped_steps_stop_the_run(tmp_path):
    trainer = Trainer(config(tmp_path, max_skipped=1), ALONE)
    with torch.no_grad():
        trainer.model.net.visual.head.proj.weight.fill_(math.nan)
    with pytest.raises(FiniteError, match="2 steps in a row were skipped, up to step 2: "):
        trainer.run()


@pytest.mark.parametrize("opt", ["adamw", "adafactor", "lion", "lamb"])
def test_every_optimizer_changes_the_weights(tmp_path, opt):
    trainer = Trainer(config(tmp_path, opt=opt, steps=2), ALONE)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    list(trainer._steps())
    moved = [
        name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])
    ]
    assert len(moved) > 0.9 * len(before)


def test_adafactor_learns_at_the_learning_rate_of_adamw():
    """Whatever the size of the weights: a bias that is 0 moves as far as others do."""
    model = nn.Linear(32, 32)
    with torch.no_grad():
        model.bias.zero_()
        model.weight.mul_(1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(opt="adafactor", lr=1e-2, wd=0.0, beta1=0.5))
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.ones(4, 32)) - 3).square().sum().backward()
        optimizer.step()
    for name, p in model.named_parameters():
        moved = float((p.detach() - before[name]).abs().mean())
        assert moved == pytest.approx(7 * 1e-2, rel=0.2)  # the momentum begins at 0
    assert {group["beta2_cap"] for group in optimizer.param_groups} == {0.98}


def test_the_learning_rate_of_a_step():
    """Linear over the warm-up, then a cosine to 0, or constant."""
    cosine, const = (OptimConfig(warmup=4, lr_scheduler=each) for each in ("cosine", "const"))
    assert [lr_at(step, 12, 1.0, cosine) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_at(8, 12, 1.0, cosine) == pytest.approx(0.5)
    assert lr_at(12, 12, 1.0, cosine) == pytest.approx(0.0)
    assert [lr_at(step, 12, 1.0, const) for step in (3, 4, 11)] == [1.0] * 3


@pytest.mark.parametrize(("how", "wanted"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_the_learning_rate_grows_with_the_batch(how, wanted):
    made = OptimConfig(lr=1e-3, lr_scaling=how, lr_batch=256)
    assert peak_lr(made, 1024) == pytest.approx(wanted)


def test_a_run_follows_its_schedule(tmp_path):
    made = config(tmp_path, lr=0.1, lr_scaling="linear", lr_batch=48, lr_scheduler="const")
    steps = Trainer(made, ALONE)._steps()
    assert [numbers["lr"] for _, numbers in steps] == pytest.approx([0.025, *[0.05] * 4])


def test_gradients_are_clipped_together(tmp_path):
    model = nn.Linear(3, 1)
    for limit, after in ((0.0, 5.0), (1.0, 1.0)):
        model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([4.0])
        assert clip_gradients(model, limit) == 5.0
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        assert norm == pytest.approx(after, abs=1e-5)
    trainer = Trainer(config(tmp_path, grad_clip_norm=1e-3), ALONE)
    assert next(trainer._steps())[1]["grad_norm"] > 1e-3
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm() == pytest.approx(1e-3, rel=1e-3)


def test_patches_are_left_out_in_training(tmp_path):
    (tmp_path / "vit.json").write_text(json.dumps(VIT))
    made = config(tmp_path, model=str(tmp_path / "vit.json"), patch_dropout=0.5)
    model, seen = Trainer(made, ALONE).model, []
    model.net.visual.transformer.register_forward_hook(
        lambda part, given, out: seen.append(out.shape[1])
    )
    pixels = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    model.images(pixels)
    with evaluating(model):
        model.images(pixels)
    assert seen == [8 + 1, 16 + 1]  # the class token is never left out


@pytest.mark.parametrize("kind", ["clip", "text"])
def test_siglip_has_a_bias_that_learns(tmp_path, kind):
    more = {**text_data(tmp_path, negatives=False), "loss": "siglip"} if kind == "text" else {}
    more = {"loss": "siglip", "init_bias": -3.0, "lr": 0.01, **more}
    trainer = Trainer(config(tmp_path, **more), ALONE)
    name = "logit_bias" if kind == "text" else "net.logit_bias"
    assert trainer.model.state_dict()[name] == -3.0
    outcome = trainer.run()
    assert weights(outcome)[name] != -3.0
    assert all(map(math.isfinite, losses(outcome)))
    assert train(config(tmp_path, resume="latest", **{**more, "steps": 6})).steps == 6


def test_the_scale_is_clamped(tmp_path):
    """To [1, max_scale], whatever it was before."""
    trainer = Trainer(config(tmp_path, temperature=0.2, max_scale=9.0, lr=1e-6), ALONE)
    for before, after in ((20.0, 9.0), (0.5, 1.0)):
        trainer.model.set_scale(before, learn=True)
        _, numbers = next(trainer._steps())
        assert numbers["scale"] == pytest.approx(after)


def test_bf16_trains(tmp_path):
    how = {"steps": 15, "lr": 3e-3, "train_data": "synthetic:48,cells=1"}
    plain = losses(train(config(tmp_path, **how)))
    half = losses(train(config(tmp_path, name="half", precision="amp_bf16", **how)))
    assert half != plain
    assert abs(half[0] - plain[0]) < 0.05
    assert half[-1] < 0.9 * half[0]


def text_data(tmp_path, negatives=True):
    words = ["red", "green", "blue", "big", "small"]
    rows = [
        {"query": f"a {a} {b}", "positive": f"{b} thing", "negatives": [f"{a} a", "a a"]}
        for a in words for b in words
    ]  # fmt: skip
    rows = rows if negatives else [{**row, "negatives": []} for row in rows]
    table = tmp_path / "pairs.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    folder = make_text_folder(tmp_path / "bert")
    return {"kind": "text", "model": folder, "train_data": str(table), "loss": "info_nce"}


def test_queries_and_documents_in_two_parts(tmp_path):
    """Parts of the encoder that nothing uses, a pooler, have no state to save."""
    more = {**text_data(tmp_path), "retrieval": [str(tmp_path / "pairs.jsonl")]}
    whole = train(config(tmp_path, name="whole", **more))
    assert "MRR@10" in {name.rsplit("/", 1)[1] for name in whole.metrics}
    stopped(config(tmp_path, name="parts", **more))
    second = train(config(tmp_path, name="parts", resume="latest", **more))
    assert losses(second) == losses(whole)


def test_prefixes_are_those_of_training_wherever_texts_are_embedded(tmp_path):
    """By the evaluations of a run, and by `tilewise eval` of it."""
    pairs = str(tmp_path / "pairs.jsonl")
    more = {**text_data(tmp_path), "retrieval": [pairs], "max_length": 12}
    more |= {"query_prefix": "red red ", "document_prefix": "small a "}
    trainer = Trainer(config(tmp_path, steps=1, **more), ALONE)
    source = trainer.suite.sources[pairs]
    form = trainer.model.form(View(1))
    inputs = load(source, form, range(len(source)), np.zeros((len(source), 1))).inputs
    metrics = trainer.run().metrics
    with evaluating(trainer.model):
        out = trainer.model(**inputs)
        found = Embedder(trainer.model, 8).embed(source)
    torch.testing.assert_close(found.queries.features, out["rows"])
    each = dict(zip(found.texts.ids.tolist(), found.texts.features, strict=True))
    documents = torch.stack([each[source[i]["id"]] for i in range(len(source))])
    torch.testing.assert_close(documents, out["cols"])
    assert eval_command([str(tmp_path / "run")]) == 0
    again = json.loads((tmp_path / "run" / "eval-step-00000001" / "metrics.json").read_text())
    assert again == metrics
    assert export_command([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    place = ["--retrieval", pairs, "--runs", str(tmp_path)]
    assert eval_command([str(tmp_path / "out"), *place]) == 0
    exported = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert exported == pytest.approx(metrics)


def test_queries_and_documents_on_ranks(tmp_path):
    more = {**text_data(tmp_path), "batch_size": 13}
    alone = losses(train(config(tmp_path, name="alone", **more)))
    made = config(tmp_path, name="ranks", **more, micro_batch=3)
    together = ranks.run(on_ranks, 2, made, 2)[0]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=2e-4, atol=0)


def test_two_views(tmp_path):
    made = config(
        tmp_path, kind="simclr", model="test_convnext2", image_size=32, loss="nt_xent", flip=True,
        temperature=0.5, projector=[32, 16], grayscale=0.2, blur=0.2, retrieval=[],
        probe=["synthetic:40,cells=1", "synthetic:20,cells=1,seed=1"],
    )  # fmt: skip
    outcome = train(made)
    assert all(map(math.isfinite, losses(outcome)))
    assert {name.rsplit("/", 1)[1] for name in outcome.metrics} >= {"knn_top1", "linear_probe_top1"}


def test_a_locked_tower_stays_and_its_features_can_be_cached(tmp_path, monkeypatch, capsys):
    how = {"eval_batch": 16, "lock_image": True, "crop_scale": 1.0, "jitter": 0.0}
    plain = train(config(tmp_path, name="plain", **how))
    trainer = Trainer(config(tmp_path, name="again", **how), ALONE)
    own = {f"net.visual.trunk.{n}": p for n, p in trainer.model.net.visual.trunk.named_parameters()}
    assert not any(p.requires_grad for p in own.values())
    assert all(torch.equal(weights(plain)[name], p) for name, p in own.items())
    monkeypatch.setattr(Screen, "QUIET_S", -1.0)
    for name in ("first", "second"):
        cached = train(config(tmp_path, name=name, feature_cache=str(tmp_path / "cache"), **how))
        assert ("embedding with the locked tower: " in capsys.readouterr().out) == (name == "first")
        torch.testing.assert_close(
            torch.tensor(losses(cached)), torch.tensor(losses(plain)), rtol=2e-3, atol=0
        )
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_cached_features_are_those_of_the_data_and_of_the_tower(tmp_path):
    how = {"lock_image": True, "crop_scale": 1.0, "jitter": 0.0, "steps": 1}
    cache = {"feature_cache": str(tmp_path / "cache")}
    for name, more in (("a", {}), ("b", {"train_data": "synthetic:100,cells=2,noise=0.9"}),
                       ("c", {"seed": 3}), ("d", {"learn_temperature": False})):  # fmt: skip
        plain = losses(train(config(tmp_path, name=name, **how, **more)))
        cached = losses(train(config(tmp_path, name=name + "2", **how, **cache, **more)))
        torch.testing.assert_close(torch.tensor(cached), torch.tensor(plain), rtol=2e-3, atol=0)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_fixed_temperature_stays(tmp_path):
    made = config(tmp_path, temperature=2.0, learn_temperature=False)
    assert weights(train(made))["net.logit_scale"] == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"train_data": "no/such/data"}, DataError, "there are no data"),
        ({"retrieval": ["no/such/data"]}, DataError, "there are no data"),
        ({"model": "ViT-B-33"}, OptionError, "near it"),
        ({"pretrained": "weights.pt"}, Exception, "not there"),
        ({"kind": "text", "model": "nowhere", "retrieval": []}, OptionError, "local folder"),
        ({"zero_shot": ["synthetic:9"], "classes": "none.txt"}, OptionError, "none.txt"),
        ({"report_to": ["wandb"]}, OptionError, "pip install wandb"),
        *(
            ({**kind, **field}, OptionError, f"{next(iter(field))} belongs to .*; leave --")
            for kind, field in [
                (SIMCLR, {"patch_dropout": 0.5}),
                (SIMCLR, {"max_length": 8}),
                (SIMCLR, {"query_prefix": "a"}),
                ({"kind": "text"}, {"image_size": 32}),
                ({"kind": "text"}, {"projector": [8]}),
                ({}, {"document_prefix": "a"}),
                ({}, {"init_bias": -3.0}),
            ]
        ),
        ({"max_scale": 0.5}, OptionError, "max_scale must be at least 1, got 0.5"),
        ({"temperature": 2.0}, OptionError, "1 / max_scale = 0.01 to 1, got 2; or fix it"),
        ({"temperature": 0.1, "max_scale": 9.0}, OptionError, "max_scale = 0.111111 to 1"),
        ({"model": "RN50"}, OptionError, r"RN50 has BatchNorm \(.*accept that with --batch-norm"),
        (
            {**SIMCLR, "model": "vgg11", "image_size": 32, "grad_checkpointing": True},
            OptionError,
            "vgg11 cannot recompute its activations: .*leave --grad-checkpointing out",
        ),
        (
            {**SIMCLR, "model": "test_byobnet", "grad_checkpointing": True, "knows": False},
            OptionError,
            "test_byobnet cannot recompute its activations; leave",
        ),
        (
            {**SIMCLR, "model": "test_vit", "image_size": 40},
            OptionError,
            "test_vit does not take images of 40 x 40 pixels: .*; set --image-size",
        ),
    ],
)
def test_what_is_missing_is_missed_before_anything_is_written(
    tmp_path, fields, error, says, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    if not fields.pop("knows", True):
        monkeypatch.setattr(build, "hasattr", lambda *of: False, raising=False)
    with pytest.raises(error, match=says):
        Trainer(config(tmp_path, **fields), ALONE)
    assert not (tmp_path / "run").exists()


def test_a_gpu_recipe_without_a_gpu(tmp_path):
    from tilewise.train.loop import train as start

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="--device cpu"):
        start(config(tmp_path, device="cuda"))


def test_a_run_is_not_written_over(tmp_path):
    train(config(tmp_path, steps=1))
    with pytest.raises(OptionError, match="--resume latest"):
        train(config(tmp_path, steps=1))


def test_too_many_damaged_samples_stop_the_run(tmp_path):
    table = tmp_path / "pairs.jsonl"
    rows = [{"image": f"{i}.png", "text": f"thing {i}"} for i in range(40)]
    table.write_text("\n".join(map(json.dumps, rows)))
    from PIL import Image

    for i in range(0, 40, 2):
        Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i + 1}.png")
        (tmp_path / f"{i}.png").write_bytes(b"not an image")
    fine = train(config(tmp_path, train_data=str(table), max_bad_share=1.0, steps=2))
    assert all(map(math.isfinite, losses(fine)))
    with pytest.raises(DataError, match="damaged"):
        train(config(tmp_path, name="strict", train_data=str(table), steps=2))
