"""Detached features of samples seen before, as negatives beyond the batch: a queue, a memory bank.

They are on the device, in pinned host memory or in a memory-mapped file, and pass by the device as
further columns: the data that a loss sees is no longer bounded by the data that it trains on.
"""

import gc
import importlib
import json
import numbers
import os
import secrets
import weakref
from pathlib import Path
from typing import IO, Any, Literal, TypedDict

import torch
from torch import Tensor

from tilewise.errors import DeviceError, OptionError, ShapeError
from tilewise.pairs import FLOAT_DTYPES, Device, check_features, check_marks, checked_device


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
    it holds must not change between a loss and its backward. Several ranks have one each,
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
            if not isinstance(number, numbers.Integral) or number < 1:
                raise OptionError(f"{name} must be an integer above 0, got {number!r}")
        if dtype not in FLOAT_DTYPES:
            raise OptionError(f"dtype must be a floating one, got {dtype}")
        self.size, self.dim, self.max_age, self.overwrite = size, dim, max_age, overwrite
        self.device = checked_device(device)
        self.path = None if where in ("device", "host") else _checked_path(where)
        self._lock = None if self.path is None else _locked(self.path)
        self._features = _memory(size, dim, dtype, self.path or str(where), self.device)
        known = {key: x for key, x in self._noted().items() if key != "token"}
        if known not in ({}, _facts(self._features)):
            raise ShapeError(
                f"the file {self.path} must hold a pool of {_facts(self._features)}, got {known}; "
                "name another file, or delete it"
            )
        # Of every place: when it was filled, and by which sample.
        self._born, self._ids = torch.zeros(2, size, dtype=torch.int64, device=self.device)
        self._count, self._clock = 0, 0
        self._token = ""
        if not known:
            self._note("")
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
        return torch.sub(self._clock, self._born[: self._count])

    def negatives(self) -> Negatives:
        """What `info_nce` takes: `info_nce(query, key, scale, ids=ids, **pool.negatives())`."""
        if self._named is None:
            return {}
        found: Negatives = {"negatives": self.features}
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
            self._drop(self._born[: self._count] <= self._clock - self.max_age)
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
        self._born[places] = self._clock
        if ids is not None:
            self._ids[places] = ids
        self._note(secrets.token_hex(8))

    def _places(self, count: int, ids: Tensor | None) -> Tensor:
        """Where samples go (count,): over their older selves, where there is room, over the oldest.

        The clock of places that are taken is set, so that none is taken twice.
        """
        places = torch.full((count,), -1, device=self.device)
        if ids is not None and self.overwrite and count and self._count:
            known, order = ids.sort()
            at = torch.searchsorted(known, self._ids[: self._count]).clamp(max=count - 1)
            (held,) = (known[at] == self._ids[: self._count]).nonzero(as_tuple=True)
            places[order[at[held]]] = held
            self._born[held] = self._clock
        (new,) = (places < 0).nonzero(as_tuple=True)
        room = min(len(new), self.size - self._count)
        places[new[:room]] = self._count + torch.arange(room, device=self.device)
        self._born[self._count : self._count + room] = self._clock
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
        return {**held, **facts, "token": self._token}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the state of a pool that was no larger.

        That of a pool in a file needs the file as it was when the state was taken.
        """
        count, dim = len(state["born"]), state["dim"]
        if count > self.size or dim != self.dim:
            raise ShapeError(
                f"the state must fit a pool of {self.size} x {self.dim}, got {count} x {dim}"
            )
        if "features" in state:
            self._note("")
            self._features[:count] = state["features"].to(self._features)
        elif not state["token"] or self._noted().get("token") != state["token"]:
            raise OptionError(
                "the state is of a pool in a file, and the features are not in it; got "
                f"{self.path or 'no file'}, which is not as it was then: put to since, "
                "interrupted, or another file"
            )
        self._count, self._clock, self._named = count, state["clock"], state["named"]
        self._born[:count], self._ids[:count] = (
            state[name].to(self.device) for name in ("born", "ids")
        )
        self._note(state["token"] if "features" not in state else secrets.token_hex(8))

    def _note(self, token: str) -> None:
        """Write down beside a file what is in it, by a token that every change makes anew."""
        self._token = token
        if self.path is not None:
            new = _beside(self.path).with_suffix(".new")
            new.write_text(json.dumps({"token": token, **_facts(self._features)}))
            new.replace(_beside(self.path))

    def _noted(self) -> dict[str, Any]:
        """What was written down beside the file."""
        if self.path is None or not _beside(self.path).exists():
            return {}
        found: dict[str, Any] = json.loads(_beside(self.path).read_text())
        return found


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _facts(features: Tensor) -> dict[str, Any]:
    return {"shape": list(features.shape), "dtype": str(features.dtype)}


def _checked_path(where: Any) -> Path:
    """A path that is meant as one: no word that may be a misspelt place."""
    word = isinstance(where, str) and Path(where).name == where and not Path(where).suffix
    if not isinstance(where, (str, Path)) or word or not Path(where).parent.is_dir():
        raise DeviceError(
            "where must be 'device', 'host' or a path in a folder that is there (./NAME for one "
            f"here), got {where!r}"
        )
    path = Path(where)
    if path.exists() and path.stat().st_size and not _beside(path).exists():
        raise DeviceError(
            f"the file {path} is there and is no pool: nothing beside it says so; name another"
        )
    return path


def _locked(path: Path) -> IO[bytes]:
    """The file, open and locked for as long as it stays open."""
    file = path.open("ab")
    if not _is_locked(file):
        gc.collect()  # a pool that nobody has any more may not have been taken away yet
        if not _is_locked(file):
            raise DeviceError(
                f"the file {path} is another pool's, here or in another process; name one file "
                "for each pool and rank, or delete that pool first"
            )
    return file


def _is_locked(file: IO[bytes]) -> bool:
    """Whether it is this one's now; where there are no locks nobody is kept out."""
    try:
        fcntl = importlib.import_module("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ModuleNotFoundError, OSError):  # Windows; some network file systems
        return True
    _LOCKED.add(file)
    return True


_LOCKED = weakref.WeakSet[IO[bytes]]()


def _unlock_in_child() -> None:
    """A process that is forked off, to load data, must not hold the lock when this one is gone."""
    for file in list(_LOCKED):
        os.close(file.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def _memory(
    size: int, dim: int, dtype: torch.dtype, where: Path | str, device: torch.device
) -> Tensor:
    if where == "device":
        return torch.zeros(size, dim, dtype=dtype, device=device)
    if where == "host":
        return torch.zeros(size, dim, dtype=dtype, pin_memory=device.type == "cuda")
    mapped = torch.from_file(str(where), shared=True, size=size * dim, dtype=dtype)
    return mapped.view(size, dim)


def _last_of_each(ids: Tensor) -> Tensor:
    """Indices of the last sample of every id, in order."""
    ordered, order = ids.sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last].sort().values
