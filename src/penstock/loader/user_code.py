"""The code of a user's function: its name for messages, and a digest by which a later run compares it.

Only code is looked at, never a value that it uses: arguments, variables and files differ between processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import xxhash

from penstock.errors import printable

#: What a module's names are looked up for: functions, and those around which `lru_cache` is.
_FUNCTIONS = (FunctionType, type(lru_cache(len)))


def name_of_code(function: Any, *, with_folder: bool = True) -> str:
    """Name code of a user for messages, by module and qualified name, with file and line where it is Python.

    A `functools.partial` is named by what it calls, an object by its class; file and line are those of the class's own
    `__call__`, where it has one.
    with_folder: whether the file's folder is named, which differs between machines.
    """
    function = _without_arguments(function)
    named = function if _is_named(function) else type(function)
    called = function if _is_named(function) else vars(named).get("__call__")
    code = getattr(inspect.unwrap(called), "__code__", None)
    name = ".".join(filter(None, (getattr(named, "__module__", None), named.__qualname__)))
    if code is None:
        return printable(name)
    file = code.co_filename if with_folder else PurePath(code.co_filename).name
    return printable(f"{name} ({file}:{code.co_firstlineno})")


def digest_of_code(function: Any) -> str:
    """Return a digest of a function's instructions, names and constants, 16 hexadecimal digits.

    The functions of its package that it names count, too, and those that these name; other packages do not. Of a
    `functools.partial` counts what it calls; of an object the name of its class, and `__call__` unless another package
    has it; of a function without Python code its name.
    """
    function = _without_arguments(function)
    is_named = _is_named(function)
    named = function if is_named else type(function)
    called = function if is_named else named.__call__
    package = _package_of(
        getattr(inspect.unwrap(called), "__globals__", {})
    )  # a decorator may be of a library
    is_own = is_named or _top_of(getattr(called, "__module__", None)) == _top_of(named.__module__)
    found: dict[int, FunctionType] = {}
    to_do: list[Any] = [called] if is_own else []
    while to_do:
        each = to_do.pop()
        each = getattr(each, "__func__", each)  # of a method
        if id(each) in found:
            continue
        if hasattr(each, "__wrapped__"):
            to_do.append(each.__wrapped__)
        if isinstance(each, FunctionType) and _package_of(each.__globals__) == package:
            found[id(each)] = each
            to_do += _functions_named_by(each)
    codes = sorted(_text_of(each.__code__) for each in found.values())
    names = [] if found and is_named else [named.__qualname__, getattr(function, "__name__", "")]
    return xxhash.xxh3_64_hexdigest(repr((names, codes)).encode())


def _without_arguments(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _is_named(function: Any) -> bool:
    """Whether it is a function or class, not an object with `__call__`."""
    return hasattr(function, "__qualname__")


def _package_of(names: Mapping[str, Any]) -> str:
    """Return the top package of a module, or the module that is in none. names: the module's."""
    return _top_of(names.get("__package__") or names.get("__name__"))


def _top_of(module: object) -> str:
    return str(module).partition(".")[0]


def _functions_named_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function's code may call by name: of its module, and of modules that it names."""
    names = {name for code in _with_nested(function.__code__) for name in code.co_names}
    places: list[dict[str, Any]] = [function.__globals__]
    # By type, not isinstance, which would ask a lazy object for its class and a lazy module for its content.
    places += [vars(each) for name in names if type(each := function.__globals__.get(name)) is ModuleType]
    for place in places:
        for name in names:
            found: Any = place.get(name)
            # One that was made at run time may be a value that a call keeps.
            if type(found) in _FUNCTIONS and "<locals>" not in found.__qualname__:
                yield found


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _with_nested(each)


def _text_of(code: CodeType) -> str:
    """Return what code does, equal in all processes: a set's order is not."""
    return repr(
        [
            (
                each.co_code,
                each.co_names,
                [
                    sorted(map(repr, value)) if isinstance(value, frozenset) else value
                    for value in each.co_consts
                    if not isinstance(value, CodeType)
                ],
            )
            for each in _with_nested(code)
        ]
    )
