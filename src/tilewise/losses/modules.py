"""The losses as modules: drop-in for open_clip's, and in the shape of other libraries' modules."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tilewise import groups
from tilewise.errors import OptionError
from tilewise.losses.clip import clip_loss
from tilewise.losses.info_nce import info_nce
from tilewise.losses.nt_xent import nt_xent
from tilewise.losses.siglip import siglip_loss
from tilewise.losses.sup_con import sup_con
from tilewise.options import SweepOptions


class ClipLoss(nn.Module):
    """open_clip's `ClipLoss`, swept instead of stored: the same constructor and call.

    Further keywords are options of `clip_loss`. With `world_size` > 1 the loss is that of all
    ranks, or of a `group`. `local_loss`, `gather_with_grad` and
    `cache_labels` choose between ways of storing the matrix and change nothing here.

    >>> loss = ClipLoss()(image_features, text_features, logit_scale.exp())
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(clip_loss, options)
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.options = options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        options = _with_world(self.options, self.world_size)
        loss = clip_loss(image_features, text_features, logit_scale, bias=logit_bias, **options)
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """open_clip's `SigLipLoss`, swept instead of stored: the same constructor and call.

    Further keywords are options of `siglip_loss`. With `world_size` > 1 the loss is that of all
    ranks, or of a `group`. `cache_labels`, `dist_impl` and `chunk_size`
    choose between ways of storing the matrix and change nothing here.
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(siglip_loss, options)
        self.cache_labels, self.rank, self.world_size = cache_labels, rank, world_size
        self.dist_impl, self.chunk_size = dist_impl, chunk_size
        self.options = options

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        options = _with_world(self.options, self.world_size)
        loss = siglip_loss(image_features, text_features, logit_scale, logit_bias, **options)
        return {"contrastive_loss": loss} if output_dict else loss


class InfoNCELoss(nn.Module):
    """`info_nce` of normalised features, with its options fixed.

    Call with (query, key), and by keyword with what changes per batch (`negatives`, `ids`, ...).
    """

    def __init__(self, temperature: float = 0.07, normalize: bool = True, **options: Any) -> None:
        super().__init__()
        _check_options(info_nce, options)
        self.normalize, self.options = normalize, {"temperature": temperature, **options}

    def forward(self, query: Tensor, key: Tensor, **per_batch: Any) -> Tensor:
        if self.normalize and isinstance(per_batch.get("negatives"), Tensor):
            per_batch["negatives"] = functional.normalize(per_batch["negatives"], dim=-1)
        query, key = _unit(self.normalize, query, key)
        return info_nce(query, key, **{**self.options, **per_batch})


class NTXentLoss(nn.Module):
    """`nt_xent` of normalised features, called with two views as lightly's module is.

    With `gather_distributed` all ranks' samples are negatives. lightly's memory bank is not here.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: int = 0,
        gather_distributed: bool = False,
        *,
        normalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_options(nt_xent, options)
        if memory_bank_size:
            raise OptionError(
                f"memory_bank_size must be 0, got {memory_bank_size}: this version has no bank"
            )
        self.gather_distributed = gather_distributed
        self.normalize, self.options = normalize, {"temperature": temperature, **options}

    def forward(self, out0: Tensor, out1: Tensor, **per_batch: Any) -> Tensor:
        out0, out1 = _unit(self.normalize, out0, out1)
        group = {"group": groups.world()} if self.gather_distributed else {}
        return nt_xent(out0, out1, **{**group, **self.options, **per_batch})


class SupConLoss(nn.Module):
    """`sup_con` of normalised features, called with (embeddings, labels)."""

    def __init__(self, temperature: float = 0.1, normalize: bool = True, **options: Any) -> None:
        super().__init__()
        _check_options(sup_con, options)
        self.normalize, self.options = normalize, {"temperature": temperature, **options}

    def forward(self, embeddings: Tensor, labels: Tensor, **per_batch: Any) -> Tensor:
        (embeddings,) = _unit(self.normalize, embeddings)
        return sup_con(embeddings, labels, **{**self.options, **per_batch})


def _unit(normalize: bool, *features: Tensor) -> tuple[Tensor, ...]:
    return tuple(functional.normalize(x, dim=-1) if normalize else x for x in features)


def _check_options(loss: Callable[..., Tensor], options: dict[str, Any]) -> None:
    """Raise at construction on an option that the loss would refuse at the first batch."""
    known = {*inspect.signature(loss).parameters, *SweepOptions.__annotations__} - {"how"}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{loss.__name__} has no option {name!r}{hint}")


def _with_world(options: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The options of a loss, with all ranks as its group where there are several."""
    if world_size == 1 or options.get("group") is not None:
        return options
    return {**options, "group": groups.world_of(world_size)}
