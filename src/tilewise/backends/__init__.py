"""Backends of the sweep, and the choice between them. Each says why it refuses."""

from typing import NamedTuple

import torch

from tilewise.backends import chunked, dense, fused
from tilewise.backends.plan import Backend
from tilewise.errors import BackendError, OptionError
from tilewise.pairs import check_choice

# "auto" takes the first that does not refuse; dense is only for being asked.
PREFERRED = ("fused", "chunked")
BACKENDS: dict[str, Backend] = {"fused": fused, "chunked": chunked, "dense": dense}
NAMES = ("auto", *BACKENDS)


class Choice(NamedTuple):
    """Which backend runs, and what each one passed over had to say."""

    name: str
    refusals: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{name}: passed over, {why}" for name, why in self.refusals.items()]
        return "\n".join([*lines, f"{self.name}: chosen"])


def choose(
    asked: str, device: torch.device, dtype: torch.dtype, precision: str = "exact"
) -> Choice:
    """The backend to run; asked for by name it runs or raises, it never falls back in silence."""
    check_choice("backend", asked, NAMES)
    refusals: dict[str, str] = {}
    for name in PREFERRED if asked == "auto" else (asked,):
        why = BACKENDS[name].refusal(device, dtype)
        if why is None and asked == "auto" and name == "fused":
            why = fused.reservation(dtype)
        if why is None:
            choice = Choice(name, refusals)
            _check_precision(precision, choice, device, dtype)
            return choice
        refusals[name] = why
    raise BackendError(f"backend {asked!r} cannot run: {refusals[asked]}; use backend='auto'")


def _check_precision(
    precision: str, choice: Choice, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise unless the chosen backend can make scores of such features in that precision."""
    if precision == "exact":
        return
    why = fused.fp8_refusal(device, dtype)
    if why is None and choice.name != "fused":
        passed = choice.refusals.get("fused", f"backend={choice.name!r} was asked for")
        why = f"it needs the fused backend, got {choice.name} ({passed})"
    if why is not None:
        raise OptionError(
            f"precision={precision!r} cannot be had: {why}; leave precision at 'exact'"
        )
