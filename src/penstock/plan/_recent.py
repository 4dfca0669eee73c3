"""Keep the last few values of a costly function."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values last made, oldest forgotten first: `capacity` of them, and more while all are of `most_bytes`.

    Values of which bytes are counted are arrays.

    Any number of threads may ask: every step is one operation of `OrderedDict` and so happens whole. Two
    threads that miss the same key both make the value, which is harmless because making is a pure function.
    Pickles as empty.
    """

    def __init__(self, capacity: int, most_bytes: int = 0) -> None:
        self._capacity, self._most_bytes = capacity, most_bytes
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of `key`, made by `make` unless it is one of the last `capacity`."""
        value = self._values.get(key)
        if value is None:
            value = make()
            self._values[key] = value
            if len(self._values) > self._capacity and not self._fit():
                self._values.popitem(last=False)
        return value

    def _fit(self) -> bool:
        values: list[Any] = list(self._values.values()) if self._most_bytes else []
        return bool(values) and sum(value.nbytes for value in values) <= self._most_bytes

    def __reduce__(self) -> tuple[type[Recent[K, V]], tuple[int, int]]:
        return (type(self), (self._capacity, self._most_bytes))
