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
    sequential = { 1 = "110 MB/s", 4 = "400 MB/s" }                # what tells consecutive from scattered reads
    random_read = "128 kB"
    request = "50 us"
    write = "200 MB/s"

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
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.machine.curve import Curve
from penstock.machine.places import Rate, SharedStore, StorageClass
from penstock.machine.tables import (
    Table,
    at,
    count,
    seconds,
    size,
    text,
    to_toml,
    unbounded_rate,
    with_unit,
)
from penstock.units import exact_bytes, exact_rate, exact_seconds, parse_rate, parse_samples_rate

if TYPE_CHECKING:
    from penstock.machine.machine import Machine

_USERS = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")


def machine_fields(table: Table) -> dict[str, Any]:
    """Return the fields of the machine that a table describes.

    Raises: ConfigError naming the field by its path.
    """
    source = table.required_table("source")
    storage = table.required_tables("storage")
    arguments: dict[str, Any] = {
        "ranks": table.read("ranks", count, 1),
        "network_bytes_per_second": table.read("network", unbounded_rate, math.inf),
        "source_network_bytes_per_second": table.read("source_network", unbounded_rate, math.inf),
        "preprocess_bytes_per_second": table.read("preprocess", unbounded_rate, math.inf),
        "compute": table.read("compute", _compute, None),
        "decode_threads": table.read("decode_threads", count, 1),
    }
    table.refuse_unknown()
    arguments["source"] = _read_source(source)
    arguments["storage"] = tuple(_read_storage(entry) for entry in storage)
    return arguments


def write_machine(machine: Machine) -> str:
    """Return the text from which `Machine.from_toml` makes an equal machine."""
    return to_toml(machine_values(machine))


def machine_values(machine: Machine) -> dict[str, Any]:
    """Return the table from which `Machine.from_table` makes an equal machine."""
    source: dict[str, Any] = {}
    if machine.source.clients is not None:
        source["clients"] = _write_curve(machine.source.clients)
    if machine.source.read is not None:
        source["read"] = _write_curve(machine.source.read)
    if machine.source.latency_seconds:
        source["latency"] = exact_seconds(machine.source.latency_seconds)
    source["threads"] = machine.source.threads
    if machine.source.sequential is not None:
        source["sequential"] = _write_curve(machine.source.sequential)
    if machine.source.random_bytes is not None:
        source["random_read"] = exact_bytes(machine.source.random_bytes)
    if machine.source.request_seconds:
        source["request"] = exact_seconds(machine.source.request_seconds)
    if machine.source.write is not None:
        source["write"] = _write_curve(machine.source.write)
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
    return values


def _read_source(table: Table) -> SharedStore:
    arguments: dict[str, Any] = {
        "clients": table.read("clients", _curve, None),
        "read": table.read("read", _curve, None),
        "latency_seconds": table.read("latency", seconds, 0.0),
        "threads": table.read("threads", count, 1),
        "sequential": table.read("sequential", _curve, None),
        "random_bytes": table.read("random_read", _read_size, None),
        "request_seconds": table.read("request", seconds, 0.0),
        "write": table.read("write", _curve, None),
    }
    table.refuse_unknown()
    with at(table.path):
        return SharedStore(**arguments)


def _read_storage(table: Table) -> StorageClass:
    arguments: dict[str, Any] = {
        "name": table.read("name", text),
        "capacity_bytes": table.read("capacity", _capacity),
        "threads": table.read("threads", count),
        "read": table.read("read", _curve),
        "write": table.read("write", _curve, None),
        "latency_seconds": table.read("latency", seconds, 0.0),
        "backend": table.read("backend", text, "memory"),
        "path": table.read("path", text, None),
    }
    table.refuse_unknown()
    with at(table.path):
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


def _capacity(value: object) -> int:
    room = size(value)
    if room < 1:
        raise ConfigError(f"{value!r} is no room at all: give it some, or drop the storage class")
    return room


def _read_size(value: object) -> int:
    if size(value) < 1:
        raise ConfigError(f"{value!r} is no size of a read: it has at least a byte")
    return size(value)


def _compute(value: object) -> Rate:
    speed = with_unit(value, "640 samples/s")
    if "samples" in speed:
        return Rate(parse_samples_rate(speed), of="samples")
    return Rate(parse_rate(speed), of="bytes")


def _curve(value: object) -> Curve:
    if not isinstance(value, dict):
        return Curve.flat(parse_rate(with_unit(value, "200 MB/s")))
    return Curve(tuple(sorted(_point(users, rate) for users, rate in value.items())))


def _point(users: str, rate: object) -> tuple[float, float]:
    if not _USERS.fullmatch(users):
        raise ConfigError(f'{users!r} is not a number of users: write for example 2 = "400 MB/s"')
    if isinstance(rate, dict):
        raise ConfigError(f"{users} is followed by a dot: put quotes round a number with a fraction")
    try:
        return float(users), parse_rate(with_unit(rate, "200 MB/s"))
    except ConfigError as error:
        raise ConfigError(f"at {users} users, {error}") from None
