"""`penstock doctor`: what this machine allows, and what would limit a training here."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.options import parsed_names
from penstock.cli.output import add_command, add_output_options, show


def add_doctor(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        "print what this machine allows, and what would limit a training",
        "Print processors, memory, open files, shared memory, file systems, decoders, caches and versions.",
        "Example: penstock doctor photos/train,saves\n"
        "JSON: results[] of what, value, concern (null where it limits nothing).",
    )
    parser.add_argument(
        "paths",
        nargs="?",
        default=".",
        metavar="PATHS",
        help="folders whose file systems to name, with commas (%(default)s)",
    )
    add_output_options(parser, plot=False)


def _doctor(options: argparse.Namespace) -> None:
    from penstock.measure.doctor import examine

    found = examine(parsed_names(options.paths, "PATHS"))
    results = [{"what": each.what, "value": each.value, "concern": each.concern or None} for each in found]
    lines = [f"{each.what}: {each.value}" for each in found]
    concerns = [f"{each.what}: {each.concern}" for each in found if each.concern]
    show(
        options,
        {"results": results},
        [],
        [*lines, "", *(concerns or ["Nothing here would limit a training."])],
    )
