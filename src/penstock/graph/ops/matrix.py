"""Operations on matrices; of more than two axes, on the last two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import FLOATS, shape_text
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.elementwise import NUMBERS, broadcast, one_dtype, tensor_of
from penstock.graph.ops.registry import register
from penstock.graph.ops.sizes import elements, last_size


def _infer_matmul(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    dtype = one_dtype(specs, NUMBERS, "MatMul")
    one, other = specs[0].shape, specs[1].shape
    for shape in (one, other):
        if shape is not None and len(shape) < 2:
            raise MismatchError(f"MatMul takes matrices, and an operand has shape {shape_text(shape)}")
    if one is None or other is None:
        return [Spec(dtype)]
    if one[-1] is not None and other[-2] is not None and one[-1] != other[-2]:
        raise MismatchError(
            f"shapes {shape_text(one)} and {shape_text(other)}: the columns of the first are not the rows of the second"
        )
    batch = broadcast(one[:-2], other[:-2])
    assert batch is not None, "both ranks are known"
    return [Spec(dtype, (*batch, one[-2], other[-1]))]


def _matmul_flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    return 2.0 * elements(gives[0]) * last_size(takes[0])


def _onednn(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Multiply by oneDNN, which on some processors is twice as fast as the default for float32."""
    if one.dtype != torch.float32 or other.ndim != 2:
        return torch.matmul(one, other)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(one, other.T, None, "none", [], "")
    return product


register(
    "MatMul",
    _infer_matmul,
    inputs=(2, 2),
    kernels={"cpu": lambda node: torch.matmul},
    alternatives={"onednn": lambda node: _onednn},
    differentiable=True,
    takes_out=True,
    flops=_matmul_flops,
)


def _infer_square(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    spec = tensor_of(specs[0], (*FLOATS, "complex64"), node.op)
    shape = spec.shape
    if shape is not None and (len(shape) < 2 or (None not in shape[-2:] and len(set(shape[-2:])) != 1)):
        raise MismatchError(f"{node.op} takes square matrices, and the operand has shape {shape_text(shape)}")
    if node.op == "MatrixDeterminant":
        return [Spec(spec.dtype, None if shape is None else shape[:-2])]
    return [Spec(spec.dtype, shape)]


# LU takes 2/3 n^3, and an inverse 4/3 n^3 more: Golub and Van Loan, sections 3.2 and 3.4.
register(
    "MatrixInverse",
    _infer_square,
    inputs=(1, 1),
    kernels={"cpu": lambda node: torch.linalg.inv},
    differentiable=True,
    flops=lambda node, takes, gives: 2.0 * elements(takes[0]) * last_size(takes[0]),
)
register(
    "MatrixDeterminant",
    _infer_square,
    inputs=(1, 1),
    kernels={"cpu": lambda node: torch.linalg.det},
    differentiable=True,
    flops=lambda node, takes, gives: 2 / 3 * elements(takes[0]) * last_size(takes[0]),
)
