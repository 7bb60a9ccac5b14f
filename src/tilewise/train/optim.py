"""How weights change: optimizers, the learning rate as a function of the step, an average of
weights.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.config import OptimConfig
from tilewise.errors import OptionError
from tilewise.models.libraries import need
from tilewise.train.setup import whole


def groups_of(model: nn.Module, wd: float) -> list[dict[str, Any]]:
    """Matrices with weight decay; biases, norms and scales without."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = [p for name, p in trained if p.ndim < 2 or name.endswith(("logit_scale", "logit_bias"))]
    bare = set(map(id, plain))
    decayed = [p for _, p in trained if id(p) not in bare]
    if not trained:
        raise OptionError("nothing is left to train; unlock a tower")
    groups = [{"params": decayed, "weight_decay": wd}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW of PyTorch; Lion, LAMB and AdaFactor of timm."""
    groups, betas = groups_of(model, config.wd), (config.beta1, config.beta2)
    if config.opt == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    library = need("timm.optim")
    if config.opt == "lion":
        found: torch.optim.Optimizer = library.Lion(groups, lr=config.lr, betas=betas)
    elif config.opt == "adafactor":
        # As "Scaling Vision Transformers" has it, with a momentum, in half precision, and learning
        # rates like AdamW's: PyTorch's multiplies them by the size of each weight.
        found = library.AdafactorBigVision(
            groups, lr=config.lr, momentum=config.beta1, beta2_cap=config.beta2,
            clipping_threshold=1.0,
        )  # fmt: skip
        found.register_state_dict_post_hook(_drop_types)
        found.register_load_state_dict_pre_hook(_keep_types)
    else:
        # Clipping of the whole gradient is ours.
        found = library.Lamb(groups, lr=config.lr, betas=betas, eps=config.eps, max_grad_norm=None)
    return found


def _drop_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Of options, which PyTorch does not gather and JSON does not hold."""
    for group in state["param_groups"]:
        for name in _types_of(group):
            del group[name]


def _keep_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state to load, with the dtypes that `_drop_types` has dropped: timm reads them then."""
    both = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [{**_types_of(own), **loaded} for own, loaded in both]}


def _types_of(group: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: x for name, x in group.items() if isinstance(x, torch.dtype)}


def set_options(optimizer: torch.optim.Optimizer, model: nn.Module, config: OptimConfig) -> None:
    """As configured now, not as when the run began that its state was loaded from."""
    fresh = make_optimizer(model, config).param_groups  # in the order that the optimizer has them
    for group, new in zip(optimizer.param_groups, fresh, strict=True):
        group.update((name, x) for name, x in new.items() if name != "params")


def peak_lr(config: OptimConfig, batch_size: int) -> float:
    """The largest learning rate of a run with this batch."""
    growth = batch_size / (config.lr_batch or batch_size)
    return config.lr * {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[config.lr_scaling]


def lr_at(step: int, steps: int, peak: float, config: OptimConfig) -> float:
    """Linear to the peak over the warm-up, then along a cosine to 0, or as it is."""
    if step < config.warmup:
        return peak * (step + 1) / config.warmup
    if config.lr_scheduler == "const":
        return peak
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return peak * (1 + math.cos(math.pi * min(1.0, share))) / 2


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the whole gradient down to a norm of at most `limit` (0: leave it); its norm before."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Tensor = whole(nn.utils.get_total_norm(grads))
    if limit:
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return float(norm)


class Ema:
    """A moving average of the weights that are trained."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.own.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        now = [p.detach() for p in self.own.values()]
        torch._foreach_lerp_(list(self.average.values()), now, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """With the average as the weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self.own.items():
            held = p.detach().clone()
            p.copy_(self.average[name])
            self.average[name].copy_(held)
