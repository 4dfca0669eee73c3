"""The thirteen types of tensors: as clients hold them, as kernels do, and as JSON.

| here | the client's NumPy array | a kernel's value |
|---|---|---|
| numbers, bool, complex64 | the same dtype | torch.Tensor |
| bytes | object array of `bytes` | the same |
| qint8, quint8, qint32 | int8, uint8, int32 | torch.Tensor of these; the dtype of the edge says that it is quantised |
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.graph.errors import MismatchError

#: torch.Tensor, or an object array of bytes; on edges of state and control, a resource or a stack.
Value: TypeAlias = Any

#: Type: (NumPy dtype at the client, torch dtype in kernels).
_TYPES: dict[str, tuple[Any, torch.dtype | None]] = {
    "float32": (np.float32, torch.float32),
    "float64": (np.float64, torch.float64),
    "int8": (np.int8, torch.int8),
    "int16": (np.int16, torch.int16),
    "int32": (np.int32, torch.int32),
    "int64": (np.int64, torch.int64),
    "uint8": (np.uint8, torch.uint8),
    "bytes": (np.object_, None),
    "bool": (np.bool_, torch.bool),
    "complex64": (np.complex64, torch.complex64),
    "qint8": (np.int8, torch.int8),
    "quint8": (np.uint8, torch.uint8),
    "qint32": (np.int32, torch.int32),
}
DTYPES = tuple(_TYPES)
QUANTIZED = ("qint8", "quint8", "qint32")
FLOATS = ("float32", "float64")
#: What a gradient can flow through.
DIFFERENTIABLE = (*FLOATS, "complex64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_ELEMENTS = 1 << 40


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of a client's array."""
    found: np.dtype[Any] = np.dtype(_TYPES[dtype][0])
    return found


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of a kernel's tensor; not for bytes."""
    found = _TYPES[dtype][1]
    assert found is not None, "bytes are no torch tensor"
    return found


def dtype_of_torch(dtype: torch.dtype) -> str:
    """Return the plain type of a torch dtype.

    Raises: MismatchError if no edge of a graph can carry it.
    """
    for name, (_, each) in _TYPES.items():
        if each == dtype:
            return name
    raise MismatchError(f"{dtype} is none of {', '.join(DTYPES)}; convert it first")


def to_value(array: Any, dtype: str) -> Value:
    """Return a kernel's copy of a client's array.

    array: a NumPy array of the dtype, a torch tensor of it, or plain numbers or bytes.
    Raises: MismatchError if the dtype is another.
    """
    if isinstance(array, torch.Tensor):
        if dtype == "bytes" or array.dtype != torch_dtype(dtype):
            raise MismatchError(f"the tensor is {array.dtype}, and {dtype} is needed: convert it")
        return array.detach().clone()
    if dtype == "bytes":
        return _bytes_array(array)
    needed = numpy_dtype(dtype)
    if not isinstance(array, np.ndarray | np.generic):
        array = _from_plain(array, needed, dtype)
    array = np.asarray(array)
    if array.dtype != needed:
        raise MismatchError(f"the array is {array.dtype}, and {dtype} is needed: convert it with astype")
    return torch.from_numpy(np.array(array, needed, order="C", copy=True))


def _from_plain(given: Any, needed: np.dtype[Any], dtype: str) -> NDArray[Any]:
    try:
        exact = np.asarray(given)
        if exact.size and not np.can_cast(exact.dtype, needed, "same_kind"):
            raise MismatchError(f"{given!r:.80} is {exact.dtype}, and {dtype} is needed")
        return np.asarray(given, needed)
    except (OverflowError, ValueError, TypeError) as error:
        if isinstance(error, MismatchError):
            raise
        raise MismatchError(f"{given!r:.80} is no array of {dtype}: {error}") from error


def _bytes_array(given: Any) -> NDArray[Any]:
    if isinstance(given, np.ndarray) and given.dtype != object:
        # NumPy's own byte strings lose the zero bytes at their ends.
        raise MismatchError(f"the array is {given.dtype}; give bytes as an object array of Python's bytes")
    array = np.array(given, object, copy=True) if not isinstance(given, bytes) else np.array(given, object)
    for each in array.ravel():
        if not isinstance(each, bytes):
            raise MismatchError(f"an element is {each!r:.40}, and bytes are needed")
    return array


def to_client(value: Value) -> NDArray[Any]:
    """Return the client's own copy of a kernel's value, in row-major order."""
    if isinstance(value, torch.Tensor):
        return np.array(value.detach().cpu().resolve_conj().resolve_neg().numpy(), order="C", copy=True)
    if isinstance(value, np.ndarray):
        return np.array(value, order="C", copy=True)
    raise MismatchError(f"a {type(value).__name__} is no tensor and cannot be fetched")


def zeros(dtype: str, shape: tuple[int, ...]) -> Value:
    """Return zeros, or empty byte strings."""
    if dtype == "bytes":
        return np.full(shape, b"", object)
    return torch.zeros(shape, dtype=torch_dtype(dtype))


