"""A machine as a TOML text: what the thesis' configuration file says (listings 4.1 and 4.7), with units.

Every quantity carries its unit, so that 1024 is never read as bytes by one and as MB by another. A curve is a
table from the number of users to a rate, or one rate for any number:

    ranks = 4
    network = "10 GB/s"             # b_c
    source_network = "2 GB/s"       # b_fs
    preprocess = "200 MB/s"         # beta, per decode thread
    compute = "640 samples/s"       # c, or "100 MB/s"
    decode_threads = 2

    [source]
    clients = { 1 = "66 MB/s", 2 = "86 MB/s", 4 = "146 MB/s" }     # t(gamma)
    read = "100 MB/s"
    latency = "5 ms"
    threads = 16

    [[storage]]                     # the staging buffer
    name = "staging"
    capacity = "1 GB"
    threads = 2
    read = { 1 = "16.55 GB/s", 2 = "21.164 GB/s" }

    [[storage]]
    name = "ssd"
    capacity = "10 GB"
    threads = 2
    read = { 1 = "192 MB/s", 2 = "399 MB/s" }
    backend = "filesystem"
    path = "/tmp/penstock"
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

import tomli_w

from penstock.errors import ConfigError
from penstock.machine.curve import Curve
from penstock.machine.machine import Machine, Rate, SharedStore, StorageClass
from penstock.units import (
    exact_bytes,
    exact_rate,
    exact_seconds,
    parse_bytes,
    parse_rate,
    parse_samples_rate,
    parse_seconds,
)

T = TypeVar("T")
_REQUIRED = object()
_USERS = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")


def read_machine(text: str) -> Machine:
    """Return the machine that a TOML text describes.

    Raises: ConfigError naming the field by its path, or the line where the text is not TOML.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the machine is not valid TOML: {error}") from error
    table = _Table(values, "")
    source = table.read("source", _table)
    storage = table.read("storage", _tables)
    arguments: dict[str, Any] = {
        "ranks": table.read("ranks", _count, 1),
        "network_bytes_per_second": table.read("network", _unbounded_rate, math.inf),
        "source_network_bytes_per_second": table.read("source_network", _unbounded_rate, math.inf),
        "preprocess_bytes_per_second": table.read("preprocess", _unbounded_rate, math.inf),
        "compute": table.read("compute", _compute, None),
        "decode_threads": table.read("decode_threads", _count, 1),
    }
    table.refuse_unknown()
    return Machine(
        source=_read_source(_Table(source, "source")),
        storage=tuple(
            _read_storage(_Table(entry, f"storage[{index}]")) for index, entry in enumerate(storage)
        ),
        **arguments,
    )


def write_machine(machine: Machine) -> str:
    """Return the text from which `read_machine` makes an equal machine."""
    source: dict[str, Any] = {}
    if machine.source.clients is not None:
        source["clients"] = _write_curve(machine.source.clients)
    source["read"] = _write_curve(machine.source.read)
    if machine.source.latency_seconds:
        source["latency"] = exact_seconds(machine.source.latency_seconds)
    source["threads"] = machine.source.threads
    values: dict[str, Any] = {"ranks": machine.ranks}
    for field, rate in (
        ("network", machine.network_bytes_per_second),
        ("source_network", machine.source_network_bytes_per_second),
        ("preprocess", machine.preprocess_bytes_per_second),
    ):
        if not math.isinf(rate):
            values[field] = exact_rate(rate)
    if machine.compute is not None:
        per_second = machine.compute.per_second
        values["compute"] = (
            exact_rate(per_second) if machine.compute.of == "bytes" else f"{per_second!r} samples/s"
        )
    values["decode_threads"] = machine.decode_threads
    values["source"] = source
    values["storage"] = [_write_storage(storage_class) for storage_class in machine.storage]
    return tomli_w.dumps(values)


def _read_source(table: _Table) -> SharedStore:
    arguments: dict[str, Any] = {
        "clients": table.read("clients", _curve, None),
        "read": table.read("read", _curve),
        "latency_seconds": table.read("latency", _latency, 0.0),
        "threads": table.read("threads", _count, 1),
    }
    table.refuse_unknown()
    with _at(table.path):
        return SharedStore(**arguments)


