"""How many bytes of tensors a step holds at a time, counted while its statistics or a trace are wanted."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from penstock.graph.model.dtypes import is_known
from penstock.graph.model.node import Node
from penstock.graph.ops.sizes import bytes_of

#: Smaller tensors are not counted: a thousand of them are less than one batch, and counting one takes a microsecond.
_LEAST_BYTES = 4096


def may_count(node: Node) -> bool:
    """Return whether a node may give tensors that are counted, as far as is known before it runs."""
    return any(not is_known(spec.shape) or bytes_of(spec) >= _LEAST_BYTES for spec in node.outputs)


class LiveBytes:
    """The bytes of tensors that live now, and the most that did. Views of one tensor count once.

    A step's values are held by what needs them and by nothing else, so a tensor is over when Python frees it.
    """

    def __init__(self) -> None:
        self._now = self.peak_bytes = 0
        #: By the storage of live tensors: how many have it, and its bytes.
        self._held: dict[int, list[int]] = {}
        #: By id: references are equal where their tensors are, which compares numbers.
        self._refs: dict[int, _Ref] = {}

    def add(self, *values: Any) -> None:
        """Count tensors that a step made, or was given."""
        self._add(values, is_own=True)

    def leave_out(self, *values: Any) -> None:
        """Remember tensors that outlive a step, as variables do: neither they nor views of them count."""
        self._add(values, is_own=False)

    def close(self) -> None:
        """Forget all tensors: some outlive the step, and would keep this."""
        self._refs.clear()

    def _add(self, values: Iterable[Any], *, is_own: bool) -> None:
        forget = self._gone
        for value in values:
            if not isinstance(value, torch.Tensor) or value.nbytes < _LEAST_BYTES:
                continue
            storage = value.untyped_storage()
            ref = _Ref(value, forget)
            ref.storage = storage._cdata
            self._refs[id(ref)] = ref
            held = self._held.get(ref.storage)
            if held is not None:
                held[0] += 1
                continue
            nbytes = storage.nbytes() if is_own else 0
            self._held[ref.storage] = [1, nbytes]
            self._now += nbytes
            self.peak_bytes = max(self.peak_bytes, self._now)

    def _gone(self, ref: Any) -> None:
        self._refs.pop(id(ref), None)
        held = self._held[ref.storage]
        held[0] -= 1
        if not held[0]:
            self._now -= held[1]
            del self._held[ref.storage]


class _Ref(weakref.ref[torch.Tensor]):
    """A reference that knows the storage of its tensor, which cannot be asked for when that is gone."""

    __slots__ = ("storage",)
    storage: int
