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
#: Of a tensor: who sends more is disconnected.
MOST_PART_BYTES = 1 << 33
_MOST_DIMENSIONS, _ALIGNMENT = 64, 8
_MOST_HEADS = 64
_NESTED = (dict, list)
_MOST_KEPT_BYTES = 1 << 12


def packed(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message: its head, and buffers.

    Raises: MismatchError for what is too large to be sent; TypeError.
    """
    parts: list[Any] = [b""]
    head = [VERSION, _plain(message, parts)]
    text = json.dumps(head, separators=(",", ":")).encode("utf-8")
    # A carrier may join the parts: what follows stays aligned.
    parts[0] = text + b" " * (-len(text) % _ALIGNMENT)
    return parts


class ValuesPacker:
    """Packs outputs of a node of a session, by port, for a step after the other."""

    __slots__ = ("_about", "_heads")

    def __init__(self, session: str, node: str) -> None:
        self._about = {"kind": "values", "session": session, "node": node}
        #: Those that were made: a step's is that of the one before, as long as shapes stay.
        self._heads: dict[Any, bytes] = {}

    def packed(self, step: int, values: Mapping[int, Any]) -> list[Any]:
        """Return the parts of a message."""
        number, key = step.to_bytes(8, "little"), list[Any]()
        parts: list[Any] = [b"", number]
        for port, value in values.items():
            if not isinstance(value, torch.Tensor):
                return self._packed(number, values)
            key += (port, value.dtype, value.shape)
            parts.append(_data(_numpy_of(value)))
        head = self._heads.get(tuple(key))
        if head is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            head = self._heads[tuple(key)] = self._packed(number, values)[0]
        parts[0] = head
        return parts

    def _packed(self, number: bytes, values: Mapping[int, Any]) -> list[Any]:
        return packed({**self._about, "step": number, "values": list(values.items())})


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
    if array.nbytes > MOST_PART_BYTES:
        raise MismatchError(
            f"a tensor of shape {list(array.shape)} has {array.nbytes:,} bytes, and {MOST_PART_BYTES:,} can be sent to "
            "or from a worker: send it in pieces"
        )
    parts.append(_data(array))
    return {"at": len(parts) - 1, "shape": list(array.shape)}


def _data(array: np.ndarray[Any, Any]) -> Any:
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # not contiguous, complex, or empty
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
        return _message(_head(bytes(parts[0])), parts)
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


def unpacked_values(parts: Sequence[Any]) -> tuple[str, int, str, dict[int, torch.Tensor]] | None:
    """Return the session, step, node and outputs by port of a message by a `ValuesPacker` that has tensors alone.

    None for other messages, and for what is malformed: `unpacked` says why.
    """
    text = parts[0]
    layout = _layout(bytes(text)) if len(text) < _MOST_KEPT_BYTES else None
    if layout is None or len(parts) != len(layout.tensors) + 2:
        return None
    values = {}
    for place, (port, dtype, shape, nbytes) in enumerate(layout.tensors, 2):
        if len(parts[place]) != nbytes:
            return None
        values[port] = _tensor(np.ndarray(shape, dtype, parts[place]))
    return layout.session, int.from_bytes(parts[1], "little"), layout.node, values


class _Layout(NamedTuple):
    """The layout that the head of a message by a `ValuesPacker` describes: all but the step and the tensors.

    tensors: by part, from the third on: port, dtype, shape and bytes.
    """

    session: str
    node: str
    tensors: list[tuple[int, np.dtype[Any], tuple[int, ...], int]]


@functools.lru_cache(1 << 10)
def _layout(text: bytes) -> _Layout | None:
    """Return the layout of a head, which comes again in each step; None if it is of another kind of message."""
    try:
        head = _head(text)
        session, node = head["session"], head["node"]
        if head["kind"] != "values" or head["step"] != {"$": "bytes", "at": 1} or len(head) != 5:
            return None
        tensors = []
        for place, (port, each) in enumerate(head["values"]):
            shape = tuple(_index(size, 1 << 62) for size in each["shape"])
            is_next = each["$"] == "tensor" and each["at"] == place + 2 and len(shape) <= _MOST_DIMENSIONS
            if not is_next or not math.prod(shape):
                return None
            dtype = _numpy(each["dtype"])
            tensors.append((int(port), dtype, shape, math.prod(shape) * dtype.itemsize))
        return _Layout(str(session), str(node), tensors)
    except (CorruptError, ValueError, TypeError, KeyError, AttributeError, RecursionError, MismatchError):
        return None  # `unpacked` says why


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
