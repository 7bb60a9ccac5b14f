"""The losses as modules: drop-in for open_clip's, and in the shape of other libraries' modules."""

import difflib
import inspect
from collections.abc import Callable, Sequence
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

FACTORS = ("scale", "temperature")  # two names of one option


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
        use_horovod: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if use_horovod:
            raise OptionError("ranks talk by torch.distributed, got use_horovod=True; leave it out")
        _check_options(clip_loss, options, ("image", "text", *FACTORS, "bias"))
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
        """The loss of images and texts (N, D) each, under a scale and a bias of shape () or (1,).

        With `output_dict` as {"contrastive_loss": loss}.
        """
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
        _check_options(siglip_loss, options, ("image", "text", *FACTORS, "bias"))
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
        """The loss of images (N, D) and texts (M, D), under a scale and a bias of shape () or (1,).

        With `output_dict` as {"contrastive_loss": loss}.
        """
        options = _with_world(self.options, self.world_size)
        loss = siglip_loss(image_features, text_features, logit_scale, logit_bias, **options)
        return {"contrastive_loss": loss} if output_dict else loss


class _Fixed(nn.Module):
    """A loss of normalised features with its options fixed; those that are learnt are its own."""

    def __init__(
        self,
        loss: Callable[..., Tensor],
        temperature: float | Tensor | None,
        options: dict[str, Any],
        in_call: Sequence[str],
        normalize: bool,
    ) -> None:
        super().__init__()
        if temperature is not None:
            options = {"temperature": temperature, **options}
        _check_options(loss, options, in_call)
        learnt = {name: x for name, x in options.items() if isinstance(x, nn.Parameter)}
        self.learnt, self.normalize = nn.ParameterDict(learnt), normalize
        self.options = {name: x for name, x in options.items() if name not in learnt}

    def _unit(self, features: Tensor) -> Tensor:
        return functional.normalize(features, dim=-1) if self.normalize else features

    def _for_batch(self, per_batch: dict[str, Any]) -> dict[str, Any]:
        """The options of a batch over those of the module."""
        options = {**self.options, **self.learnt}
        if any(per_batch.get(name) is not None for name in FACTORS):
            options = {name: x for name, x in options.items() if name not in FACTORS}
        return {**options, **per_batch}


class InfoNCELoss(_Fixed):
    """`info_nce` of normalised features, with its options fixed.

    Args:
        temperature: 0.07 by default; or `scale`, by keyword. A parameter is the module's own.
        normalize: whether features are brought to unit length first; but not those of a `Pool`,
            which is too large to be copied every step: put unit vectors into it.
        options: any other of `info_nce`.
    """

    def __init__(
        self, temperature: float | Tensor | None = None, normalize: bool = True, **options: Any
    ) -> None:
        super().__init__(info_nce, temperature, options, ("query", "key"), normalize)

    def forward(self, query: Tensor, key: Tensor, **per_batch: Any) -> Tensor:
        """The loss of queries (N, D) and keys (M, D).

        By keyword what changes per batch (`negatives`, `ids`, `scale`, ...), over the options.
        """
        options = self._for_batch(per_batch)
        negatives = options.get("negatives")
        if isinstance(negatives, Tensor) and not getattr(negatives, "of_a_pool", False):
            options["negatives"] = self._unit(negatives)
        return info_nce(self._unit(query), self._unit(key), **options)


class NTXentLoss(_Fixed):
    """`nt_xent` of normalised features, called with two views as lightly's module is.

    Args:
        temperature: 0.5 by default; or `scale`, by keyword. A parameter is the module's own.
        memory_bank_size: 0: lightly's memory bank is not here.
        gather_distributed: whether all ranks' samples are negatives.
        normalize: whether features are brought to unit length first.
        options: any other of `nt_xent`.
    """

    def __init__(
        self,
        temperature: float | Tensor | None = None,
        memory_bank_size: int = 0,
        gather_distributed: bool = False,
        *,
        normalize: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(nt_xent, temperature, options, ("first", "second"), normalize)
        if memory_bank_size:
            raise OptionError(
                f"memory_bank_size must be 0, got {memory_bank_size}: this version has no bank"
            )
        self.gather_distributed = gather_distributed

    def forward(self, out0: Tensor, out1: Tensor, **per_batch: Any) -> Tensor:
        """The loss of two views (N, D) each; by keyword what changes per batch."""
        group = {"group": groups.world()} if self.gather_distributed else {}
        options = {**group, **self._for_batch(per_batch)}
        return nt_xent(self._unit(out0), self._unit(out1), **options)


class SupConLoss(_Fixed):
    """`sup_con` of normalised features, called with (embeddings, labels).

    Args:
        temperature: 0.1 by default; or `scale`, by keyword. A parameter is the module's own.
        normalize: whether features are brought to unit length first.
        options: any other of `sup_con`.
    """

    def __init__(
        self, temperature: float | Tensor | None = None, normalize: bool = True, **options: Any
    ) -> None:
        super().__init__(sup_con, temperature, options, ("features", "labels"), normalize)

    def forward(self, embeddings: Tensor, labels: Tensor, **per_batch: Any) -> Tensor:
        """The loss of embeddings (N, D) and labels (N,); by keyword what changes per batch."""
        return sup_con(self._unit(embeddings), labels, **self._for_batch(per_batch))


def _check_options(
    loss: Callable[..., Tensor], options: dict[str, Any], in_call: Sequence[str]
) -> None:
    """Raise at construction on an option that the loss would refuse at the first batch."""
    known = {*inspect.signature(loss).parameters, *SweepOptions.__annotations__} - {"how"}
    if all(options.get(name) is not None for name in FACTORS):
        raise OptionError("scale and temperature both set the same factor; pass one of them")
    for name in options:
        if name in in_call:
            raise OptionError(
                f"{name} of {loss.__name__} comes with every call, got it at construction; pass "
                "it (to open_clip's modules as logit_scale or logit_bias) when you call"
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{loss.__name__} has no option {name!r}{hint}")


def _with_world(options: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The options of a loss, with all ranks as its group where there are several."""
    if world_size == 1 or options.get("group") is not None:
        return options
    return {**options, "group": groups.world_of(world_size)}
