"""Time, memory and gradients of a cached step: against its peers, and against encoders alone.

    python benchmarks/cached_step.py peers [--model small] [--batch 1024] [--micro-batch 128]
        [--repeats 3] [--contenders NAME,...] [--device cpu] [--precision fp32] [--output FOLDER]
    python benchmarks/cached_step.py encoders [--models ViT-B-32,...] [--batches 4096,...]
        [--keep-batches 1024,...] [--micro-batch N] [--repeats 1] [--samples 16] ...

`peers`: one batch, on the device, for everyone, in turns; times are medians. The best peer is the
fastest that bounds memory, so not `plain`. Gradients are compared with a plain step in float64, on
a GPU in float32, on a smaller batch of four micro-batches.

`encoders`: inputs in host memory. Encoders alone are the same forwards and backwards of a sample of
micro-batches that lie on the device, scaled to the batch: with `--batches` (keep=0) two forwards
and a backward of each, with `--keep-batches` (keep="auto") one forward and a backward.

Peak memory is above weights and inputs, gradients included. Models are tiny, small, or names of
open_clip's, with random weights. Without git, TILEWISE_COMMIT may name the commit.
"""

import argparse
import csv
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cached_peers as known
import torch
from cached_peers import Contender
from cached_rows import EncoderRow, PeerRow, encoder_rows, peer_rows
from run import provenance

PACKAGES = ("sentence-transformers", "open_clip_torch", "gradcache", "GradCache")


def peer_cells(row: PeerRow) -> dict[str, str]:
    """A line of the table."""
    if row.time_ms is None or row.scale_error is None:
        return {"contender": row.contender, "remark": row.status}
    off = row.scale_error > 0.5
    return {
        "contender": row.contender,
        "ms": f"{row.time_ms:,.4g}" if row.time_ms < 1e4 else f"{row.time_ms:,.0f}",
        "min..max": f"{row.time_min_ms:,.0f}..{row.time_max_ms:,.0f}",
        "/ best peer": f"{row.to_best_peer:.2f}" if row.to_best_peer else "",
        "peak MiB": f"{row.peak_mib:,.1f}",
        "encoder error": f"{row.encoder_error:.1e}",
        "scale error": f"{row.scale_error:.1e}",
        "remark": f"gradient of the scale {row.scale_ratio:.2f} x the truth" if off else "",
    }


def encoder_cells(row: EncoderRow) -> dict[str, str]:
    """A line of the table."""
    start = {"model": row.model, "keep": row.keep, "batch": f"{row.batch:,}"}
    if row.step_s is None or row.ratio is None or row.kept is None or row.replayed is None:
        return {**start, "remark": row.status}
    met = "" if row.bar is None else "met" if row.ratio <= row.bar else "missed"
    return {
        **start,
        "kept": f"{row.kept} of {row.kept + row.replayed}",
        "step s": f"{row.step_s:.3f}",
        "embed, loss, replay": f"{row.embed_s:.3f}, {row.loss_s:.3f}, {row.replay_s:.3f}",
        "alone s": f"{row.alone_s:.3f}",
        "ratio": f"{row.ratio:.3f}",
        "pairs/s": f"{row.pairs_per_s:,.0f}",
        "peak MiB": f"{row.peak_mib:,.1f}",
        "of features": f"{row.features_mib:,.1f}",
        "remark": met and f"bar {row.bar:.2f} {met}",
    }


def show(title: str, lines: Sequence[dict[str, str]]) -> None:
    """A table, with rich where it is installed."""
    headings = list(max(lines, key=len))
    cells = [[line.get(heading, "") for heading in headings] for line in lines]
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        print(title, *("  ".join(line) for line in [headings, *cells]), sep="\n")
        return
    shown = Table(title=title, title_justify="left")
    for heading in headings:
        words = heading in ("contender", "model", "remark")
        shown.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for line in cells:
        shown.add_row(*line)
    # A file or a pipe has no width of its own.
    Console(width=None if sys.stdout.isatty() else 150).print(shown, markup=False)


def save(path: Path, rows: Iterable[Any], about: dict[str, str]) -> Iterator[Any]:
    """Append each row as soon as it is known."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        for row in rows:
            writer = csv.DictWriter(file, [*row._fields, *about])
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({**row._asdict(), **about})
            file.flush()
            yield row


def _numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _contenders(text: str) -> list[Contender]:
    by_name = {contender.name: contender for contender in known.CONTENDERS}
    names = text.split(",")
    if not set(names) <= set(by_name):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(by_name)}, got {text!r}")
    return [by_name[name] for name in names]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, with defaults that depend on the device."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--device", choices=("cpu", "cuda"))
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    cuda = (first.parse_known_args(arguments)[0].device or usual) == "cuda"
    first.add_argument("--micro-batch", type=int)
    first.add_argument("--precision", choices=("fp32", "bf16"), default="bf16" if cuda else "fp32")
    first.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    peers = parts.add_parser("peers", parents=[first])
    peers.add_argument("--model", default="ViT-B-32" if cuda else "small")
    peers.add_argument("--batch", type=int, default=8192 if cuda else 1024)
    peers.add_argument("--repeats", type=int, default=3)
    peers.add_argument("--contenders", type=_contenders, default=list(known.CONTENDERS))
    encoders = parts.add_parser("encoders", parents=[first])
    encoders.add_argument("--models", default="ViT-B-32" if cuda else "tiny")
    batches = "4096,8192,16384,32768,65536" if cuda else "64,128,256"
    encoders.add_argument("--batches", type=_numbers, default=batches)
    encoders.add_argument("--keep-batches", type=_numbers, default="1024,2048" if cuda else "128")
    encoders.add_argument("--repeats", type=int, default=1)
    encoders.add_argument("--samples", type=int, default=16, help="micro-batches of encoders alone")
    options = parser.parse_args(arguments)
    options.device = torch.device("cuda:0" if cuda else "cpu")
    options.autocast = options.precision == "bf16"
    if options.part == "peers":
        options.micro_batch = options.micro_batch or (512 if cuda else 128)
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure, print, save."""
    options = parse(arguments)
    about = provenance(options.device, arguments, "", script="cached_step.py")
    installed = importlib.metadata.distributions()
    about["packages"] = ", ".join(f"{x.name} {x.version}" for x in installed if x.name in PACKAGES)
    path = options.output / f"cached-{options.part}-{about['date'][:10]}-{options.device.type}.csv"
    how = f"{options.precision}; {about['gpu'] or about['machine']}, PyTorch {about['torch']}"
    if options.part == "peers":
        title = f"{options.model}, B = {options.batch:,}, micro-batch {options.micro_batch:,}"
        lines = [peer_cells(row) for row in save(path, peer_rows(options), about)]
    else:
        title, lines, options.models = "Steps over encoders alone", [], options.models.split(",")
        for row in save(path, encoder_rows(options), about):
            lines.append(encoder_cells(row))
            print(*filter(None, lines[-1].values()), sep="  ", flush=True)
    show(f"{title}, {how}", lines)
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
