"""Random operations: a draw depends on the session's seed, the node's name, its run and the loop iterations alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import DTYPES, FLOATS, check_shape, is_known, numpy_dtype
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.elementwise import tensor_of
from penstock.graph.ops.registry import REQUIRED, register
from penstock.plan.random import generator_for


def _infer_uniform(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    dtype, shape = node.attr.get("dtype", "float32"), check_shape(node.attr["shape"])
    if dtype not in FLOATS:
        raise MismatchError(f"dtype is {dtype!r:.80}; uniform numbers are float32 or float64")
    if not is_known(shape):
        raise MismatchError(f"shape is {node.attr['shape']!r:.80}; all sizes of a draw are known")
    return [Spec(dtype, shape)]


def _uniform(node: Node, resources: Any) -> Any:
    shape, dtype = tuple(node.attr["shape"]), numpy_dtype(node.attr.get("dtype", "float32")).type
    return lambda key: torch.from_numpy(np.asarray(generator_for(key, 0, 0).random(shape, dtype)))


register(
    "RandomUniform",
    _infer_uniform,
    kind="random",
    attributes={"shape": REQUIRED, "dtype": "float32"},
    kernels={"cpu": _uniform},
)


def _infer_shuffle(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], DTYPES, "Shuffle")
    if spec.shape == ():
        raise MismatchError("Shuffle permutes the first axis, and a scalar has none")
    return [Spec(spec.dtype, spec.shape), Spec("int64", None if spec.shape is None else (spec.shape[0],))]


def _shuffle(node: Node, resources: Any) -> Any:
    def kernel(key: int, value: Any) -> Any:
        order = generator_for(key, 0, 0).permutation(value.shape[0])
        return value[order], torch.from_numpy(order)

    return kernel


register("Shuffle", _infer_shuffle, kind="random", inputs=(1, 1), kernels={"cpu": _shuffle})


def _infer_take(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    rows, order = specs
    return [Spec(rows.dtype, rows.shape if order.shape is not None else None)]


def _restore_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return rows[torch.argsort(order)]


#: The inverse of a Shuffle: rows into the order that they had before.
register(
    "Unshuffle", _infer_take, inputs=(2, 2), kernels={"cpu": lambda node: _restore_order}, differentiable=True
)
