"""What is put to the test: a store of snapshots, seen as a few calls, found by its name in any process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

from penstock.policy.delta_schemes import Scheme

#: What a snapshot holds, as bytes by name: two states are the same if these are.
State = Mapping[str, bytes]


class OpenStore(Protocol):
    """An open store, for writing."""

    def save(self, step: int, state: State) -> None:
        """Return once the snapshot would outlive a loss of power, and retention has acted."""
        ...

    def restore(self, step: int) -> State:
        """Return a snapshot's state. Raises where it is damaged."""
        ...

    def settle(self) -> None:
        """Return once nothing goes on in the background."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Subject(Protocol):
    """A kind of store, and how it is set up."""

    @property
    def keep(self) -> int:
        """Return how many of the latest snapshots retention keeps."""
        ...

    def state(self, step: int) -> State:
        """Return the state to save at a step: a pure function of the step."""
        ...

    def open(self, folder: Path) -> OpenStore:
        """Open the store at a folder, making it where there is none."""
        ...

    def steps(self, folder: Path) -> list[int]:
        """Return the steps of the snapshots that a store would restore, ascending."""
        ...

    def leftovers(self, folder: Path, steps: list[int]) -> list[str]:
        """Return the names in a closed store's folder that the snapshots of these steps do not account for."""
        ...


def subject_named(name: str) -> Subject:
    """Return the store that a name stands for: "stand-in/WHAT IS BROKEN" or "store/SCHEME[+fast]"."""
    kind, _, variant = name.partition("/")
    if kind == "stand-in":
        from tests.checkpoint.crash.broken_stores import Broken, StandInSubject

        return StandInSubject(Broken(variant))
    assert kind == "store", name
    from tests.checkpoint.crash.real_store import RealSubject

    return RealSubject(cast(Scheme, variant.removesuffix("+fast")), variant.endswith("+fast"))
