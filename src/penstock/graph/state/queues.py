"""Queues and mutexes. What has to wait is a list of requests; no thread waits here.

A request is granted by whoever makes it possible, under the lock of the container, in the order of asking. A request
that is withdrawn leaves no trace: what it had taken or put so far is undone, as is what a step took that fails later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from penstock.graph.errors import CancelledError, GraphError, MismatchError, OutOfRangeError
from penstock.graph.model.dtypes import Value, fits, shape_text, zeros
from penstock.graph.model.node import Node, Spec
from penstock.graph.state.containers import owned
from penstock.graph.state.tensors import decode, encode
from penstock.plan.random import derive_key, generator_for

Element = tuple[Value, ...]


class Waits(Protocol):
    """Who waits for a request to be granted.

    withdraw: forgets the request. taken: the queue that granted it, and the elements it gave.
    """

    step: Any
    withdraw: Callable[[], None]
    taken: tuple[Any, Sequence[Any]] | None

    def finish(self, values: Any) -> None: ...

    def fail(self, error: BaseException) -> None: ...


@dataclass(slots=True, eq=False)
class _Request:
    """What a waiter asked: to put `elements`, or to take `count`, stacked where `many`.

    taken, put: what it has been given, or has put in, before the rest.
    """

    waiter: Waits
    elements: deque[Element] = field(default_factory=deque)
    count: int = 0
    many: bool = False
    taken: list[Element] = field(default_factory=list)
    put: list[Element] = field(default_factory=list)


class Queue:
    """A queue of elements, each a tuple of tensors; first in, first out, or shuffled by a seed."""

    def __init__(self, lock: Any, node: Node, seed: int) -> None:
        self._lock = lock
        self.node = node
        self.parts: tuple[Spec, ...] = node.outputs[0].parts
        self._capacity = int(node.attr["capacity"])
        self._shuffles = node.op == "RandomShuffleQueue"
        self._least = int(node.attr.get("min_after_dequeue") or 0)
        own = node.attr.get("seed")
        self._key = derive_key(seed if own is None else int(own) & (2**64 - 1), f"queue {node.name}")
        self.elements: deque[Element] = deque()
        self.draws = 0
        self.is_closed = False
        self._puts: deque[_Request] = deque()
        self._takes: deque[_Request] = deque()

    # -- Asking ----------------------------------------------------------------------------------------------

    def put(self, waiter: Waits, elements: Sequence[Element]) -> None:
        """Add elements, all or none. Raises: MismatchError if one has another shape, CancelledError if closed."""
        for element in elements:
            for place, (part, value) in enumerate(zip(self.parts, element, strict=True)):
                if not fits(part.shape, tuple(value.shape)):
                    raise MismatchError(
                        f"component {place} of the queue {self.node.name!r} has shape {shape_text(part.shape)}, and "
                        f"{shape_text(tuple(value.shape))} is given"
                    )
        kept = deque(tuple(map(owned, element)) for element in elements)
        with self._lock:
            if self.is_closed:
                raise CancelledError(f"the queue {self.node.name!r} is closed")
            self._ask(self._puts, _Request(waiter, kept))

    def put_many(self, waiter: Waits, parts: Sequence[Value]) -> None:
        """Add what lies along the first axis of each component."""
        sizes = {part.shape[0] if part.ndim else -1 for part in parts}
        if len(sizes) != 1 or -1 in sizes:
            raise MismatchError("the components need a first axis of the same size")
        self.put(waiter, [tuple(part[row, ...] for part in parts) for row in range(sizes.pop())])

    def take(self, waiter: Waits) -> None:
        """Remove an element."""
        with self._lock:
            self._ask(self._takes, _Request(waiter, count=1))

    def take_many(self, waiter: Waits, count: int) -> None:
        """Remove elements, and stack each component."""
        with self._lock:
            self._ask(self._takes, _Request(waiter, count=count, many=True))

    def _ask(self, line: deque[_Request], request: _Request) -> None:
        line.append(request)
        request.waiter.withdraw = lambda: self._withdraw(line, request)
        self._grant()

    def _withdraw(self, line: deque[_Request], request: _Request) -> None:
        with self._lock:
            if request in line:
                line.remove(request)
                self.elements.extendleft(reversed(request.taken))
                # By identity: elements are tensors, whose equality is no truth.
                put = set(map(id, request.put))
                self.elements = deque(each for each in self.elements if id(each) not in put)
                self._grant()

    def give_back(self, elements: Sequence[Element]) -> None:
        """Put elements that were taken in front of the others, in the order in which they were taken."""
        with self._lock:
            self.elements.extendleft(reversed(elements))
            self._grant()

    # -- Granting --------------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Grant what can be granted; under the lock."""
        while self._grant_put() or self._grant_take():
            pass

    def _grant_put(self) -> bool:
        if not self._puts:
            return False
        request = self._puts[0]
        free = self._capacity - len(self.elements)
        if len(request.elements) > free and len(request.elements) <= self._capacity:
            return False
        moved = 0
        # More than ever fit at once go in as there is space.
        while request.elements and len(self.elements) < self._capacity:
            request.put.append(request.elements.popleft())
            self.elements.append(request.put[-1])
            moved += 1
        if request.elements:
            return moved > 0
        self._puts.popleft()
        request.waiter.finish(())
        return True

    def _grant_take(self) -> bool:
        if not self._takes:
            return False
        request = self._takes[0]
        missing = request.count - len(request.taken)
        usable = len(self.elements) - (0 if self.is_closed and not self._puts else self._least)
        at_once = request.count <= self._capacity - self._least
        moved = 0
        if usable >= missing or not at_once:
            while len(request.taken) < request.count and usable > 0:
                request.taken.append(self._next())
                usable -= 1
                moved += 1
        if len(request.taken) == request.count:
            self._takes.popleft()
            self._deliver(request)
            return True
        if moved == 0 and self.is_closed and not self._puts:
            self._takes.popleft()
            self.elements.extendleft(reversed(request.taken))
            request.waiter.fail(
                OutOfRangeError(
                    f"the queue {self.node.name!r} is closed and has {len(self.elements)} elements, and "
                    f"{request.count} are asked for"
                )
            )
            return True
        return moved > 0

    def _next(self) -> Element:
        if not self._shuffles:
            return self.elements.popleft()
        draw = generator_for(derive_key(self._key, f"draw {self.draws}"), 0, 0).integers(len(self.elements))
        self.draws += 1
        place = int(draw)
        element = self.elements[place]
        del self.elements[place]
        return element

    def _deliver(self, request: _Request) -> None:
        taken = request.taken
        request.waiter.taken = (self, taken)
        try:
            if not request.many:
                (element,) = taken
                values: Any = element
            else:
                values = tuple(
                    _stacked([row[place] for row in taken], part) for place, part in enumerate(self.parts)
                )
        except GraphError as error:
            request.waiter.fail(error)
            return
        request.waiter.finish(values if len(values) != 1 else values[0])

    def state(self) -> Any:
        """Return elements, draws and whether it is closed, as a snapshot holds them."""
        elements = [
            [encode(part.dtype, value) for part, value in zip(self.parts, element, strict=True)]
            for element in self.elements
        ]
        return {"elements": elements, "draws": self.draws, "is_closed": self.is_closed}

    def load(self, state: Any) -> None:
        """Continue from what `state` returned."""
        self.elements = deque(tuple(decode(part)[1] for part in element) for element in state["elements"])
        self.draws, self.is_closed = int(state["draws"]), bool(state["is_closed"])

    # -- Looking and closing ---------------------------------------------------------------------------------

    def size(self) -> Value:
        """Return how many elements are in the queue."""
        with self._lock:
            return torch.tensor(len(self.elements), dtype=torch.int32)

    def close(self) -> tuple[()]:
        """Refuse further elements; those in the queue, and those that wait to get in, can be taken."""
        with self._lock:
            self.is_closed = True
            self._grant()
        return ()


