"""What samples that a data set's own code makes depend on, as fingerprints: by these a later run knows them again."""

from __future__ import annotations

import contextlib
import copyreg
import dis
import pickle
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from os import PathLike, stat
from stat import S_ISREG
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import xxhash

from penstock.errors import ConfigError
from penstock.flow.channel import Reducers

#: Raise it when rows are kept in another form.
_FORMAT = 1
#: Of a class, what says nothing of what its code does.
_NOT_COUNTED = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "__firstlineno__",
    "_abc_impl",
}
#: What a lot of state is made of, and is never asked for a fingerprint of its own.
_PLAIN = {str, bytes, int, float, bool, type(None), list, tuple, dict}
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class RowCode(NamedTuple):
    """What made rows: the data set, for people, and hexadecimal digests of its state, its code and the versions of
    what that calls.
    """

    place: str
    data: str
    code: str
    versions: str

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that tell rows from others."""
        return xxhash.xxh3_128_digest(repr(self).encode())

    @property
    def about(self) -> str:
        """The same for whoever lists tiers; `changed_since` reads it."""
        return f"{self._of}data {self.data}, code {self.code}, versions {self.versions}"

    @property
    def _of(self) -> str:
        return f"rows of {self.place}: "

    def changed_since(self, about: str) -> list[str]:
        """Return which digests differ from those of other rows of the data set; none for other data sets."""
        if not about.startswith(self._of):
            return []
        known = dict(re.findall(r"(\w+) ([0-9a-f]+)", about.removeprefix(self._of)))
        return [name for name in ("data", "code", "versions") if known.get(name) != getattr(self, name)]


def row_code(dataset: Any, optional: Any, reducers: Reducers) -> RowCode:
    """Return what the rows of a data set depend on: docs/decisions/0042 says what counts.

    optional: what samples get that lack a field. reducers: how some types are pickled, in place of their own way.
    Raises: ConfigError naming what cannot be pickled and thus not be compared.
    """
    walk = _Walk(reducers)
    place = type(dataset).__qualname__
    data = _digest_of_text(_FORMAT, len(dataset))
    try:
        walk.add_state((dataset, optional), data)
    except Exception as error:
        raise ConfigError(
            f"its state cannot be pickled ({error}), so that no later run could tell whether it is the same: leave "
            "that part out in __getstate__, or give the data set an attribute fingerprint, text that changes with what "
            "it returns"
        ) from error
    walk.add_code()
    code = _digest_of_text(sorted(walk.code))
    versions = _digest_of_text(sys.version_info[:2], sorted(walk.versions.items()))
    return RowCode(f"{place} ({len(dataset):,})", data.hexdigest(), code.hexdigest(), versions.hexdigest())


class _Walk:
    """Goes from a data set's state to its classes, and from code to what it refers to by name, as far as that is the
    user's; of libraries the version counts.
    """

    def __init__(self, reducers: Reducers) -> None:
        self.reducers = reducers
        self.code: list[tuple[str, str]] = []
        self.versions: dict[str, str] = {}
        self.to_do: list[FunctionType | type] = []
        #: By number, which is another's once nothing keeps them.
        self._seen: dict[int, FunctionType | type] = {}

    def add_state(self, value: Any, digest: xxhash.xxh3_64) -> None:
        """Digest a value as it is pickled. Raises: what pickling raises."""
        _StatePickler(self, digest).dump(value)

    def add_code(self) -> None:
        """Digest the functions and classes that were found, and those that they lead to."""
        while self.to_do:
            value = self.to_do.pop()
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            module = value.__module__ or ""
            if self.is_library(module):
                continue
            digest = xxhash.xxh3_64()
            if isinstance(value, type):
                self._add_class(value, digest)
            else:
                self._add_function(value, digest)
            self.code.append((f"{module}.{value.__qualname__}", digest.hexdigest()))

    def is_library(self, name: str) -> bool:
        """Return whether a module is nobody's own code, and have its version count."""
        module = sys.modules.get(name)
        if name == "__main__" or module is None:
            return False
        file = getattr(module, "__file__", None)
        return self._is_installed(name, file or next(iter(getattr(module, "__path__", ())), None))

    def _is_installed(self, name: str, place: str | None) -> bool:
        top = name.partition(".")[0]
        if top != "penstock" and place is not None and not place.startswith(_LIBRARIES):
            return False
        if top not in self.versions:
            self.versions[top] = _version_of(top)
        return True

    def _add_class(self, value: type, digest: xxhash.xxh3_64) -> None:
        self.to_do += value.__bases__
        for name, each in sorted(vars(value).items()):
            if name not in _NOT_COUNTED:
                digest.update(name.encode())
                self._add_value(_function_in(each), digest)

    def _add_function(self, value: FunctionType, digest: xxhash.xxh3_64) -> None:
        for each in (value.__defaults__, value.__kwdefaults__, *_variables_around(value)):
            self._add_value(each, digest)
        # A library's wrapper around a function of the user's.
        if self.is_library(value.__globals__.get("__name__") or ""):
            return
        names = dict.fromkeys(self._add_instructions(value.__code__, digest))
        modules = list(self._imported_by(value))
        for name in names:
            if name in value.__globals__:
                found = value.__globals__[name]
                if isinstance(found, ModuleType):
                    modules.append(found)
                else:
                    self._add_value(found, digest)
        self._add_modules(modules, names, digest)

    def _add_modules(self, modules: list[ModuleType], names: dict[str, None], digest: xxhash.xxh3_64) -> None:
        """Digest what some names are in modules of the user's, and in their submodules that are among the names."""
        seen: set[ModuleType] = set()
        while modules:
            module = modules.pop()
            if module in seen or self.is_library(module.__name__):
                continue
            seen.add(module)
            for name in names:
                found = vars(module).get(name)
                if isinstance(found, ModuleType):
                    modules.append(found)
                else:
                    self._add_value(found, digest)

    def _imported_by(self, function: FunctionType) -> Iterator[ModuleType]:
        """Yield the modules of the user's that a function imports when it is called; libraries are not imported."""
        for name, wanted, level in _imports_in(function.__code__):
            module = None
            with contextlib.suppress(Exception):  # whatever a module raises: who calls the function gets it
                if level or not self._is_library_to_import(name.partition(".")[0]):
                    module = __import__(name, function.__globals__, None, wanted or (), level)
            if module is not None:
                yield module

    def _is_library_to_import(self, name: str) -> bool:
        if name in sys.modules:
            return self.is_library(name)
        spec = find_spec(name)
        if spec is None:
            return False
        return self._is_installed(
            name, spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        )

    def _add_instructions(self, code: CodeType, digest: xxhash.xxh3_64) -> Iterator[str]:
        """Digest what code does, and yield the names that it uses."""
        digest.update(code.co_code)
        digest.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount)).encode())
        yield from code.co_names
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from self._add_instructions(each, digest)
            else:
                self._add_value(each, digest)

    def _add_value(self, value: Any, digest: xxhash.xxh3_64) -> None:
        """Digest what code refers to: a constant, a function. Of what cannot be pickled, such as a lock, the type."""
        found = xxhash.xxh3_64()
        try:
            self.add_state(value, found)
        except Exception:  # whatever pickling raises
            found = _digest_of_text(type(value).__qualname__)
        digest.update(found.digest())


