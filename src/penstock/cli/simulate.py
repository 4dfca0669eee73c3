"""`penstock simulate`: everything that can be predicted, kept together."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli import bundles, caches, layout, loading, wear


def add_simulate(commands: Any) -> None:
    group: argparse.ArgumentParser = commands.add_parser(
        "simulate", help="predict loading, caches and SSD wear, before a run or a purchase"
    )
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    for command in (loading, layout, caches, bundles, wear):
        command.add(kinds)
