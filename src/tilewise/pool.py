"""Detached features of samples seen before, as negatives beyond the batch: a queue, a memory bank.

They are on the device, in pinned host memory or in a memory-mapped file, and pass by the device as
further columns: the data that a loss sees is no longer bounded by the data that it trains on.
"""

import numbers
import secrets
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from tilewise import poolfile
from tilewise.errors import OptionError, ShapeError
from tilewise.pairs import FLOAT_DTYPES, Device, check_features, check_marks, checked_device

TURNS = 2**32  # more than a put has samples
STATE = ("born", "ids", "dim", "clock", "named", "token")


class Negatives(TypedDict, total=False):
    """Keywords of `info_nce`."""

    negatives: Tensor  # (K, D)
    negative_ids: Tensor  # (K,)
    device: torch.device


class Pool:
    """At most `size` features (D,), the newest of every sample, the oldest making room.

        pool = Pool(1_000_000, 768, device="cuda")
        loss = info_nce(query, key, scale, ids=ids, **pool.negatives())
        loss.backward()
        pool.put(key, ids)

    Samples are told apart by ids: one that is put again takes the place of its older self, and a
    loss that knows the batch's ids leaves a query's own copies out. Without ids it is a queue. What
    it holds must not change between a loss and its backward. `InfoNCELoss` normalises what it is
    given, but not what is in a pool: put unit vectors into it. Several ranks have one each,
    and `info_nce(..., group=group)` lets all of them go round.

    Args:
        size, dim: most samples, and features of each.
        device: where losses are computed, and ids and ages are held.
        where: "device", "host" (pinned memory), or a path to a file, made if it is not there: one
            for each pool, so one for each rank.
        dtype: of the features; those put in are rounded to it.
        max_age: how many `put`s a sample lasts, its own counted: 1 leaves those of the last one.
        overwrite: whether samples of known ids take the place of their older selves.
    """

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        device: Device = None,
        where: Literal["device", "host"] | Path | str = "device",
        dtype: torch.dtype = torch.bfloat16,
        max_age: int | None = None,
        overwrite: bool = True,
    ) -> None:
        last = 1 if max_age is None else max_age
        for name, number in {"size": size, "dim": dim, "max_age": last}.items():
            whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
            if not whole or number < 1:
                raise OptionError(f"{name} must be an integer above 0, got {number!r}")
        if dtype not in FLOAT_DTYPES:
            raise OptionError(f"dtype must be a floating one, got {dtype}")
        self.size, self.dim, self.max_age, self.overwrite = size, dim, max_age, overwrite
        self.device = checked_device(device)
        self._file: poolfile.PoolFile | None = None
        if where == "device":
            self._features = torch.zeros(size, dim, dtype=dtype, device=self.device)
        elif where == "host":
            pinned = self.device.type == "cuda"
            self._features = torch.zeros(size, dim, dtype=dtype, device="cpu", pin_memory=pinned)
        else:
            self._file = poolfile.PoolFile(where, (size, dim), dtype)
            self._features = self._file.features
        # Of every place: by which sample it was filled, and when: TURNS times the put, and its turn
        # in that.
        self._born, self._ids = torch.zeros(2, size, dtype=torch.int64, device=self.device)
        self._count, self._clock = 0, 0
        self._named: bool | None = None  # whether samples have ids, once that is known

    def __len__(self) -> int:
        return self._count

    @property
    def features(self) -> Tensor:
        """What it holds (K, D), in no order; on the device, or in host memory."""
        return self._features[: self._count]

    @property
    def ids(self) -> Tensor | None:
        """Whose they are (K,), on the device; None without ids."""
        return self._ids[: self._count] if self._named else None

    @property
    def ages(self) -> Tensor:
        """How many `put`s ago each came (K,)."""
        return torch.sub(self._clock, self._born[: self._count] // TURNS)

    @property
    def path(self) -> Path | None:
        """The file that it is in, if it is in one."""
        return None if self._file is None else self._file.path

    @staticmethod
    def is_path(where: Any) -> bool:
        """Whether `where` is meant as a path: a bare word may be a misspelt place."""
        return poolfile.is_path(where)

    def negatives(self) -> Negatives:
        """What `info_nce` takes: `info_nce(query, key, scale, ids=ids, **pool.negatives())`."""
        if self._named is None:
            return {}
        found: Negatives = {"negatives": self.features}
        found["negatives"].of_a_pool = True  # type: ignore[attr-defined] # see InfoNCELoss
        if self.ids is not None:
            found["negative_ids"] = self.ids
        if self._features.device != self.device:
            found["device"] = self.device
        return found

    @torch.no_grad()
    def put(self, features: Tensor, ids: Tensor | None = None) -> None:
        """Take in features (B, D) of some samples, and their ids (B,), always or never.

        Of equal ids the last one counts, and of more than `size` samples the last ones.
        """
        check_features("features", features, empty=True)
        if features.shape[1] != self.dim:
            raise ShapeError(f"features must be of size {self.dim}, got {features.shape[1]}")
        if self._named not in (None, ids is not None):
            raise OptionError(
                "ids must be given always or never, since a sample without one cannot be found "
                f"again; got {'ids' if ids is not None else 'none'} after {self._count} samples"
            )
        if ids is not None:
            check_marks("ids", ids, (len(features),), ids)
        self._clock += 1
        self._named = ids is not None
        if self.max_age is not None:
            self._note("")  # what stays may move
            self._drop(self._born[: self._count] // TURNS <= self._clock - self.max_age)
        if ids is not None:
            ids = ids.to(self.device, torch.int64)
            last = _last_of_each(ids)
            features, ids = features[last.to(features.device)], ids[last]
        features = features[-self.size :]
        ids = None if ids is None else ids[-self.size :]
        places = self._places(len(features), ids)
        self._note("")  # until all is there, a file belongs to no state
        self._features[places.to(self._features.device)] = features.detach().to(
            self._features.device, self._features.dtype
        )
        self._born[places] = TURNS * self._clock + torch.arange(len(places), device=self.device)
        if ids is not None:
            self._ids[places] = ids
        self._note(secrets.token_hex(8))

    def _places(self, count: int, ids: Tensor | None) -> Tensor:
        """Where samples go (count,): over their older selves, where there is room, over the oldest.

        Places that are taken are made the newest, so that none is taken twice.
        """
        places = torch.full((count,), -1, device=self.device)
        if ids is not None and self.overwrite and count and self._count:
            known, order = ids.sort()
            at = torch.searchsorted(known, self._ids[: self._count]).clamp(max=count - 1)
            (held,) = (known[at] == self._ids[: self._count]).nonzero(as_tuple=True)
            places[order[at[held]]] = held
            self._born[held] = TURNS * self._clock
        (new,) = (places < 0).nonzero(as_tuple=True)
        room = min(len(new), self.size - self._count)
        places[new[:room]] = self._count + torch.arange(room, device=self.device)
        self._born[self._count : self._count + room] = TURNS * self._clock
        self._count += room
        if len(new) > room:
            places[new[room:]] = self._born.topk(len(new) - room, largest=False).indices
        return places

    def _drop(self, dropped: Tensor) -> None:
        """Leave samples (count,) out: the last ones take their places."""
        left = self._count - int(dropped.sum())
        (holes,) = dropped[:left].nonzero(as_tuple=True)
        (moved,) = (~dropped[left:]).nonzero(as_tuple=True)
        for of in (self._features, self._born, self._ids):
            of[holes.to(of.device)] = of[(left + moved).to(of.device)]
        self._count = left

    def __getstate__(self) -> dict[str, Any]:
        if self.path is not None:
            raise OptionError(
                f"a pool in a file cannot be copied or pickled, got that of {self.path}: two would "
                "share the file; take its state_dict"
            )
        return self.__dict__

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is held; but features that are in a file stay there."""
        parts = {"born": self._born, "ids": self._ids}
        if self.path is None:
            parts["features"] = self._features
        held = {name: x[: self._count].cpu().clone() for name, x in parts.items()}
        facts = {"dim": self.dim, "clock": self._clock, "named": self._named}
        return {**held, **facts, "token": "" if self._file is None else self._file.token}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a pool that was no larger.

        That of a pool in a file needs the file as it was when the state was taken. Of samples that
        are in it several times, as `overwrite=False` leaves them, an overwriting pool takes the
        newest.
        """
        born = _checked_born(state, self.size, self.dim)
        count = len(born)
        if "features" in state:
            self._note("")
            self._features[:count] = state["features"].to(self._features)
            self._note(secrets.token_hex(8))
        elif self._file is None or not state["token"] or self._file.token != state["token"]:
            raise OptionError(
                "the state is of a pool in a file, and the features are not in it; got "
                f"{self.path or 'no file'}, which is not as it was then: put to since, "
                "interrupted, cut short, or another file"
            )
        self._count, self._clock, self._named = count, state["clock"], state["named"]
        self._born[:count], self._ids[:count] = (
            each.to(self.device) for each in (born, state["ids"])
        )
        if self._named and self.overwrite:
            self._drop_older_selves()

    def _drop_older_selves(self) -> None:
        order = self._born[: self._count].argsort()
        older = torch.ones_like(order, dtype=torch.bool)
        older[order[_last_of_each(self._ids[order])]] = False
        if older.any():
            self._note("")
            self._drop(older)
            self._note(secrets.token_hex(8))

    def _note(self, token: str) -> None:
        """Of which state a file is from now on, if there is one."""
        if self._file is not None:
            self._file.note(token)


def _checked_born(state: dict[str, Any], size: int, dim: int) -> Tensor:
    """When the samples of a state came (count,), if it is whole and fits a pool."""
    missing = [name for name in STATE if name not in state]
    if missing:
        raise OptionError(f"the state must be of Pool.state_dict, got one without {missing[0]!r}")
    born: Tensor = state["born"]
    clock = state["clock"]
    count = born.numel() if isinstance(born, Tensor) else 0
    if count > size or state["dim"] != dim:
        raise ShapeError(
            f"the state must fit a pool of {size} x {dim}, got {count} x {state['dim']}"
        )
    for name in ("born", "ids"):
        check_marks(f"{name} of the state", state[name], (count,), state[name])
    if "features" in state:
        check_features("features of the state", state["features"], empty=True)
        if state["features"].shape != (count, dim):
            got = tuple(state["features"].shape)
            raise ShapeError(f"features of the state must have shape {(count, dim)}, got {got}")
    puts = born.long() // TURNS
    if not isinstance(clock, int) or bool(((puts < 1) | (puts > clock)).any()):
        raise OptionError(
            f"born of the state must be of puts up to its clock, {clock!r}; it is damaged, or of "
            "another version"
        )
    return born


def _last_of_each(ids: Tensor) -> Tensor:
    """Indices of the last sample of every id, in order."""
    ordered, order = ids.sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last].sort().values
