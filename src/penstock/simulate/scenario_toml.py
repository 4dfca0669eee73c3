"""A scenario as a TOML text: what the thesis' listings 4.1 to 4.3 say, with units.

name = "images on four ranks"

[machine]                       # or: machine = "machine.toml"
ranks = 4                       # and all else that a machine's file has

[data]
samples = 10_000
distribution = "normal"         # or any of scipy.stats; or instead of all this: folder = "/data/images"
loc = "27 kB"
scale = "10 kB"
min = "1 B"

[training]
batch_size = 100
epochs = 10
seed = 0
split = "balanced"
drop_last = false
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.machine.tables import (
    Field,
    Table,
    at,
    count,
    flag,
    integer,
    number,
    size,
    text,
    to_toml,
    with_unit,
    write_fields,
)
from penstock.machine.toml import machine_values
from penstock.simulate.sizes import SizeDistribution, Sizes, SizesOfFolder
from penstock.units import exact_bytes, exact_mean_bytes, parse_mean_bytes

if TYPE_CHECKING:
    from penstock.simulate.scenario import Scenario

#: Parameters of a distribution that are bytes; the others are plain numbers.
_IN_BYTES = ("loc", "scale")


def scenario_fields(
    table: Table,
    name: str,
    machine_text: Callable[[str], str] | None,
    sizes_of: Callable[[str], Sizes] | None,
) -> dict[str, Any]:
    """Return the fields of the scenario that a table describes; the arguments are those of `Scenario.from_toml`."""
    name = table.read("name", text, name)
    machine = _read_machine(table, machine_text)
    data = table.required_table("data")
    training = table.required_table("training")
    if "assumptions" in table:
        raise ConfigError(
            f"{table.path_of('assumptions')} cannot be chosen: every prediction is made by the loaders' own "
            "schedulers. Leave it out; the thesis's assumptions are those of penstock paper thesis-table-5-1"
        )
    table.refuse_unknown()
    arguments = training.read_all(_TRAINING)
    training.refuse_unknown()
    arguments["data"] = _read_data(data, sizes_of)
    return {"name": name, "machine": machine, **arguments}


def write_scenario(scenario: Scenario) -> str:
    """Return the text from which `Scenario.from_toml` makes an equal scenario."""
    return to_toml(
        {
            "name": scenario.name,
            "data": _write_data(scenario.data),
            "training": write_fields(_TRAINING, scenario),
            "machine": machine_values(scenario.machine),
        }
    )


def _read_machine(table: Table, machine_text: Callable[[str], str] | None) -> Machine:
    if not isinstance(table.value("machine"), str):
        return Machine.from_table(table.required_table("machine"))

    def from_file(path: str) -> Machine:
        if machine_text is None:
            raise ConfigError(
                f"{path!r} is a file, and a simulation opens none: "
                "read the scenario with penstock.measure.scenarios.open_scenario"
            )
        with at(path):
            return Machine.from_toml(machine_text(path))

    return table.read("machine", from_file)


def _read_data(table: Table, sizes_of: Callable[[str], Sizes] | None) -> SizeDistribution | SizesOfFolder:
    if "folder" in table:

        def from_folder(value: object) -> SizesOfFolder:
            path = text(value)
            if sizes_of is None:
                raise ConfigError(
                    f"{path!r} is a folder, and a simulation opens none: "
                    "read the scenario with penstock.measure.scenarios.open_scenario"
                )
            return SizesOfFolder(path, sizes_of(path))

        found = table.read("folder", from_folder)
        if others := table.rest():
            raise ConfigError(
                f"{table.path_of(others[0])} is given with {table.path_of('folder')}, whose files say how many samples "
                "there are and how large: keep one of the two"
            )
        return found
    parameters = {
        parameter: table.read(parameter, _signed_size) for parameter in _IN_BYTES if parameter in table
    }
    arguments: dict[str, Any] = {
        "min_bytes": table.read("min", size, 1),
        "max_bytes": table.read("max", size, None),
        "name": table.read("distribution", text),
        "samples": table.read("samples", count),
    }
    # What is left is a shape parameter or a mistake: the distribution knows.
    parameters |= {parameter: table.read(parameter, number) for parameter in table.rest()}
    with at(table.path):
        return SizeDistribution(parameters=parameters, **arguments)


def _write_data(data: SizeDistribution | SizesOfFolder) -> dict[str, Any]:
    if isinstance(data, SizesOfFolder):
        return {"folder": data.path}
    values: dict[str, Any] = {"samples": data.samples, "distribution": data.name}
    for parameter, value in dict(data.parameters).items():
        values[parameter] = _write_signed_size(value) if parameter in _IN_BYTES else float(value)
    values["min"] = exact_bytes(data.min_bytes)
    if data.max_bytes is not None:
        values["max"] = exact_bytes(data.max_bytes)
    return values


def _split(value: object) -> str | tuple[int, ...]:
    return tuple(integer(share) for share in value) if isinstance(value, list) else text(value)


def _write_split(split: str | Sequence[int]) -> str | list[int]:
    return split if isinstance(split, str) else list(split)


_TRAINING = (
    Field("batch_size", "batch_size", count),
    Field("epochs", "epochs", count),
    Field("seed", "seed", integer, default=0),
    Field("split", "split", _split, _write_split, "balanced"),
    Field("drop_last", "drop_last", flag, default=False),
)


def _signed_size(value: object) -> float:
    """Return bytes of any sign: a fitted distribution may well begin below zero."""
    written = with_unit(value, "4 kB").strip()
    return -parse_mean_bytes(written[1:]) if written.startswith("-") else parse_mean_bytes(written)


def _write_signed_size(value: float) -> str:
    return f"-{exact_mean_bytes(-value)}" if value < 0 else exact_mean_bytes(value)
