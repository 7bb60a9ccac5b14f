"""Configurations: checked, complete on the command line, refused with the nearest name."""

import dataclasses
import inspect
import math
import sys
import warnings

import pytest
import torch

from tilewise.cli import main
from tilewise.config import Config
from tilewise.errors import OptionError
from tilewise.train import checks
from tilewise.train.configfile import ALIASES, from_tables, read, recipes, to_toml, with_flags


def fields():
    for section in dataclasses.fields(Config):
        for each in dataclasses.fields(section.default_factory):
            yield section.name, each


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_parses_and_comes_back(name, tmp_path):
    config = read(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert read(str(path)) == config


def test_the_papers_recipes_are_there():
    wanted = {"emoji", "cc3m-b32-16k", "cc12m-b32-32k", "cc12m-b16-32k", "laion400m-b32-256k",
              "laion400m-b16-lit-256k", "laion400m-l14-256k", "iconify", "wordnet", "lit-cifar10",
              "simclr-cifar10"}  # fmt: skip
    assert wanted <= set(recipes())


SCRATCH = {"opt": "adamw", "lr": 5e-4, "wd": 0.5, "beta2": 0.98, "eps": 1e-8, "grad_clip_norm": 0.0}
LIT = {"opt": "adafactor", "lr": 1e-3, "wd": 1e-4, "beta2": 0.95, "grad_clip_norm": 1.0}


@pytest.mark.parametrize(
    ("name", "optim", "samples", "epochs"),
    [
        ("cc3m-b32-16k", SCRATCH, 3_018_714, 40),
        ("cc12m-b32-32k", SCRATCH, 10_445_970, 40),
        ("laion400m-b32-256k", SCRATCH, 280_321_756, 8),
        ("laion400m-b16-lit-256k", LIT, 280_321_756, 8),
    ],
)
def test_recipes_are_as_the_authors_scripts_have_them(name, optim, samples, epochs):
    config = read(name)
    assert {key: getattr(config.optim, key) for key in optim} == optim
    assert config.optim.lr_scaling == "none"
    assert config.optim.warmup == samples // (2 * config.step.batch_size)  # half an epoch
    assert config.data.crop_scale == 0.08
    assert config.run.epochs == epochs


def test_other_names_are_of_fields():
    names = {each.name for _, each in fields()}
    assert set(ALIASES.values()) <= names
    assert not set(ALIASES) & names


def test_every_field_has_a_flag_of_its_own_and_a_sentence():
    names = [each.name for _, each in fields()]
    assert len(names) == len(set(names))
    text = inspect.getsource(sys.modules[Config.__module__])
    for name in names:
        line = text.index(f"    {name}: ")
        after = text[text.index("\n", line) :].lstrip()
        assert after.startswith('"""'), f"{name} has no sentence under it"


def test_any_field_can_be_given_as_a_flag():
    base = read("emoji")
    changed = with_flags(
        base,
        ["--lr", "0.5", "--lock-image", "--retrieval", "a", "b", "--keep", "12", "--model", "RN50",
         "--precision", "amp_bf16", "--resume", "latest", "--name", "x", "--no-mask-equal"],
        prog="test",
    )  # fmt: skip
    assert changed.optim.lr == 0.5
    assert changed.model.lock_image
    assert changed.model.model == "RN50"
    assert changed.eval.retrieval == ("a", "b")
    assert changed.step.keep == 12
    assert changed.step.precision == "amp_bf16"
    assert changed.run.resume == "latest"
    assert not changed.data.mask_equal
    assert with_flags(base, [], prog="test") == base


def test_torchrun_takes_no_flag_for_one_of_its_own():
    """It refuses what could be the beginning of two of its options, wherever it stands."""
    from torch.distributed.run import get_args_parser

    flags = [f"--{each.name.replace('_', '-')}" for _, each in fields()]
    parsed = get_args_parser().parse_args(["--no-python", "tilewise", "train", *flags])
    assert parsed.training_script_args == ["train", *flags]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"optimm": {}}, "did you mean 'optim'"),
        ({"optim": {"lrr": 1.0}}, "did you mean 'lr'"),
        ({"optim": {"zzz": 1.0}}, "there are opt, lr"),
        ({"optim": {"lr": "big"}}, "must be of type float"),
        ({"optim": {"lr": -1.0}}, "lr must be above 0"),
        ({"optim": {"opt": "adam"}}, "did you mean 'adamw'"),
        ({"optim": 3}, "must be a table"),
        ({"optim": {"lr_scaling": "sqrt"}}, "needs lr_batch"),
        ({"step": {"batch_size": 1.5}}, "must be of type int"),
        ({"step": {"keep": "all"}}, "keep"),
        ({"step": {"keep": True}}, "step.keep must be 'auto' or a number, got True"),
        ({"eval": {"retrieval": [1]}}, "retrieval must hold values of type str, got 1"),
        ({"eval": {"templates": ["{}", ["{}"]]}}, r"values of type str, got \['{}'\]"),
        ({"model": {"projector": [1.5]}}, "projector must hold values of type int, got 1.5"),
        ({"model": {"projector": ["a"]}}, "values of type int, got 'a'"),
        ({"model": {"projector": [True, 128]}}, "values of type int, got True"),
        ({"run": {"report_to": [1]}}, "must be one of tensorboard"),
        ({"step": {"pool": 10}}, "loss = 'info_nce'"),
        ({"loss": {"loss": "nt_xent"}}, "belong together"),
        ({"loss": {"loss": "siglip", "label_smoothing": 0.1}}, "label_smoothing"),
        ({"data": {"crop_scale": 0.0}}, "crop_scale"),
        ({"data": {"feature_cache": "x"}}, "lock_image"),
        ({"model": {"kind": "text", "lock_image": True}}, "belong to kind"),
        ({"eval": {"probe": ["one"]}}, "two data sets"),
        ({"eval": {"templates": []}}, "templates"),
        ({"run": {"name": "a/b"}}, "name of a folder"),
        ({"run": {"name": "a\x07b"}}, r"without control characters, got 'a\\x07b'"),
        ({"run": {"name": "a\x7f"}}, "without control characters"),
        ({"run": {"report_to": ["tensorbord"]}}, "did you mean 'tensorboard'"),
        ({"run": {"epochs": 0}}, "epochs must be above 0"),
        ({"run": {"epochs": math.inf}}, "epochs must be above 0 and finite, got inf"),
        ({"run": {"steps": -1}}, "steps must not be negative, got -1"),
        ({"loss": {"temperature": math.inf}}, "temperature must be above 0 and finite"),
        ({"optim": {"lr": math.inf}}, "lr must be above 0 and finite"),
        ({"loss": {"max_scale": 0.0}}, "max_scale must be above 0, got 0.0"),
        ({"loss": {"init_bias": -math.inf}}, "init_bias must be finite, got -inf"),
        ({"optim": {"wd": math.inf}}, "wd must be finite and not negative, got 20, inf"),
        ({"step": {"pool_where": "hsot"}}, r"a path, ./NAME for one here, got 'hsot'"),
        ({"run": {"resume": "latest"}}, "give --name"),
        ({"run": {"seed": 2**40}}, "seed must be below"),
        ({"model": {"kind": "text", "pretrained": "x"}}, "leave pretrained out"),
        (
            {"model": {"lock_image": True}, "data": {"feature_cache": "x", "flip": True}},
            "features are cached of images as they are",
        ),
    ],
)
def test_what_cannot_be_right_is_told(tables, says):
    with pytest.raises(OptionError, match=says):
        from_tables(tables, "run.toml")


