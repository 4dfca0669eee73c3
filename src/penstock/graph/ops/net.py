"""Blocks of neural networks: SoftMax, convolution and pooling over images as NHWC."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import FLOATS, shape_text
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.elementwise import one_dtype, tensor_of
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.sizes import elements, last_size


def _infer_softmax(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], FLOATS, "SoftMax")
    if spec.shape == ():
        raise MismatchError("SoftMax works along the last axis, and a scalar has none")
    return [Spec(spec.dtype, spec.shape)]


register(
    "SoftMax",
    _infer_softmax,
    inputs=(1, 1),
    kernels={"cpu": lambda node: functools.partial(torch.softmax, dim=-1)},
    differentiable=True,
)


def _pair(node: Node, name: str) -> tuple[int, int]:
    """Return (height, width) of an attribute that is one number, two, or four for NHWC; strides are 1 by default."""
    given = node.attr.get(name, 1 if name == "strides" else None)
    values = [given, given] if isinstance(given, int) else given
    if isinstance(values, list | tuple) and len(values) == 4 and values[0] == values[3] == 1:
        values = values[1:3]
    if not (
        isinstance(values, list | tuple)
        and len(values) == 2
        and all(isinstance(each, int) and not isinstance(each, bool) and each >= 1 for each in values)
    ):
        raise MismatchError(f"{name} is {given!r:.80}; give height and width of at least 1")
    return values[0], values[1]


def _padding(node: Node) -> str:
    padding = node.attr.get("padding")
    if padding not in ("SAME", "VALID"):
        raise MismatchError(f"padding is {padding!r:.80}; it is SAME or VALID")
    return str(padding)


def _reach(size: int | None, window: int | None, stride: int, padding: str) -> int | None:
    """Return how many windows fit along an axis. Raises: MismatchError if none does."""
    if size is None or (window is None and padding == "VALID"):
        return None
    if padding == "SAME":
        return -(-size // stride)
    assert window is not None, "checked above"
    if size < window:
        raise MismatchError(f"a window of {window} does not fit into {size} with padding VALID")
    return (size - window) // stride + 1


def _pads(size: int, window: int, stride: int) -> tuple[int, int]:
    """Return what SAME adds before and after an axis: the odd one is added after."""
    total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _padded(
    image: torch.Tensor, window: Sequence[int], strides: tuple[int, int], value: float
) -> torch.Tensor:
    top, bottom = _pads(image.shape[2], window[0], strides[0])
    left, right = _pads(image.shape[3], window[1], strides[1])
    if not (top or bottom or left or right):
        return image
    return functional.pad(image, (left, right, top, bottom), value=value)


def _infer_convolution(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    dtype = one_dtype(specs, FLOATS, "Convolution2D")
    strides, padding = _pair(node, "strides"), _padding(node)
    image, window = specs[0].shape, specs[1].shape
    for name, shape in (("the images, NHWC,", image), ("the filters, HWIO,", window)):
        if shape is not None and len(shape) != 4:
            raise MismatchError(f"{name} have four axes, not shape {shape_text(shape)}")
    image, window = image or (None,) * 4, window or (None,) * 4
    if image[3] is not None and window[2] is not None and image[3] != window[2]:
        raise MismatchError(
            f"images {shape_text(image)} have {image[3]} channels, and filters {shape_text(window)} take {window[2]}"
        )
    rows = _reach(image[1], window[0], strides[0], padding)
    columns = _reach(image[2], window[1], strides[1], padding)
    return [Spec(dtype, (image[0], rows, columns, window[3]))]


def _convolution_flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    return 2.0 * elements(gives[0]) * elements(takes[1]) / last_size(takes[1])


def _convolution(node: Node) -> Any:
    strides, same = _pair(node, "strides"), node.attr["padding"] == "SAME"

    def kernel(images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
        planes, weights = images.permute(0, 3, 1, 2), filters.permute(3, 2, 0, 1)
        if same:
            planes = _padded(planes, weights.shape[2:], strides, 0.0)
        return functional.conv2d(planes, weights, stride=strides).permute(0, 2, 3, 1)

    return kernel


register(
    "Convolution2D",
    _infer_convolution,
    inputs=(2, 2),
    attributes={"strides": 1, "padding": REQUIRED},
    kernels={"cpu": _convolution},
    differentiable=True,
    flops=_convolution_flops,
)


_POOL = {"ksize": REQUIRED, "strides": REQUIRED, "padding": REQUIRED}


def _pool_flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    return float(elements(gives[0]) * math.prod(_pair(node, "ksize")))


def _infer_pool(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], FLOATS, "MaxPool")
    window, strides, padding = _pair(node, "ksize"), _pair(node, "strides"), _padding(node)
    if spec.shape is not None and len(spec.shape) != 4:
        raise MismatchError(f"the images, NHWC, have four axes, not shape {shape_text(spec.shape)}")
    image = spec.shape or (None,) * 4
    shape = (
        image[0],
        _reach(image[1], window[0], strides[0], padding),
        _reach(image[2], window[1], strides[1], padding),
        image[3],
    )
    return [Spec(spec.dtype, shape), *([Spec("int64", shape)] if node.attr.get("indices") else [])]


def _pool(node: Node) -> Any:
    window, strides = _pair(node, "ksize"), _pair(node, "strides")
    same, indices = node.attr["padding"] == "SAME", bool(node.attr.get("indices"))

    def kernel(images: torch.Tensor) -> Any:
        planes = images.permute(0, 3, 1, 2)
        if same:
            planes = _padded(planes, window, strides, -math.inf)
        if not indices:
            return functional.max_pool2d(planes, window, strides).permute(0, 2, 3, 1)
        found = functional.max_pool2d(planes, window, strides, return_indices=True)
        return tuple(each.permute(0, 2, 3, 1) for each in found)

    return kernel


register(
    "MaxPool",
    _infer_pool,
    inputs=(1, 1),
    # indices: whether it also gives where each maximum is; set by gradients, which need it.
    attributes={**_POOL, "indices": False},
    kernels={"cpu": _pool},
    differentiable=True,
    flops=_pool_flops,
)


# -- Gradients that use what the forward pass gave, in place of computing it again ---------------------


def _infer_backward(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [Spec(specs[0].dtype, specs[0].shape)]


def _pool_backward(node: Node) -> Any:
    window, strides = _pair(node, "ksize"), _pair(node, "strides")
    same = node.attr["padding"] == "SAME"

    def kernel(images: torch.Tensor, places: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
        planes = images.permute(0, 3, 1, 2)
        padded = _padded(planes, window, strides, -math.inf) if same else planes
        found: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            cotangent.permute(0, 3, 1, 2),
            padded,
            window,
            strides,
            (0, 0),
            (1, 1),
            False,
            places.permute(0, 3, 1, 2),
        )
        if padded is not planes:
            (top, _), (left, _) = (
                _pads(planes.shape[axis], window[axis - 2], strides[axis - 2]) for axis in (2, 3)
            )
            found = found[:, :, top : top + planes.shape[2], left : left + planes.shape[3]]
        return found.permute(0, 2, 3, 1)

    return kernel


register(
    "MaxPoolBackward",
    _infer_backward,
    inputs=(3, 3),
    attributes=_POOL,
    kernels={"cpu": _pool_backward},
    differentiable=True,
)


def _infer_norm_backward(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    has, wrt = node.attr["has"], node.attr["wrt"]
    if len(specs) != 4 + sum(has) or len(wrt) != 3:
        raise MismatchError("it takes cotangent, values, mean, 1 / deviation, and the weight and bias it has")
    given = iter(specs[4:])
    sought = [specs[1], *(next(given) if is_there else None for is_there in has)]
    return [
        Spec(each.dtype, each.shape)
        for each, is_wanted in zip(sought, wrt, strict=True)
        if is_wanted and each
    ]


def _norm_backward(node: Node) -> Any:
    (weighs, adds), wrt = node.attr["has"], list(node.attr["wrt"])
    axes, eps, is_one = node.attr.get("axes"), node.attr.get("eps"), sum(wrt) == 1

    def kernel(
        cotangent: torch.Tensor,
        values: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        *given: torch.Tensor,
    ) -> Any:
        weight, bias = given[0] if weighs else None, given[-1] if adds else None
        if axes is None:
            found = _aten.native_batch_norm_backward(
                cotangent, values, weight, None, None, mean, rstd, True, eps, wrt
            )
        else:
            shape = values.shape[values.dim() - axes :]
            found = _aten.native_layer_norm_backward(cotangent, values, shape, mean, rstd, weight, bias, wrt)
        found = tuple(each for each, is_wanted in zip(found, wrt, strict=True) if is_wanted)
        return found[0] if is_one else found

    return kernel


for _name, _size in (("LayerNormBackward", "axes"), ("BatchNormBackward", "eps")):
    register(
        _name,
        _infer_norm_backward,
        inputs=(4, 6),
        attributes={_size: REQUIRED, "has": REQUIRED, "wrt": REQUIRED},
        kernels={"cpu": _norm_backward},
        differentiable=True,
    )
_aten = torch.ops.aten
for _name, _kernel in (
    ("ReLU", lambda value, cotangent: _aten.threshold_backward(cotangent, value, 0)),
    ("Sigmoid", lambda value, cotangent: _aten.sigmoid_backward(cotangent, value)),
    ("SoftMax", lambda value, cotangent: _aten._softmax_backward_data(cotangent, value, -1, value.dtype)),
    ("Exp", lambda value, cotangent: cotangent * value.conj()),
):
    register(
        f"{_name}Backward",
        _infer_backward,
        inputs=(2, 2),
        kernels={"cpu": lambda node, kernel=_kernel: kernel},
        differentiable=True,
    )
