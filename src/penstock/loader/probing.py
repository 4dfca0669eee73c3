"""Learning what samples look like from the first one that can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.errors import WaitTimeout

T = TypeVar("T")


def from_first(samples: Iterable[int], look: Callable[[int], T], *, on_error_raise: bool) -> T:
    """Return what `look` makes of the first sample that it does not raise for.

    samples: ids, at least one. on_error_raise: the first sample's error is final.
    Raises: the last error of `look`, where there is nothing to return; WaitTimeout at once, and KeyboardInterrupt,
        also where somebody's code wraps it into an error of its own.
    """
    last_error: Exception | None = None
    for sample in samples:
        try:
            return look(sample)
        except WaitTimeout:
            raise
        except Exception as error:
            raise_interrupt(error)
            last_error = error
            if on_error_raise:
                break
    assert last_error is not None, "a plan has samples"
    raise last_error


def raise_interrupt(error: Exception) -> None:
    """Raise the KeyboardInterrupt that an error was raised from, or while it was handled, if there is one."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if isinstance(each, KeyboardInterrupt):
            raise each from None
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            todo += [each.__cause__, each.__context__]
