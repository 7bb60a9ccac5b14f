"""The `tilewise` command."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tilewise
from tilewise import bench, bench_report, check_ring, measure
from tilewise.errors import OptionError, TilewiseError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

APPLICATIONS = {
    "train": "train a contrastive model: tilewise train [RECIPE] [--field value ...]",
    "eval": (
        "evaluate a run, a checkpoint or an exported model: tilewise eval RUN [--field value ...]"
    ),
    "export": (
        "write a model for open_clip, sentence-transformers or timm: tilewise export RUN FOLDER"
    ),
}
FREE_SHARE = 0.85  # of the processor; what matrix products get on an idle machine is above it


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 if all is well, 1 if what it checks is not so, 2 if an option is wrong,
    129, 130 and 143 if it was stopped by SIGHUP, SIGINT and SIGTERM.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in APPLICATIONS:
            return _application(argv[0], argv[1:])
        options = vars(_parser().parse_args(argv))
        commands = {"bench": _bench, "check-ring": _check_ring, "data": _data_pack}
        command = commands[options.pop("command")]
        return command(options)
    except (TilewiseError, OSError) as error:
        print(f"tilewise: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        more = (
            "; tilewise train runs/NAME/config.toml --resume latest goes on from its last "
            "checkpoint, if it has saved one"
        )
        told = f"interrupted at once{more if argv[:1] == ['train'] else ''}"
        print(f"tilewise: {str(error) or told}", file=sys.stderr)
        return getattr(error, "code", 130)


def _application(name: str, args: list[str]) -> int:
    """A command whose flags are the fields of its configuration."""
    from tilewise.train import commands  # noqa: PLC0415 - the losses need nothing of it

    run = {
        "train": commands.train_command,
        "eval": commands.eval_command,
        "export": commands.export_command,
    }[name]
    return run(args)


def run() -> NoReturn:
    """The command as a process of its own."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1"))) > 1:
        # Threads of gloo can outlive their group, and abort a rank that is done while it exits.
        os._exit(code)
    sys.exit(code)