def _read_storage(table: _Table) -> StorageClass:
    arguments: dict[str, Any] = {
        "name": table.read("name", _text),
        "capacity_bytes": table.read("capacity", _capacity),
        "threads": table.read("threads", _count),
        "read": table.read("read", _curve),
        "write": table.read("write", _curve, None),
        "latency_seconds": table.read("latency", _latency, 0.0),
        "backend": table.read("backend", _text, "memory"),
        "path": table.read("path", _text, None),
    }
    table.refuse_unknown()
    with _at(table.path):
        return StorageClass(**arguments)


def _write_storage(storage_class: StorageClass) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": storage_class.name,
        "capacity": exact_bytes(storage_class.capacity_bytes),
        "threads": storage_class.threads,
        "read": _write_curve(storage_class.read),
    }
    if storage_class.write is not None:
        values["write"] = _write_curve(storage_class.write)
    if storage_class.latency_seconds:
        values["latency"] = exact_seconds(storage_class.latency_seconds)
    values["backend"] = storage_class.backend
    if storage_class.path is not None:
        values["path"] = storage_class.path
    return values


def _write_curve(curve: Curve) -> str | dict[str, str]:
    if len(curve.points) == 1 and curve.points[0][0] == 1:
        return exact_rate(curve.points[0][1])
    return {
        str(int(users)) if float(users).is_integer() else repr(users): exact_rate(rate)
        for users, rate in curve.points
    }


class _Table:
    """A TOML table that is asked for every field it may have, and knows where in the file it stands."""

    def __init__(self, values: Mapping[str, object], path: str) -> None:
        self.path = path
        self._values = values
        self._known: list[str] = []

    def read(self, field: str, parse: Callable[[Any], T], default: Any = _REQUIRED) -> T:
        self._known.append(field)
        if field in self._values:
            try:
                return parse(self._values[field])
            except ConfigError as error:
                raise ConfigError(f"{_join(self.path, field)}: {error}") from None
        if default is _REQUIRED:
            # A misspelt required field is both unknown and missing; the first of the two says more.
            self._refuse_likely_misspelling(field)
            raise ConfigError(f"{_join(self.path, field)} is missing: add it")
        found: T = default
        return found

    def refuse_unknown(self) -> None:
        for field in self._values:
            if field not in self._known:
                close = get_close_matches(field, self._known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(self._known)}"
                raise ConfigError(f"{_join(self.path, field)} is not a field; {hint}")

    def _refuse_likely_misspelling(self, field: str) -> None:
        for close in get_close_matches(field, self._values.keys() - set(self._known), n=1):
            raise ConfigError(f"{_join(self.path, close)} is not a field; did you mean {field}?")


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Put the path in front of what is wrong with the value built inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{value!r} is not a table")
    return value


def _tables(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list):
        raise ConfigError(f"{value!r} is not a list of tables: write each storage class under [[storage]]")
    return [_table(entry) for entry in value]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not text in quotes")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{value!r} is not a whole number")
    if value < 1:
        raise ConfigError(f"{value} is below 1")
    return value


def _with_unit(value: object, example: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} has no unit: write for example {example!r}")
    return value


def _capacity(value: object) -> int:
    size = parse_bytes(_with_unit(value, "4 GB"))
    if size < 1:
        raise ConfigError(f"{value!r} is no room at all: give it some, or drop the storage class")
    return size


def _latency(value: object) -> float:
    seconds = parse_seconds(_with_unit(value, "5 ms"))
    if math.isinf(seconds):
        raise ConfigError(f"{value!r} never ends: a latency is finite")
    return seconds


def _unbounded_rate(value: object) -> float:
    if isinstance(value, float) and math.isinf(value):
        return parse_rate(value)
    return parse_rate(_with_unit(value, "200 MB/s"))


def _compute(value: object) -> Rate:
    text = _with_unit(value, "640 samples/s")
    if "samples" in text:
        return Rate(parse_samples_rate(text), of="samples")
    return Rate(parse_rate(text), of="bytes")


def _curve(value: object) -> Curve:
    if not isinstance(value, dict):
        return Curve.flat(parse_rate(_with_unit(value, "200 MB/s")))
    return Curve(tuple(sorted(_point(users, rate) for users, rate in value.items())))


def _point(users: str, rate: object) -> tuple[float, float]:
    if not _USERS.fullmatch(users):
        raise ConfigError(f'{users!r} is not a number of users: write for example 2 = "400 MB/s"')
    if isinstance(rate, dict):
        raise ConfigError(f"{users} is followed by a dot: put quotes round a number with a fraction")
    try:
        return float(users), parse_rate(_with_unit(rate, "200 MB/s"))
    except ConfigError as error:
        raise ConfigError(f"at {users} users, {error}") from None
