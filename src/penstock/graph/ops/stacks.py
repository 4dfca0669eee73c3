"""Stacks: what a loop keeps of each iteration for its gradient, as values that are never changed.

A stack is None (empty) or a pair (top, rest); pushing shares the rest. Its gradient is a stack, too, in which an empty
one stands for zeros: so the gradient of a push is a pop, that of a pop is a push, to any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import check_dtype, check_shape, common
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.registry import REQUIRED, register


def stack_of(element: Spec) -> Spec:
    """Return the spec of a stack of such elements."""
    return Spec(element.dtype, None, "stack", (element,))


def element_of(spec: Spec) -> Spec:
    """Return the spec of a stack's elements."""
    if spec.kind != "stack":
        raise MismatchError(f"this takes a stack, and this is {spec}")
    return spec.parts[0]


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """Return an element's spec as an attribute."""
    shape = None if spec.shape is None else list(spec.shape)
    return {
        "dtype": spec.dtype,
        "shape": shape,
        "kind": spec.kind,
        "parts": [spec_to_json(part) for part in spec.parts],
    }


def spec_from_json(given: Any) -> Spec:
    """Return the spec that `spec_to_json` wrote. Raises: MismatchError."""
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "kind", "parts"}:
        raise MismatchError(f"of is {given!r:.80}; give what an element of the stack is")
    kind, parts = given["kind"], given["parts"]
    if kind not in ("tensor", "stack") or not isinstance(parts, list):
        raise MismatchError(f"of is {given!r:.80}; a stack holds tensors or stacks")
    return Spec(
        check_dtype(given["dtype"]), check_shape(given["shape"]), kind, tuple(map(spec_from_json, parts))
    )


def _infer_empty(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [stack_of(spec_from_json(node.attr["of"]))]


def _infer_push(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    element = element_of(specs[0])
    if (specs[1].dtype, specs[1].kind) != (element.dtype, element.kind):
        raise MismatchError(f"the stack holds {element}, and {specs[1]} is pushed")
    shape = element.shape if element.kind == "stack" else common(element.shape, specs[1].shape)
    return [stack_of(Spec(element.dtype, shape, element.kind, element.parts))]


def _infer_pop(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    element = element_of(specs[0])
    return [specs[0], element]


def zeros_like(value: Any) -> Any:
    """Return zeros of a tensor's shape, the empty stack for a stack."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def _pop(stack: Any, *like: Any) -> Any:
    """Return the rest and the top of a stack; of an empty one, which stands for zeros, itself and zeros."""
    if stack is None:
        if not like:
            raise IndexError("the stack is empty: a loop's gradient ran more often than the loop")
        return None, zeros_like(like[0])
    return stack[1], stack[0]


def add(one: Any, other: Any) -> Any:
    """Return the sum of two gradients, of tensors or stacks; None is zeros of either."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, torch.Tensor):
        return torch.add(one, other)
    pairs = []
    while one is not None and other is not None:
        pairs.append(add(one[0], other[0]))
        one, other = one[1], other[1]
    rest = other if one is None else one
    for top in reversed(pairs):
        rest = (top, rest)
    return rest


def _infer_add(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [specs[0]]


register("StackEmpty", _infer_empty, attributes={"of": REQUIRED}, kernels={"cpu": lambda node: lambda: None})
register(
    "StackPush", _infer_push, inputs=(2, 2), kernels={"cpu": lambda node: lambda stack, value: (value, stack)}
)
register("StackPop", _infer_pop, inputs=(1, 2), kernels={"cpu": lambda node: _pop})
register("GradientSum", _infer_add, inputs=(2, 2), kernels={"cpu": lambda node: add})
