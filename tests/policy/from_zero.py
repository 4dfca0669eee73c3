"""Arrays that nothing takes from the end: compiled, a negative index leads out of an array (`indexed_from_zero`)."""

from typing import Any


class FromZero:
    """A view of an array in which a negative index is an error, as one behind the end is in any."""

    def __init__(self, array: Any) -> None:
        self._view = memoryview(array)
        self.shape = self._view.shape

    def __getitem__(self, key: Any) -> Any:
        return self._view[_checked(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._view[_checked(key)] = value


def _checked(key: Any) -> Any:
    if not isinstance(key, slice) and min(key if isinstance(key, tuple) else (key,)) < 0:
        raise IndexError(f"{key}: an index is negative")
    return key


def views_from_zero(tables: Any) -> Any:
    """Return what `penstock.policy.decision_state.views_of` does, of such arrays."""
    return type(tables)(*map(FromZero, tables))
