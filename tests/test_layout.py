"""The shape of the code: imports point down, limits are kept, public names are documented."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import tilewise as tw

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tilewise"

# A module may import from its own layer or below; the longest matching prefix counts.
LAYERS = {
    "errors": 0, "pairs": 0, "tiles": 0, "measure": 0, "costs": 0, "routes": 0, "trees": 0,
    "ahead": 0, "mapped": 0, "locks": 0,
    "reductions": 1, "positives": 1,
    "backends": 2, "groups": 2, "ring": 2,
    "rounds": 3.0, "hosted": 3.1, "autograd": 3.2, "dot_rows": 3.3, "entropy": 3.3,
    "options": 3.4, "agreement": 3.4, "sweep": 3.4,
    "losses": 4,
    "gradcache": 5, "embedding": 5, "pushing": 5, "featurebuffers": 5, "microbatches": 5,
    "gradsync": 5, "stepchecks": 5, "pool": 5, "poolfile": 5,
    "randomness": 5, "phases": 5, "models": 5, "data": 5,
    "config": 6.0, "ranks": 6.0, "recipes": 6.0, "evaluate": 6.1, "train": 6.2, "bench": 6.2,
    "bench_report": 6.3, "check_ring": 6.3, "cli": 6.4, "__main__": 6.5,
}  # fmt: skip
APPLICATION = 6  # and above
# Of one layer, and yet neither imports the other.
SIBLINGS = {"ring": ["backends"], "groups": ["backends"], "backends": ["ring", "groups"]}
# A good reason beats a limit: Triton passes no state by reference, so a kernel's loop stays whole.
LONG_FUNCTIONS = {"sums", "dz_of_softplus"}
TRITON = {
    "adding.py", "kernels.py", "dz.py", "vectors.py", "hopper.py", "convert.py", "operands.py",
    "products.py", "split_products.py", "hopper_dz.py", "hopper_split.py", "fused_softplus.py",
    "tuning.py", "fused_forward.py", "fused_backward.py", "fused_attend.py", "entropies.py",
    "fused_entropy.py", "finishes.py", "ready.py",
}  # fmt: skip


def modules():
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


def name_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name):
    """Of a module; of the package itself, which only the application imports, its lowest."""
    return LAYERS[name.split(".")[0]] if name else APPLICATION


def imports(path):
    """(dotted name below tilewise, line) of every import of our own modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "tilewise":
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif (node.module or "").startswith("tilewise."):
                yield node.module.removeprefix("tilewise."), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tilewise":
                    yield alias.name.removeprefix("tilewise").lstrip("."), node.lineno


def test_imports_point_down():
    wrong = []
    for path in modules():
        own = layer_of(name_of(path))
        for name, line in imports(path):
            if own >= APPLICATION and name in tw.__all__:
                continue  # the application uses the public API
            if layer_of(name) > own:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} from above")
            if name.split(".")[0] in SIBLINGS.get(name_of(path).split(".")[0], ()):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports its sibling {name}")
    assert not wrong, "\n".join(wrong)


def test_the_application_uses_only_the_public_api():
    allowed = {"", "errors", "locks", "measure", "models", "data", "__version__", *tw.__all__}
    allowed |= {name for name, layer in LAYERS.items() if layer >= APPLICATION}
    for path in modules():
        if layer_of(name_of(path)) >= APPLICATION:
            for name, line in imports(path):
                inside = name if name in allowed else name.split(".")[0]
                assert inside in allowed, f"{path.name}:{line} reaches behind the API: {name}"


def test_only_autograd_knows_autograd():
    words = re.compile(r"register_autograd|autograd\.Function|save_for_backward|torch\.library")
    for path in modules():
        # libraries.py declares operators that another library lacks.
        if path.name not in ("autograd.py", "dot_rows.py", "entropy.py", "libraries.py"):
            assert not words.search(path.read_text()), path


def test_torch_distributed_and_triton_stay_where_they_belong():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                known = path.parent.name == "backends" and path.name in TRITON
                assert known or not name.startswith("triton"), f"{path} imports Triton"
                allowed = name_of(path) in (
                    "ring", "groups", "check_ring", "ranks", "train.setup", "train.checkpoint"
                )  # fmt: skip
                assert allowed or not name.startswith("torch.distributed"), path


def test_triton_is_imported_when_it_is_needed():
    code = "import sys, tilewise; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_limits():
    wrong = []
    for path in [*modules(), *(ROOT / "benchmarks").glob("*.py")]:
        text = path.read_text()
        lines = len(text.splitlines())
        if lines > 400:
            wrong.append(f"{path.name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name not in LONG_FUNCTIONS:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                size = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if size > 50:
                    wrong.append(f"{path.name}: {node.name} has {size} lines")
    assert not wrong, "\n".join(wrong)


def test_public_names_are_the_documented_ones():
    documented = set(re.findall(r"^### `(\w+)`", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert documented == set(tw.__all__)
    public = {name for name in vars(tw) if not name.startswith("_")}
    submodules = {path.name.split(".")[0] for path in SOURCE.iterdir()}
    assert public - submodules == set(tw.__all__) - submodules
    for name in tw.__all__:
        thing = getattr(tw, name)
        assert name == "NO_POSITIVE" or (thing.__doc__ or "").strip(), f"{name} has no docstring"


def test_modules_import_alone():
    for path in modules():
        if path.stem != "__main__":
            importlib.import_module(f"tilewise.{name_of(path)}")


def test_the_map_names_every_file():
    known = (ROOT / "README.md").read_text() + (ROOT / "docs" / "architecture.md").read_text()
    missing = [
        path.relative_to(SOURCE)
        for path in modules()
        if path.stem not in ("__init__", "__main__")
        and not re.search(rf"\b{path.stem}(\.py)?\b", known)
    ]
    assert not missing


def test_versions_agree():
    assert f"version: {tw.__version__}" in (ROOT / "CITATION.cff").read_text()
