"""Tensors in a snapshot store: all thirteen types, bit for bit, also empty ones.

A tensor is a mapping of its dtype and one or three arrays: bytes are kept end to end, with their ends and their shape;
quantised numbers as the integers that they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from penstock.checkpoint import SnapshotStore
from penstock.checkpoint.state.tree import encode_keys
from penstock.errors import ConfigError
from penstock.graph.errors import CorruptError, MismatchError, NotFoundError, nearest
from penstock.graph.model.dtypes import Value, check_dtype, to_client, torch_dtype
from penstock.ranks import alone


def encode(dtype: str, value: Value) -> dict[str, Any]:
    """Return a tensor as a snapshot holds it."""
    if dtype != "bytes":
        return {"dtype": dtype, "data": value.detach().cpu().contiguous()}
    flat = to_client(value).ravel().tolist()
    ends = np.cumsum([len(each) for each in flat], dtype=np.int64) if flat else np.zeros(0, np.int64)
    return {
        "dtype": dtype,
        "data": np.frombuffer(b"".join(flat), np.uint8).copy(),
        "ends": ends,
        "shape": list(value.shape),
    }


def decode(document: Mapping[str, Any]) -> tuple[str, Value]:
    """Return the dtype and the tensor that `encode` took. Raises: CorruptError if the document is none."""
    try:
        dtype = check_dtype(document["dtype"])
        if dtype != "bytes":
            value = torch.as_tensor(document["data"])
            if value.dtype != torch_dtype(dtype):
                raise CorruptError(f"the saved tensor is {value.dtype} and says {dtype}")
            return dtype, value
        data, ends = np.asarray(document["data"]).tobytes(), np.asarray(document["ends"]).tolist()
        parts = [data[begin:end] for begin, end in pairwise([0, *ends])]
        return dtype, np.array(parts, object).reshape(document["shape"])
    except (KeyError, TypeError, ValueError, MismatchError) as error:
        raise CorruptError(f"this is no saved tensor: {error}") from error


#: What a folder holds shows what wrote it: `Session.save`, or Save nodes.
_STATE, _TENSORS = "graph_state", "tensors/*/dtype"


def write_state(path: str, state: Mapping[str, Any]) -> None:
    """Write a state as the newest snapshot of a folder; the one before it is removed.

    Raises: MismatchError if Save nodes wrote the folder.
    """
    with open_folder(path) as store:
        _save_next(store, state)


def _save_next(store: SnapshotStore, state: Mapping[str, Any]) -> None:
    store.save(max((each.step for each in store.list()), default=-1) + 1, dict(state)).wait()


def read_state(path: str) -> Any:
    """Return the newest state of a folder.

    Raises: NotFoundError if there is none, MismatchError if Save nodes wrote the folder.
    """
    with _saved(path) as store:
        _look(store, path, _STATE)
        return store.restore()


@contextmanager
def _saved(path: str) -> Iterator[SnapshotStore]:
    with _store(path) as store:
        if not store.list():
            raise NotFoundError(f"nothing was saved in {path}")
        yield store


@contextmanager
def open_folder(path: str, **options: Any) -> Iterator[SnapshotStore]:
    """Open a folder for states, with options of a `SnapshotStore`. Raises: MismatchError if Save nodes wrote it."""
    with _store(path, **options) as store:
        if store.list():
            _look(store, path, _STATE)
        yield store


def _look(store: SnapshotStore, path: str, what: str) -> Any:
    """Return a part of the newest snapshot. Raises: MismatchError if it is of the other kind."""
    try:
        return store.restore(only=[what])
    except ConfigError as error:
        is_state = what != _STATE
        raise MismatchError(
            f"{path} holds {'the state of a session' if is_state else 'tensors of Save nodes'}, which "
            f"{'Session.restore' if is_state else 'a Restore node'} reads; "
            f"give {'a folder of Save nodes' if is_state else 'a folder that Session.save wrote'}, or a new one"
        ) from error


def _store(path: str, **options: Any) -> SnapshotStore:
    plain: dict[str, Any] = {"keep": 1, "scheme": "complete", "codec": "stored", "reference": "stored"}
    return SnapshotStore(path, ranks=alone, report=None, **(plain | options))


def write_tensors(path: str, tensors: Mapping[str, tuple[str, Value]]) -> None:
    """Write tensors by name, next to those that are in the folder under other names."""
    with _store(path) as store:
        kept: dict[str, Any] = {}
        if store.list():
            _look(store, path, _TENSORS)
            kept = dict(store.restore()["tensors"])
        kept.update({name: encode(dtype, value) for name, (dtype, value) in tensors.items()})
        _save_next(store, {"tensors": kept})


def read_tensor(path: str, name: str, dtype: str) -> Value:
    """Return a saved tensor. Raises: NotFoundError if there is none of the name, MismatchError if its dtype differs."""
    with _saved(path) as store:
        names = _look(store, path, _TENSORS)["tensors"]
        if name not in names:
            raise NotFoundError(f"no tensor {name!r} was saved in {path}{nearest(name, names)}")
        _, (key,) = encode_keys([name], "tensors")
        # A name that is a pattern, too, fits itself first; what else it fits is read in vain.
        found, value = decode(store.restore(only=[f"tensors/{key}"])["tensors"][name])
    if found != dtype:
        raise MismatchError(f"the saved tensor {name!r} is {found}, and the node says {dtype}")
    return value
