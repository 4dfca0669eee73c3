"""Operations that may wait: queues and mutexes. Their kernels return at once and hold no thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.graph.errors import MismatchError
from penstock.graph.model.dtypes import DTYPES, check_dtype, check_shape, fits
from penstock.graph.model.node import Node, Spec
from penstock.graph.ops.arrays import integer
from penstock.graph.ops.elementwise import tensor_of
from penstock.graph.ops.registry import REQUIRED, register
from penstock.graph.ops.state import SHARED, check_texts, handle_of


def components_of(given: Any) -> tuple[Spec, ...]:
    """Return the components of a queue's elements: each a dtype, [dtype, shape] or {dtype, shape}.

    Raises: MismatchError.
    """
    if not isinstance(given, list | tuple) or not given:
        raise MismatchError(f"components is {given!r:.80}; give a list of [dtype, shape]")
    specs = []
    for each in given:
        if isinstance(each, str):
            each = (each, None)
        elif isinstance(each, dict) and each.keys() <= {"dtype", "shape"} and "dtype" in each:
            each = (each["dtype"], each.get("shape"))
        if not isinstance(each, list | tuple) or len(each) != 2:
            raise MismatchError(f"a component is {each!r:.80}; give [dtype, shape]")
        specs.append(Spec(check_dtype(each[0]), check_shape(each[1])))
    return tuple(specs)


def _infer_queue(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    check_texts(node)
    integer(node, "capacity", 1)
    if node.op == "RandomShuffleQueue":
        least = node.attr.get("min_after_dequeue", 0)
        if isinstance(least, bool) or not isinstance(least, int) or not 0 <= least < node.attr["capacity"]:
            raise MismatchError(
                f"min_after_dequeue is {least!r:.80}; it is at least 0 and below capacity {node.attr['capacity']}"
            )
        if node.attr.get("seed") is not None:
            integer(node, "seed")
    return [Spec("bytes", (), "queue", components_of(node.attr["components"]))]


for _name, _more in (("FIFOQueue", {}), ("RandomShuffleQueue", {"min_after_dequeue": 0, "seed": None})):
    register(
        _name,
        _infer_queue,
        kind="state",
        attributes={"capacity": REQUIRED, "components": REQUIRED, **_more, **SHARED},
        kernels={"cpu": lambda node, resources: lambda: resources.queue(node)},
    )


def _infer_enqueue(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    parts = handle_of(specs, node.op, "queue").parts
    if len(specs) - 1 != len(parts):
        raise MismatchError(
            f"the queue's elements have {len(parts)} components, and {len(specs) - 1} are given"
        )
    for place, (part, spec) in enumerate(zip(parts, specs[1:], strict=True)):
        tensor_of(spec, DTYPES, node.op)
        shape = spec.shape
        if node.op == "EnqueueMany" and shape is not None:
            if not shape:
                raise MismatchError("EnqueueMany takes elements along the first axis, and a scalar has none")
            shape = shape[1:]
        if spec.dtype != part.dtype or not fits(shape, part.shape):
            raise MismatchError(f"component {place} is {part}, and {spec} is given")
    return []


def _infer_dequeue(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    parts = handle_of(specs, node.op, "queue").parts
    if node.op == "Dequeue":
        return parts
    count = integer(node, "n", 0)
    return [Spec(part.dtype, None if part.shape is None else (count, *part.shape)) for part in parts]


register(
    "Enqueue",
    _infer_enqueue,
    kind="waiting",
    inputs=(1, None),
    kernels={"cpu": lambda node, resources: lambda waiter, queue, *parts: queue.put(waiter, [parts])},
)
register(
    "EnqueueMany",
    _infer_enqueue,
    kind="waiting",
    inputs=(2, None),
    kernels={"cpu": lambda node, resources: lambda waiter, queue, *parts: queue.put_many(waiter, parts)},
)
register(
    "Dequeue",
    _infer_dequeue,
    kind="waiting",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: lambda waiter, queue: queue.take(waiter)},
)


def _dequeue_many(node: Node, resources: Any) -> Any:
    count = node.attr["n"]
    return lambda waiter, queue: queue.take_many(waiter, count)


register(
    "DequeueMany",
    _infer_dequeue,
    kind="waiting",
    inputs=(1, 1),
    attributes={"n": REQUIRED},
    kernels={"cpu": _dequeue_many},
)


def _infer_size(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    handle_of(specs, node.op, "queue")
    return [Spec("int32", ())] if node.op == "QueueSize" else []


register(
    "QueueSize",
    _infer_size,
    kind="state",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: lambda queue: queue.size()},
)
register(
    "QueueClose",
    _infer_size,
    kind="state",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: lambda queue: queue.close()},
)


# -- Mutexes -------------------------------------------------------------------------------------------


def _infer_mutex(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    check_texts(node)
    return [Spec("bytes", (), "mutex")]


def _infer_locking(node: Node, specs: Sequence[Spec]) -> Sequence[Spec]:
    handle_of(specs, node.op, "mutex")
    return []


register(
    "Mutex",
    _infer_mutex,
    kind="state",
    attributes=SHARED,
    kernels={"cpu": lambda node, resources: lambda: resources.mutex(node)},
)
register(
    "MutexAcquire",
    _infer_locking,
    kind="waiting",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: lambda waiter, mutex: mutex.acquire(waiter)},
)
register(
    "MutexRelease",
    _infer_locking,
    kind="state",
    inputs=(1, 1),
    kernels={"cpu": lambda node, resources: lambda mutex: mutex.release()},
)
