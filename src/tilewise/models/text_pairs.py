"""Queries with documents: any text encoder of sentence-transformers or Hugging Face."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilewise.data.loader import Form, Inputs
from tilewise.data.samples import Sample
from tilewise.data.views import View
from tilewise.errors import DataError, OptionError
from tilewise.models.base import PairModel
from tilewise.models.libraries import need, quiet

REMEDY = "pip install 'tilewise[text]'"
NONE = "none"  # a prefix that is none, though the folder has one
# Where a folder names classes to import, under which keys, and where those may come from.
NAMING = ("modules.json", "router_config.json", "config.json")
CLASSES = {
    "type": "sentence_transformers.",
    "types": "sentence_transformers.",
    "tokenizer_class": "sentence_transformers.",
    "activation_function": "torch.",
}


class TextPairs(PairModel):
    """One encoder for queries and documents: tokens -> rows (queries), cols (documents), negatives,
    scale and, with one, bias.

    Args:
        folder: of sentence-transformers, or of a Hugging Face model, whose tokens are averaged
            then.
        max_length: tokens of a text; 0 for what the model says.
        query_prefix: put before queries, as some models want it; document_prefix before documents;
            empty for the prompts that the folder tells of, if it does, "none" for none.
        init_bias: to begin with, for a loss that has a bias; None for one that has none.
        told: what `facts` was of a model whose weights will be loaded into this one.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int = 0,
        query_prefix: str = "",
        document_prefix: str = "",
        init_bias: float | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not Path(folder).is_dir():
            raise OptionError(
                f"model must be a local folder of a text encoder, got {folder!r}; "
                "copy it here first"
            )
        self.net: Any = _read_encoder(folder)
        self.net.float()  # weights in half precision cannot be trained by small steps
        self.tokenizer = self.net.tokenizer
        positions = _positions(self.net)
        if max_length > positions:
            raise OptionError(
                f"max_length must be at most {positions}, the tokens that {folder} has places for, "
                f"got {max_length}; set --max-length {positions}"
            )
        self.max_length = max_length or int(min(self.net.max_seq_length or 512, positions))
        given = {"query": query_prefix, "positive": document_prefix}
        own = {
            "query": self._prompt("query"),
            "positive": self._prompt("document", "passage", "corpus"),
        }
        known = own if told is None else told.get("prefixes", {})
        self.prefixes = {
            side: "" if prefix == NONE else prefix or known.get(side, "")
            for side, prefix in given.items()
        }
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = None if init_bias is None else nn.Parameter(torch.tensor(init_bias))

    def _prompt(self, *names: str) -> str:
        """The first of these that the folder tells of, named as sentence-transformers does."""
        return next((self.net.prompts[name] for name in names if self.net.prompts.get(name)), "")

    @property
    def log_scale(self) -> nn.Parameter:
        return self.logit_scale

    def forward(self, **tokens: Tensor) -> dict[str, Tensor]:
        """query_ids, query_mask, positive_ids, positive_mask: (n, length);
        negatives_*: (n, H, length).
        """
        out = {
            "rows": self._embedded(tokens["query_ids"], tokens["query_mask"]),
            "cols": self._embedded(tokens["positive_ids"], tokens["positive_mask"]),
            "scale": self.logit_scale.exp(),
        }
        if self.logit_bias is not None:
            out["bias"] = self.logit_bias
        if "negatives_ids" in tokens:
            ids, mask = tokens["negatives_ids"], tokens["negatives_mask"]
            flat = self._embedded(ids.flatten(0, 1), mask.flatten(0, 1))
            out["negatives"] = flat.unflatten(0, ids.shape[:2])
        return out

    def _embedded(self, ids: Tensor, mask: Tensor) -> Tensor:
        out = self.net({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        return functional.normalize(out, dim=-1)

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(n, length) of the longest; the rest is masked."""
        found = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return found["input_ids"], found["attention_mask"]

    def texts(self, texts: Sequence[str], *, queries: bool = False) -> Tensor:
        """n documents, or queries -> (n, D) unit features, with the prefix that training gives
        them.
        """
        prefix = self.prefixes["query" if queries else "positive"]
        ids, mask = self.tokens([prefix + text for text in texts])
        return self._embedded(ids.to(self.device), mask.to(self.device)).float()

    def form(self, view: View) -> Form:
        return Form(_prepare, self._collate, 1)

    def _collate(self, prepared: list[dict[str, Any]]) -> Inputs:
        inputs: Inputs = {}
        for name, prefix in self.prefixes.items():
            ids, mask = self.tokens([prefix + each[name] for each in prepared])
            inputs |= {f"{name}_ids": ids, f"{name}_mask": mask}
        counts = {len(each["negatives"]) for each in prepared}
        if len(counts) > 1:
            raise DataError(
                "all samples must have the same number of hard negatives, "
                f"got {sorted(counts)}; cut or fill them up"
            )
        if count := counts.pop():
            prefix = self.prefixes["positive"]
            flat = [prefix + text for each in prepared for text in each["negatives"]]
            ids, mask = (part.unflatten(0, (-1, count)) for part in self.tokens(flat))
            inputs |= {"negatives_ids": ids, "negatives_mask": mask}
        return inputs

    def facts(self) -> dict[str, Any]:
        return {"prefixes": self.prefixes}

    def export(self, folder: Path) -> None:
        """A folder for `SentenceTransformer(folder)` and, as its parts, for transformers.

        `encode(texts, prompt_name="query")`, or "document", embeds as training does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.net.max_seq_length = self.max_length
        prompts = {"query": self.prefixes["query"], "document": self.prefixes["positive"]}
        self.net.prompts = {**self.net.prompts, **prompts}
        self.net.set_pooling_include_prompt(True)  # here a prefix is text like any other
        self.net.save(str(folder))
        for file in folder.rglob("*.safetensors"):  # its library lets the owner alone read them
            file.chmod((folder / "modules.json").stat().st_mode)


def _read_encoder(folder: str) -> Any:
    """What sentence-transformers makes of a folder; errors name it, whoever raised them."""
    library = need("sentence_transformers", REMEDY)
    if not any((Path(folder) / name).is_file() for name in ("modules.json", "config.json")):
        raise OptionError(
            f"model must be a folder of a text encoder, and {folder!r} has neither modules.json "
            "(sentence-transformers) nor config.json (Hugging Face)"
        )
    _check_classes(folder)
    try:
        with quiet():
            return library.SentenceTransformer(folder, device="cpu", local_files_only=True)
    except Exception as error:
        raise OptionError(
            f"model must be a folder of a text encoder, {folder!r} cannot be read as one: "
            f"{type(error).__name__}: {error}; copy it again, with its weights and tokenizer"
        ) from error


def _positions(net: nn.Module) -> float:
    """How many tokens it has learned places for; infinity where it knows them otherwise."""
    tables = [
        part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
        for name, part in net.named_modules()
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding)
    ]
    return min(tables, default=math.inf)


def _check_classes(folder: str) -> None:
    """Raise where a folder names classes that are not the library's: version 5 imports them
    unasked, from the folder's own files too.
    """
    for file in sorted(each for each in Path(folder).rglob("*.json") if each.name in NAMING):
        found: Any = None
        with suppress(ValueError):  # what is no JSON the library does not read, either
            found = json.loads(file.read_text("utf-8"))
        for key, name in _classes(found):
            if not name.startswith(CLASSES[key]):
                raise OptionError(
                    f"{file} names {name!r}, code that would run, and only classes of "
                    f"{CLASSES[key].removesuffix('.')} may stand there; if you trust it, load the "
                    "folder in Python and save the encoder inside as a Hugging Face folder"
                )


def _classes(found: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names that stand somewhere under one of the keys, with that key."""
    if isinstance(found, dict):
        for inner, value in found.items():
            yield from _classes(value, inner if inner in CLASSES else key)
    elif isinstance(found, list):
        for value in found:
            yield from _classes(value, key)
    elif key and isinstance(found, str) and "." in found:
        yield key, found


def _prepare(sample: Sample, chances: NDArray[np.float64]) -> dict[str, Any]:
    if "query" in sample and "positive" in sample:
        return {name: sample.get(name, ()) for name in ("query", "positive", "negatives")}
    # Two of several texts that belong together: paraphrases, captions of one image.
    texts = sample.get("text", ())
    if len(texts) < 2:
        raise DataError(
            f"a sample must have a query and a positive, or two texts, got {', '.join(sample)}",
            "fields",
        )
    first = int(chances[0] * len(texts))
    return {"query": texts[first], "positive": texts[(first + 1) % len(texts)], "negatives": ()}
