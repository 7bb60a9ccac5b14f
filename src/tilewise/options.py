"""How to sweep: the keywords that every loss takes, and the plan they make."""

from collections.abc import Sequence
from typing import Literal, TypedDict

from tilewise import backends
from tilewise.backends.plan import PRECISIONS, Plan
from tilewise.costs import SCHEDULES
from tilewise.errors import DtypeError, OptionError
from tilewise.groups import Group
from tilewise.pairs import Device, check_choice, check_number


class SweepOptions(TypedDict, total=False):
    """How to sweep: keywords that every loss takes."""

    backend: str  # "auto" (default), "fused", "chunked" or "dense"
    workspace_mib: float  # most memory for tiles at work, 256 by default
    # Most memory for exponentials kept for the backward, or "auto". With retain_graph or under
    # torch.compile the backward works on a copy of them: as much again. By default (None) all are
    # kept where they fit into the workspace, which the backward then does without.
    keep_mib: float | Literal["auto"] | None
    # Where to compute, for features in host memory, pinned, memory-mapped or not; see hosted.py.
    device: Device
    check_values: bool  # read scale and indices back from a device to check them
    precision: str  # "exact" (default), or "fp8": scores of half-precision features rounded to e4m3
    # The ranks whose columns all count: a ProcessGroup, or a DeviceMesh of one dimension or of two,
    # nodes and ranks on each. Without, a loss is this process's own, however many there are.
    group: Group | None
    # How many columns (keys, texts, samples) each rank has, by its rank in the group: a promise
    # that saves asking.
    sizes: Sequence[int]
    schedule: str  # how columns travel: "auto" (default), "ring", "two-level" or "gather"


def make_plan(how: SweepOptions, reduction: str, columns: bool, sums: bool) -> Plan:
    """The plan for one process, with checked options."""
    unknown = set(how) - set(SweepOptions.__annotations__)
    if unknown:
        raise OptionError(
            f"unknown option {sorted(unknown)[0]!r}; the sweep takes "
            f"{', '.join(SweepOptions.__annotations__)}"
        )
    backend = how.get("backend", "auto")
    check_choice("backend", backend, backends.NAMES)
    workspace_mib = check_number("workspace_mib", how.get("workspace_mib", 256))
    if workspace_mib <= 0:
        raise OptionError(f"workspace_mib must be positive, got {workspace_mib}")
    _check_keep(how.get("keep_mib"))
    check_values = how.get("check_values", False)
    if not isinstance(check_values, bool):
        raise DtypeError(f"check_values must be True or False, got {check_values!r}")
    check_choice("schedule", how.get("schedule", "auto"), ("auto", *SCHEDULES))
    precision = how.get("precision", "exact")
    check_choice("precision", precision, PRECISIONS)
    workspace = bytes_of(workspace_mib)
    return Plan(reduction, columns, sums, backend, workspace, check_values, precision)


def bytes_of(mib: float) -> int:
    """In bytes, but no more than the integers of an op can hold."""
    return int(min(mib * 2**20, 2**62))


def _check_keep(keep_mib: float | str | None) -> None:
    if keep_mib is None or keep_mib == "auto":
        return
    if isinstance(keep_mib, str):
        raise OptionError(f"keep_mib must be a number or 'auto', got {keep_mib!r}")
    number = check_number("keep_mib", keep_mib)
    if number < 0:
        raise OptionError(f"keep_mib must not be negative, got {number}; 0 keeps nothing")
