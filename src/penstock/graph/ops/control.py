"""Control flow: what the executor itself does, and the loops and conditions that are lowered to it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import fits
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.arrays import integer, same_kind
from penstock.graph.ops.registry import REQUIRED, register


def check_predicate(spec: Spec, what: str) -> None:
    """Raise MismatchError unless this is a bool scalar."""
    if spec.dtype != "bool" or spec.kind not in ("tensor", "variable") or not fits(spec.shape, ()):
        raise MismatchError(f"{what} is a bool scalar, and this is {spec}")


def _infer_switch(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    check_predicate(specs[1], "the second input of Switch")
    return [specs[0].value()] * 2


def _infer_merge(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return [same_kind([spec.value() for spec in specs], "Merge"), Spec("int32", ())]


def _infer_pass(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    if node.op == "Enter":
        frame = node.attr["frame"]
        if not isinstance(frame, str) or not frame:
            raise MismatchError(f"frame is {frame!r:.80}; give the name of the loop")
        if "parallel_iterations" in node.attr:
            integer(node, "parallel_iterations", 1)
    return [specs[0].value()]


def _infer_nothing(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return []


def _infer_structured(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    raise AssertionError(f"{node.op} is checked with its subgraphs")


PARALLEL_ITERATIONS = 10

register("NoOp", _infer_nothing, kind="control")
register("Switch", _infer_switch, kind="control", inputs=(2, 2))
register("Merge", _infer_merge, kind="control", inputs=(1, None))
register(
    "Enter",
    _infer_pass,
    kind="control",
    inputs=(1, 1),
    attributes={"frame": REQUIRED, "is_constant": False, "parallel_iterations": PARALLEL_ITERATIONS},
)
register("Leave", _infer_pass, kind="control", inputs=(1, 1))
register("NextIteration", _infer_pass, kind="control", inputs=(1, 1))
register(
    "While",
    _infer_structured,
    kind="control",
    inputs=(0, None),
    attributes={
        "cond": REQUIRED,
        "body": REQUIRED,
        "parallel_iterations": PARALLEL_ITERATIONS,
        "carry_shapes": None,
        "saved": (),
    },
)
register(
    "Cond",
    _infer_structured,
    kind="control",
    inputs=(1, None),
    attributes={"then": REQUIRED, "else": REQUIRED, "saved": ()},
)
