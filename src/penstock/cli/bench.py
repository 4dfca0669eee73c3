"""`penstock bench`: what this cluster's storage does for a training, measured by mini-applications."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli import bench_checkpoint, bench_input, bench_train


def add_bench(commands: Any) -> None:
    group: argparse.ArgumentParser = commands.add_parser(
        "bench", help="measure reading, training and saving on this machine, compared with other libraries"
    )
    kinds = group.add_subparsers(required=True, metavar="WHAT")
    for command in (bench_input, bench_train, bench_checkpoint):
        command.add(kinds)
