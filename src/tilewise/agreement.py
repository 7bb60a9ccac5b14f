"""Several ranks that compute one loss: what they must have in common, and how they talk."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise import backends, costs, groups, ring
from tilewise.backends.plan import Plan
from tilewise.errors import OptionError, RingError, TilewiseError
from tilewise.options import SweepOptions, make_plan
from tilewise.pairs import Pairs, check_values, make_pairs

# Whether Dynamo can follow a loss. That of torch 2.8 gets lost in named tuples; 2.11 is the oldest
# that was seen to follow.
TRACED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)

Args = ParamSpec("Args")
Result = TypeVar("Result")


def together(loss: Callable[Args, Result]) -> Callable[Args, Result]:
    """What is refused on one rank of its group is raised on all, so that none waits."""
    signature = inspect.signature(loss)

    def run(*args: Args.args, **options: Args.kwargs) -> Result:
        given = signature.bind(*args, **options).arguments
        call = groups.Call(_said(loss.__name__, given))
        token = groups.calling.set(call)
        try:
            return loss(*args, **options)
        except RingError:
            raise
        except TilewiseError as error:
            if given["how"].get("sizes") is None and not call.agreed:
                groups.refuse(given["how"]["group"], error)
            raise
        finally:
            groups.calling.reset(token)

    @functools.wraps(loss)
    def choose(*args: Args.args, **options: Args.kwargs) -> Result:
        # Within another call, that one speaks for both.
        alone = options.get("group") is None or groups.calling.get() is not None
        how = loss if alone else run
        # What goes round is nothing for a compiler, and an old one cannot follow the rest.
        if torch.compiler.is_compiling() and not (alone and TRACED):
            opaque: Any = torch.compiler.disable(how)
            result: Result = opaque(*args, **options)
            return result
        return how(*args, **options)

    return choose


def _said(name: str, given: dict[str, Any]) -> dict[str, object]:
    """What decides how the ranks talk to each other."""
    negatives, weight = given.get("negatives"), given.get("weight")
    learnt = [key for key in ("scale", "temperature", "bias", "weight")
              if isinstance(given.get(key), Tensor) and given[key].requires_grad]  # fmt: skip
    return {
        "loss": name,
        "reduction": given.get("reduction", "mean"),
        # Such a loss ends in other messages.
        "decoupled": bool(given.get("decoupled", False)),
        "weight": "none" if weight is None else "given",
        "negatives": "none"
        if negatives is None
        else f"{getattr(negatives, 'ndim', '?')} dimensions",
        "learnable numbers": learnt,
    }


def with_group(plan: Plan, how: SweepOptions, pairs: Pairs) -> Plan:
    """The plan for all ranks, once they agree on what is to be done."""
    group = how.get("group")
    if group is None:
        for name, given in (
            ("sizes", how.get("sizes") is not None),
            ("schedule", how.get("schedule", "auto") != "auto"),
        ):
            if given:
                raise OptionError(f"{name}= is about the ranks of a group, which was not given")
        return plan
    if plan.check_values or pairs.device.type == "cpu":
        check_values(pairs)
    backends.choose(plan.backend, pairs.device, pairs.rows.dtype, plan.precision)
    if pairs.rows.device != pairs.device:
        raise OptionError(
            "rows of a rank must be on its device where there is a group, got them in host memory; "
            "only columns, such as a pool of negatives, may be there"
        )
    if pairs.columns.device != pairs.device and (pairs.kind != "none" or plan.columns):
        raise OptionError(
            "columns in host memory must be negatives only where there is a group, such as a pool; "
            "got some with positives: move them to the device"
        )
    plan = plan._replace(group=groups.name_of(group))
    agreed = _agreed(how, pairs, plan)
    if len(agreed.sizes) > 1:
        # What is kept for the backward would be of some columns only.
        plan = plan._replace(keep_bytes=0)
    name = _schedule(how, pairs, plan, agreed).name
    ways = {"ring": [0] * len(agreed.nodes), "two-level": agreed.nodes, "gather": []}
    return plan._replace(sizes=agreed.sizes, nodes=ways[name if any(agreed.sizes) else "ring"])


def _agreed(how: SweepOptions, pairs: Pairs, plan: Plan) -> groups.Agreed:
    """How many columns each rank has, and its node: as they say, or as the caller promises."""
    group, sizes, own = how["group"], how.get("sizes"), pairs.shape[1]
    if sizes is None:
        facts = {**_facts(pairs, plan), "schedule": how.get("schedule", "auto")}
        return groups.agree(group, facts, own)
    groups.check_sizes(group, sizes, own)
    return groups.Agreed([int(size) for size in sizes], groups.nodes_of(group))


def _schedule(how: SweepOptions, pairs: Pairs, plan: Plan, agreed: groups.Agreed) -> costs.Schedule:
    """The one that is asked for, or the best."""
    asked = how.get("schedule", "auto")
    if asked == "auto":
        return _choose(pairs, plan, *agreed)
    why = costs.refusal(asked, agreed.nodes)
    if why is not None:
        raise OptionError(f"schedule={asked!r} cannot be had: {why}; use schedule='auto'")
    return costs.Schedule(asked, "asked for by name")


def _choose(pairs: Pairs, plan: Plan, sizes: Sequence[int], nodes: Sequence[int]) -> costs.Schedule:
    """How columns travel, from numbers that all ranks have in common."""
    travel = plan.columns or pairs.symmetric
    wanted = torch.is_grad_enabled() and pairs.columns.requires_grad and not pairs.symmetric
    load = costs.Load(
        columns=max(sizes),
        features=pairs.shape[2],
        feature_bytes=pairs.rows.element_size(),
        slices=len(range(0, max(sizes), ring.slice_height(pairs.columns, sizes))),
        stats=plan.num_stats if travel else 0,
        carried=plan.columns,
        grads=wanted,
    )
    cluster = costs.CLUSTERS.get(pairs.device.type, costs.CLUSTERS["cpu"])
    # Known beforehand, so that the choice, and with it the bits of a result, stay as they are.
    return costs.choose(load, nodes, cluster, plan.workspace_bytes)


@together
def explain_schedule(rows: Tensor, cols: Tensor, **how: Unpack[SweepOptions]) -> costs.Schedule:
    """How `clip_loss` of such features would send columns round a group, and why.

    All ranks must ask; with `sizes` only the first time that the group is used.

    Args:
        rows, cols: this rank's features (N, D) and (M, D); N and M may be 0.
        how: `group`, and what else the loss would be given; see docs/api.md.
    """
    pairs = make_pairs(
        rows, cols, (1.0, None), positives=None, ids=None, labels=None, skip_self=False, empty=True
    )
    if how.get("group") is None:
        raise OptionError("group must be given to say how its ranks talk; got None")
    plan = make_plan(how, "logsumexp", True, False)
    return _schedule(how, pairs, plan, _agreed(how, pairs, plan))


def _facts(pairs: Pairs, plan: Plan) -> dict[str, object]:
    """What the ranks must have in common, in words."""
    wanted = (torch.is_grad_enabled() and x.requires_grad for x in (pairs.rows, pairs.columns))
    return {
        "feature size": pairs.shape[2],
        "dtype": pairs.rows.dtype,
        "device": pairs.device.type,
        "place of the columns": pairs.columns.device.type,
        "workspace": plan.workspace_bytes,
        "kind of loss": (
            f"{plan.reduction}{' of rows and columns' if plan.columns else ''}"
            f"{' with sums' if plan.sums else ''}{' among themselves' if pairs.symmetric else ''}"
        ),
        "kind of positives": pairs.kind,
        "ids": _dtype_or_none(pairs.col_ids),
        "labels": _dtype_or_none(pairs.col_labels),
        "need of gradients (rows, columns)": tuple(wanted),
    }


def _dtype_or_none(marks: Tensor | None) -> object:
    return None if marks is None else marks.dtype
