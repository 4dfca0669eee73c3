"""A user's objects as bytes for worker processes: what they need to be found again there, or why that cannot be."""

from __future__ import annotations

import ast
import io
import math
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xxhash

from penstock.arena import Arena
from penstock.errors import ConfigError
from penstock.flow.channel import Reducers
from penstock.units import format_bytes

_LEAST_SHARED_BYTES = 4 << 10
_ALIGNMENT = 64
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_GUARDS = ("__name__ == '__main__'", "'__main__' == __name__")
#: How deep, and at how many parts of one value, the one is looked for that cannot be pickled.
_DEPTH, _PARTS = 8, 1000


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object that was pickled once, for any number of processes.

    arena: its large buffers, such as a data set's arrays, which the processes map and do not copy; None without any.
    extents: where in it. main: how a process imports this one's `__main__`, for `multiprocessing.spawn.prepare`;
        empty where nothing of it is used. digest: of all that was pickled.
    """

    data: bytes
    arena: Arena | None
    extents: list[slice]
    main: dict[str, str]
    digest: bytes


class _Pickler(pickle.Pickler):
    """Takes note of what of `__main__` is used. known: pickled as a call of a function of the other process."""

    def __init__(
        self, file: io.BytesIO, reducers: Reducers, known: Any, found_by: Any, buffers: list[Any] | None
    ) -> None:
        super().__init__(
            file, 5, buffer_callback=None if buffers is None else lambda each: _keep(each, buffers)
        )
        self._reducers, self._known, self._found_by = reducers, known, found_by
        self.of_main = list[Any]()

    def reducer_override(self, value: Any) -> Any:
        if value is self._known and value is not None:
            return self._found_by, ()
        if isinstance(value, _FUNCTIONS) and getattr(value, "__module__", None) == "__main__":
            self.of_main.append(value)
        reduce = self._reducers.get(type(value))
        return NotImplemented if reduce is None else reduce(value)


def _keep(buffer: pickle.PickleBuffer, buffers: list[Any]) -> bool:
    raw = buffer.raw()
    if raw.nbytes < _LEAST_SHARED_BYTES:
        return True
    buffers.append(raw)
    return False


def pickled(
    value: Any,
    name: str,
    reducers: Reducers,
    *,
    known: Any = None,
    found_by: Callable[[], Any] | None = None,
    before: Pickled | None = None,
    parts: Mapping[str, Any] = MappingProxyType({}),
    most_bytes: float = math.inf,
) -> Pickled:
    """Pickle what a worker process needs. name: of the value, for messages.

    known: an object that the process has, and gets by calling `found_by` there.
    parts: of the value, by names that a user knows them by.
    before: what was pickled of it earlier; returned itself, with no buffer copied, where nothing has changed since.
    Raises: ConfigError naming the part that cannot be pickled or found there, and what to do; for more than
        `most_bytes`.
    """
    file, buffers = io.BytesIO(), list[Any]()
    pickler = _Pickler(file, reducers, known, found_by, buffers)
    try:
        pickler.dump(value)
    except Exception as error:

        def fails(part: Any) -> Exception | None:
            try:
                _Pickler(io.BytesIO(), reducers, known, found_by, None).dump(part)
            except Exception as error:
                return error
            return None

        wrong = [(each, part, why) for each, part in parts.items() if (why := fails(part)) is not None]
        copied, part, why = (*wrong, (name, value, error))[0]
        where, culprit, reason = _culprit(part, copied, fails, why)
        raise ConfigError(
            f"worker processes need a copy of {copied}, and {'it' if where == copied else where} "
            f'{_why(culprit, reason)}; workers="threads" needs no copy'
        ) from error
    data = file.getvalue()
    nbytes = len(data) + sum(each.nbytes for each in buffers)
    if nbytes > most_bytes:
        raise ConfigError(
            f"worker processes need a copy of {name}, which takes {format_bytes(nbytes)}: ask for them by workers=n"
        )
    digest = _digest_of([data, *buffers])
    if before is not None and before.digest == digest:
        return before
    main = _main_of(pickler.of_main) if pickler.of_main else {}
    arena, extents = _placed(buffers)
    return Pickled(data, arena, extents, main, digest)


def _digest_of(parts: list[Any]) -> bytes:
    digest = xxhash.xxh3_128()
    for each in parts:
        digest.update(each)
    return digest.digest()


def _placed(buffers: list[Any]) -> tuple[Arena | None, list[slice]]:
    extents, end = [], 0
    for each in buffers:
        extents.append(slice(end, end + each.nbytes))
        end += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return None, extents
    arena = Arena(end, is_shared=True)
    memory = arena.array
    for extent, each in zip(extents, buffers, strict=True):
        memory[extent] = np.frombuffer(each, np.uint8)
    return arena, extents


def _culprit(
    value: Any, name: str, fails: Callable[[Any], Exception | None], error: Exception
) -> tuple[str, Any, Exception]:
    """Return the innermost part of a value that cannot be pickled: where it is, itself, and why."""
    for _ in range(_DEPTH):
        for step, part in _parts(value):
            wrong = fails(part)
            if wrong is not None:
                name, value, error = name + step, part, wrong
                break
        else:
            break
    return name, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are pickled with it, with the expression behind the value's name."""
    if isinstance(value, _FUNCTIONS):
        return
    if isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Mapping):
        for _, (key, part) in zip(range(_PARTS), value.items(), strict=False):
            yield f"[{key!r:.40}]", part
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value[:_PARTS]):
            yield f"[{index}]", part
    else:
        try:
            state = value.__getstate__()
        except Exception:  # whatever it raises is why the value itself cannot be pickled
            return
        for each in state if isinstance(state, tuple) else (state,):
            if isinstance(each, dict):
                for key, part in each.items():
                    yield f".{key}", part


