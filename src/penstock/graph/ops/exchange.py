"""Send and Recv: an edge that leads from one worker to another. They are put in when a graph is cut into parts.

A Send hands its values on and is done, or waits until the Recv asks for them; a Recv waits. Neither takes a thread.
Source: Abadi et al. 2015, section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.graph.errors import MismatchError, UnsupportedError
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.waiting import components_of

#: Shapes of inputs that a kernel remembers.
_MOST_SHAPES = 64


def writing(kernel: Callable[..., Any], mail: Any, to: str) -> Callable[..., Any]:
    """Return a kernel whose value, which is sent and used nowhere else, is written where the receiver has it.

    The first call with inputs of these shapes shows what shape the value has.
    """
    shapes: dict[Any, tuple[torch.Size, torch.dtype, int] | None] = {}

    def write(*values: Any) -> Any:
        key = tuple([(value.shape, value.stride()) for value in values])
        known = shapes.get(key)
        if known is not None:
            shape, dtype, nbytes = known
            if (lent := mail.lend(to, nbytes)) is not None:
                return kernel(*values, out=torch.from_numpy(lent).view(dtype).view(shape))
        result = kernel(*values)
        if key not in shapes:
            if len(shapes) >= _MOST_SHAPES:
                shapes.clear()
            is_plain = result.device.type == "cpu" and result.is_contiguous() and result.numel()
            shapes[key] = (result.shape, result.dtype, result.nbytes) if is_plain else None
        return result

    return write


def _infer_send(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    for spec in specs:
        if spec.kind not in ("tensor", "variable"):
            raise MismatchError(f"a {spec.kind} stays on its worker and cannot be sent")
    return []


def _infer_recv(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    return components_of(node.attr["outputs"]) if node.attr["outputs"] else []


def _mail(node: Node, resources: Any) -> Any:
    if resources.mail is None:
        raise UnsupportedError(
            f"{node.op} runs on workers alone, which a WorkerSession cuts a graph for",
            node=node.name,
            where=node.where,
        )
    return resources.mail


def _send(node: Node, resources: Any) -> Callable[..., tuple[()] | None]:
    """Return what takes the number of the step, or who waits where the Recv asks, and values."""
    mail = _mail(node, resources)
    name, to, ports = node.attr["node"], node.attr["to"], node.attr["ports"]

    def send(step: int, *values: Any) -> tuple[()]:
        mail.send(to, step, name, dict(zip(ports, values, strict=True)))
        return ()

    def offer(waiter: Any, *values: Any) -> None:
        mail.offer(waiter.step.number, name, to, dict(zip(ports, values, strict=True)), waiter)

    return offer if node.attr.get("is_asked") else send


def _recv(node: Node, resources: Any) -> Callable[..., None]:
    mail, ports = _mail(node, resources), len(node.outputs)

    def give(waiter: Any, sent: Mapping[int, Any]) -> None:
        # Outputs that nobody here needs were not sent.
        waiter.finish(sent.get(0) if ports == 1 else tuple([sent.get(port) for port in range(ports)]))

    def receive(waiter: Any) -> None:
        mail.receive(waiter.step.number, node.name, waiter, give)
        if asked := node.attr.get("asks"):
            mail.ask(waiter.step.number, node.name, asked)

    return receive


register(
    "Send",
    _infer_send,
    kind="waiting",
    inputs=(0, None),
    attributes={"node": REQUIRED, "ports": REQUIRED, "to": REQUIRED, "is_asked": False},
    kernels={"cpu": _send},
)
register(
    "Recv", _infer_recv, kind="waiting", attributes={"outputs": REQUIRED, "asks": ""}, kernels={"cpu": _recv}
)
