"""The benchmark against peers: every case is a row, nothing crashes, red tests stop it."""

import csv
import importlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

# Scripts, not a package: they import each other by name.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
cases, report, run = (importlib.import_module(name) for name in ("cases", "report", "run"))

CPU = torch.device("cpu")
TINY = "clip-fp32-64x16"
NUMBERS = [
    "time_ms", "time_min_ms", "time_max_ms", "ceiling_tflops", "efficiency", "peak_mib",
    "limit_mib", "gradient_error", "first_call_s",
]  # fmt: skip
ABOUT = [
    "tests", "machine", "gpu", "torch", "triton", "python", "commit", "date", "command",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setitem(run.GEMMS, "cpu", (64, torch.float32))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def measure(folder, *arguments, names=f"{TINY},siglip-bf16-64x16"):
    """The rows of a short run."""
    short = ["--seconds", "0.01", "--repeats", "2", "--output", str(folder)]
    assert run.main(["--cases", names, *short, *arguments]) == 0
    (path,) = folder.glob("*.csv")
    with path.open() as file:
        return path, list(csv.DictReader(file))


def broken(case):
    raise RuntimeError("the peer's own\nmessage")


def test_rows_and_columns(tmp_path, capsys):
    arguments = ["--skip-tests", "--contenders", "tilewise,dense,tilewise graph"]
    path, rows = measure(tmp_path, *arguments)
    assert [(row["case"], row["contender"], row["status"]) for row in rows] == [
        (case, name, "needs CUDA" if "graph" in name else "ok")
        for case in (TINY, "siglip-bf16-64x16")
        for name in ("tilewise", "dense", "tilewise graph")
    ]
    assert set(NUMBERS + ABOUT) <= set(rows[0])
    for row in rows:
        assert row["tests"] == "skipped"
        assert row["torch"] == torch.__version__
        assert "--skip-tests" in row["command"]
        if row["status"] == "ok":
            assert all(math.isfinite(float(row[name])) for name in NUMBERS)
            assert float(row["time_min_ms"]) <= float(row["time_ms"]) <= float(row["time_max_ms"])
            assert float(row["gradient_error"]) < (1e-5 if row["dtype"] == "fp32" else 1e-2)
            assert float(row["peak_mib"]) < float(row["limit_mib"])
            assert row["num_repeats"] == "2"
    assert TINY in capsys.readouterr().out
    assert path.name.endswith("-cpu.csv")


def test_a_missing_peer_is_a_row():
    absent = replace(cases.find_contender("open_clip"), module="no_such_package")
    row = run.measure_row(run.Setting(CPU, 0.01, 1), cases.find_case(TINY), absent)
    assert row.status == "not installed"
    assert row.time_ms is None
    half = replace(absent, module="", load=lambda case: __import__("no_such_package"))
    row = run.measure_row(run.Setting(CPU, 0.01, 1), cases.find_case(TINY), half)
    assert row.status.startswith("not installed: No module named")


def test_a_failing_contender_is_a_row(monkeypatch, tmp_path):
    contenders = (
        cases.Contender(name="tilewise", load=broken),
        cases.find_contender("dense"),
    )
    monkeypatch.setattr(cases, "CONTENDERS", contenders)
    _, rows = measure(tmp_path, "--skip-tests", names=TINY)
    assert [row["status"] for row in rows] == ["error: RuntimeError: the peer's own message", "ok"]
    assert rows[0]["time_ms"] == ""


def test_out_of_memory_is_a_row():
    def load(case):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")

    greedy = cases.Contender(name="greedy", load=load)
    row = run.measure_row(run.Setting(CPU, 0.01, 1), cases.find_case(TINY), greedy)
    assert row.status == "out of memory"
    huge = cases.find_case("clip-fp32-4000000x16")
    assert cases.find_contender("dense").refusal(huge, CPU).startswith("out of memory")


def test_red_tests_stop_the_run(monkeypatch, tmp_path, capsys):
    red = [sys.executable, "-c", "print('1 failed'); raise SystemExit(1)"]
    monkeypatch.setattr(run, "tests_command", lambda cuda: red)
    assert run.main(["--cases", TINY, "--output", str(tmp_path)]) == 1
    assert "1 failed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_green_tests_are_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "tests_command", lambda cuda: [sys.executable, "-c", ""])
    _, rows = measure(tmp_path, "--contenders", "tilewise", names=TINY)
    assert [row["tests"] for row in rows] == ["green"]


def test_the_tests_that_must_be_green():
    assert run.tests_command(cuda=True)[-3:] == ["-m", "gpu", "tests"]
    assert run.tests_command(cuda=False)[-1] == "tests/test_semantics.py"


def test_case_names():
    table = (*cases.CASES, *cases.ON_REQUEST, *cases.CPU_CASES)
    for case in table:
        assert cases.find_case(case.name) is case
    assert len({case.name for case in table}) == len(table)
    parsed = cases.find_case("siglip-fp32-autocast-128x32")
    assert parsed == cases.Case(loss="siglip", batch=128, dim=32, dtype="fp32", autocast=True)
    for name in ("clip", "clip-bf16-64", "clip-int8-64x64", "mse-fp32-64x64", "clip-fp32-0x64"):
        with pytest.raises(ValueError, match=r"named as|must be"):
            cases.find_case(name)
    assert run.main(["--cases", "clip"]) == 1
    assert run.main(["--contenders", "nobody", "--skip-tests"]) == 1


def test_flop_and_memory_of_a_case():
    clip, siglip = cases.find_case("clip-bf16-65536x768"), cases.find_case("siglip-bf16-65536x768")
    assert clip.flop == 8 * 65536**2 * 768
    assert siglip.flop == 6 * 65536**2 * 768
    features_mib = 2 * 65536 * 768 * 2 / 2**20
    assert clip.limit_bytes / 2**20 == 1.25 * 2 * features_mib + 256 - features_mib


def test_both_directions_are_the_clip_loss():
    def cross_entropy(rows, classes, targets):
        return torch.nn.functional.cross_entropy(rows @ classes.T, targets)

    case = cases.find_case(TINY)
    twice = cases.Contender(name="twice", load=lambda _: cases._both_directions(cross_entropy))
    assert cases.gradient_error(case, twice, CPU) < 1e-5


def test_report(tmp_path, capsys):
    contenders = "tilewise,dense,tilewise graph"
    names = f"{TINY},clip-fp32-128x16"
    path, _ = measure(tmp_path, "--skip-tests", "--contenders", contenders, names=names)
    capsys.readouterr()
    assert report.main([str(path)]) == 0
    shown = capsys.readouterr().out
    assert "CLIP, fp32, B = 64, D = 16" in shown
    assert "needs CUDA" in shown
    assert "tests skipped" in shown
    pictures = sorted(tmp_path.glob("*.png"))
    assert [x.stem.split("-")[-1] for x in pictures] == ["efficiency", "memory", "time"]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000


def test_report_without_rich_or_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # importing it raises
    path, _ = measure(tmp_path, "--skip-tests", "--contenders", "tilewise graph", names=TINY)
    assert "needs CUDA" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert report.main([str(path)]) == 0
    assert "tilewise graph" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


def test_report_takes_the_newest_row(tmp_path):
    path, _ = measure(tmp_path, "--skip-tests", "--contenders", "tilewise", names=TINY)
    newer = tmp_path / "newer.csv"
    with path.open() as file:
        (row,) = csv.DictReader(file)
    with newer.open("w") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow({**row, "date": "2999-01-01T00:00:00+00:00", "time_ms": "7.0"})
    (kept,) = report.load([newer, path])
    assert kept.get("time_ms") == 7.0


def gpu_session(folder, *parts, within=590):
    """The script, with a Python that only says what it was asked; pytest fails, steps take long."""
    python = folder / "python"
    answers = '"-m pytest"*) exit 1;; *encoders*) sleep 60;;'
    python.write_text(f'#!/bin/sh\necho "asked: $*"\ncase "$*" in {answers} esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(folder), "WITHIN": str(within)}
    command = ["bash", str(Path(run.ROOT, "benchmarks", "gpu_session.sh")), *parts]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_parts_of_a_gpu_session_do_not_cost_each_other(tmp_path):
    done = gpu_session(tmp_path, "tests", "step-peers", "steps", "bars", within=7)
    assert done.returncode == 1
    lines = done.stdout.splitlines()[-4:]
    assert [line.rsplit(",", 1)[0] for line in lines] == [
        "tests: failed (1)", "step-peers: ok", "steps: out of time", "bars: not begun",
    ]  # fmt: skip
    assert "peers --repeats 7" in (tmp_path / "step-peers.log").read_text()


def test_every_part_of_a_gpu_session_asks_for_cases_that_exist(tmp_path):
    done = gpu_session(tmp_path, "bars", "bars-large", "peers")
    assert done.returncode == 0, done.stdout
    asked = [line.split() for line in done.stdout.splitlines() if "--cases" in line]
    assert len(asked) == 5
    barred = set()
    for words in asked:
        names = words[words.index("--cases") + 1].split(",")
        barred |= {case for case in map(cases.find_case, names) if case in cases.CASES}
    assert {case for case in cases.CASES if case.bar or case.note} <= barred
    assert gpu_session(tmp_path, "all").returncode == 2
