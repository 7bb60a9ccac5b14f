"""What a step minimises: a loss of the features of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise import Pool, clip_loss, info_nce, nt_xent, siglip_loss
from tilewise.config import Config, LossConfig, StepConfig
from tilewise.errors import OptionError
from tilewise.ranks import Ranks

SAVED_BYTES = 4 * 2**30  # features of a pool in a file that a checkpoint takes in, of each rank


def check_negatives(config: Config, some: bool) -> None:
    """Raise where samples bring hard negatives that the loss has no place for."""
    if some and config.loss.loss != "info_nce":
        raise OptionError(f"hard negatives need loss = 'info_nce', got {config.loss.loss!r}")
    if some and config.step.pool:
        raise OptionError(
            "a pool and hard negatives of each query are not offered together; set pool = 0"
        )


@dataclass
class Objective:
    """rows, cols, scale and what else the model returns -> the loss."""

    loss: LossConfig
    step: StepConfig
    ranks: Ranks
    pool: Pool | None = None

    def __call__(self, rows: Tensor, cols: Tensor, scale: Tensor, **more: Any) -> Tensor:
        """rows, cols: (n, D); `bias`, `negatives` and `ids` as the losses take them."""
        options: dict[str, Any] = {"backend": self.loss.backend, "group": self.ranks.group, **more}
        if self.step.features == "host":
            options["device"] = self.ranks.device
        if self.loss.label_smoothing:
            options["label_smoothing"] = self.loss.label_smoothing
        kind = self.loss.loss
        if kind != "siglip":
            options.pop("bias", None)
        if kind == "info_nce":
            return info_nce(rows, cols, scale, **self._with_pool(options, cols))
        losses: dict[str, Callable[..., Tensor]] = {
            "clip": clip_loss,
            "siglip": siglip_loss,
            "nt_xent": nt_xent,
        }
        return losses[kind](rows, cols, scale, **options)

    def _with_pool(self, options: dict[str, Any], cols: Tensor) -> dict[str, Any]:
        if not self.step.pool:
            return options
        if self.pool is None:
            self.pool = self._make_pool(cols.shape[1])
        return {**options, **self.pool.negatives()}

    def _make_pool(self, dim: int) -> Pool:
        dtypes = {"fp32": torch.float32, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
        where = self.step.pool_where
        if where not in ("device", "host") and self.ranks.world > 1:
            where = f"{where}.{self.ranks.rank}"
        return Pool(
            self.step.pool,
            dim,
            device=self.ranks.device,
            where=where,
            dtype=dtypes[self.step.precision],
        )

    def pool_state(self) -> dict[str, Any] | None:
        """Of the pool, if there is one: also what is in a file, since that goes on to change."""
        if self.pool is None:
            return None
        state = self.pool.state_dict()
        if "features" not in state and self.pool.features.nbytes <= SAVED_BYTES:
            state["features"] = self.pool.features
        return state

    def load_pool(self, state: dict[str, Any]) -> bool:
        """Go on with a pool; or, if features are missing, with an empty one: whether all is there.

        They are where they were left in a file that has changed since and is too large to save.
        """
        count = len(state["born"])
        if count > self.step.pool:
            raise OptionError(
                f"the checkpoint's pool holds {count} negatives, got --pool {self.step.pool}; "
                f"resume with --pool of at least {count}"
            )
        self.pool = self._make_pool(state["dim"])
        try:
            self.pool.load_state_dict(state)
        except OptionError:
            if "features" in state:
                raise
            return False
        return True

    def after(self, features: Any, ids: Tensor | None) -> None:
        """Take the documents of a step into the pool."""
        if self.pool is not None:
            self.pool.put(features["cols"], ids)
