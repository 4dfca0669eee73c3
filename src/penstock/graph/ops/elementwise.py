"""Elementwise operations, with NumPy's broadcasting; both operands of one dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import DTYPES, FLOATS, INTEGERS, QUANTIZED, Shape, shape_text
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.registry import register

NUMBERS = (*FLOATS, *INTEGERS, "complex64")


def broadcast(one: Shape, other: Shape) -> Shape:
    """Return the shape of two operands together. Raises: MismatchError if they do not broadcast."""
    if one is None or other is None:
        return None
    rank = max(len(one), len(other))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in (one, other)]
    sizes: list[int | None] = []
    for left, right in zip(*padded, strict=True):
        if left == 1 or right == 1:
            sizes.append(right if left == 1 else left)
        elif left is None or right is None:
            sizes.append(right if left is None else left)
        elif left == right:
            sizes.append(left)
        else:
            raise MismatchError(f"shapes {shape_text(one)} and {shape_text(other)} do not broadcast")
    return tuple(sizes)


def tensor_of(spec: Spec, allowed: Sequence[str], what: str) -> Spec:
    """Return a tensor's spec. Raises: MismatchError if it is none, or of a dtype that is not allowed."""
    if spec.kind not in ("tensor", "variable"):
        raise MismatchError(f"{what} takes tensors, and an input is a {spec.kind}")
    if spec.dtype not in allowed:
        raise MismatchError(f"{what} is not defined for {spec.dtype}, only for {', '.join(allowed)}")
    return spec


def one_dtype(specs: Sequence[Spec], allowed: Sequence[str], what: str) -> str:
    """Return the dtype of operands. Raises: MismatchError if they differ."""
    for spec in specs:
        tensor_of(spec, allowed, what)
        if spec.dtype != specs[0].dtype:
            raise MismatchError(
                f"{what} takes operands of one dtype, and these are {specs[0]} and {spec}: convert one of them"
            )
    return specs[0].dtype


def _binary(
    name: str,
    function: Callable[..., Any],
    allowed: Sequence[str],
    gives: str | None = None,
    *,
    takes_out: bool = True,
) -> None:
    def infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
        dtype = one_dtype(specs, allowed, name)
        return [Spec(gives or dtype, broadcast(specs[0].shape, specs[1].shape))]

    register(
        name,
        infer,
        inputs=(2, 2),
        kernels={"cpu": lambda node: function},
        differentiable=gives is None,
        takes_out=takes_out,
    )


def _unary(name: str, function: Callable[..., Any], allowed: Sequence[str]) -> None:
    def infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
        spec = tensor_of(specs[0], allowed, name)
        return [Spec(spec.dtype, spec.shape)]

    register(
        name,
        infer,
        inputs=(1, 1),
        kernels={"cpu": lambda node: function},
        differentiable=True,
        takes_out=True,
    )


def _divide(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if one.is_floating_point() or one.is_complex():
        return torch.div(one, other, out=out)
    return torch.div(one, other, rounding_mode="trunc", out=out)


def _relu(one: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    # That is what `relu`, which takes no `out`, calls; but where the input is 0 its gradient is another.
    return torch.relu(one) if out is None else torch.clamp_min(one, 0, out=out)


def _equal(one: Any, other: Any) -> Any:
    if isinstance(one, np.ndarray):
        return torch.from_numpy(np.asarray(np.equal(one, other), bool))
    return torch.eq(one, other)


_binary("Add", torch.add, NUMBERS)
_binary("Sub", torch.sub, NUMBERS)
_binary("Mul", torch.mul, NUMBERS)
_binary("Div", _divide, NUMBERS)
_binary("Greater", torch.gt, (*FLOATS, *INTEGERS, *QUANTIZED), "bool")
_binary("Less", torch.lt, (*FLOATS, *INTEGERS, *QUANTIZED), "bool")
_binary("Equal", _equal, DTYPES, "bool", takes_out=False)
_unary("Exp", torch.exp, (*FLOATS, "complex64"))
_unary("Log", torch.log, (*FLOATS, "complex64"))
_unary("Neg", torch.neg, NUMBERS)
_unary("Square", torch.square, NUMBERS)
_unary("Sigmoid", torch.sigmoid, FLOATS)
_unary("ReLU", _relu, (*FLOATS, *INTEGERS))