def _stacked(rows: Sequence[Value], part: Spec) -> Value:
    if not rows:
        return zeros(part.dtype, (0, *(size or 0 for size in part.shape or ())))
    if len({tuple(row.shape) for row in rows}) != 1:
        raise MismatchError("the elements have different shapes and cannot be stacked")
    if part.dtype == "bytes":
        return np.stack(rows)
    return torch.stack(list(rows))


class Mutex:
    """At most one step holds it, until a MutexRelease, or until the step that acquired it fails."""

    def __init__(self, lock: Any, node: Node) -> None:
        self._lock = lock
        self.node = node
        #: The step that holds it, or None.
        self._holder: Any = None
        self._line: deque[Waits] = deque()

    def acquire(self, waiter: Waits) -> None:
        """Hold the mutex, as soon as those that asked before have released it."""
        with self._lock:
            self._line.append(waiter)
            waiter.withdraw = lambda: self._withdraw(waiter)
            self._grant()

    def _withdraw(self, waiter: Waits) -> None:
        with self._lock:
            if waiter in self._line:
                self._line.remove(waiter)

    def _grant(self) -> None:
        if self._holder is None and self._line:
            waiter = self._line.popleft()
            self._holder = waiter.step
            waiter.step.held.add(self)
            waiter.finish(())

    def release(self) -> tuple[()]:
        """Let the next one have it. Raises: MismatchError if nobody holds it."""
        with self._lock:
            if self._holder is None:
                raise MismatchError(f"the mutex {self.node.name!r} is not held")
            self._holder.held.discard(self)
            self._holder = None
            self._grant()
        return ()

    def release_of(self, step: Any) -> None:
        """Release what a failed step held."""
        with self._lock:
            if self._holder is step:
                self.release()
