"""One rank of many on one machine: the mirror, and what is measured with it."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import tilewise as tw

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
one_rank = importlib.import_module("one_rank")
LOSSES = {"clip": tw.clip_loss, "siglip": tw.siglip_loss, "info_nce": tw.info_nce}


@pytest.fixture
def mirrored():
    yield one_rank.make_group(4)
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mirror_repeats_this_rank(mirrored, name, schedule):
    """A loss over four of the same is the loss of the features four times."""
    made = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = (x.requires_grad_() for x in functional.normalize(made, dim=-1))
    scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name](a, b, scale, group=mirrored, schedule=schedule)
    many = [x.detach().repeat(4, 1).requires_grad_() for x in (a, b)]
    truth = LOSSES[name](*many, scale)
    assert torch.allclose(loss, truth, rtol=1e-13)
    got = torch.autograd.grad(loss, [a, b, scale])
    wanted = torch.autograd.grad(truth, [*many, scale])
    for x, y in zip(got, (4 * wanted[0][:7], 4 * wanted[1][:7], wanted[2]), strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-14)


def test_rows_are_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(one_rank.PAPER, "4x256", (8.0, 4))
    monkeypatch.setattr(one_rank, "sustained_s", lambda *_: 1.0)
    assert one_rank.main(["--cases", "4x256,2x64", "--dim", "8", "--output", str(tmp_path)]) == 0
    dist.destroy_process_group()
    (path,) = tmp_path.glob("*.csv")
    with path.open() as file:
        first, second = csv.DictReader(file)
    assert (first["ranks"], first["local"], first["bar_gb"]) == ("4", "64", "2.0")
    assert second["paper_gb"] == ""
    assert float(first["extra_gb"]) > 0
    assert float(first["predicted_s"]) >= float(first["step_s"]) * 0.999
    assert "(paper 8.00, bar 2.00)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["8", "8x1024m", "3x1k"])
def test_a_case_must_make_sense(text):
    with pytest.raises(one_rank.argparse.ArgumentTypeError):
        one_rank.parse_case(text)