class _Parser(argparse.ArgumentParser):
    """Raises what it would print, so that every wrong option is told in the same way."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tilewise", description=tilewise.__doc__)
    parser.add_argument("--version", action="version", version=f"tilewise {tilewise.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in APPLICATIONS.items():
        commands.add_parser(name, help=about, add_help=False)
    _add_bench(commands.add_parser(
        "bench",
        help="measure speed, memory and gradient error against dense PyTorch on this machine",
        argument_default=argparse.SUPPRESS,
    ))  # fmt: skip
    _add_check_ring(commands.add_parser(
        "check-ring",
        help="under torchrun: compare all ranks with one process, and measure their links",
        argument_default=argparse.SUPPRESS,
    ))  # fmt: skip
    data = commands.add_parser("data", help="tilewise data pack: build WebDataset shards")
    _add_pack(data.add_subparsers(dest="action", required=True).add_parser(
        "pack", help="a table with images, a folder of class folders or arrays -> tar shards",
        argument_default=argparse.SUPPRESS,
    ))  # fmt: skip
    return parser


def _add_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="data by name, as train_data: pairs.csv, pairs.csv?images=folder, images/, "
        "packs/emoji32; an ending such as @0-95 takes the samples whose id falls into these "
        "hundredths",
    )
    parser.add_argument("out", help="folder for the shards and their manifest, new or without any")
    parser.add_argument("--samples-per-shard", type=int, help="(default 10000)")
    parser.add_argument(
        "--size", type=int, help="reduce images to so many pixels on the short side"
    )
    parser.add_argument("--image-format", choices=("png", "webp"), help="(default png)")


def _data_pack(options: dict[str, Any]) -> int:
    from tilewise.data.pack import pack_source  # noqa: PLC0415
    from tilewise.data.sources import open_source  # noqa: PLC0415
    from tilewise.models.libraries import need  # noqa: PLC0415

    options.pop("action")
    source, out = open_source(options.pop("source")), options.pop("out")
    bad: Counter[str] = Counter()
    watched = sys.stdout.isatty()
    with need("rich.progress").Progress(transient=True, disable=not watched) as progress:
        bar = progress.add_task("packing", total=len(source))
        pack_source(
            source, out, **options,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
            on_damage=lambda error: bad.update([error.kind]),
        )  # fmt: skip
    left_out = f"; left out as damaged: {dict(bad)}" if bad else ""
    print(f"packed {len(source) - sum(bad.values()):,} samples into {out}{left_out}")
    return 0


def _add_check_ring(parser: argparse.ArgumentParser) -> None:
    default = check_ring.CheckConfig
    parser.add_argument("--pairs", type=int, help=f"of each rank (default {default.pairs})")
    parser.add_argument("--dim", type=int, help=f"feature size (default {default.dim})")
    parser.add_argument("--repeats", type=int, help=f"timed steps (default {default.repeats})")
    parser.add_argument(
        "--timeout", dest="timeout_s", type=float,
        help=f"seconds after which a rank gives up (default {default.timeout_s:.0f})",
    )  # fmt: skip


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """The options of BenchConfig; one that is not given is left to its default there."""
    default = bench.BenchConfig
    parser.add_argument(
        "--batch", dest="batches", action="extend", type=_sizes, metavar="B[,B...]",
        help=f"batch sizes to time, may be repeated (default {_listed(default.batches)})",
    )  # fmt: skip
    parser.add_argument(
        "--memory", dest="memory_batches", action="extend", type=_sizes, metavar="B[,B...]",
        help=f"batch sizes of the memory curve (default {_listed(default.memory_batches)})",
    )  # fmt: skip
    parser.add_argument("--dim", type=int, help=f"feature size (default {default.dim})")
    parser.add_argument("--dtype", help=f"{', '.join(bench.DTYPES)} (default {default.dtype})")
    parser.add_argument("--loss", help=f"{', '.join(bench.TASKS)} (default {default.loss})")
    parser.add_argument("--repeats", type=int, help=f"timed steps (default {default.repeats})")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default auto)")
    parser.add_argument("--out", help=f"folder for bench.csv and .png (default {default.out})")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: to see that it works, not to measure"
    )


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"a batch size must be a whole number, or several with commas between, got {text!r}"
        ) from None


def _listed(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _bench(options: dict[str, Any]) -> int:
    bench_report.check_extras()
    from rich.console import Console  # noqa: PLC0415

    # Keeps the profiler, which counts memory, from writing to stderr whenever it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for name in ("batches", "memory_batches"):
        if name in options:
            options[name] = tuple(options[name])
    quick = bench.QUICK if options.pop("quick", False) else {}
    config = bench.BenchConfig(**{**quick, **options})
    folder = bench_report.make_folder(config)
    console = Console()
    rows = list(_run(config, console))
    console.print(_table(config, rows))
    _warn_if_busy(rows)
    _save(config, rows, folder)
    return 0


def _check_ring(options: dict[str, Any]) -> int:
    """The first rank prints; all of them return the same."""
    bench_report.check_extras()
    config = check_ring.CheckConfig(**options)
    device = check_ring.start(config.timeout_s)
    report = check_ring.run(config, device)
    if check_ring.is_first():
        _show_report(config, report, measure.machine(device))
    check_ring.stop()
    return 0 if report.fine else 1


def _show_report(
    config: check_ring.CheckConfig, report: check_ring.Report, machine: measure.Machine
) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    where = f"{_number(report.world, 'rank')} on {_number(report.nodes, 'node')}, {report.backend}"
    table = Table(title=f"{where}: against one process, float64", caption=str(machine))
    for name in ("loss", "schedule", "largest relative difference", ""):
        table.add_column(name, justify="right" if "difference" in name else "left")
    for one in report.differences:
        table.add_row(one.loss, one.schedule, f"{one.found:.1e}", "" if one.fine else "WRONG")
    console.print(table)
    speeds = Table(title=f"{config.pairs} pairs a rank, D = {config.dim}, slowest rank")
    for name in ("schedule", "step (ms)", "arithmetic alone", "messages alone", "hidden"):
        speeds.add_column(name, justify="left" if name == "schedule" else "right")
    for speed in report.speeds:
        hidden = "" if speed.overlap is None else f"{speed.overlap:.0%}"
        times = (f"{ms:.2f}" for ms in (speed.step_ms, speed.alone_ms, speed.messages_ms))
        speeds.add_row(speed.schedule, *times, hidden)
    console.print(speeds)
    if report.link is not None:
        link = report.link
        print(
            f"to the next rank: {link.gb_per_s:.2f} GB/s, {link.latency_us:.0f} us a message, "
            f"{link.hop_ms:.2f} ms for the columns and gradients of a rank"
        )
    print(f"schedule='auto' takes {report.chosen}")
    verdict = "all ranks agree with one process" if report.fine else "the ranks do NOT agree"
    print(verdict)


def _number(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _save(config: bench.BenchConfig, rows: list[bench.Row], folder: Path) -> None:
    bench_report.save_csv(config, rows, folder / "bench.csv")
    bench_report.save_plot(config, rows, folder / "bench.png")
    print(f"saved {folder / 'bench.csv'} and {folder / 'bench.png'}")


def _run(config: bench.BenchConfig, console: "Console") -> Iterator[bench.Row]:
    """Rows as they come, with a progress bar, or a line for each where there is no terminal."""
    from rich.progress import Progress  # noqa: PLC0415

    todo = bench.cases(config)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(todo))
        rows = bench.run(config)
        for case in todo:
            progress.update(bar, description=str(case))
            row = next(rows)
            progress.advance(bar)
            if row.skipped or not console.is_terminal:
                print(_line(row), flush=True)
            yield row


def _line(row: bench.Row) -> str:
    if row.skipped:
        return f"{row.case}: skipped, {row.skipped}"
    time = "" if row.time_ms is None else f"{row.time_ms:.1f} ms, "
    return f"{row.case}: {time}{row.peak_mib:.1f} MiB above the inputs"


def _table(config: bench.BenchConfig, rows: list[bench.Row]) -> "Table":
    """The timed cases."""
    from rich.table import Table  # noqa: PLC0415

    timed = [row for row in rows if row.case.timed]
    speeds = [row.gemm_tflops for row in timed if row.gemm_tflops is not None]
    title = bench.TASKS[config.loss].title
    table = Table(
        title=f"{title}, forward and backward, D = {config.dim}, {config.dtype}",
        caption=f"efficiency relative to a matrix product: {min(speeds):.3f} to "
        f"{max(speeds):.3f} TFLOP/s here\n{measure.machine(config.where)}",
    )
    table.add_column("contender")
    for name in ("batch", "time (ms)", "efficiency", "peak (MiB)", "gradient error"):
        table.add_column(name, justify="right")
    for row in timed:
        cells = (
            _cell(row.time_ms, ",.1f"),
            _cell(row.efficiency, ".0%"),
            _cell(row.peak_mib, ",.1f"),
            _cell(row.gradient_error, ".1e"),
        )
        table.add_row(row.case.contender, str(row.case.batch), *cells)
    return table


def _warn_if_busy(rows: list[bench.Row]) -> None:
    """Say so when the processor was shared: efficiency does not make up for that.

    Steps of many short parallel loops wait for the slower thread at each, and so lose several
    times more than the matrix product that they are held against.
    """
    shares = [row.cpu_share for row in rows if row.cpu_share is not None]
    num_busy = sum(share < FREE_SHARE for share in shares)
    if num_busy:
        print(
            f"other work held the processor during {num_busy} of {len(shares)} timed cases (share "
            f"down to {min(shares):.0%}): do not trust their times, run again on an idle machine"
        )


def _cell(value: float | None, form: str) -> str:
    return "skipped" if value is None else format(value, form)
