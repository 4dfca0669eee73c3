"""The gradient of any operation that torch can differentiate, as one operation: Vjp.

A Vjp node takes the inputs of a forward node and the cotangents of some of its outputs, and gives the gradients of
some of its inputs. It is derived from the forward kernel by torch's autograd, at the shapes that arrive, and is itself
an operation that torch can differentiate: so gradients of any order are Vjp nodes of Vjp nodes.

From its tenth use with the same shapes and dtypes on, a node that is not of an LSTM runs as straight ATen code, traced
once by make_fx, in which the forward part that the gradient does not need is gone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.graph.errors import MismatchError
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.aten import refuse_draws
from penstock.graph.ops.registry import REQUIRED, operation, register
from penstock.graph.ops.sizes import filled, one_each

#: A trace takes some 10 ms, the first of a process seconds.
TRACED_FROM_USE = 10
_MOST_TRACED = 4096


def vjp_node(forward: Node, cotangents: Sequence[int], wrt: Sequence[int]) -> Node:
    """Return a nameless Vjp node of a forward node, without inputs.

    cotangents: ports of the forward node; wrt: places of its inputs.
    """
    of = {
        "op": forward.op,
        # Of PyTorch's own kernel: others have no gradient.
        "attr": {name: value for name, value in forward.attr.items() if name != "kernel"},
        "inputs": len(forward.inputs),
        "outputs": len(forward.outputs),
        "device": forward.device,
    }
    return Node("", "Vjp", attr={"of": of, "cotangents": list(cotangents), "wrt": list(wrt)})


def _infer(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    of, wrt = node.attr["of"], node.attr["wrt"]
    _check_forward(of)
    if len(specs) != of["inputs"] + len(node.attr["cotangents"]):
        raise MismatchError("Vjp takes the inputs of the forward node and its cotangents")
    return [Spec(specs[place].dtype, specs[place].shape) for place in wrt]


def _flops(node: Node, takes: Sequence[Spec], gives: Sequence[Spec]) -> float:
    """Return the work of the forward node once for each gradient, as it is of products and convolutions."""
    of = node.attr["of"]
    forward = Node(node.name, of["op"], attr=of["attr"])
    forward.takes = node.takes[: of["inputs"]]
    count = operation(of["op"]).flops or one_each
    results = filled(operation(of["op"]).infer(forward, forward.takes))
    return len(gives) * count(forward, takes[: of["inputs"]], results)


def _check_forward(of: Any) -> None:
    is_one = isinstance(of, dict) and of.keys() == {"op", "attr", "inputs", "outputs", "device"}
    if not is_one or not isinstance(of["attr"], dict):
        raise MismatchError(
            f"of is {of!r:.80}; it describes a forward node: op, attr, inputs, outputs, device"
        )
    if not operation(of["op"]).differentiable:
        raise MismatchError(f"{of['op']} has no gradient by torch")
    if of["op"] == "Vjp":
        _check_forward(of["attr"].get("of"))
    refuse_draws(of["op"], of["attr"])


def _pull(forward: Callable[..., Any], single: bool, inputs: int, node: Node) -> Callable[..., Any]:
    """Return the function from inputs and cotangents to gradients."""
    ports, wrt = list(node.attr["cotangents"]), list(node.attr["wrt"])

    def pull(*values: Any) -> Any:
        is_nested = torch.is_grad_enabled()
        with torch.enable_grad():
            given = list(values[:inputs])
            for place in wrt:
                value = given[place]
                # A view: one tensor may be two inputs, whose gradients are two.
                given[place] = (
                    value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
                )
            results = forward(*given)
            outputs = [results] if single else list(results)
            used = [
                (outputs[port], cotangent) for port, cotangent in zip(ports, values[inputs:], strict=True)
            ]
            used = [pair for pair in used if pair[0].requires_grad]
            sought = [given[place] for place in wrt]
            found: Sequence[Any] = [None] * len(sought)
            if used:
                found = torch.autograd.grad(
                    [output for output, _ in used],
                    sought,
                    [cotangent for _, cotangent in used],
                    create_graph=is_nested,
                    allow_unused=True,
                )
            gradients = tuple(
                torch.zeros_like(value) if gradient is None else gradient
                for gradient, value in zip(found, sought, strict=True)
            )
        return gradients[0] if len(wrt) == 1 else gradients

    return pull


#: A call as torch's function takes a third to two thirds of the time of one as an ATen operation.
_FUNCTIONS = {
    getattr(getattr(torch.ops.aten, name), overload): getattr(torch, name)
    for name, overload in (
        ("permute", "default"),
        ("transpose", "int"),
        ("t", "default"),
        ("unsqueeze", "default"),
        ("squeeze", "dim"),
        ("select", "int"),
        ("mm", "default"),
        ("bmm", "default"),
        ("mul", "Tensor"),
        ("add", "Tensor"),
        ("sub", "Tensor"),
        ("neg", "default"),
        ("sum", "dim_IntList"),
    )
}


def _simplify(graph: fx.Graph) -> None:
    """Take out what no gradient needs: dead code, and detaching, as nothing is recorded where a trace runs."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        node.target = _FUNCTIONS.get(node.target, node.target)
    graph.eliminate_dead_code()


class _Traces:
    """Straight code by operation, shapes and dtypes; for all sessions of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By key: how often it was used, then its code.
        self._code: dict[Any, Callable[..., Any] | int] = {}

    def find(self, key: Any, pull: Callable[..., Any], values: Sequence[Any]) -> Callable[..., Any]:
        found: Callable[..., Any] | int | None = self._code.get(key)
        if callable(found):
            return found
        with self._lock:
            # Of threads that come to the tenth use at once, one traces.
            found = self._code.get(key)
            if callable(found):
                return found
            if len(self._code) >= _MOST_TRACED:
                self._code.clear()
            uses = self._code[key] = (found or 0) + 1
            if uses < TRACED_FROM_USE:
                return pull
            traced = make_fx(pull)(*[value.detach() for value in values])
            _simplify(traced.graph)
            traced.recompile()
            self._code[key] = traced.forward
            compiled: Callable[..., Any] = traced.forward
            return compiled


_TRACES = _Traces()


def _is_traceable(of: Any) -> bool:
    while of["op"] == "Vjp":
        of = of["attr"]["of"]
    # Of an LSTM, oneDNN's kernel keeps a workspace, which a trace has not.
    return not of["op"].startswith("aten.lstm.")


def _vjp(node: Node) -> Callable[..., Any]:
    of = node.attr["of"]
    is_traceable = _is_traceable(of)
    forward_node = Node(node.name, of["op"], attr=of["attr"], device=of["device"])
    forward = operation(of["op"]).kernel(forward_node)(forward_node)
    pull = _pull(forward, of["outputs"] == 1, of["inputs"], node)
    name = json.dumps(node.attr, sort_keys=True, default=str)

    def kernel(*values: Any) -> Any:
        # Inside a gradient of this one, autograd needs its own record.
        if torch.is_grad_enabled() or not is_traceable:
            return pull(*values)
        key = (name, tuple([(value.shape, value.dtype, value.stride(), value.device) for value in values]))
        return _TRACES.find(key, pull, values)(*values)

    return kernel


register(
    "Vjp",
    _infer,
    inputs=(1, None),
    attributes={"of": REQUIRED, "cotangents": REQUIRED, "wrt": REQUIRED},
    kernels={"cpu": _vjp},
    differentiable=True,
    flops=_flops,
)
