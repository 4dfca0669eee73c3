"""What the commands of `penstock bench` are asked alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from penstock.bench.checks import MODELS
from penstock.cli.launcher import ranks_of_launcher
from penstock.cli.options import parsed_amount, parsed_count, parsed_names
from penstock.cli.output import add_output_options, progress
from penstock.units import parse_seconds
from penstock.validate import check_above_zero

Found = TypeVar("Found")

#: Of a step, without a model.
STEP_SECONDS = "100ms"


def add_run_options(parser: argparse.ArgumentParser, repeats: int, sets: str) -> None:
    """Give a command --seconds, --repeats and where its results go. sets: what --seconds does, in words."""
    parser.add_argument(
        "--seconds", type=float, default=120.0, help=f"time for all runs, about (%(default)g): {sets}"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=repeats,
        help="runs of each setting, the first left out (%(default)s)",
    )
    add_output_options(parser)


def add_batch_options(parser: argparse.ArgumentParser, threads: str) -> None:
    """Give a command --threads and --batch-size, each of several numbers. threads: what they are."""
    parser.add_argument("--threads", metavar="NUMBERS", default="1,2,4,8", help=f"{threads} (%(default)s)")
    parser.add_argument(
        "--batch-size",
        metavar="NUMBERS",
        default="64",
        help="samples of a batch, over all ranks (%(default)s)",
    )


def add_step_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Give a command --model and --step-seconds. what: is done with the model."""
    *first, last = MODELS
    parser.add_argument(
        "--model", metavar="NAME", help=f"{what}: {', '.join(first)} or {last} (needs PyTorch)"
    )
    parser.add_argument(
        "--step-seconds", metavar="TIME", help=f"time that a step computes, without a model ({STEP_SECONDS})"
    )


def add_peers_option(parser: argparse.ArgumentParser, peers: str, what: str) -> None:
    """Give a command --peers. peers: those there are; what: they are."""
    parser.add_argument(
        "--peers",
        metavar="NAMES",
        default=peers.replace(" ", ""),
        help=f"{what} to measure too, where installed: {peers}; or none (%(default)s)",
    )


def peers_of(options: argparse.Namespace) -> list[str]:
    """Return the names behind --peers. Raises: ConfigError."""
    return [] if options.peers == "none" else parsed_names(options.peers, "--peers")


def seconds_of(options: argparse.Namespace) -> float:
    """Return what --seconds gives. Raises: ConfigError."""
    check_above_zero("--seconds", options.seconds)
    return float(options.seconds)


def step_seconds_of(options: argparse.Namespace) -> float:
    """Return what --step-seconds gives. Raises: ConfigError."""
    return parsed_amount("--step-seconds", parse_seconds, options.step_seconds or STEP_SECONDS)


def counts_of(text: str, option: str) -> list[int]:
    """Return integers of at least 1 between commas, each once. Raises: ConfigError."""
    return [parsed_count(option, word) for word in parsed_names(text, option)]


def measure_and_show(
    options: argparse.Namespace,
    description: str,
    settings: int,
    measure: Callable[..., Found],
    show: Callable[[argparse.Namespace, Found], None],
) -> None:
    """Measure so many settings by all ranks of the job; rank 0 draws how many runs were made, and shows the results.

    measure: takes max_seconds, repeats, ranks, and done, which it calls after each run.
    """
    max_seconds, runs = seconds_of(options), options.repeats * settings
    with (
        # Ranks that save are heard of only where they meet: one may compute for as long as all may take.
        ranks_of_launcher("bench", max_seconds) as ranks,
        progress(description, runs if ranks.rank == 0 else 0) as move,
    ):
        made = iter(range(1, runs + 1))
        found = measure(
            max_seconds=max_seconds,
            repeats=options.repeats,
            ranks=ranks,
            done=lambda *_: move(next(made, runs)),
        )
    if ranks.rank == 0:
        show(options, found)
