"""Keep the last few values of a costly function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values last made, oldest forgotten first.

    Any number of threads may ask: every step is one operation of `OrderedDict` and so happens whole. Two
    threads that miss the same key both make the value, which is harmless because making is a pure function.
    Pickles as empty.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made by `make` unless it is one of the last `capacity`."""
        value = self._values.get(key)
        if value is None:
            value = make()
            self._values[key] = value
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        return value

    def __reduce__(self) -> tuple[type[Recent[K, V]], tuple[int]]:
        return (type(self), (self._capacity,))
