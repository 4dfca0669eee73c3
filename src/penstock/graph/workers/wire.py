"""Messages between a client and workers: a tree of plain values and arrays as a head of JSON and the arrays' bytes.

    {"kind": "done", "step": 7, "values": [tensor, ...]}   ->   [b'{"kind": ...}', bytes of the tensor, ...]

An array stands in the head as {"$": kind, "at": its part, "dtype", "shape"}; its bytes are sent as they lie in memory,
and a received one is the received message itself. Nothing that is received is believed: sizes are checked against the
bytes that are there.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.graph.errors import CorruptError, MismatchError
from penstock.graph.model.dtypes import dtype_of_torch, torch_dtype
from penstock.graph.state.tensors import decode, encode
from penstock.graph.tools.lossy import from_upper_half, to_upper_half

VERSION = 1
_MOST_DIMENSIONS, _ALIGNMENT = 64, 8
_MOST_HEADS = 64
_NESTED = (dict, list)
_MOST_KEPT_BYTES = 1 << 12


def packed(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message: its head, and buffers."""
    parts: list[Any] = [b""]
    head = [VERSION, _plain(message, parts)]
    text = json.dumps(head, separators=(",", ":")).encode("utf-8")
    # A carrier may join the parts: what follows stays aligned.
    parts[0] = text + b" " * (-len(text) % _ALIGNMENT)
    return parts


def packed_values(
    heads: dict[Any, Any], about: Mapping[str, Any], step: int, values: Mapping[int, Any]
) -> list[Any]:
    """Return the parts of a message with outputs of a node, by port, for a step.

    heads: those that were made before, for this `about`: a step's are those of the one before, as long as shapes stay.
    """
    number, key = step.to_bytes(8, "little"), list[Any]()
    parts: list[Any] = [b"", number]
    for port, value in values.items():
        if not isinstance(value, torch.Tensor):
            return packed({**about, "step": number, "values": list(values.items())})
        key += (port, value.dtype, value.shape)
        parts.append(_data(_numpy_of(value)))
    parts[0] = heads.get(tuple(key))
    if parts[0] is None:
        if len(heads) >= _MOST_HEADS:
            heads.clear()
        parts[0] = heads[tuple(key)] = packed({**about, "step": number, "values": list(values.items())})[0]
    return parts


def halved(values: Mapping[int, Any]) -> dict[int, Any]:
    """Return values with those that are float32 as the upper halves of their bits: they arrive as float32 again."""
    return {
        port: Halves(to_upper_half(_numpy_of(value)))
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32
        else value
        for port, value in values.items()
    }


class Halves(NamedTuple):
    """The upper halves of float32 values."""

    array: np.ndarray[Any, Any]


