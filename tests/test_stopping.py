"""Runs that are told to stop: a checkpoint where they are, and what they end with."""

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

import ranks
from test_train import config, losses, same, train, weights
from tilewise import cli
from tilewise.ranks import Ranks
from tilewise.train import checkpoint
from tilewise.train.configfile import to_toml
from tilewise.train.loop import RESULTS, Trainer
from tilewise.train.stepping import Stepper
from tilewise.train.stopping import Stop

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def _listening():
    """A shell lets what it runs in the background ignore SIGINT; runs respect that."""
    before = {number: signal.getsignal(number) for number in CODES}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    """As `nohup` and shells have it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signalled(monkeypatch, Stepper, "step", second_step, signal.SIGINT)
    assert command(tmp_path) == 0


def command(tmp_path, **fields):
    """Through the command line, in this process; its exit code."""
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config(tmp_path, **fields)))
    return cli.main(["train", str(path)])


def signalled(monkeypatch, place, name, when, *numbers):
    """Calls of `name` send signals to this process before they do what they do."""
    former = getattr(place, name)

    def sending(self, *args, **more):
        if when(*args):
            for number in numbers:
                os.kill(os.getpid(), number)
        return former(self, *args, **more)

    monkeypatch.setattr(place, name, sending)


def second_step(step, *_):
    return step == 1


@pytest.mark.parametrize("number", CODES, ids=str)
def test_a_signal_saves_after_the_step_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    whole = train(config(tmp_path, name="whole", wd=0.1))
    before = [signal.getsignal(each) for each in CODES]
    with monkeypatch.context() as sent:
        signalled(sent, Stepper, "step", second_step, number)
        assert command(tmp_path, wd=0.1) == CODES[number]
    assert [signal.getsignal(each) for each in CODES] == before
    told = capsys.readouterr().out
    assert f"stopped by {number.name} after step 2 of 5, saved as {tmp_path}/run" in told
    assert f"step-00000002; go on with: tilewise train {tmp_path}/run/config.toml" in told
    assert checkpoint.latest(tmp_path / "run/checkpoints").name == "step-00000002"
    assert not (tmp_path / "run" / RESULTS).exists()
    go_on = told[told.index("tilewise train") :].splitlines()[0]
    assert cli.main(shlex.split(go_on)[1:]) == 0
    assert "with other settings" not in capsys.readouterr().out
    second = Trainer(
        config(tmp_path, resume="latest", wd=0.1), Ranks(0, 1, torch.device("cpu"))
    ).run()
    assert losses(second) == losses(whole)
    assert same(weights(second), weights(whole))


@pytest.mark.parametrize("number", CODES, ids=str)
def test_before_the_first_step_nothing_is_saved(tmp_path, monkeypatch, capsys, number):
    signalled(monkeypatch, Trainer, "_check_sample", lambda: True, number)
    assert command(tmp_path) == CODES[number]
    said = f"stopped by {number.name} before its first step: nothing was trained or saved"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_terminal_that_is_closed_may_say_so_twice(tmp_path, monkeypatch, capsys):
    signalled(monkeypatch, Stepper, "step", second_step, signal.SIGHUP, signal.SIGHUP)
    assert command(tmp_path) == 129
    assert checkpoint.latest(tmp_path / "run/checkpoints").name == "step-00000002"


def test_a_second_interrupt_acts_at_once(tmp_path, monkeypatch, capsys):
    signalled(monkeypatch, Stepper, "step", second_step, signal.SIGINT, signal.SIGINT)
    assert command(tmp_path) == 130
    assert "interrupted at once" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path / "run/checkpoints") is None


@pytest.mark.parametrize("step", [2, 5])
def test_an_evaluation_ends_early(tmp_path, monkeypatch, step):
    """After the last step too: what was trained is saved, what was not measured is afterwards."""
    how = {"retrieval": ["synthetic:30"], "eval_batch": 8, "eval_every": 2, "ema": 0.5}
    whole = train(config(tmp_path, name="whole", **how))
    with monkeypatch.context() as sent:
        signalled(sent, Trainer, "_evaluate", lambda now: now == step, signal.SIGTERM)
        assert command(tmp_path, **how) == 143
    assert checkpoint.latest(tmp_path / "run/checkpoints").name == f"step-{step:08d}"
    assert not (tmp_path / "run" / RESULTS).exists()
    second = train(config(tmp_path, resume="latest", **how))
    assert second.metrics == whole.metrics
    assert same(weights(second, "ema"), weights(whole, "ema"))


def told_to_stop(rank, made, whom):
    step = Stepper.step

    def sending(self, number, *args):
        if number == 1 and rank in whom:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number, *args)

    Stepper.step = sending
    with Stop() as stop:
        outcome = Trainer(made, Ranks(rank, 2, torch.device("cpu")), stop).run()
    return outcome.steps, outcome.signal


@pytest.mark.parametrize("whom", [(1,), (0, 1)], ids=str)
def test_ranks_stop_together(tmp_path, whom):
    made = config(tmp_path, dist="fsdp" if len(whom) == 1 else "ddp")
    assert ranks.run(told_to_stop, 2, made, whom) == [(2, signal.SIGTERM)] * 2
    assert checkpoint.latest(tmp_path / "run/checkpoints").name == "step-00000002"


def test_a_signal_to_all_processes_leaves_those_that_load(tmp_path):
    """As of Ctrl-C and of torchrun: the step that is under way still needs its data."""
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config(tmp_path, workers=2, steps=100_000)))
    command = [sys.executable, "-m", "tilewise", "train", str(path)]
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        log = tmp_path / "run/metrics.jsonl"
        while process.poll() is None and not (log.exists() and log.read_text()):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "stopped by SIGTERM after step" in out
    assert not err
    assert checkpoint.latest(tmp_path / "run/checkpoints") is not None


def test_a_terminal_that_is_closed_takes_nothing_with_it(tmp_path):
    """What is shown then goes nowhere, and what was trained is saved."""
    path, log = tmp_path / "run.toml", tmp_path / "run/metrics.jsonl"
    path.write_text(to_toml(config(tmp_path, steps=100_000)))
    ours, theirs = pty.openpty()
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"  # its own terminal
    command = [sys.executable, "-c", f"{code}; from tilewise.cli import run; run()", "train", path]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        while process.poll() is None and not (log.exists() and log.read_text()):
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        os.close(ours)
        assert process.wait(timeout=60) == 129
    assert checkpoint.latest(tmp_path / "run/checkpoints") is not None
