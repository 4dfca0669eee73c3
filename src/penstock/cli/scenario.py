"""The scenario of a command: a file or a built-in name, and what is different this time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_memory
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.simulate.scenario import Scenario


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Give a command its SCENARIO and the options that change single values of it."""
    parser.add_argument("scenario", metavar="SCENARIO", help="a .toml file, or scenario1 to scenario4")
    parser.add_argument("--ranks", type=_at_least(1), metavar="N", help="processes of the job")
    parser.add_argument("--samples", type=_at_least(1), metavar="F", help="samples that are drawn")
    parser.add_argument("--batch-size", type=_at_least(1), metavar="B", help="samples of a global batch")
    parser.add_argument("--epochs", type=_at_least(1), metavar="E", help="epochs of the training")
    parser.add_argument(
        "--seed", type=_at_least(0), metavar="SEED", help="seed of the order and of drawn sizes"
    )


def scenario_from(options: argparse.Namespace) -> Scenario:
    """Return the scenario that the options of `add_scenario_options` mean.

    Raises: ConfigError naming the option or the file's field; DataError for a file that cannot be read.
    """
    from dataclasses import replace

    from penstock.measure.scenarios import open_scenario
    from penstock.simulate.sizes import SizeDistribution

    scenario = open_scenario(options.scenario)
    changes: dict[str, Any] = {
        field: getattr(options, field)
        for field in ("batch_size", "epochs", "seed")
        if getattr(options, field) is not None
    }
    if options.ranks is not None:
        changes["machine"] = replace(scenario.machine, ranks=options.ranks)
    if options.samples is not None:
        if not isinstance(scenario.data, SizeDistribution):
            raise ConfigError(
                f"--samples is {options.samples}, but {options.scenario} takes the sizes of {scenario.data.path}"
            )
        changes["data"] = replace(scenario.data, samples=options.samples)
    # Before the rest is checked, which looks at all epochs. Its size and one read of it, 8 bytes each.
    check_memory(
        "data.samples" if options.samples is None else "--samples",
        changes.get("data", scenario.data).samples,
        16,
    )
    return replace(scenario, **changes)


def _at_least(least: int) -> Callable[[str], int]:
    def integer(written: str) -> int:
        try:
            value = int(written)
        except ValueError:
            several = "; several are compared by simulate loading --scaling" if "," in written else ""
            raise argparse.ArgumentTypeError(f"{written!r} is not an integer{several}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return integer
