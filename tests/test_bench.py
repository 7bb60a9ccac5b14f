"""The benchmark runs, saves what it shows and refuses what it cannot measure."""

import contextlib
import csv
import io
import math
import sys

import pytest
import torch

import tilewise
from tilewise import bench, bench_report, measure
from tilewise.bench import DENSE, OURS, BenchConfig, Case
from tilewise.cli import main
from tilewise.errors import OptionError

NUMBERS = ["time_ms", "gemm_tflops", "efficiency", "peak_mib", "gradient_error"]


def tiny(**options):
    return BenchConfig(
        **{**bench.QUICK, "batches": (16,), "memory_batches": (16, 32), "gemm_size": 32, **options}
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Exit code, output and folder of one quick run."""
    folder = tmp_path_factory.mktemp("bench") / "made" / "here"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(["bench", "--quick", "--out", str(folder)])
    return code, output.getvalue(), folder


def test_quick_run_shows_a_table(quick):
    code, output, folder = quick
    assert code == 0
    table = [line for line in output.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in table] == [OURS, DENSE, OURS, DENSE]
    assert "TFLOP/s" in output
    assert torch.__version__ in output
    assert str(folder / "bench.csv") in output
    assert str(folder / "bench.png") in output


def test_one_line_for_each_case_where_there_is_no_terminal(quick):
    output = quick[1]
    assert "tilewise, B = 512, D = 64: " in output
    assert "dense PyTorch, B = 1024, D = 64: " in output


def test_csv_has_every_row(quick):
    with (quick[2] / "bench.csv").open() as file:
        rows = list(csv.DictReader(file))
    timed = [row for row in rows if row["timed"] == "True"]
    assert [(row["contender"], row["batch"]) for row in timed] == [
        (OURS, "256"), (DENSE, "256"), (OURS, "512"), (DENSE, "512"),
    ]  # fmt: skip
    assert len(rows) == 10
    for row in timed:
        assert all(math.isfinite(float(row[name])) and float(row[name]) > 0 for name in NUMBERS)
        assert float(row["gradient_error"]) < 1e-5
    for row in rows:
        assert float(row["peak_mib"]) > 0
        assert row["torch"] == torch.__version__
        assert row["tilewise"] == tilewise.__version__
        assert row["date"]


def test_plot_is_a_picture(quick):
    path = quick[2] / "bench.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_plot_leaves_pyplot_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    rows = [bench.Row(case, time_ms=1.0, peak_mib=1.0) for case in bench.cases(tiny())]
    bench_report.save_plot(tiny(), rows, tmp_path / "bench.png")


def test_dense_needs_the_matrices_and_ours_does_not():
    rows = list(bench.run(tiny(batches=(8,), memory_batches=(4096,))))
    peak_mib = {row.case.contender: row.peak_mib for row in rows if not row.case.timed}
    matrix_mib = 4 * 4096**2 / 2**20
    assert peak_mib[DENSE] > 2 * matrix_mib
    assert peak_mib[OURS] < matrix_mib


@pytest.mark.parametrize("loss", ["clip", "siglip"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient_error_is_that_of_the_dtype(loss, dtype):
    rows = list(bench.run(tiny(loss=loss, dtype=dtype, memory_batches=(8,))))
    errors = [row.gradient_error for row in rows if row.case.timed]
    assert all(0 < error < 20 * torch.finfo(bench.DTYPES[dtype]).eps for error in errors)


def test_dense_is_skipped_when_it_does_not_fit(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 2 * 20 * 300**2)
    assert main(["bench", "--quick", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "dense PyTorch, B = 512, D = 64: skipped, needs about 0.0 GiB for the matrix" in output
    assert "dense PyTorch, B = 256, D = 64: skipped" not in output
    assert (tmp_path / "bench.png").exists()


def test_efficiency_counts_the_products_of_the_loss(monkeypatch):
    monkeypatch.setattr(measure, "median_s", lambda call, repeats, device: 0.5)
    speeds = iter([1.0, 3.0, 3.0])
    monkeypatch.setattr(measure, "gemm_tflops", lambda *args: next(speeds))
    ours = next(bench.run(tiny(batches=(16,), dim=64)))
    assert ours.gemm_tflops == 2.0
    assert ours.efficiency == pytest.approx(8 * 16 * 16 * 64 / 0.5 / 2e12)


def test_a_busy_machine_is_told(monkeypatch, tmp_path, capsys):
    shares = iter([0.97, 0.97, 0.5, 0.97, 0.97])
    monkeypatch.setattr(bench, "_gemm", lambda config: bench.Gemm(1.0, next(shares)))
    assert main(["bench", "--quick", "--out", str(tmp_path)]) == 0
    assert "other work held the processor during 2 of 4 timed cases" in capsys.readouterr().out


def test_the_share_of_the_processor_is_of_all_threads(monkeypatch):
    monkeypatch.setattr(measure, "gemm_tflops", lambda *args: 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(bench.time, "process_time", iter([0.0, 6.0, 0.0, 0.1]).__next__)
    monkeypatch.setattr(bench.time, "perf_counter", iter([0.0, 3.0, 0.0, 0.1]).__next__)
    assert bench._gemm(tiny()) == bench.Gemm(1.0, 0.5)
    assert bench._gemm(tiny()) == bench.Gemm(1.0, None)


def test_batches_may_be_repeated_or_listed(monkeypatch, tmp_path):
    seen = []

    def stop(config):
        seen.append(config)
        raise OptionError("far enough")

    monkeypatch.setattr(bench_report, "make_folder", stop)
    main(["bench", "--batch", "64,128", "--batch", "256", "--dim", "32", "--loss", "siglip"])
    main(["bench", "--quick", "--batch", "8192"])
    assert seen[0] == BenchConfig(batches=(64, 128, 256), dim=32, loss="siglip")
    assert seen[1].batches == (8192,)
    assert seen[1].dim == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["bench", "--dtype", "int8"], "dtype must be one of float32, bfloat16, float16"),
        (["bench", "--loss", "hinge"], "loss must be one of clip, siglip"),
        (["bench", "--batch", "8k"], "whole number"),
        (["bench", "--batch", "0"], "batches must be a whole number of at least 1, got 0"),
        (["bench", "--device", "toaster"], "device must be auto, cpu, cuda or cuda:N"),
        (["bench", "--device", "cuda:99"], "is not there"),
        (["bench", "--fast"], "--help"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert len(output.err.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_told_before_measuring(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["bench", "--out", str(tmp_path / "file")]) == 2
    assert "out must be a folder" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--quick"]) == 2
    assert "pip install 'tilewise[bench]'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert tilewise.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        {"batches": ()},
        {"batches": (-1,)},
        {"memory_batches": ()},
        {"dim": 0},
        {"dim": 1.5},
        {"repeats": 0},
        {"gemm_size": 0},
        {"out": ""},
    ],
)
def test_config_rejects(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        BenchConfig(**options)


def test_contract_is_about_inputs_and_gradients():
    case = Case(OURS, 1024, 64, False)
    features_bytes = 2 * 1024 * 64 * 2
    got = bench.contract_bytes(tiny(dtype="bfloat16"), case)
    assert got == 1.25 * 2 * features_bytes + 256 * 2**20
