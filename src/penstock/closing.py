"""Objects whose `with` block ends by closing them."""

from __future__ import annotations

from typing import Protocol, Self


class _Closes(Protocol):
    def close(self) -> None: ...


class Closeable:
    """What a class with a `close` is to be a context manager: of itself, closed when the block ends."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        self.close()
