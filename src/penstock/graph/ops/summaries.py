"""Summaries as nodes: what TensorBoard shows of a tensor, as a scalar of bytes that `Events.summary` writes.

The bytes are a serialised Summary of TensorBoard; such messages are joined by putting one after the other. Kernels need
the package tensorboard, which works without TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import FLOATS, INTEGERS, Value, fits, shape_text, to_client
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.elementwise import one_dtype, tensor_of
from penstock.graph.ops.registry import REQUIRED, register

_EDGES = 1e-12 * 1.1 ** np.arange(775)
#: Buckets of histograms: from 1e-12 to 1e20, each a tenth wider than the one before, on both sides of 0.
_BINS = np.concatenate([-_EDGES[::-1], [0.0], _EDGES])
#: By operation: dtypes, the shape, and what makes the summary of a tag and an array.
_SUMMARIES: dict[str, tuple[Sequence[str], tuple[None, ...] | None, Callable[[Any, str, Any], Any]]] = {
    "ScalarSummary": ((*FLOATS, *INTEGERS), (), lambda make, tag, value: make.scalar(tag, float(value))),
    "HistogramSummary": (
        (*FLOATS, *INTEGERS),
        None,
        lambda make, tag, values: make.histogram(tag, np.asarray(values, np.float64), _BINS),
    ),
    "ImageSummary": (
        (*FLOATS, "uint8"),
        (None, None, None, None),
        lambda make, tag, images: make.image(tag, images, dataformats="NHWC"),
    ),
}


def _infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    allowed, shape, _ = _SUMMARIES[node.op]
    spec, tag = tensor_of(specs[0], allowed, node.op), node.attr["tag"]
    if not isinstance(tag, str) or not tag:
        raise MismatchError(f"tag is {tag!r:.80}; give the name under which TensorBoard shows it")
    if not fits(shape, spec.shape):
        raise MismatchError(f"{node.op} takes {shape_text(shape)}, and the input is {spec}")
    return [Spec("bytes", ())]


def _kernel(node: Node) -> Callable[[Value], Value]:
    make_summary, tag = _SUMMARIES[node.op][2], node.attr["tag"]

    def kernel(value: Value) -> Value:
        from torch.utils.tensorboard import summary

        return np.array(make_summary(summary, tag, to_client(value)).SerializeToString(), object)

    return kernel


for _name in _SUMMARIES:
    register(_name, _infer, inputs=(1, 1), attributes={"tag": REQUIRED}, kernels={"cpu": _kernel})


def _infer_merge(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    one_dtype(specs, ("bytes",), node.op)
    return [Spec("bytes", ())]


def _merge(*summaries: Value) -> Value:
    return np.array(b"".join(each.item() for each in summaries), object)


register("MergeSummary", _infer_merge, inputs=(1, None), kernels={"cpu": lambda node: _merge})
