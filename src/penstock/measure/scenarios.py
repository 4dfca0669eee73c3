"""Scenarios from files: what a simulation, which opens none, is handed."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError, DataError
from penstock.files import read_text
from penstock.machine import Machine
from penstock.machine.tables import at, load_toml
from penstock.simulate.scenario import Scenario, scenario_named, scenario_names
from penstock.simulate.sizes import Sizes


def open_scenario(name_or_file: str | os.PathLike[str]) -> Scenario:
    """Return a scenario by its file, or one that comes with the package by its name.

    name_or_file: a path that ends in ``.toml``, or a built-in name such as ``"scenario1"``. Paths inside of the file
        (``machine = "machine.toml"``, ``[data] folder = "images"``) are relative to the file's own folder; a ``~`` at
        their beginning is the home folder.
    Raises: ConfigError naming file and field; DataError for a file or folder that cannot be read.
    """
    written = os.fspath(name_or_file)
    if not written.endswith(".toml"):
        if written not in scenario_names() and os.path.exists(written):
            raise ConfigError(f"{written} does not end in .toml: a scenario's file does")
        return scenario_named(written)
    file = Path(written).expanduser()

    def beside(path: str) -> Path:
        return file.parent / Path(path).expanduser()

    with at(written):
        return Scenario.from_toml(
            _text_of(file),
            name=file.stem,
            machine_text=lambda path: _text_of(beside(path)),
            sizes_of=lambda path: _sizes_of(beside(path)),
        )


def open_machine(name_or_file: str | os.PathLike[str]) -> Machine:
    """Return the machine of a file, such as `penstock calibrate` writes, or that of a scenario.

    name_or_file: as of `open_scenario`, or a machine's file. Raises: as `open_scenario`.
    """
    written = os.fspath(name_or_file)
    if written.endswith(".toml"):
        with at(written):
            table = load_toml(_text_of(Path(written).expanduser()), "the machine")
            if "machine" not in table:
                return Machine.from_table(table)
    return open_scenario(written).machine


def _sizes_of(folder: Path) -> Sizes:
    from penstock.store import open_source

    return open_source(folder).sizes_bytes


def _text_of(file: Path) -> str:
    try:
        return read_text(file)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
