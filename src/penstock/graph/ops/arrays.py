"""Operations on arrays: constants, parts, joins, shapes and sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError, MissingFeedError
from penstock.graph.model.dtypes import (
    DTYPES,
    Shape,
    check_dtype,
    check_shape,
    common,
    fits,
    shape_text,
    zeros,
)
from penstock.graph.model.node import Constant, Node, Spec
from penstock.graph.ops.elementwise import NUMBERS, one_dtype, tensor_of
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.stacks import zeros_like


def integer(node: Node, name: str, least: int | None = None) -> int:
    """Return an attribute that is an integer. Raises: MismatchError."""
    value = node.attr.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise MismatchError(f"{name} is {value!r:.80}; give an integer{bound}")
    return value


def integers(node: Node, name: str) -> list[int]:
    """Return an attribute that is a list of integers. Raises: MismatchError."""
    value = node.attr.get(name)
    if not isinstance(value, list | tuple) or any(
        isinstance(v, bool) or not isinstance(v, int) for v in value
    ):
        raise MismatchError(f"{name} is {value!r:.80}; give a list of integers")
    return list(value)


def axis_of(axis: int, shape: Shape) -> int:
    """Return an axis counted from 0, where the rank is known. Raises: MismatchError if there is none."""
    if shape is None:
        return axis
    if not -len(shape) <= axis < len(shape):
        raise MismatchError(f"axis is {axis}, and shape {shape_text(shape)} has {len(shape)} axes")
    return axis % len(shape)


# -- Placeholder, Constant, Identity -------------------------------------------------------------------


def _infer_placeholder(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [Spec(check_dtype(node.attr["dtype"]), check_shape(node.attr.get("shape")))]


def _placeholder(node: Node) -> Any:
    def kernel() -> Any:
        raise MissingFeedError("this Placeholder is needed: feed it", node=node.name, where=node.where)

    return kernel


register(
    "Placeholder",
    _infer_placeholder,
    kind="state",
    attributes={"dtype": REQUIRED, "shape": None},
    kernels={"cpu": lambda node, resources: _placeholder(node)},
    flops=None,
)


def _infer_constant(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    constant = node.attr["value"]
    if not isinstance(constant, Constant):
        raise MismatchError(f"value is {constant!r:.80}; give {{dtype, shape, data}}")
    return [Spec(constant.dtype, tuple(constant.value.shape))]


def _constant(node: Node) -> Any:
    value = node.attr["value"].value
    return lambda: value


register("Constant", _infer_constant, attributes={"value": REQUIRED}, kernels={"cpu": _constant}, flops=None)


def _infer_identity(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [specs[0].value()]


register(
    "Identity",
    _infer_identity,
    inputs=(1, 1),
    kernels={"cpu": lambda node: lambda value: value},
    differentiable=True,
    flops=None,
)


# -- Zeros, of a shape or of a tensor's ----------------------------------------------------------------


def _infer_zeros(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [Spec(check_dtype(node.attr["dtype"]), check_shape(node.attr["shape"]))]


def _zeros(node: Node) -> Any:
    dtype, shape = node.attr["dtype"], tuple(node.attr["shape"])
    return lambda: zeros(dtype, shape)


register("Zeros", _infer_zeros, attributes={"dtype": REQUIRED, "shape": REQUIRED}, kernels={"cpu": _zeros})


def _infer_like(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [Spec(tensor_of(specs[0], NUMBERS, node.op).dtype, specs[0].shape)]


def _like(name: str, function: Callable[..., Any]) -> None:
    register(name, _infer_like, inputs=(1, 1), kernels={"cpu": lambda node: function})


_like("ZerosLike", zeros_like)
_like("OnesLike", torch.ones_like)


# -- Concat, Slice, Split ------------------------------------------------------------------------------


def _infer_concat(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    dtype = one_dtype(specs, DTYPES, "Concat")
    known = [spec.shape for spec in specs if spec.shape is not None]
    if not known:
        integer(node, "axis")
        return [Spec(dtype)]
    axis = axis_of(integer(node, "axis"), known[0])
    sizes: list[int | None] = list(known[0])
    total: int | None = 0 if len(known) == len(specs) else None
    for shape in known:
        rest = [None if place == axis else size for place, size in enumerate(shape)]
        if not fits(tuple(rest), tuple(None if place == axis else s for place, s in enumerate(sizes))):
            raise MismatchError(
                f"shapes {shape_text(known[0])} and {shape_text(shape)} differ in another axis than {axis}"
            )
        size = shape[axis]
        total = None if total is None or size is None else total + size
        sizes = [one if other is None else other for one, other in zip(sizes, rest, strict=True)]
    sizes[axis] = total
    return [Spec(dtype, tuple(sizes))]


def _concat(node: Node) -> Any:
    axis = node.attr["axis"]

    def kernel(*parts: Any) -> Any:
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts, axis)
        return torch.cat(parts, axis)

    return kernel


register(
    "Concat",
    _infer_concat,
    inputs=(1, None),
    attributes={"axis": REQUIRED},
    kernels={"cpu": _concat},
    differentiable=True,
)


def _infer_slice(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], DTYPES, "Slice")
    begin, size = integers(node, "begin"), integers(node, "size")
    if len(begin) != len(size) or (spec.shape is not None and len(spec.shape) != len(begin)):
        raise MismatchError(
            f"begin {begin} and size {size} need one number for each axis of shape {shape_text(spec.shape)}"
        )
    sizes: list[int | None] = []
    for place, (first, count) in enumerate(zip(begin, size, strict=True)):
        there = None if spec.shape is None else spec.shape[place]
        if first < 0 or count < -1 or (there is not None and first + max(count, 0) > there):
            raise MismatchError(
                f"begin {begin} and size {size} reach beyond shape {shape_text(spec.shape)} on axis {place}"
            )
        sizes.append(count if count >= 0 else None if there is None else there - first)
    return [Spec(spec.dtype, tuple(sizes))]


def _slice(node: Node) -> Any:
    cuts = [
        (axis, first, count)
        for axis, (first, count) in enumerate(zip(node.attr["begin"], node.attr["size"], strict=True))
        if (first, count) != (0, -1)
    ]

    def kernel(value: Any) -> Any:
        for axis, first, count in cuts:
            length = value.shape[axis] - first if count < 0 else count
            if first < 0 or length < 0 or first + length > value.shape[axis]:
                raise IndexError(f"[{first}, {first + length}) on axis {axis} of {tuple(value.shape)}")
            if isinstance(value, np.ndarray):
                value = value[(slice(None),) * axis + (slice(first, first + length),)]
            else:
                value = torch.narrow(value, axis, first, length)
        return value

    return kernel


register(
    "Slice",
    _infer_slice,
    inputs=(1, 1),
    attributes={"begin": REQUIRED, "size": REQUIRED},
    kernels={"cpu": _slice},
    differentiable=True,
    flops=None,
)


def _infer_split(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec, num = tensor_of(specs[0], DTYPES, "Split"), integer(node, "num", 1)
    axis = axis_of(integer(node, "axis"), spec.shape)
    if num > 10_000:
        raise MismatchError(f"num is {num}; a Split has at most 10,000 outputs")
    if spec.shape is None:
        return [Spec(spec.dtype)] * num
    size = spec.shape[axis]
    if size is not None and size % num:
        raise MismatchError(f"axis {axis} has {size} elements, which {num} does not divide")
    sizes = list(spec.shape)
    sizes[axis] = None if size is None else size // num
    return [Spec(spec.dtype, tuple(sizes))] * num


def _split(node: Node) -> Any:
    axis, num = node.attr["axis"], node.attr["num"]

    def kernel(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            parts: Any = tuple(np.split(value, num, axis))
        else:
            if value.shape[axis] % num:
                raise ValueError(f"{num} does not divide {value.shape[axis]}")
            length = value.shape[axis] // num
            parts = tuple(torch.narrow(value, axis, place * length, length) for place in range(num))
        return parts if num != 1 else parts[0]

    return kernel


register(
    "Split",
    _infer_split,
    inputs=(1, 1),
    attributes={"axis": REQUIRED, "num": REQUIRED},
    kernels={"cpu": _split},
    differentiable=True,
    flops=None,
)


# -- Rank, Shape, Sum ----------------------------------------------------------------------------------


def _infer_rank(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    shape = tensor_of(specs[0], DTYPES, node.op).shape
    if node.op == "Rank":
        return [Spec("int32", ())]
    return [Spec("int32", (None if shape is None else len(shape),))]


register(
    "Rank",
    _infer_rank,
    inputs=(1, 1),
    kernels={"cpu": lambda node: lambda value: torch.tensor(value.ndim, dtype=torch.int32)},
    flops=None,
)
register(
    "Shape",
    _infer_rank,
    inputs=(1, 1),
    kernels={"cpu": lambda node: lambda value: torch.tensor(tuple(value.shape), dtype=torch.int32)},
    flops=None,
)


def _infer_sum(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], NUMBERS, "Sum")
    if node.attr.get("axis") is None:
        return [Spec(spec.dtype, ())]
    given = node.attr["axis"]
    axes = integers(node, "axis") if isinstance(given, list | tuple) else [integer(node, "axis")]
    if spec.shape is None:
        return [Spec(spec.dtype)]
    gone = {axis_of(axis, spec.shape) for axis in axes}
    if len(gone) != len(axes):
        raise MismatchError(f"axis {given} names an axis twice")
    return [Spec(spec.dtype, tuple(size for place, size in enumerate(spec.shape) if place not in gone))]


def _sum(node: Node) -> Any:
    axis = node.attr.get("axis")
    if axis is None:
        return lambda value: torch.sum(value, dtype=value.dtype)
    axes = tuple(axis) if isinstance(axis, list | tuple) else axis
    if axes == ():
        return lambda value: value
    return lambda value: torch.sum(value, axes, dtype=value.dtype)


register(
    "Sum", _infer_sum, inputs=(1, 1), attributes={"axis": None}, kernels={"cpu": _sum}, differentiable=True
)


def same_kind(specs: Sequence[Spec], what: str) -> Spec:
    """Return what alternatives have in common. Raises: MismatchError if dtype or kind differ."""
    first = specs[0]
    shape = first.shape
    for spec in specs[1:]:
        if (spec.dtype, spec.kind) != (first.dtype, first.kind):
            raise MismatchError(f"{what} takes one dtype, and these are {first} and {spec}")
        shape = common(shape, spec.shape)
    return Spec(first.dtype, shape, first.kind, first.parts)
