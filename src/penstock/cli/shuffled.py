"""A full shuffle read by ranks, from the options of the commands that count its reads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.options import check_memory
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.plan import AccessPlan


def add_shuffle_options(parser: argparse.ArgumentParser, *, samples: int, epochs: int, batch: int) -> None:
    """Give a command --samples, --ranks, --epochs, --batch and --seed, with these defaults."""
    shown = "(%(default)s)"
    parser.add_argument("--samples", type=int, default=samples, metavar="F", help=shown)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help=shown)
    parser.add_argument("--epochs", type=int, default=epochs, metavar="E", help=shown)
    parser.add_argument("--batch", type=int, default=batch, metavar="B", help=f"samples per rank {shown}")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help=f"of the shuffle {shown}")


def shuffled_plan(options: argparse.Namespace) -> AccessPlan:
    """Return the plan that the options of `add_shuffle_options` mean.

    Raises: ConfigError naming the option or the plan's field.
    """
    from penstock.plan import AccessPlan, FullShuffle

    if options.ranks < 1:
        raise ConfigError(f"--ranks is {options.ranks}; at least one rank reads the samples: raise it")
    if options.batch < 1:
        raise ConfigError(f"--batch is {options.batch}; each rank reads at least one sample a step: raise it")
    # Where the sample is, and who has it, or how often it was read.
    check_memory("--samples", options.samples, 16)
    order = FullShuffle(options.samples, options.seed)
    return AccessPlan(order, options.batch * options.ranks, options.epochs, options.ranks)
