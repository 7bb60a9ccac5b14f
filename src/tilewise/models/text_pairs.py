"""Queries with documents: any text encoder of sentence-transformers or Hugging Face."""

from collections.abc import Sequence
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
from tilewise.models.libraries import need

REMEDY = "pip install 'tilewise[text]'"
NONE = "none"  # a prefix that is none, though the folder has one


class TextPairs(PairModel):
    """One encoder for queries and documents: tokens -> rows (queries), cols (documents), negatives,
    scale.

    Args:
        folder: of sentence-transformers, or of a Hugging Face model, whose tokens are averaged
            then.
        max_length: tokens of a text; 0 for what the model says.
        query_prefix: put before queries, as some models want it; document_prefix before documents;
            empty for the prompts that the folder tells of, if it does, "none" for none.
        told: what `facts` was of a model whose weights will be loaded into this one.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int = 0,
        query_prefix: str = "",
        document_prefix: str = "",
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
        self.max_length = max_length or int(self.net.max_seq_length or 512)
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


def _read_encoder(folder: str) -> Any:
    """What sentence-transformers makes of a folder; errors name it, whoever raised them."""
    library = need("sentence_transformers", REMEDY)
    if not any((Path(folder) / name).is_file() for name in ("modules.json", "config.json")):
        raise OptionError(
            f"model must be a folder of a text encoder, and {folder!r} has neither modules.json "
            "(sentence-transformers) nor config.json (Hugging Face)"
        )
    try:
        return library.SentenceTransformer(folder, device="cpu", local_files_only=True)
    except Exception as error:
        raise OptionError(
            f"model must be a folder of a text encoder, {folder!r} cannot be read as one: "
            f"{type(error).__name__}: {error}; copy it again, with its weights and tokenizer"
        ) from error


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