def _plain(value: Any, parts: list[Any]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and "$" not in value:
            return {key: _plain(each, parts) for key, each in value.items()}
        return {
            "$": "pairs",
            "pairs": [[_plain(key, parts), _plain(each, parts)] for key, each in value.items()],
        }
    if isinstance(value, Halves):
        return {"$": "halves", **_array(value.array, parts), "dtype": value.array.dtype.str}
    if isinstance(value, list | tuple):
        return [_plain(each, parts) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        parts.append(value.cast("B") if isinstance(value, memoryview) else value)
        return {"$": "bytes", "at": len(parts) - 1}
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", **_array(_numpy_of(value), parts), "dtype": dtype_of_torch(value.dtype)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return {"$": "strings", "of": _plain(encode("bytes", value), parts)}
        return {"$": "array", **_array(value, parts), "dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _array(array: np.ndarray[Any, Any], parts: list[Any]) -> dict[str, Any]:
    parts.append(_data(array))
    return {"at": len(parts) - 1, "shape": list(array.shape)}


def _data(array: np.ndarray[Any, Any]) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def _numpy_of(value: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return value.numpy()
    except (RuntimeError, TypeError):  # of another device, or conjugated ..., and 4 us dearer
        return value.numpy(force=True)


def unpacked(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the message of received parts. Its arrays are the parts' memory.

    Raises: CorruptError if it is malformed, or of another version.
    """
    try:
        text = bytes(parts[0])
        known = _layout(text) if len(text) < _MOST_KEPT_BYTES else None
        if known is not None and (values := _tensors(known, parts)) is not None:
            return {**known.about, "step": bytes(parts[1]), "values": values}
        return _message(_head(text), parts)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"the message is malformed: {type(error).__name__}: {error!s:.100}") from error


def _head(text: bytes) -> Any:
    version, head = json.loads(text)
    if version != VERSION:
        raise CorruptError(f"the message is of version {version!r:.20}, and this is version {VERSION}")
    return head


def _message(head: Any, parts: Sequence[Any]) -> dict[str, Any]:
    message = _tree(head, parts)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise CorruptError("the message has no kind")
    return message


class _Layout(NamedTuple):
    """The layout that the head of a message by `packed_values` describes: all but the step and the tensors.

    tensors: by part, from the third on: port, dtype, shape and bytes.
    """

    about: dict[str, Any]
    tensors: list[tuple[int, np.dtype[Any], tuple[int, ...], int]]


@functools.lru_cache(1 << 10)
def _layout(text: bytes) -> _Layout | None:
    """Return the layout of a head, which comes again in each step; None if it is of another kind of message."""
    head = _head(text)
    try:
        about = {name: value for name, value in head.items() if isinstance(value, str)}
        if head["step"] != {"$": "bytes", "at": 1} or len(head) != len(about) + 2 or "kind" not in about:
            return None
        tensors = []
        for place, (port, each) in enumerate(head["values"]):
            shape = tuple(_index(size, 1 << 62) for size in each["shape"])
            is_next = each["$"] == "tensor" and each["at"] == place + 2 and len(shape) <= _MOST_DIMENSIONS
            if not is_next or not math.prod(shape):
                return None
            dtype = _numpy(each["dtype"])
            tensors.append((port, dtype, shape, math.prod(shape) * dtype.itemsize))
        return _Layout(about, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, MismatchError):
        return None  # whoever takes it apart says why


def _tensors(layout: _Layout, parts: Sequence[Any]) -> list[tuple[int, torch.Tensor]] | None:
    """Return the tensors of a message, by port; None where its parts are not what its layout says."""
    if len(parts) != len(layout.tensors) + 2:
        return None
    found = []
    for place, (port, dtype, shape, nbytes) in enumerate(layout.tensors, 2):
        if len(parts[place]) != nbytes:
            return None
        found.append((port, _tensor(np.ndarray(shape, dtype, parts[place]))))
    return found


def _tree(value: Any, parts: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_tree(each, parts) if isinstance(each, _NESTED) else each for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _tree(each, parts) if isinstance(each, _NESTED) else each for key, each in value.items()}
    if kind == "pairs":
        return {_tree(key, parts): _tree(each, parts) for key, each in value["pairs"]}
    if kind == "strings":
        return decode(_tree(value["of"], parts))[1]
    data = memoryview(parts[_index(value["at"], len(parts))]).cast("B")
    if kind == "bytes":
        return bytes(data)
    shape = [_index(size, 1 << 62) for size in value["shape"]]
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    dtype = np.dtype(value["dtype"]) if kind in ("array", "halves") else _numpy(value["dtype"])
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes are no {dtype} of shape {shape}")
    array = np.frombuffer(data, dtype).reshape(shape) if data.nbytes else np.zeros(shape, dtype)
    if kind == "array":
        return array
    if kind == "halves":
        return torch.from_numpy(from_upper_half(array))
    if kind != "tensor":
        raise ValueError(f"no value is a {kind!r:.20}")
    return _tensor(array)


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    flags = array.flags
    return torch.from_numpy(array if flags.writeable and flags.aligned else array.copy())


@functools.lru_cache(64)
def _numpy(dtype: str) -> np.dtype[Any]:
    if dtype == "bytes":
        raise ValueError("byte strings are no tensor")
    return torch.empty(0, dtype=torch_dtype(dtype)).numpy().dtype


def _index(value: Any, end: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r:.40} is no number below {end}")
    return value
