"""A machine as a TOML text: what the thesis' configuration file says (listings 4.1 and 4.7), with units.

Every quantity carries its unit, so that 1024 is never read as bytes by one and as MB by another. A curve is a
table from the number of users to a rate, or one rate for any number:

    ranks = 4
    network = "10 GB/s"             # b_c
    source_network = "2 GB/s"       # b_fs
    preprocess = "200 MB/s"         # beta, of a decode thread on a processor of its own
    compute = "640 samples/s"       # c, or "100 MB/s"
    decode_threads = 2
    processors = 2                  # that they share

    [source]
    clients = { 1 = "66 MB/s", 2 = "86 MB/s", 4 = "146 MB/s" }     # t(gamma)
    read = "100 MB/s"
    latency = "5 ms"
    threads = 16
    sequential = { 1 = "110 MB/s", 4 = "400 MB/s" }                # what distinguishes consecutive from scattered reads
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

    [[device]]                      # of dataflow graphs
    name = "/job:worker/task:0/device:cpu:0"
    memory = "16 GB"
    flops = "100 GFLOP/s"
    memory_rate = "20 GB/s"

    [[link]]                        # between devices, where it is not the network
    between = ["/job:worker/task:0/device:cpu:0", "/job:worker/task:1/device:cpu:0"]
    latency = "50 us"
    rate = "1 GB/s"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.machine.curve import Curve
from penstock.machine.places import Device, DeviceLink, Rate, SharedStore, StorageClass
from penstock.machine.tables import (
    Field,
    Table,
    at,
    count,
    seconds,
    size,
    text,
    to_toml,
    unbounded_rate,
    with_unit,
    write_fields,
)
from penstock.units import (
    exact_bytes,
    exact_flops_rate,
    exact_rate,
    exact_seconds,
    parse_flops_rate,
    parse_rate,
    parse_samples_rate,
)

if TYPE_CHECKING:
    from penstock.machine.machine import Machine

_USERS = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")


def machine_fields(table: Table) -> dict[str, Any]:
    """Return the fields of the machine that a table describes.

    Raises: ConfigError naming the field by its path.
    """
    source = table.required_table("source")
    storage = table.required_tables("storage")
    arguments = table.read_all([field for field in _MACHINE if field is not _NETWORK]) | cluster_fields(table)
    arguments["source"] = _read_part(source, _SOURCE, SharedStore)
    arguments["storage"] = tuple(_read_part(entry, _STORAGE, StorageClass) for entry in storage)
    return arguments


def cluster_fields(table: Table) -> dict[str, Any]:
    """Return the fields of the cluster that a table describes, which has no others than were asked for.

    Raises: ConfigError naming the field by its path.
    """
    arguments = table.read_all([_NETWORK])
    devices, links = table.tables("device"), table.tables("link")
    table.refuse_unknown()
    arguments["devices"] = tuple(_read_part(entry, _DEVICE, Device) for entry in devices)
    arguments["links"] = tuple(_read_part(entry, _LINK, DeviceLink) for entry in links)
    return arguments


def write_machine(machine: Machine) -> str:
    """Return the text from which `Machine.from_toml` makes an equal machine."""
    return to_toml(machine_values(machine))


def machine_values(machine: Machine) -> dict[str, Any]:
    """Return the table from which `Machine.from_table` makes an equal machine."""
    lists = {
        "storage": [write_fields(_STORAGE, each) for each in machine.storage],
        "device": [write_fields(_DEVICE, each) for each in machine.devices],
        "link": [write_fields(_LINK, each) for each in machine.links],
    }
    return (
        write_fields(_MACHINE, machine)
        | {"source": write_fields(_SOURCE, machine.source)}
        | {name: values for name, values in lists.items() if values}
    )


def _read_part(table: Table, fields: Sequence[Field], kind: Callable[..., Any]) -> Any:
    arguments = table.read_all(fields)
    table.refuse_unknown()
    with at(table.path):
        return kind(**arguments)


def _write_curve(curve: Curve) -> str | dict[str, str]:
    if len(curve.points) == 1 and curve.points[0][0] == 1:
        return exact_rate(curve.points[0][1])
    return {
        str(int(users)) if float(users).is_integer() else repr(users): exact_rate(rate)
        for users, rate in curve.points
    }


def _capacity(value: object) -> int:
    space = size(value)
    if space < 1:
        raise ConfigError(f"{value!r} is no space at all: give it some, or drop the storage class")
    return space


def _read_size(value: object) -> int:
    if size(value) < 1:
        raise ConfigError(f"{value!r} is no size of a read: it has at least a byte")
    return size(value)


def _compute(value: object) -> Rate:
    speed = with_unit(value, "640 samples/s")
    if "samples" in speed:
        return Rate(parse_samples_rate(speed), of="samples")
    return Rate(parse_rate(speed), of="bytes")


def _flops_rate(value: object) -> float:
    return parse_flops_rate(with_unit(value, "100 GFLOP/s"))


def _rate(value: object) -> float:
    return parse_rate(with_unit(value, "200 MB/s"))


def _write_compute(rate: Rate) -> str:
    return exact_rate(rate.per_second) if rate.of == "bytes" else f"{rate.per_second!r} samples/s"


def _curve(value: object) -> Curve:
    if not isinstance(value, dict):
        return Curve.flat(_rate(value))
    return Curve(tuple(sorted(_point(users, rate) for users, rate in value.items())))


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{value!r} is not a list of names of devices")
    return tuple(text(each) for each in value)


def _point(users: str, rate: object) -> tuple[float, float]:
    if not _USERS.fullmatch(users):
        raise ConfigError(f'{users!r} is not a number of users: write for example 2 = "400 MB/s"')
    if isinstance(rate, dict):
        raise ConfigError(f"{users} is followed by a dot: put quotes round a number with a fraction")
    try:
        return float(users), _rate(rate)
    except ConfigError as error:
        raise ConfigError(f"at {users} users, {error}") from None


_NETWORK = Field("network", "network_bytes_per_second", unbounded_rate, exact_rate, math.inf)
_MACHINE = (
    Field("ranks", "ranks", count, default=1),
    _NETWORK,
    Field("source_network", "source_network_bytes_per_second", unbounded_rate, exact_rate, math.inf),
    Field("preprocess", "preprocess_bytes_per_second", unbounded_rate, exact_rate, math.inf),
    Field("compute", "compute", _compute, _write_compute, None),
    Field("decode_threads", "decode_threads", count, default=1),
    Field("processors", "processors", count, default=math.inf),
)
_SOURCE = (
    Field("clients", "clients", _curve, _write_curve, None),
    Field("read", "read", _curve, _write_curve, None),
    Field("latency", "latency_seconds", seconds, exact_seconds, 0.0),
    Field("threads", "threads", count, default=1),
    Field("sequential", "sequential", _curve, _write_curve, None),
    Field("random_read", "random_bytes", _read_size, exact_bytes, None),
    Field("request", "request_seconds", seconds, exact_seconds, 0.0),
    Field("write", "write", _curve, _write_curve, None),
)
_DEVICE = (
    Field("name", "name", text),
    Field("memory", "memory_bytes", size, exact_bytes, None),
    Field("flops", "flops_per_second", _flops_rate, exact_flops_rate, None),
    Field("memory_rate", "memory_bytes_per_second", _rate, exact_rate, None),
)
_LINK = (
    Field("between", "between", _names, list),
    Field("latency", "latency_seconds", seconds, exact_seconds, 0.0),
    Field("rate", "bytes_per_second", unbounded_rate, exact_rate, math.inf),
)
_STORAGE = (
    Field("name", "name", text),
    Field("capacity", "capacity_bytes", _capacity, exact_bytes),
    Field("threads", "threads", count),
    Field("read", "read", _curve, _write_curve),
    Field("write", "write", _curve, _write_curve, None),
    Field("latency", "latency_seconds", seconds, exact_seconds, 0.0),
    Field("backend", "backend", text, default="memory"),
    Field("path", "path", text, default=None),
)
