"""What kernels find their state in: the resources of a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.graph.errors import (
    CorruptError,
    MismatchError,
    NotFoundError,
    OutOfRangeError,
    UnsupportedError,
    nearest,
)
from penstock.graph.model.dtypes import Value, fits, shape_text, to_value
from penstock.graph.model.node import Node
from penstock.graph.state.containers import Container, Variable, shared_container
from penstock.graph.state.queues import Mutex, Queue
from penstock.graph.state.readers import Reader, reader_of
from penstock.graph.state.tensors import read_tensor, write_tensors
from penstock.plan.random import derive_key


def check_state(state: Mapping[str, Any]) -> None:
    """Raise CorruptError unless this is what `Resources.state` returned."""
    if state.get("graph_state") != 1:
        raise CorruptError("this is no saved state of a graph of version 1")


class Resources:
    """The state of a session by name: its own container, and those that it shares with others.

    functions, batches: what Call and NextBatch nodes name.
    """

    def __init__(
        self,
        seed: int,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        batches: Mapping[str, Iterable[Any] | Callable[[], Iterable[Any]]] | None = None,
    ) -> None:
        self.seed = seed
        self.own = Container()
        self.shared: dict[str, Container] = {}
        self.runs: dict[str, int] = {}
        self._functions = dict(functions or {})
        self._batches = dict(batches or {})
        #: By which nodes send to other workers and receive; None outside of workers.
        self.mail: Any = None
        #: What functions of `batches` made and is in use.
        self._open: dict[str, Any] = {}
        #: Of `shared` and `runs`.
        self._lock = threading.Lock()
        #: A Save reads the folder and writes it again: one at a time.
        self._saving = threading.Lock()

    # -- By node ---------------------------------------------------------------------------------------------

    def _home(self, node: Node) -> tuple[Container, str]:
        return self._container(node.attr.get("container")), node.attr.get("shared_name") or node.name

    def _container(self, name: str | None) -> Container:
        if not name:
            return self.own
        with self._lock:
            return self.shared.setdefault(name, shared_container(name))

    def variable(self, node: Node) -> Variable:
        """Return the variable of a node. Raises: MismatchError if it is shared and holds another type."""
        home, name = self._home(node)
        found: Variable = home.find("variable", name, lambda: Variable(home.lock, node))
        spec = node.outputs[0]
        if found.spec.dtype != spec.dtype or not fits(found.spec.shape, spec.shape):
            raise MismatchError(
                f"the shared variable {name!r} holds {found.spec.dtype}{shape_text(found.spec.shape)}, and this node "
                f"says {spec.dtype}{shape_text(spec.shape)}"
            )
        return found

    def queue(self, node: Node) -> Queue:
        """Return the queue of a node. Raises: MismatchError if it is shared and has other components."""
        home, name = self._home(node)
        found: Queue = home.find("queue", name, lambda: Queue(home.lock, node, self.seed))
        if [part.dtype for part in found.parts] != [part.dtype for part in node.outputs[0].parts]:
            raise MismatchError(f"the shared queue {name!r} has other components")
        return found

    def mutex(self, node: Node) -> Mutex:
        """Return the mutex of a node."""
        home, name = self._home(node)
        found: Mutex = home.find("mutex", name, lambda: Mutex(home.lock, node))
        return found

    def reader(self, node: Node) -> Reader:
        """Return the reader of a node."""
        found: Reader = self.own.find("reader", node.name, lambda: reader_of(node))
        return found

    # -- Draws -----------------------------------------------------------------------------------------------

    def count_run(self, name: str) -> int:
        """Return how many runs a random node had before this one."""
        with self._lock:
            count = self.runs.get(name, 0)
            self.runs[name] = count + 1
            return count

    def draw_key(self, name: str, run: int, tag: tuple[int, ...]) -> int:
        """Return the key of a draw."""
        return derive_key(self.seed, f"graph {name} {run} {tag}")

    # -- One state -------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return variables, queues, positions of readers and counts of draws, as of one moment."""
        with self._lock:
            # In one order for all sessions: two that are saved at once do not wait for each other.
            homes = sorted([("", self.own), *self.shared.items()])
        with ExitStack() as locks:
            for _, home in homes:
                locks.enter_context(home.lock)
            resources = [
                {"container": container, "kind": kind, "name": name, "state": state}
                for container, home in homes
                for (kind, name), state in home.state().items()
            ]
            with self._lock:
                runs = [[name, count] for name, count in self.runs.items()]
        return {"graph_state": 1, "resources": resources, "runs": runs}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned. Raises: CorruptError if this is no such state."""
        check_state(state)
        by_home: dict[str, dict[tuple[str, str], Any]] = {"": {}}
        for each in state["resources"]:
            by_home.setdefault(each["container"], {})[each["kind"], each["name"]] = each["state"]
        for container, states in by_home.items():
            self._container(container).load(states)
        with self._lock:
            self.runs = {name: int(count) for name, count in state["runs"]}

    # -- Saved tensors ---------------------------------------------------------------------------------------

    def input_dtypes(self, node: Node) -> list[str]:
        """Return the dtypes of a node's inputs."""
        return [spec.dtype for spec in node.takes]

    def save_tensors(self, path: str, tensors: Mapping[str, tuple[str, Value]]) -> None:
        """Write tensors, by name, with their dtypes."""
        with self._saving:
            write_tensors(path, tensors)

    def restore_tensor(self, path: str, name: str, dtype: str) -> Value:
        """Return a tensor that was saved. Raises: NotFoundError, MismatchError."""
        return read_tensor(path, name, dtype)

    # -- What users bring ------------------------------------------------------------------------------------

    def function(self, node: Node) -> Callable[..., Any]:
        """Return the kernel of a Call."""
        name = node.attr["function"]
        function = self._functions.get(name)
        if function is None:
            raise NotFoundError(
                f"the session has no function {name!r}{nearest(name, self._functions)}; give it by functions=, or "
                "to the worker that runs the node, by functions= or --module",
                node=node.name,
                where=node.where,
            )

        def call(*values: Any) -> Any:
            return _checked(node, function(*values))

        return call

    def batches(self, node: Node) -> Batches:
        """Return the batches of a NextBatch."""
        name = node.attr["batches"]
        if name not in self._batches:
            raise NotFoundError(
                f"the session has no batches {name!r}{nearest(name, self._batches)}; give them by batches=",
                node=node.name,
                where=node.where,
            )
        found: Batches = self.own.find("batches", name, lambda: Batches(name, self._made(name)))
        return found

    def _made(self, name: str) -> Any:
        """Return the batches of a name; where a function makes them, new ones, the ones before being closed."""
        given = self._batches[name]
        if isinstance(given, Iterable):
            return given
        self._close(name)
        self._open[name] = made = given()
        return made

    def _close(self, name: str) -> None:
        close = getattr(self._open.pop(name, None), "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """Close the batches that functions made. Twice is harmless."""
        for name in list(self._open):
            self._close(name)


class Batches:
    """An iterable of batches, such as a Loader's: each run gives the next one. Its position is state."""

    def __init__(self, name: str, given: Any) -> None:
        self._name = name
        self.given = given
        self._iterator: Iterator[Any] | None = None
        self._lock = threading.Lock()

    def read(self, node: Node) -> Any:
        """Return the next batch as a node's outputs. Raises: OutOfRangeError after the last."""
        with self._lock:
            if self._iterator is None:
                self._iterator = iter(self.given)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise OutOfRangeError("there are no more batches") from None
            if isinstance(batch, Mapping):
                batch = tuple(batch.values())
            return _checked(node, batch)

    def state(self) -> Any:
        """Return where the batches are, or None if they cannot tell."""
        state = getattr(self.given, "state_dict", None)
        return state() if state is not None else None

    def load(self, state: Any) -> None:
        """Go on from where `state` was.

        Raises: UnsupportedError if these batches cannot, as a Loader that has begun.
        """
        with self._lock:
            try:
                self.given.load_state_dict(state)
            except ConfigError as error:
                raise UnsupportedError(
                    f"the batches {self._name!r} cannot be restored into: {error}. Give a function that makes them, "
                    f"batches={{{self._name!r}: lambda: Loader(...)}}: then each restore makes new ones"
                ) from error
            self._iterator = None


def _checked(node: Node, results: Any) -> Any:
    """Return what a function gave as the node's outputs. Raises: MismatchError if it is not what the node says."""
    outputs = list(results) if isinstance(results, tuple | list) else [results]
    if len(outputs) != len(node.outputs):
        raise MismatchError(f"it gave {len(outputs)} values, and the node has {len(node.outputs)} outputs")
    values = []
    for port, (spec, each) in enumerate(zip(node.outputs, outputs, strict=True)):
        value = to_value(np.asarray(each) if isinstance(each, memoryview) else each, spec.dtype)
        if not fits(spec.shape, tuple(value.shape)):
            raise MismatchError(
                f"output {port} has shape {shape_text(tuple(value.shape))}, and the node says {shape_text(spec.shape)}"
            )
        values.append(value)
    return values[0] if len(values) == 1 else tuple(values)
