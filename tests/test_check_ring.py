"""`tilewise check-ring`, as torchrun starts it."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import tilewise as tw
from ranks import run
from tilewise import check_ring, cli, ring

TINY = ["--pairs", "64", "--dim", "16", "--repeats", "1"]


def launch(*arguments):
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m"]
    command = [*start, "tilewise", "check-ring", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_three_ranks():
    done = launch(*TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks on 1 node, gloo" in done.stdout
    assert "all ranks agree with one process" in done.stdout
    rows = re.findall(
        r"│ (clip|siglip|nt_xent) +│ (ring|two-level|gather) +│ +(\S+) │", done.stdout
    )
    assert len(rows) == 9
    assert all(float(found) < 1e-13 for *_, found in rows)
    assert "GB/s" in done.stdout
    assert "schedule='auto' takes" in done.stdout
    assert done.stdout.count("agree with one process") == 1, "one rank prints"


def on_unequal_nodes(rank):
    os.environ.update(GROUP_RANK=str(rank // 2))
    config = check_ring.CheckConfig(pairs=16, dim=4, repeats=1)
    return check_ring.run(config, torch.device("cpu"))


def test_unequal_nodes_have_no_two_levels():
    for report in run(on_unequal_nodes, 3):
        assert report.fine
        assert [speed.schedule for speed in report.speeds] == ["ring", "gather"]


def spoilt(rank, schedule):
    """A report of ranks that get what was not sent."""
    wait = ring.Message.wait

    def wrong(self):
        received = wait(self)
        for x in received:
            if x.is_floating_point():
                x.mul_(1 + 1e-6)
        return received

    if rank == 1:
        ring.Message.wait = wrong
    return check_ring._difference("clip", schedule, torch.device("cpu"))


@pytest.mark.parametrize("schedule", ["ring", "gather"])
def test_a_difference_is_found(schedule):
    for found in run(spoilt, 3, schedule):
        one = check_ring.Difference("clip", schedule, found)
        assert 1e-8 < found < 1e-3
        assert not one.fine
    assert not check_ring.Difference("clip", schedule, float("nan")).fine


def test_the_command_fails_on_a_difference(monkeypatch, capsys):
    monkeypatch.setattr(check_ring, "_difference", lambda *_: 1e-3)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["check-ring", *TINY]) == 1
    assert not dist.is_initialized()
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert "the ranks do NOT agree" in said


def test_ranks_of_slurm(monkeypatch):
    """Alone they would all agree, each with itself."""
    told = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0",
            "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # fmt: skip
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: joined.append(how))
    assert check_ring.start(5.0) == torch.device("cpu")
    assert [(how["rank"], how["world_size"]) for how in joined] == [(1, 2)]


def test_wrong_options():
    with pytest.raises(tw.OptionError, match="pairs must be above 0, got 0"):
        check_ring.CheckConfig(pairs=0)
    assert cli.main(["check-ring", "--pairs", "none"]) == 2
