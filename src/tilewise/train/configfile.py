"""Configurations as TOML files, recipes by name, and flags for every field."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import sys
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tilewise import config as config_module
from tilewise.config import Config
from tilewise.errors import OptionError
from tilewise.models.libraries import need

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What others call a field, where neither its name nor its sentence is near.
ALIASES = {
    "accum_freq": "micro_batch",
    "save_frequency": "save_every",
    "val_frequency": "eval_every",
    "zeroshot_frequency": "eval_every",
    "val_data": "retrieval",
    "imagenet_val": "zero_shot",
    "force_image_size": "image_size",
    "logs": "runs",
    "bf16": "precision",
    "fp16": "precision",
}
RECIPES = resources.files("tilewise") / "recipes"


def recipes() -> list[str]:
    """Names of the recipes that come with tilewise."""
    return sorted(
        each.name.removesuffix(".toml") for each in RECIPES.iterdir() if each.name.endswith(".toml")
    )


def read(name: str) -> Config:
    """A recipe by name, or a TOML file."""
    path = Path(name)
    if name in recipes():
        text = (RECIPES / f"{name}.toml").read_text("utf-8")
    elif path.is_file():
        text = _read_text(path)
    else:
        near = ", ".join(difflib.get_close_matches(name, recipes(), 3)) or ", ".join(recipes())
        raise OptionError(f"there is no recipe or TOML file {name!r}; recipes near it: {near}")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{name} is not TOML: {error}") from error
    return from_tables(tables, name)


def _read_text(path: Path) -> str:
    """Of a file that some editors begin with a mark."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is not TOML, which is UTF-8: {error}; save it as such"
        ) from error


def from_tables(tables: dict[str, Any], origin: str) -> Config:
    """Tables by section; what is not there keeps its default, what is not known is refused."""
    sections = {each.name: each.default_factory for each in dataclasses.fields(Config)}
    _check_known(tables, sections, f"{origin}: table")
    made = {}
    for name, values in tables.items():
        section: Any = sections[name]
        if not isinstance(values, dict):
            raise OptionError(f"{origin}: {name} must be a table, [{name}], got {values!r}")
        known = {each.name: each for each in dataclasses.fields(section)}
        _check_known(values, known, f"{origin}: field of [{name}]")
        made[name] = section(
            **{
                key: _typed(value, known[key], f"{origin}: {name}.{key}")
                for key, value in values.items()
            }
        )
    return Config(**made)


def _check_known(given: dict[str, Any], known: dict[str, Any], what: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise OptionError(f"{what} {name!r} is not known; {hint}")


def _typed(value: Any, known: Any, where: str) -> Any:
    """TOML's value as the field's type, judged by its default: lists are tuples, whole numbers may
    be floats.
    """
    default = known.default
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    mixed = known.name == "keep" and type(value) in (int, float)  # True is an int, too
    if type(value) is not type(default) and not mixed:
        wanted = (
            "'auto' or a number" if known.name == "keep" else f"of type {type(default).__name__}"
        )
        raise OptionError(f"{where} must be {wanted}, got {value!r}")
    choices = _choices(known.type)
    # tuple[int, ...]: of what type each is; a Literal's choices say more.
    element = (*typing.get_args(known.type), None)[0]
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(value, tuple) and not choices and type(one) is not element:
            raise OptionError(f"{where} must hold values of type {element.__name__}, got {one!r}")
        if choices and not mixed and one not in choices:
            near = difflib.get_close_matches(str(one), choices, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where} must be one of {', '.join(choices)}, got {one!r}{hint}")
    return value


def _choices(kind: Any) -> list[str]:
    """What a Literal allows, also inside a tuple."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    return [name for part in typing.get_args(kind) for name in _choices(part)]


def to_toml(config: Config) -> str:
    """The whole configuration, as `read` takes it."""
    lines = []
    for section, values in dataclasses.asdict(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_written(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _written(value: Any) -> str:
    """JSON's strings, numbers, truth values and lists are TOML's as well, but for one character
    that TOML has escaped.
    """
    if value == float("inf"):
        return "inf"
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def with_flags(config: Config, flags: Sequence[str], *, prog: str) -> Config:
    """The configuration with any of its fields given as flags:
    --lr 3e-4 --lock-image --retrieval a b.
    """
    tyro = need("tyro")
    marked = tyro.conf.OmitArgPrefixes[Config]
    made: tuple[Config, list[str]] = tyro.cli(
        marked,
        prog=prog,
        default=config,
        args=list(flags),
        description="Every field of a configuration is a flag.",
        return_unknown_args=True,
    )
    if made[1]:
        raise OptionError(_unknown(made[1][0], prog))
    return made[0]


def _unknown(given: str, prog: str) -> str:
    """What to say of an argument that is none."""
    if not given.startswith("-"):
        hint = "one that is on or off takes none: --flip, --no-flip"
        if given in recipes() or Path(given).exists():
            command = prog.rsplit(" ", 1)[0]
            hint = f"what is run goes before all flags: {command} {given} ..."
        return f"{given!r} is not the value of a flag; {hint}"
    sentences = _sentences()
    name = given.lstrip("-").split("=")[0].replace("-", "_")
    if name in ALIASES:
        field = ALIASES[name]
        flag = "--" + field.replace("_", "-")
        return f"there is no flag {given}; here it is {flag}: {' '.join(sentences[field].split())}"
    words = name.replace("_", " ").lower()
    told = [
        field
        for field, sentence in sentences.items()
        if len(words) >= 3 and words in sentence.lower()  # fewer letters are in any sentence
    ]
    begun = [
        field
        for field in sentences
        if min(len(name), len(field)) >= 3 and (field.startswith(name) or name.startswith(field))
    ]
    near = [*difflib.get_close_matches(name, sentences, 3, 0.7), *begun, *told]
    near = list(dict.fromkeys(near))[:3]
    flags = ", ".join("--" + field.replace("_", "-") for field in near)
    return f"there is no flag {given}; {f'near it: {flags}' if near else f'see {prog} --help'}"


def _sentences() -> dict[str, str]:
    """What stands under each field."""
    found = {}
    for section in ast.parse(inspect.getsource(config_module)).body:
        parts = section.body if isinstance(section, ast.ClassDef) else []
        for part, after in itertools.pairwise(parts):
            if isinstance(part, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(part.target)] = ast.literal_eval(after.value)
    return found