def test_whole_numbers_stand_for_floats_and_lists_for_tuples():
    made = from_tables({"optim": {"lr": 1}, "eval": {"retrieval": ["x"]}}, "run.toml")
    assert made.optim.lr == 1.0
    assert made.eval.retrieval == ("x",)


def test_any_text_and_number_comes_back(tmp_path):
    texts = ['a \U0001f600 "{}"', "é {}\n", "{} \x7f\x00\u2028"]
    tables = {"eval": {"templates": texts}, "step": {"keep": 1e400}}
    config = from_tables(tables, "run.toml")
    (tmp_path / "again.toml").write_text(to_toml(config), encoding="utf-8")
    assert read(str(tmp_path / "again.toml")) == config


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("lr = = 3")
    with pytest.raises(OptionError, match="is not TOML"):
        read(str(path))
    path.write_bytes('[run]\nname = "é"\n'.encode("latin-1"))
    with pytest.raises(OptionError, match=r"run.toml is not TOML, which is UTF-8"):
        read(str(path))
    path.write_text('[run]\nname = "é"\n', encoding="utf-8-sig")  # with the mark of some editors
    assert read(str(path)).run.name == "é"


def test_the_command_prints_its_configuration(capsys, tmp_path):
    assert main(["train", "--print-config", "--lr", "0.25"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "printed.toml"
    path.write_text(printed)
    assert read(str(path)).optim.lr == 0.25


def test_an_unknown_recipe_is_told_with_those_near_it(capsys):
    assert main(["train", "emojis"]) == 2
    assert "near it: emoji" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch-sizes", "3"], "there is no flag --batch-sizes; near it: --batch-size\n"),
        (["--learning-rate=1"], "near it: --lr, "),
        (["--weight-decay", "1"], "near it: --wd\n"),
        (["--optimizer", "lion"], "near it: --opt\n"),
        (["--warmup-steps=3"], "near it: --warmup\n"),
        (["--accum-freq", "4"], "here it is --micro-batch: Pairs that the encoders take at once"),
        (["--save-frequency", "1"], "here it is --save-every: Steps between checkpoints"),
        (["--bf16"], "here it is --precision: fp32, or mixed precision"),
        (["--zzz"], "see tilewise train [RECIPE] --help"),
        (["--zz"], "see tilewise train [RECIPE] --help"),
        (["--s", "1"], "there is no flag --s; see tilewise train [RECIPE] --help"),
        (["--lr", "1e-3", "emoji"], "goes before all flags: tilewise train emoji ..."),
        (["--flip", "true"], "'true' is not the value of a flag; one that is on or off takes none"),
    ],
    ids=str,
)
def test_an_unknown_flag_is_told_with_those_near_it(capsys, flags, says):
    """By name, or by what their sentences say."""
    assert main(["train", *flags]) == 2
    assert says in capsys.readouterr().err


def test_what_may_be_infinite_or_a_path():
    assert from_tables({"loss": {"max_scale": math.inf}}, "run.toml").loss.max_scale == math.inf
    for where in ("./pool", "pool.bin", "/data/pool", "host"):
        assert from_tables({"step": {"pool_where": where}}, "run.toml").step.pool_where == where


def test_an_old_torch_is_warned_of(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.warn_of_old_torch()
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.warns(UserWarning, match=r"torch 2\.9\.1.*CVE-2026-24747.*'torch>=2\.10'"):
        checks.warn_of_old_torch()