def bits_of(value: Value) -> bytes | tuple[bytes, ...]:
    """Return the bits of a value, in row-major order."""
    if isinstance(value, np.ndarray):
        return tuple(value.ravel().tolist())
    return to_client(value).tobytes()


# -- JSON ----------------------------------------------------------------------------------------------


def value_to_json(value: Value, dtype: str) -> dict[str, Any]:
    """Return `{"dtype", "shape", "data"}`, the data in row-major order."""
    array = to_client(value)
    flat = array.ravel()
    data: list[Any]
    if dtype == "bytes":
        data = [base64.b64encode(each).decode("ascii") for each in flat]
    elif dtype == "complex64":
        data = [[_number(float(each.real)), _number(float(each.imag))] for each in flat]
    elif dtype in FLOATS:
        data = [_number(float(each)) for each in flat]
    else:
        data = flat.tolist()
    return {"dtype": dtype, "shape": list(array.shape), "data": data}


def _number(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"


def value_from_json(document: Any) -> tuple[Value, str]:
    """Return the value that `value_to_json` wrote, and its dtype.

    Raises: MismatchError naming what is wrong.
    """
    if not isinstance(document, dict) or document.keys() != {"dtype", "shape", "data"}:
        raise MismatchError(f"a value is {{dtype, shape, data}}, and this is {document!r:.80}")
    dtype, shape, data = document["dtype"], document["shape"], document["data"]
    check_dtype(dtype)
    sizes = check_shape(shape)
    if not is_known(sizes):
        raise MismatchError(f"the shape of a value is known, and this is {shape!r:.80}")
    count = math.prod(sizes)
    if not isinstance(data, list) or len(data) != count:
        held = len(data) if isinstance(data, list) else "no list of"
        raise MismatchError(f"shape {shape!r:.80} has {count} elements, and data {held}")
    try:
        flat = _flat_of(data, dtype)
    except (TypeError, ValueError, OverflowError, KeyError, binascii.Error) as error:
        raise MismatchError(f"the data are no {dtype}: {error!r:.120}") from error
    array = flat.reshape(sizes)
    return (array if dtype == "bytes" else torch.from_numpy(array)), dtype


def _flat_of(data: list[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bytes":
        return np.array([base64.b64decode(each, validate=True) for each in data], object)
    if dtype == "complex64":
        pairs = np.array([[_float(part) for part in pair] for pair in data], np.float64).reshape(len(data), 2)
        return np.ascontiguousarray(pairs.astype(np.float32)).view(np.complex64).reshape(len(data))
    if dtype in FLOATS:
        with np.errstate(over="ignore"):
            return np.array([_float(each) for each in data], np.float64).astype(numpy_dtype(dtype))
    kind = bool if dtype == "bool" else int
    for each in data:
        if type(each) is not kind:
            raise TypeError(f"{each!r:.40} is no {kind.__name__}")
    return np.array(data, numpy_dtype(dtype)).reshape(len(data))


def _float(given: Any) -> float:
    if isinstance(given, str):
        return _WORDS[given]
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{given!r:.40} is no number")
    return float(given)


# -- Checks --------------------------------------------------------------------------------------------

#: Sizes of the dimensions, None where one is unknown; None: not even their number is known.
Shape: TypeAlias = "tuple[int | None, ...] | None"


def check_dtype(dtype: Any) -> str:
    """Return a dtype's name. Raises: MismatchError if it is none."""
    if not isinstance(dtype, str) or dtype not in _TYPES:
        raise MismatchError(f"dtype is {dtype!r:.80}; it is one of {', '.join(DTYPES)}")
    return dtype


def check_shape(shape: Any) -> Shape:
    """Return a shape as a tuple, or None. Raises: MismatchError if it is none."""
    if shape is None:
        return None
    if not isinstance(shape, list | tuple) or len(shape) > 64:
        raise MismatchError(f"shape is {shape!r:.80}; give a list of sizes and nulls, or null")
    for each in shape:
        if each is not None and (isinstance(each, bool) or not isinstance(each, int) or each < 0):
            raise MismatchError(f"shape has {each!r:.40}; a size is an integer of at least 0, or null")
    if math.prod(each for each in shape if each) > _MOST_ELEMENTS:
        raise MismatchError(f"shape {shape!r:.80} has more than 2**40 elements")
    return tuple(shape)


def fits(shape: Shape, asked: Shape) -> bool:
    """Return whether two partially known shapes can be the same."""
    if shape is None or asked is None:
        return True
    return len(shape) == len(asked) and all(
        one is None or other is None or one == other for one, other in zip(shape, asked, strict=True)
    )


def common(shape: Shape, other: Shape) -> Shape:
    """Return what two shapes have in common: None where they differ."""
    if shape is None or other is None or len(shape) != len(other):
        return None
    return tuple(one if one == two else None for one, two in zip(shape, other, strict=True))


def is_known(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    """Return whether every size is known."""
    return shape is not None and None not in shape


def shape_text(shape: Shape) -> str:
    """Return a shape for people: [3, ?], or ? if nothing is known of it."""
    return (
        "?" if shape is None else "[" + ", ".join("?" if each is None else str(each) for each in shape) + "]"
    )
