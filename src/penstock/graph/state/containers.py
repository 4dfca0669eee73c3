"""Containers: where variables, queues and mutexes live, by name; and the variables themselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.graph.errors import MismatchError, UninitializedError
from penstock.graph.model.dtypes import Value, fits, shape_text
from penstock.graph.model.node import Node
from penstock.graph.state.tensors import decode, encode


class Container:
    """Resources by kind and name.

    lock: of the contents of all of them; nothing slow happens under it but the addition of AssignAdd.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._contents: dict[tuple[str, str], Any] = {}
        #: Restored state of resources that nobody asked for yet.
        self._restored: dict[tuple[str, str], Any] = {}

    def find(self, kind: str, name: str, make: Callable[[], Any]) -> Any:
        """Return the resource of a name, made the first time."""
        with self.lock:
            found = self._contents.get((kind, name))
            if found is None:
                found = make()
                if (kind, name) in self._restored:
                    found.load(self._restored[kind, name])
                    del self._restored[kind, name]
                self._contents[kind, name] = found
            return found

    def state(self) -> dict[tuple[str, str], Any]:
        """Return the state of each resource that has one, by kind and name."""
        with self.lock:
            states = {key: each.state() for key, each in self._contents.items() if hasattr(each, "state")}
            return self._restored | {key: state for key, state in states.items() if state is not None}

    def load(self, states: dict[tuple[str, str], Any]) -> None:
        """Replace all resources by what `state` returned; each takes its state when it is next asked for."""
        with self.lock:
            self._contents.clear()
            self._restored = dict(states)

    def clear(self) -> None:
        """Forget all resources: variables are uninitialised again, queues empty."""
        self.load({})


_SHARED: dict[str, Container] = {}
_SHARED_LOCK = threading.Lock()


def shared_container(name: str) -> Container:
    """Return the container of a name, which all sessions of this process share."""
    with _SHARED_LOCK:
        return _SHARED.setdefault(name, Container())


def reset_container(name: str) -> None:
    """Forget what is in a named container of this process."""
    shared_container(name).clear()


def owned(value: Value) -> Value:
    """Return a value that keeps no more memory than its own: a view into a larger tensor is copied."""
    if isinstance(value, torch.Tensor):
        if value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return value.clone()
        return value
    if isinstance(value, np.ndarray) and value.base is not None:
        return value.copy()
    return value


class Variable:
    """A tensor that lives longer than a run.

    Its value is replaced, so that readers keep theirs, and changed only where nobody else has it.
    """

    def __init__(self, lock: Any, node: Node) -> None:
        self._lock = lock
        self._value: Value = None
        self.node = node

    @property
    def spec(self) -> Any:
        """Return what the variable may hold."""
        return self.node.outputs[0]

    def state(self) -> Any:
        """Return the value as a snapshot holds it, or None before the first assignment."""
        return None if self._value is None else encode(self.spec.dtype, self._value)

    def load(self, state: Any) -> None:
        """Take a value that `state` returned. Raises: MismatchError if it is of another type."""
        dtype, value = decode(state)
        if dtype != self.spec.dtype:
            raise MismatchError(
                f"the variable {self.node.name!r} holds {self.spec.dtype}, and {dtype} was saved"
            )
        self.assign(value)

    def read(self) -> Value:
        """Return the value. Raises: UninitializedError."""
        with self._lock:  # which `assign_add` has while it changes the value
            value = self._value
        if value is None:
            raise UninitializedError(
                "the variable was not assigned: run its Assign first, or initialise all",
                node=self.node.name,
                where=self.node.where,
            )
        return value

    def assign(self, value: Value) -> Value:
        """Replace the value, and return it. Raises: MismatchError if the shape is another."""
        if not fits(self.spec.shape, tuple(value.shape)):
            raise MismatchError(
                f"the variable {self.node.name!r} has shape {shape_text(self.spec.shape)}, and the value "
                f"{shape_text(tuple(value.shape))}"
            )
        value = owned(value)
        with self._lock:
            self._value = value
        return value

    def assign_add(self, value: Value) -> Value:
        """Add to the value, atomically, and return the sum. Raises: MismatchError if it has not the same shape."""
        with self._lock:
            shape = tuple(self.read().shape)
            if shape != tuple(value.shape):
                raise MismatchError(
                    f"the variable {self.node.name!r} holds shape {shape_text(shape)}, and "
                    f"{shape_text(tuple(value.shape))} is added"
                )
            # Half of an update's time is that of new memory.
            if sys.getrefcount(self._value) == 2 and _storage_users(self._value) == _ALONE:
                self._value.add_(value)
            else:
                self._value = torch.add(self._value, value)
            return self._value


def _storage_users(value: torch.Tensor) -> int:
    """Return how many tensors and arrays share a tensor's memory, as PyTorch counts them."""
    return torch._C._storage_Use_Count(value.untyped_storage()._cdata)


_ALONE = _storage_users(torch.zeros(1))
