"""A training to be predicted: on which machine, over which samples, in which batches.

The letters of the thesis (R. Böhringer, "Clairvoyant Prefetching for Machine Learning I/O", ETH Zürich 2020, sections
3.1 and 4.1) stand next to the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from importlib.resources.abc import Traversable

from penstock.errors import ConfigError
from penstock.machine import Machine
from penstock.machine.tables import at, load_toml
from penstock.plan import AccessPlan, FullShuffle
from penstock.plan.orders import check_seed
from penstock.simulate.scenario_toml import scenario_fields, write_scenario
from penstock.simulate.sizes import SizeDistribution, Sizes, SizesOfFolder


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a prediction needs to know.

    name: for tables and files.
    machine: what each byte costs; its ranks are N.
    data: the samples' sizes, drawn or found.
    batch_size: B, samples of a global batch, over all ranks. epochs: E.
    seed: of the order of the samples and of drawn sizes.
    split: "balanced", "uniform", "strided", "replicated", "imbalanced", "local", or one share per rank; see
        `penstock.plan.splits`.
    drop_last: leave out an epoch's last batch if it is short.
    Raises: ConfigError naming the field.

    >>> scenario_named("scenario1").sizes_bytes().size
    10000
    """

    name: str
    machine: Machine
    data: SizeDistribution | SizesOfFolder
    batch_size: int
    epochs: int
    seed: int = 0
    split: str | tuple[int, ...] = "balanced"
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not isinstance(self.split, str):
            object.__setattr__(self, "split", tuple(self.split))
        if not any(self.plan().epochs_by_length()):
            raise ConfigError(
                f"batch_size is {self.batch_size:,}, but there are {self.samples:,} samples, so that drop_last leaves "
                "nothing to read: make batch_size smaller, or set drop_last to false"
            )

    @property
    def samples(self) -> int:
        """F."""
        return self.data.samples

    @property
    def ranks(self) -> int:
        """N."""
        return self.machine.ranks

    def sizes_bytes(self, seed_offset: int = 0) -> Sizes:
        """Return the size of each sample as stored: int64[F].

        seed_offset: added to the seed, to draw other sizes of the same distribution.
        """
        return self.data.sizes_bytes(self.seed + seed_offset)

    def plan(self, seed_offset: int = 0) -> AccessPlan:
        """Return who reads what when: a full shuffle anew each epoch.

        seed_offset: added to the seed, to draw another order.
        """
        return AccessPlan(
            FullShuffle(self.samples, self.seed + seed_offset),
            self.batch_size,
            self.epochs,
            self.ranks,
            self.split,
            self.drop_last,
        )

    def with_ranks(self, ranks: int) -> Scenario:
        """Return the same training on another number of ranks, for strong scaling: B and F stay."""
        return replace(self, machine=replace(self.machine, ranks=ranks))

    def to_toml(self) -> str:
        """Return the text from which `from_toml` makes an equal scenario (of a folder, if it has not changed)."""
        return write_scenario(self)

    @classmethod
    def from_toml(
        cls,
        text: str,
        *,
        name: str = "scenario",
        machine_text: Callable[[str], str] | None = None,
        sizes_of: Callable[[str], Sizes] | None = None,
    ) -> Scenario:
        """Return the scenario that a TOML text describes; its fields are in docs/reference/scenarios.md.

        name: used where the text has none.
        machine_text: called with the path of ``machine = "..."``, returns the machine's text.
        sizes_of: called with the path of ``[data] folder = "..."``, returns int64[F]. A simulation opens no files;
            `penstock.measure.scenarios.open_scenario` brings both functions along.
        Raises: ConfigError naming the field by its path, as in ``data.scale``.
        """
        fields = scenario_fields(load_toml(text, "the scenario"), name, machine_text, sizes_of)
        with at("training"):
            return cls(**fields)


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the package, sorted."""
    return sorted(
        file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")
    )


def scenario_named(name: str) -> Scenario:
    """Return one of the scenarios that come with the package; ``scenario1`` to ``scenario4`` are those of the thesis.

    Raises: ConfigError listing the known names.
    Source: thesis, section 5.2; the epochs and the points that 5.2.1 leaves out are the reference simulator's.
    """
    return Scenario.from_toml(scenario_text(name), name=name)


def scenario_text(name: str) -> str:
    """Return the TOML text of a scenario that comes with the package.

    Raises: ConfigError listing the known names.
    """
    names = scenario_names()
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{name!r} is no built-in scenario. {hint}The known ones are {', '.join(names)}")
    return (_folder() / f"{name}.toml").read_text("utf-8")


def _folder() -> Traversable:
    return resources.files("penstock.simulate") / "scenarios"
