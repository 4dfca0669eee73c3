"""Pictures: a file's bytes become pixels, by the decoders and transforms of the loader.

A crop's draw depends on what all draws of graphs depend on, so a node that runs elsewhere, such as on a machine that
decodes for others, gives the same pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import Value, shape_text
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.elementwise import tensor_of
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.sizes import elements

#: For each number of the pixels. Measured: 44 kB of JPEG become 224 x 224 pixels in 0.9 ms of one processor.
_DECODE_FLOPS = 600.0
_MOST_SAMPLE = np.int64((1 << 63) - 1)


def _infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec, size = tensor_of(specs[0], ("bytes",), node.op), node.attr["size"]
    if spec.shape is not None and len(spec.shape) > 1:
        raise MismatchError(
            f"{node.op} takes a file, or a list of them, and the input has shape {shape_text(spec.shape)}"
        )
    is_size = isinstance(size, list | tuple) and len(size) == 2
    if not is_size or not all(type(each) is int and 0 < each < 1 << 15 for each in size):
        raise MismatchError(f"size is {size!r:.80}; give height and width, in pixels")
    return [Spec("uint8", None if spec.shape is None else (*spec.shape, *size, 3))]


def _flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    return _DECODE_FLOPS * elements(gives[0])


def _kernel(node: Node) -> Callable[[int, Value], Value]:
    from penstock.loader.transforms import RandomResizedCrop, Resize
    from penstock.loader.transforms.pipeline import compile_pipeline
    from penstock.loader.transforms.stages import Scratch

    size = tuple(node.attr["size"])
    step = Resize(size) if node.op == "DecodeImage" else RandomResizedCrop(size)
    pipeline = compile_pipeline([step], 0, "uint8", "NHWC")
    own = threading.local()

    def decoded(key: int, files: Value) -> Value:
        if not hasattr(own, "scratch"):
            own.scratch = Scratch()
        data = np.asarray(files, object).reshape(-1)
        out = np.empty((data.size, *size, 3), np.uint8)
        # Each picture has its own draw: as a loader has one for each sample of an epoch.
        draws = pipeline.draw(0, (key >> 1) + np.arange(data.size, dtype=np.int64) & _MOST_SAMPLE)
        for row, file in enumerate(data):
            pipeline.run(file, out[row], draws, row, own.scratch)
        return torch.from_numpy(out.reshape(*files.shape, *size, 3))

    return decoded


def _plain(node: Node) -> Callable[[Value], Value]:
    decoded = _kernel(node)
    return lambda file: decoded(0, file)


register(
    "DecodeImage", _infer, inputs=(1, 1), attributes={"size": REQUIRED}, kernels={"cpu": _plain}, flops=_flops
)


def _random(node: Node, resources: Any) -> Any:
    return _kernel(node)


register(
    "DecodeRandomCrop",
    _infer,
    kind="random",
    inputs=(1, 1),
    attributes={"size": REQUIRED},
    kernels={"cpu": _random},
    flops=_flops,
)
