"""Compile every sweep kernel for one architecture without a device; print what came out as JSON.

Run by `tests/test_compile.py` in a process of its own: other tests have Triton's interpreter on.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tilewise.backends import (
    adding,
    convert,
    dz,
    entropies,
    finishes,
    hopper,
    hopper_dz,
    hopper_split,
    kernels,
    split_products,
    tuning,
    vectors,
)
from tilewise.backends.tuning import Target, copies_tiles, tiles_for

FLOAT_POINTERS = """head flag row_part col_part row_pull col_pull out row_gain col_gain row_vectors
    col_vectors scale_part row_parts row_weight col_weight stats mean product_of"""
INT_POINTERS = "index row_ids col_ids row_labels col_labels"
POINTERS = {
    **dict.fromkeys(FLOAT_POINTERS.split(), "fp32"), **dict.fromkeys(INT_POINTERS.split(), "i32"),
}  # fmt: skip
COMMON = {
    "IDS": False, "SELF": False, "UPPER": False, "COLUMNS": True, "SCALED": False, "kept": None,
}  # fmt: skip
ALIGNED, INDEX, LABEL = (kernels.KINDS[name] for name in ("aligned", "index", "label"))
VARIANTS = {
    "sums": ("sums", "sums", {"KIND": ALIGNED, "MASKED": False}),
    "sums-keep": ("sums", "kept", {"KIND": ALIGNED, "MASKED": False, "kept": "i16"}),
    "sums-keep-scale": (
        "sums", "kept", {"KIND": ALIGNED, "MASKED": False, "SCALED": True, "kept": "i16"},
    ),
    "sums-ids": ("sums", "masked", {"KIND": ALIGNED, "IDS": True, "MASKED": True}),
    "sums-symmetric": (
        "sums", "masked", {"KIND": INDEX, "SELF": True, "UPPER": True, "MASKED": True},
    ),
    "dz_of_sums": ("dz_of_sums", "dz", {"KIND": ALIGNED, "SCALED": False}),
    "dz_of_sums-scale": ("dz_of_sums", "dz", {"KIND": ALIGNED, "SCALED": True}),
    "marked_sums": ("marked_sums", "marked", {"KIND": ALIGNED, "SUMS": False, "ON_FLAG": True}),
    "marked_sums-labels": (
        "marked_sums", "marked", {"KIND": LABEL, "IDS": True, "SUMS": True, "ON_FLAG": False},
    ),
    "marked_means": ("marked_means", "marked", {"KIND": ALIGNED, "IDS": True}),
    "dz_of_marked": (
        "dz_of_marked", "marked",
        {"KIND": ALIGNED, "SUMS": False, "SCALED": True, "ON_FLAG": True},
    ),
    "dz_of_marked-labels": (
        "dz_of_marked", "marked",
        {"KIND": LABEL, "IDS": True, "SUMS": True, "SCALED": True, "ON_FLAG": False},
    ),
    "dz_of_softplus": (
        "dz_of_softplus", "softplus",
        {"KIND": ALIGNED, "VALUES": True, "GRADS": True, "SCALED": True, "COLUMNS": False,
         "MASKED": False, "EDGES": False},
    ),
    "dz_of_softplus-edges": (
        "dz_of_softplus", "softplus",
        {"KIND": ALIGNED, "VALUES": True, "GRADS": True, "SCALED": True, "COLUMNS": False,
         "MASKED": True, "EDGES": True},
    ),
    "dz_of_softplus-labels": (
        "dz_of_softplus", "masked",
        {"KIND": LABEL, "IDS": True, "VALUES": True, "GRADS": True, "SCALED": True,
         "COLUMNS": False, "MASKED": True, "EDGES": False},
    ),
}  # fmt: skip
CONVERT = {"WIDTH": 8, "WHOLE_AT": 64, "COLS": True, "BLOCK": 16, "TD": 64}
VECTORS = {
    "measure": {"KIND": INDEX, "BLOCK": 16, "TD": 128},
    "begin": {"BLOCK": 8192},
    "scaled": {"ADD": True, "BLOCK": 2048},
    "merge": {"K": 7, "BLOCK": 256},
    "parts": {"PARTS": 128, "BLOCK": 32},
    "finish": {"KIND": INDEX, "SELF": True, "SYMMETRIC": True, "ROWS": 2, "COLS": 3, "PARTS": 256,
               "BLOCK": 32},
    "finish_marked": {
        "KIND": LABEL, "SELF": False, "SYMMETRIC": False, "SUMS": True, "ON_FLAG": True,
    },
    "longest": {"BLOCK": 16, "TD": 64},
    "store_units": {"TOP": 14, "BLOCK": 1024},
    "convert": {**CONVERT, "FORM": 0},
    "convert-split": {**CONVERT, "FORM": 1},
    "convert-fp8": {**CONVERT, "FORM": 2},
    "convert-high-low": {**CONVERT, "FORM": 3},
    "survey": {"MULTIPLIER": 1.0, "SUMS": True, "COLUMNS": True, "BLOCK": 8192},
    "measure-plain": {
        "units": None, "other_norm": None, "KIND": INDEX, "BLOCK": 16, "TD": 128,
    },
    "begin-plain": {"units": None, "BLOCK": 8192},
    "survey-plain": {
        "units": None, "MULTIPLIER": 1.0, "SUMS": True, "COLUMNS": True, "BLOCK": 8192,
    },
    "gains": {"KIND": INDEX, "SUMS": True, "COLUMNS": True, "FIXED": True},
    "losses": {},
    "losses-plain": {"weight": None},
    "average": {"MEAN": True, "SIDES": 2, "GIVEN": False},
    "average-given": {"MEAN": True, "SIDES": 1, "GIVEN": True},
    "pull": {},
    "pull-plain": {"weight": None},
}  # fmt: skip
FLOATS = """x other norm other_norm dot row_norm col_norm scale part found row_stats d_rows d_cols
    col_stats stats d other_d vectors at_positive head out rows cols unit units flag memo factor
    total gain a b weight upstream row_part col_part row_out col_out row_found col_found
    row_vectors col_vectors"""
POINTERS_OF_VECTORS = {
    **dict.fromkeys(FLOATS.split(), "*fp32"), "index": "*i32",
    **dict.fromkeys(["row_more", "col_more", "sums", "totals", "divisors"], "*fp64"),
}  # fmt: skip
# What kernels see of features: fp32 is split into fp16; fp8 is a copy of half-precision features.
SCORES = {torch.float32: torch.float16}
GRADIENTS = {torch.float32: torch.float16, torch.float8_e4m3fn: torch.bfloat16}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv"}
# Loads and stores of a single 16-bit number.
NARROW = {
    "cuda": r"(ld|st)\.global[.\w:]*\.[bu]16\b",
    "hip": r"global_(load_(short|ushort)|store_short)|buffer_(load_(short|ushort)|store_short)",
}
# Floats added up outside of tensor cores, one or two at a time.
SUM = {"cuda": r"\badd\.(rn\.)?(ftz\.)?f32", "hip": r"v_(pk_)?add_f32"}
MMA = {"cuda": r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", "hip": r"v_mfma"}


def compile_variant(name, target, dtype, features, ones=()):
    """The compiled kernel of one variant; arguments of 1 are constants, as Triton takes them."""
    kernel_name, tile_name, options = VARIANTS[name]
    kernel = getattr(dz if kernel_name.startswith("dz") else kernels, kernel_name)
    size = getattr(tiles_for(target, dtype), tile_name)
    values = {
        **COMMON, **options, "D": features, "TN": size.rows, "TM": size.cols, "TD": size.features,
        "FOLD": min(size.rows, 16 * size.warps), "GROUP": size.group, "WHOLE_AT": 0,
    }  # fmt: skip
    if dtype == torch.float32:
        values |= {"D": 4 * features, "WHOLE_AT": 3 * features}
    piece = (size.rows, size.cols // (4 if kernel_name == "dz_of_softplus" else 2))
    scores, gradients = SHORT[SCORES.get(dtype, dtype)], SHORT[GRADIENTS.get(dtype, dtype)]
    blocks = {
        "rows": (scores, size.rows, size.features),
        "cols": (scores, size.cols, size.features),
        "dz": (gradients, *piece),
        "rest": (gradients, *piece),
    }
    if values["kept"] is not None:
        blocks["kept"] = (values.pop("kept"), size.rows, size.cols)
    if dtype != torch.float32:
        del blocks["rest"]
        values["rest"] = None
    signature, constants, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in blocks and copies_tiles(target):
            signature[argument] = "tensordesc<{}[{},{}]>".format(*blocks[argument])
        elif argument in blocks:
            signature[argument] = (f"*{blocks[argument][0]}", "i32", "i32")
            attributes[(position, 0)] = [["tt.divisibility", 16]]
        elif argument in POINTERS:
            signature[argument] = "*" + POINTERS[argument]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif argument in values:
            signature[argument] = "constexpr"
            constants[(position,)] = values[argument]
        elif argument in ones:
            signature[argument] = "constexpr"
            constants[(position,)] = 1
        else:
            signature[argument] = "i32"
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": size.warps, "num_stages": size.stages}
    return triton.compile(source, target=gpu_of(target), options=options)


def gpu_of(target):
    """A target, as Triton's compiler wants it."""
    if target.kind == "hip":
        return GPUTarget("hip", f"gfx{target.version}", 64)
    return GPUTarget(target.kind, target.version, 32)


