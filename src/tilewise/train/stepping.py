"""One step: the gradient of a batch, and weights by it if all ranks find it finite."""

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise import CachedStep, StepResult
from tilewise.config import Config
from tilewise.data.loader import Batch, moved
from tilewise.errors import FiniteError, StepError
from tilewise.models.base import PairModel
from tilewise.ranks import Ranks
from tilewise.train.objective import Objective
from tilewise.train.optim import (
    Ema,
    clip_gradients,
    lr_at,
    make_optimizer,
    peak_lr,
    set_lr,
    set_options,
)
from tilewise.train.setup import spread, whole
from tilewise.train.stopping import Stop

DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def autocast(config: Config, device: torch.device) -> Any:
    """Of a configuration's precision."""
    dtype = DTYPES.get(config.step.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


class Stepper:
    """A model and all that changes it; a step is a function of the weights and of its number."""

    def __init__(self, config: Config, ranks: Ranks, model: PairModel, stop: Stop) -> None:
        self.config, self.ranks, self.model, self.stop = config, ranks, model, stop
        wrapped = spread(model, ranks, config.run.dist)
        if config.model.torchcompile:
            wrapped.compile()
        self.optimizer = make_optimizer(model, config.optim)
        self.ema = Ema(model, config.optim.ema) if config.optim.ema else None
        self.objective = Objective(config.loss, config.step, ranks)
        half = config.step.precision == "amp_fp16"
        self.scaler = torch.amp.GradScaler(ranks.device.type) if half else None
        self.skipped = self.skipped_in_a_row = 0
        self.peak_lr = peak_lr(config.optim, config.step.batch_size)
        self.cached = CachedStep(
            wrapped,
            self.objective,
            micro_batch=config.step.micro_batch,
            keep=config.step.keep,
            features=config.step.features,
            device=ranks.device,
            scaler=self.scaler,
            batch_norm=config.step.batch_norm,
            return_features=bool(config.step.pool),
            progress=False,
        )

    def step(self, step: int, steps: int, batch: Batch) -> dict[str, float]:
        """Take the step of this number, counted from 0; what is to be told of it."""
        # Dropout too is a function of the step's number.
        torch.manual_seed(self.config.run.seed * 1_000_003 + step * 1009 + self.ranks.rank)
        lr = lr_at(step, steps, self.peak_lr, self.config.optim)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        numbers = self._step(step, batch)
        if self.skipped:
            numbers["skipped"] = float(self.skipped)  # so far
        return {**numbers, "lr": lr, "scale": math.exp(float(whole(self.model.log_scale.detach())))}

    def _step(self, step: int, batch: Batch) -> dict[str, float]:
        ids = batch.ids.to(self.ranks.device) if self.config.data.mask_equal else None
        try:
            result = self._differentiate(batch, ids)
        except StepError as error:
            if not isinstance(error.__cause__, FiniteError):
                raise
            if self.scaler is not None:  # nothing was unscaled that it could judge by
                self.scaler.update(self.scaler.get_scale() * self.scaler.get_backoff_factor())
            return self._skip(step, str(error))
        norm = self._clip()
        if not self.ranks.all_agree(math.isfinite(norm)):
            if self.scaler is not None:
                self.scaler.update()  # a smaller factor next time
            return self._skip(step, f"the gradient's norm is {norm}", float(result.loss))
        self.skipped_in_a_row = 0
        self._take()
        self.objective.after(result.features, ids)
        spent = result.metrics
        return {
            "loss": self._mean(float(result.loss)),
            "grad_norm": norm,
            "encoders_s": spent.embed_s + spent.replay_s,
            "loss_s": spent.loss_s,
            "kept": float(spent.kept),
            "replayed": float(spent.replayed),
        }

    def _differentiate(self, batch: Batch, ids: Tensor | None) -> StepResult:
        inputs = self._precomputed(batch)
        options = {} if ids is None else {"ids": ids}
        with self.autocast():
            return self.cached(inputs, **options)

    def _precomputed(self, batch: Batch) -> dict[str, Tensor]:
        """With the features of a locked tower in place of its images."""
        inputs = batch.inputs
        if not self.config.model.lock_image:
            return inputs
        size, parts = self.config.step.micro_batch, list[dict[str, Tensor]]()
        with self.autocast():
            for first in range(0, len(batch.ids), size):
                part = {name: x[first : first + size] for name, x in inputs.items()}
                parts.append(self.model.precompute(moved(part, self.ranks.device)))
        return {name: torch.cat([part[name] for part in parts]) for name in inputs}

    def autocast(self) -> Any:
        """As the configuration has it."""
        return autocast(self.config, self.ranks.device)

    def state(self) -> dict[str, Any]:
        """What the next step depends on, besides weights, optimizer and pool."""
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        row, total = self.skipped_in_a_row, self.skipped
        return {"scaler": scaler, "skipped_in_a_row": row, "skipped": total}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.skipped = state.get("skipped", 0)
        self.skipped_in_a_row = state.get("skipped_in_a_row", 0)
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        set_options(self.optimizer, self.model, self.config.optim)

    def _clip(self) -> float:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return clip_gradients(self.model, self.config.optim.grad_clip_norm)

    def _take(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.model.clamp(self.config.loss.max_scale)
        if self.ema is not None:
            self.ema.update()

    def _skip(self, step: int, why: str, loss: float = math.nan) -> dict[str, float]:
        """Leave the weights as they are; all ranks do."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.config.optim.max_skipped:
            raise FiniteError(
                f"{self.skipped_in_a_row} steps in a row were skipped, up to step {step + 1}: {why}"
            )
        return {"loss": self._mean(loss)}

    def _mean(self, loss: float) -> float:
        """Over ranks, which learn by the way whether one is to stop: every step asks once."""
        (total,) = self.stop.agree(self.ranks, loss)
        return total / self.ranks.world
