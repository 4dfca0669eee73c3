"""What a user brings: Python functions as opaque nodes, and iterators of batches such as Penstock's loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.graph.errors import MismatchError
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.waiting import components_of


def _infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    name = node.attr["function"] if node.op == "Call" else node.attr["batches"]
    if not isinstance(name, str) or not name:
        raise MismatchError(f"{name!r:.80} is no name; the session has the function or the batches under one")
    for spec in specs:
        if spec.kind not in ("tensor", "variable"):
            raise MismatchError(f"{node.op} takes tensors, and an input is {spec}")
    return components_of(node.attr["outputs"])


def _function(node: Node, resources: Any) -> Any:
    return resources.function(node)


register(
    "Call",
    _infer,
    kind="state",
    inputs=(0, None),
    attributes={"function": REQUIRED, "outputs": REQUIRED},
    kernels={"cpu": _function},
)
register(
    "NextBatch",
    _infer,
    kind="state",
    attributes={"batches": REQUIRED, "outputs": REQUIRED},
    kernels={"cpu": lambda node, resources: lambda: resources.batches(node).read(node)},
)
