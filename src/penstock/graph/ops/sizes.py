"""How large tensors are: what estimates of work count by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.graph.model.dtypes import numpy_dtype
from penstock.graph.model.node import Node, Spec

#: In place of each size that a graph leaves open, such as the number of a batch's samples, and of a loop's iterations.
UNKNOWN_SIZE = 32
#: Of a node, its inputs and its outputs, `filled`: how many additions, multiplications and the like it does.
Flops = Callable[[Node, Sequence[Spec], Sequence[Spec]], float]


def filled(specs: Sequence[Spec]) -> list[Spec]:
    """Return edges with `UNKNOWN_SIZE` in place of each size that is not known; as one size where the rank is not."""
    return [
        replace(
            spec,
            shape=tuple(
                UNKNOWN_SIZE if size is None else size
                for size in ((None,) if spec.shape is None else spec.shape)
            ),
        )
        for spec in specs
    ]


def elements(spec: Spec) -> int:
    """Return how many numbers a tensor has, or what a variable holds; none of another kind. spec: `filled`."""
    return math.prod(size or 0 for size in spec.shape or ()) if spec.kind in ("tensor", "variable") else 0


def bytes_of(spec: Spec) -> int:
    """Return the bytes of these numbers; of texts, whose lengths nobody knows, none."""
    return 0 if spec.dtype == "bytes" else elements(spec) * numpy_dtype(spec.dtype).itemsize


def last_size(spec: Spec) -> int:
    """Return the size of the last axis, 1 of a scalar or of none. spec: `filled`."""
    return (spec.shape[-1] if spec.shape else 1) or 1


def one_each(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    """Return one for each element of the largest tensor: of elementwise operations, sums and copies."""
    return max(map(elements, (*takes, *gives)), default=0)