SPLIT_PRODUCTS = {"split_product": False, "split_product-turned": True}


def compile_split_product(name, target):
    """The compiled kernel of gradients from parts."""
    kernel, size = split_products.split_product, tuning.tiles_for(target, torch.float32).product
    turned = SPLIT_PRODUCTS[name]
    values = {
        "TURNED": turned, "ADD": False, "TN": size.rows, "TD": size.cols, "TK": size.features,
    }  # fmt: skip
    dz = (size.features, size.rows) if turned else (size.rows, size.features)
    blocks = dict.fromkeys(("high", "rest"), dz)
    blocks |= dict.fromkeys(("upper", "lower"), (size.features, size.cols))
    signature, constants, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in blocks and copies_tiles(target):
            signature[argument] = "tensordesc<fp16[{},{}]>".format(*blocks[argument])
        elif argument in blocks:
            signature[argument] = ("*fp16", "i32", "i32")
            attributes[(position, 0)] = [["tt.divisibility", 16]]
        elif argument in values:
            signature[argument], constants[(position,)] = "constexpr", values[argument]
        else:
            signature[argument] = "*fp32" if argument == "out" else "i32"
    # The features of a panel are stored to a multiple of 8.
    attributes[(kernel.arg_names.index("width"),)] = [["tt.divisibility", 8]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": size.warps, "num_stages": size.stages}
    return triton.compile(source, target=gpu_of(target), options=options)


GLUON = {
    "gluon-sums": ("sums", "sums", {"SCALED": False, "kept": None}),
    "gluon-sums-keep": ("sums", "sums", {"SCALED": False, "kept": "i16"}),
    "gluon-sums-attend": ("sums", "sums", {"SCALED": True, "COLUMNS": False, "kept": "bf16"}),
    "gluon-dz": ("dz_of_sums", "dz", {"SCALED": False}),
    "gluon-dz-scale": ("dz_of_sums", "dz", {"SCALED": True}),
    "gluon-dz-foreign": ("dz_of_sums", "dz", {"SCALED": False, "DIAGONAL": False}),
    "gluon-dz-scale-foreign": ("dz_of_sums", "dz", {"SCALED": True, "DIAGONAL": False}),
    "gluon-dz-scale-rows": ("dz_of_sums", "dz", {"SCALED": True, "COLUMNS": False}),
    "gluon-softplus": ("dz_of_softplus", "softplus", {"SCALED": False}),
    "gluon-sums-keep-scale": ("sums", "sums", {"SCALED": True, "kept": "i16"}),
    "gluon-softplus-scale": ("dz_of_softplus", "softplus", {"SCALED": True}),
}
# Of features in parts: what is kept or goes through softplus is not for `hopper`.
GLUON_SPLIT = ("gluon-sums", *(name for name in GLUON if name.startswith("gluon-dz")))


def compile_gluon(name, dtype, features):
    """The compiled kernel of `hopper`."""
    kernel_name, tile_name, options = GLUON[name]
    kernel = getattr(hopper_dz if kernel_name.startswith("dz") else hopper, kernel_name)
    split = dtype == torch.float32
    size = getattr(tuning.GLUON_SPLIT if split else tuning.GLUON, tile_name)
    values = {
        "D": 4 * features if split else features, "STAGES": size.stages, "LANES": size.group,
        "DIAGONAL": True, "COLUMNS": kernel_name != "dz_of_softplus", "VALUES": True,
        "rest": None, **options,
    }  # fmt: skip
    features_of, half = SHORT[SCORES.get(dtype, dtype)], (size.rows, size.cols // 2)
    blocks = {
        "rows": (features_of, size.rows, size.features),
        "cols": (features_of, size.cols, size.features),
        "dz": (features_of, *half),
    }
    if split:
        blocks["rest"] = (features_of, *half)
        del values["rest"]
    if values.get("kept") is not None:
        blocks["kept"] = (values.pop("kept"), *half)
    return compile_in_gluon(kernel, values, blocks)


def compile_gluon_split_product(name, ones=()):
    """The compiled kernel of `hopper_split`; arguments of 1 are constants."""
    size, turned = tuning.GLUON_SPLIT.product, SPLIT_PRODUCTS[name.removeprefix("gluon-")]
    half = size.rows // 2
    dz = (size.features, half) if turned else (half, size.features)
    blocks = dict.fromkeys(("high", "rest"), ("fp16", *dz))
    blocks |= dict.fromkeys(("upper", "lower"), ("fp16", size.features, size.cols))
    values = {"STAGES": size.stages, "TURNED": turned, "ADD": True, **dict.fromkeys(ones, 1)}
    return compile_in_gluon(hopper_split.split_product, values, blocks)


def compile_in_gluon(kernel, values, blocks):
    """A compiled kernel in Gluon, from its constants and the tiles of its descriptors."""
    signature, constants, attributes = {}, {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in values:
            signature[argument], constants[(position,)] = "constexpr", values[argument]
        elif argument in blocks:
            layout = gl.NVMMASharedLayout(min(128, 2 * blocks[argument][2]), 16, 2)
            signature[argument] = "tensordesc<{}[{},{}],{!r}>".format(*blocks[argument], layout)
        elif argument in POINTERS:
            signature[argument] = "*" + POINTERS[argument]
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compile_vectors(target, size):
    """The kernels over vectors, for sizes of 1 (constants to Triton) or more."""
    for name, options in VECTORS.items():
        kernel_name = name.split("-")[0]
        (kernel,) = (
            vars(x)[kernel_name]
            for x in (vectors, finishes, adding, convert, entropies)
            if hasattr(x, kernel_name)
        )
        values = {"BLOCK": 256, **options}
        signature, constants = {}, {}
        for position, argument in enumerate(kernel.arg_names):
            value = values.get(argument, 1 if size == 1 else None)
            signature[argument] = POINTERS_OF_VECTORS.get(argument, "i32")
            if argument in values or (argument not in POINTERS_OF_VECTORS and value is not None):
                signature[argument], constants[(position,)] = "constexpr", value
        gpu = GPUTarget(target.kind, target.version, 32)
        triton.compile(ASTSource(kernel, signature, constants, {}), target=gpu)


def spills(ptx, version):
    """Bytes spilled, and registers, as ptxas counts them."""
    suffix = "a" if version >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            get_ptxas(version).path,  # which one it is depends on Triton's version
            "-v",
            f"--gpu-name=sm_{version}{suffix}",
            path,
            "-o",
            path.with_suffix(".o"),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return (
        sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        max(map(int, re.findall(r"Used (\d+) registers", said))),
    )


def report(name, target, dtype, features):
    if name in GLUON:
        compiled = compile_gluon(name, dtype, features)
    elif name.startswith("gluon"):
        compiled = compile_gluon_split_product(name)
    elif name in SPLIT_PRODUCTS:
        compiled = compile_split_product(name, target)
    else:
        compiled = compile_variant(name, target, dtype, features)
    text = compiled.asm["ptx" if target.kind == "cuda" else "amdgcn"]
    found = {
        "name": name,
        "dtype": str(dtype),
        "shared": compiled.metadata.shared,
        "mma": len(re.findall(MMA[target.kind], text)),
        "trap": len(re.findall(r"^\s*trap;|s_trap", text, re.MULTILINE)),
        "narrow": len(re.findall(NARROW[target.kind], text)),
        "sums": len(re.findall(SUM[target.kind], text)),
    }
    if target.kind == "cuda":
        found["spilled"], found["registers"] = spills(text, target.version)
    else:
        found["spilled"] = sum(map(int, re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)))
        found["registers"] = max(map(int, re.findall(r"\.vgpr_count:\s*(\d+)", text)))
    return found


if __name__ == "__main__":
    kind, version, dtype, *names = sys.argv[1:]
    if names == ["ones"]:  # a single row against a single column
        compile_vectors(Target(kind, int(version)), 1)
        compile_vectors(Target(kind, int(version)), 2)
        for variant in VARIANTS:
            compile_variant(variant, Target(kind, int(version)), getattr(torch, dtype), 8,
                            ones=("N", "M", "n", "m"))  # fmt: skip
        if version == "90":
            compile_gluon_split_product("gluon-split_product", ("n", "k", "D"))
        sys.exit()
    gluon = tuning.gluon_tiles(Target(kind, int(version)), getattr(torch, dtype))
    split = list(SPLIT_PRODUCTS) if dtype == "float32" else []
    in_gluon = []
    if gluon:
        in_gluon = [*GLUON_SPLIT, *("gluon-" + name for name in split)] if split else list(GLUON)
    for variant in names or [*VARIANTS, *in_gluon, *split]:
        found = report(variant, Target(kind, int(version)), getattr(torch, dtype), 768)
        sys.stdout.write(json.dumps(found) + "\n")
