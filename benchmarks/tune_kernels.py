"""Times of the fused kernels alone, tile size by tile size: where `backends/tuning.py` comes from.

    python benchmarks/tune_kernels.py [--features 768] [--seconds 0.4]
                                      [--panels|--split|--kept|--bias -10]

Each candidate runs for a while; the ceiling is cuBLAS 8192^3 before and after the table. With
`--panels` whole steps of B = 32768 instead, by rows and columns of dz at a time; with `--split`
the products that make gradients of float32 features, beside three of cuBLAS; with `--kept` the
pass that makes dz of kept exponentials, by how memory is walked; with `--bias` the kernels of
SigLIP alone, whose speed depends on it.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from cases import Case, captured, find_contender
from torch import Tensor
from torch.nn import functional

from tilewise.backends import dz, fused_backward, hopper_dz, kernels, products
from tilewise.backends.fused_forward import Forward, SumPanel
from tilewise.backends.fused_softplus import Softplus
from tilewise.backends.plan import Needs, Plan
from tilewise.backends.products import DzPanel
from tilewise.backends.ready import Ready, make_ready
from tilewise.backends.tuning import TileSize, panel_for
from tilewise.pairs import Pairs, make_pairs
from tilewise.tiles import Tile

PANELS = [(8192, 8192), (8448, 8448), (8448, 11264), (11264, 8448), (4096, 8192)]
CANDIDATES = {
    "sums": [TileSize(256, 128, 64, 8, stages) for stages in (3, 4)],
    "dz_of_sums": [
        *(TileSize(128, 256, 64, 8, 3, group) for group in (16, 32)),
        *(TileSize(128, 128, 64, 4, 3, group, 2) for group in (8, 16, 32, 64)),
        TileSize(128, 128, 64, 8, 3, 32, 2),
        TileSize(128, 128, 32, 4, 6, 32, 2),
        TileSize(128, 128, 64, 4, 2, 32, 2),
    ],
    "dz_of_softplus": [
        TileSize(128, 256, 64, 8, 3, 32),
        *(TileSize(128, 128, 64, 4, 3, group, 2) for group in (16, 32)),
        TileSize(128, 128, 64, 8, 3, 32, 2),
    ],
}

# 32 pairs at a time: sums of more are cut off too often (docs/log.md).
SPLIT = [
    *(TileSize(128, 128, 32, 8, stages) for stages in (2, 3, 4)),
    *(TileSize(*shape, 32, 4, 3) for shape in ((64, 128), (128, 64))),
    TileSize(128, 64, 32, 8, 3),
]
SPLIT_IN_GLUON = [TileSize(128, 128, 32, 4, stages) for stages in (4, 6)]
# Rows and columns of a program, and its warps.
KEPT = [(16, 1024, 8), (4, 1024, 4), (8, 2048, 8), (4, 2048, 8), (4, 4096, 8), (1, 8192, 8)]
GLUON = {
    "sums": [TileSize(128, 128, 64, 4, stages, lanes) for stages in (6, 7) for lanes in (1, 4)],
    "dz_of_sums": [TileSize(128, 128, 64, 4, *rest) for rest in ((5, 1), (6, 1), (6, 3))],
    "dz_of_softplus": [TileSize(128, 128, 64, 4, stages, 1) for stages in (5, 6)],
}


def sustained(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds a call, repeated for so long."""
    call()
    torch.cuda.synchronize()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            call()
        count += 10
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def ceiling(seconds: float) -> float:
    """TFLOP/s of cuBLAS."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / sustained(lambda: torch.mm(a, b, out=out), seconds) / 1e9


def make(
    name: str, size: TileSize, pairs: Pairs, in_gluon: bool
) -> tuple[Callable[[], object], int]:
    """(a call that runs the kernel once, pairs it looks at); `in_gluon` for those of `hopper`."""
    n, m, _ = pairs.shape
    if name == "sums":
        forward = Forward(pairs, Plan("logsumexp", True, False, "fused", 2**28, False))
        forward._begin()
        whole = Tile(0, n // 2, 0, m)
        panel = SumPanel(whole, size, in_gluon=in_gluon, masked=False, kept=None)
        return lambda: forward._sweep(panel, forward._parts(panel)), n // 2 * m
    softplus = name == "dz_of_softplus"
    plan = Plan("softplus" if softplus else "logsumexp", False, False, "fused", 2**28, False)
    backward = Softplus(pairs, plan, Needs(True, True, False, False))
    backward._softplus_head(torch.ones((), device="cuda"))
    height, width = panel_for(pairs.shape[2], split=False)
    panel = DzPanel(Tile(0, height, 0, width), pairs.rows.new_empty(height, width))
    ones = torch.ones(max(n, m), device="cuda")
    parts = torch.empty(3, -(-width // size.cols), height, device="cuda")
    kind = {"KIND": kernels.KINDS["aligned"], "SELF": False}
    if softplus:
        options = {"VALUES": True, "COLUMNS": False, "SCALED": False, "GRADS": True, "IDS": False}
        args = (ones, ones, parts, ones, *backward.ready.marks)
        options |= {"MASKED": False, "EDGES": False, "WHOLE_AT": 0, "pieces": 4}
    else:
        forward = Forward(pairs, plan)
        forward._begin()
        backward.head.copy_(forward.head)
        backward.flag.zero_()
        options = {"COLUMNS": True, "SCALED": False}
        args = (backward.flag, ones, ones, parts)
    if in_gluon:
        if softplus:
            args, options = args[:3], {"VALUES": True, "COLUMNS": False, "SCALED": False}
        else:
            options["DIAGONAL"] = True
        kernel = getattr(hopper_dz, name)
        launch = lambda: backward._launch_gluon(kernel, size, panel, *args, **options)  # noqa: E731
        return launch, height * width
    kernel = getattr(dz, name)
    return (
        lambda: backward._launch(kernel, size, panel, *args, **kind, **options),
        height * width,
    )


def time_panels(features: int, seconds: float) -> None:
    """A line for each size of panels."""
    case = Case(loss="clip", batch=32768, dim=features, dtype="bf16")
    inputs, loss = case.inputs(torch.device("cuda")), find_contender("tilewise").load(case)
    for panel in PANELS:
        with mock.patch.object(fused_backward, "panel_for", lambda *_, own=panel: own):
            step = captured(case, loss, inputs)
        ms = sustained(step, seconds)
        rate = 8 * case.batch**2 * features / ms / 1e9
        print(f"panels of {panel[0]} x {panel[1]}: {ms:7.3f} ms {rate:5.0f} TFLOP/s", flush=True)


def time_split(features: int, seconds: float) -> None:
    """A line for cuBLAS and for each tile: both products of a panel as B = 32768 has them."""
    n, m = panel_for(features, split=True)
    x = torch.randn(m, features, device="cuda")
    pairs = make_pairs(x, None, (1.0, None), positives=None, ids=None, labels=None, skip_self=True)
    ready = make_ready(pairs, "exact")
    dz = torch.randn(2, n, m, device="cuda").half()

    def three_products(acc: Tensor, parts: tuple[Tensor, ...], turned: bool) -> None:
        for part, side in ((dz[1], 0), (dz[0], 1), (dz[0], 0)):
            products.add_product(acc, part.t() if turned else part, parts[side], False)

    def one_kernel(acc: Tensor, parts: tuple[Tensor, ...], turned: bool, made: Ready) -> None:
        products.add_products(made, acc, tuple(dz), parts, turned=turned, first=False)

    calls = {"cuBLAS, cut off": three_products}
    for size in SPLIT:
        made = ready._replace(tiles=ready.tiles._replace(product=size), gluon=None)
        calls[str(tuple(size))] = partial(one_kernel, made=made)
    for size in SPLIT_IN_GLUON if ready.gluon is not None else ():
        made = ready._replace(gluon=ready.gluon._replace(product=size))
        calls[f"Gluon {tuple(size)}"] = partial(one_kernel, made=made)
    for turned, (height, length) in ((False, (n, m)), (True, (m, n))):
        parts, acc = (
            ready.cols.parts(slice(0, length)),
            torch.zeros(height, features, device="cuda"),
        )
        for name, call in calls.items():
            label = f"{name:32} {'turned' if turned else '':8}"
            try:
                ms = sustained(partial(call, acc, parts, turned), seconds)
            except Exception as error:  # a tile that does not compile is a line of the table
                print(f"{label} {type(error).__name__}", flush=True)
                continue
            rate = 6 * n * m * features / ms / 1e9
            print(f"{label} {ms:7.3f} ms {rate:5.0f} TFLOP/s", flush=True)


def time_kept(seconds: float) -> None:
    """A line for each way through exponentials (16384, 65536), which are read and overwritten."""
    n, m = 16384, 65536
    kept = torch.zeros(n, m, dtype=torch.int16, device="cuda")
    rows, cols, flag = (torch.ones(size, device="cuda") for size in (n, m, 1))
    flag.zero_()
    for height, width, warps in KEPT:
        launch = partial(
            dz.dz_of_kept[(m // width, n // height)], kept, kept.view(torch.bfloat16), m, flag,
            rows, cols, 0, 0, n, m, COLUMNS=True, TN=height, TM=width, num_warps=warps,
        )  # fmt: skip
        ms = sustained(launch, seconds)
        print(
            f"{(height, width, warps)!s:16} {ms:7.3f} ms {4 * n * m / ms / 1e6:5.0f} GB/s",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--bias", type=float, help="of softplus; -10 is where SigLIP begins")
    parser.add_argument("--panels", action="store_true")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--kept", action="store_true")
    options = parser.parse_args()
    unit = lambda: functional.normalize(  # noqa: E731
        torch.randn(16384, options.features, device="cuda"), dim=1
    ).bfloat16()
    pairs = make_pairs(
        unit(),
        unit(),
        (14.3, options.bias),
        positives="aligned",
        ids=None,
        labels=None,
        skip_self=False,
    )
    best = ceiling(2.0)
    print(f"cuBLAS 8192^3: {best:.0f} TFLOP/s")
    if options.panels or options.split or options.kept:
        if options.kept:
            time_kept(options.seconds)
        else:
            (time_panels if options.panels else time_split)(options.features, options.seconds)
        print(f"cuBLAS 8192^3: {ceiling(2.0):.0f} TFLOP/s")
        return
    candidates = [(name, size, False) for name, sizes in CANDIDATES.items() for size in sizes]
    candidates += [(name, size, True) for name, sizes in GLUON.items() for size in sizes]
    for name, size, in_gluon in candidates:
        if options.bias is not None and name != "dz_of_softplus":
            continue
        try:
            call, count = make(name, size, pairs, in_gluon)
            ms = sustained(call, options.seconds)
        except Exception as error:  # a tile that does not compile is a line of the table
            print(f"{name:15} {tuple(size)}: {type(error).__name__}", flush=True)
            continue
        rate = 2 * count * options.features / ms / 1e9
        language = "Gluon" if in_gluon else "Triton"
        print(
            f"{name:15} {tuple(size)!s:32} {language:8} {ms:7.3f} ms {rate:5.0f} TFLOP/s",
            flush=True,
        )
    print(f"cuBLAS 8192^3: {ceiling(2.0):.0f} TFLOP/s")


if __name__ == "__main__":
    main()