class _StatePickler(pickle.Pickler):
    """Digests what it pickles, with code by its name, and notes which code that is."""

    def __init__(self, walk: _Walk, digest: xxhash.xxh3_64) -> None:
        self._walk, self._digest = walk, digest
        super().__init__(_Sink(digest.update), 5, buffer_callback=self._add_buffer)
        self.dispatch_table = {**copyreg.dispatch_table, **walk.reducers}

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self._digest.update(buffer.raw())

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind in (set, frozenset):  # whose order is another in each process
            return "set", sorted(map(self._digest_of, value))
        code = self._in_library_wrapper(value)
        if isinstance(code, FunctionType | type):
            self._walk.to_do.append(code)
            return "code", code.__module__, code.__qualname__
        if isinstance(value, ModuleType | MethodType):
            return ("module", value.__name__) if isinstance(value, ModuleType) else None
        if isinstance(value, np.memmap):
            return (
                "file",
                str(value.filename),
                value.offset,
                value.shape,
                value.dtype.str,
                _stamp(value.filename),
            )
        own = getattr(value, "fingerprint", None)
        if isinstance(own, str | bytes | int):
            return "fingerprint", kind.__qualname__, own
        self._walk.to_do.append(kind)
        for each in getattr(value, "__dict__", {}).values():
            if isinstance(each, str | PathLike):
                self._digest.update(repr(_stamp(each)).encode())
        return None

    def _in_library_wrapper(self, value: Any) -> Any:
        """Return the function that an object of a library is around, such as that of lru_cache; others as they are."""
        while not issubclass(type(value), FunctionType | type) and hasattr(value, "__wrapped__"):
            if not self._walk.is_library(type(value).__module__):
                break
            value = value.__wrapped__
        return value

    def _digest_of(self, value: Any) -> bytes:
        digest = xxhash.xxh3_64()
        self._walk.add_state(value, digest)
        return digest.digest()


def _digest_of_text(*values: object) -> xxhash.xxh3_64:
    return xxhash.xxh3_64(repr(values).encode())


class _Sink:
    """A file that hands on what is written to it."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        self.write = write


def _variables_around(function: FunctionType) -> Iterator[Any]:
    """Yield what a function uses of those around it, less variables without a value, and what it stands for."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
    yield getattr(function, "__wrapped__", None)
    registry = getattr(function, "registry", None)
    if isinstance(registry, MappingProxyType):  # of functools.singledispatch
        yield dict(registry)


def _imports_in(code: CodeType) -> Iterator[tuple[str, tuple[str, ...] | None, int]]:
    """Yield what code imports: the name as it is written, names that are taken from there, how many packages up."""
    before: list[Any] = [0, None]
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME" and isinstance(before[-2], int):
            yield each.argval, before[-1], before[-2]
        if each.opname != "EXTENDED_ARG":
            before = [before[-1], each.argval]
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _imports_in(each)


def _version_of(library: str) -> str:
    """Return the version of a library, or size and time of its file; the standard library has Python's."""
    found: object = getattr(sys.modules.get(library), "__version__", None)
    if found is None and library not in sys.stdlib_module_names:
        try:
            found = metadata.version(library)
        except metadata.PackageNotFoundError:
            with contextlib.suppress(ImportError, ValueError):
                spec = find_spec(library)
                found = _stamp("" if spec is None else spec.origin or "")
    return str(found)


def _function_in(attribute: Any) -> Any:
    """Return the code of a class's attribute, or the attribute."""
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget, attribute.fset
    return attribute.func if isinstance(attribute, cached_property) else attribute


def _stamp(path: Any) -> tuple[int, int] | None:
    """Return size and time of what may be a file; None where it is none."""
    try:
        found = stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_size, found.st_mtime_ns) if S_ISREG(found.st_mode) else None