def _why(culprit: Any, reason: Exception) -> str:
    kind = type(culprit).__name__
    if isinstance(culprit, _FUNCTIONS):
        named = getattr(culprit, "__qualname__", str(culprit))
        return (
            f"is {named}, which no other process can import: define it at the top of a module, under its name"
        )
    if "<locals>" in type(culprit).__qualname__ or "<locals>" in str(reason):
        return (
            f"is a {kind}, whose class is defined in a function: define it at the top of a module ({reason})"
        )
    return (
        f"is a {kind}, which belongs to one process ({reason}): open or make it in __getitem__ when it is first used, "
        "or leave it out in __getstate__"
    )


def _main_of(used: Sequence[Any]) -> dict[str, str]:
    """Return how another process imports what is `__main__` here. Raises: ConfigError where it cannot find these."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    guarded = _defined_under_guard(path)
    for each in used:
        if each.__qualname__.partition(".")[0] in guarded:
            raise ConfigError(
                f"{each.__qualname__} is defined under `if __name__ == '__main__':`, which worker processes do not "
                'run: define it above that line or in a module, or take workers="threads"'
            )
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", ""):
        return {"init_main_from_name": spec.name}
    if path is None or not path.endswith(".py"):
        raise ConfigError(
            f"{used[0].__qualname__} is defined in a notebook, on the command line or at a prompt, where worker "
            'processes cannot import it from: move it to a module, or take workers="threads"'
        )
    return {"init_main_from_path": os.path.abspath(path)}


def _defined_under_guard(path: str | None) -> set[str]:
    """Return the classes and functions that a script defines under `if __name__ == "__main__":` alone."""
    try:
        script = ast.parse(Path(path).read_bytes()) if path else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):  # it may be no Python, or be gone
        return set()
    guarded, others = set[str](), set[str]()
    for statement in script.body:
        is_guard = isinstance(statement, ast.If) and ast.unparse(statement.test) in _GUARDS
        (guarded if is_guard else others).update(
            each.name for each in ast.walk(statement) if isinstance(each, _DEFINITIONS)
        )
    return guarded - others
