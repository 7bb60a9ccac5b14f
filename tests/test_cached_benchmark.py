"""The benchmark of the cached step: every contender is a row, and errors show what is claimed."""

import csv
import importlib
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Scripts, not a package: they import each other by name.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
cached_step, cached_rows, peers = (
    importlib.import_module(name) for name in ("cached_step", "cached_rows", "cached_peers")
)

CPU = torch.device("cpu")
OURS = ("tilewise keep=0", "tilewise keep=auto")
ACCUMULATED = "open_clip --accum-freq"
NAMES = [contender.name for contender in peers.CONTENDERS]


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def measured(folder, *arguments):
    """The rows of a short run."""
    assert cached_step.main([*arguments, "--output", str(folder)]) == 0
    (path,) = folder.glob("*.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def run_peers(folder, *arguments):
    sizes = ["--model", "tiny", "--batch", "22", "--micro-batch", "8", "--repeats", "2"]
    return {row["contender"]: row for row in measured(folder, "peers", *sizes, *arguments)}


def test_every_contender_is_a_row(tmp_path, capsys):
    rows = run_peers(tmp_path)
    shown = capsys.readouterr().out
    assert list(rows) == NAMES
    assert all(name in shown for name in NAMES)
    assert "gradient of the scale 4.00 x the truth" in shown
    for name, row in rows.items():
        if name == "sentence-transformers" and not importlib.util.find_spec(
            "sentence_transformers"
        ):
            assert row["status"] == "not installed"
            assert row["time_ms"] == ""
            continue
        assert row["status"] == "ok"
        assert float(row["time_min_ms"]) <= float(row["time_ms"]) <= float(row["time_max_ms"])
        assert float(row["peak_mib"]) > 0
        assert float(row["encoder_error"]) < 1e-5
        assert float(row["to_best_peer"]) > 0
        assert row["num_repeats"] == "2"
        assert row["torch"] == torch.__version__
    ratios = [float(row["to_best_peer"]) for row in rows.values() if row["status"] == "ok"]
    assert 1.0 in ratios


def test_the_scale_is_learned_once_by_all_but_one(tmp_path):
    rows = run_peers(tmp_path)
    errors = {name: float(row["scale_error"]) for name, row in rows.items() if row["scale_error"]}
    assert set(OURS) < set(errors)
    assert errors.pop(ACCUMULATED) == pytest.approx(peers.ERROR_PARTS - 1, rel=1e-5)
    assert max(errors.values()) < 1e-5


def test_contenders_are_chosen_by_name(tmp_path):
    rows = run_peers(tmp_path, "--contenders", f"plain,{OURS[0]}", "--precision", "bf16")
    assert list(rows) == ["plain", OURS[0]]
    assert rows["plain"]["to_best_peer"] == ""
    assert 1e-5 < float(rows[OURS[0]]["encoder_error"]) < 0.1
    with pytest.raises(SystemExit):
        cached_step.main(["peers", "--contenders", "nobody"])


def test_a_missing_and_a_failing_peer_are_rows(monkeypatch, tmp_path, capsys):
    def broken(job):
        raise RuntimeError("the peer's own\nmessage")

    def greedy(job):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")

    plain = peers.CONTENDERS[0]
    absent = replace(plain, name="absent", module="no_such_package")
    failing = [replace(plain, name=f.__name__, make=f) for f in (broken, greedy)]
    monkeypatch.setattr(peers, "CONTENDERS", (plain, absent, *failing))
    rows = run_peers(tmp_path)
    assert [row["status"] for row in rows.values()] == [
        "ok", "not installed", "error: RuntimeError: the peer's own message", "out of memory",
    ]  # fmt: skip
    assert "out of memory" in capsys.readouterr().out


def test_the_algorithm_of_grad_cache_is_exact():
    pair, shape = peers.make_pair("tiny", CPU, autocast=False)
    job = peers.Job(pair.double(), peers.make_data(shape, 10, CPU), 4)
    got = peers.gradients(peers.grad_cache_algorithm, job)
    truth = peers.gradients(peers.plain, job)
    assert torch.allclose(got.encoders, truth.encoders, rtol=1e-9, atol=1e-12)
    assert got.scale == pytest.approx(truth.scale, rel=1e-12)


def test_peers_do_not_see_the_folder_of_the_benchmarks():
    """Of which transformers would import kernels.py, by the name of a package it knows."""
    with pytest.raises(ModuleNotFoundError):
        peers.load("sanitize")
    assert peers.load("json").loads("1") == 1


def test_steps_over_encoders_alone(tmp_path, capsys):
    sizes = ["--models", "tiny", "--batches", "16,40", "--keep-batches", "16", "--micro-batch", "8"]
    rows = measured(tmp_path, "encoders", *sizes, "--samples", "2")
    shown = capsys.readouterr().out
    assert "Steps over encoders alone" in shown
    assert [(row["keep"], row["batch"], row["kept"], row["replayed"]) for row in rows] == [
        ("0", "16", "0", "4"), ("0", "40", "0", "10"), ("auto", "16", "4", "0"),
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok"
        numbers = [float(row[x]) for x in ("step_s", "alone_s", "ratio", "peak_mib", "pairs_per_s")]
        assert all(math.isfinite(x) and x > 0 for x in numbers)
        assert row["bar"] == ""
        assert float(row["ratio"]) == pytest.approx(float(row["step_s"]) / float(row["alone_s"]))


def test_encoders_alone_are_scaled_to_the_batch(monkeypatch, tmp_path):
    """Two forwards and a backward of each micro-batch, one and one where graphs are kept."""
    monkeypatch.setattr(cached_rows, "time_alone", lambda *_: cached_rows.Alone(1.0, 10.0))
    sizes = ["--models", "tiny", "--batches", "20", "--keep-batches", "16", "--micro-batch", "8"]
    again, kept = measured(tmp_path, "encoders", *sizes)
    assert float(again["alone_s"]) == 11 * 20 / 8
    assert float(kept["alone_s"]) == 10 * 16 / 8
