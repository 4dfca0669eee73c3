"""How a snapshot store is opened, as a value: printed, compared, and given to several stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypedDict

from penstock.checkpoint.arguments import (
    check_given,
    checked_folder,
    checked_keep,
    checked_options,
    checked_path,
    checked_quantity,
    checked_schedule,
)
from penstock.checkpoint.codecs import DEFAULT
from penstock.checkpoint.recipe import EncodingConfig, encoding_config
from penstock.errors import ConfigError, given_beside
from penstock.flow.cpus import default_coders
from penstock.plan.saves import SaveSchedule
from penstock.policy.delta_schemes import Scheme
from penstock.policy.retention import Keep
from penstock.policy.snap_distance import SnapDistance
from penstock.units import parse_bytes, parse_rate
from penstock.validate import check_count


class StoreArguments(TypedDict, total=False):
    """The arguments of a store, see `StoreConfig`."""

    keep: Keep | int
    scheme: Scheme
    snap_dis: SnapDistance | Literal["auto"]
    codec: str
    kept_mantissa_bits: int | None
    reference: Literal["memory", "stored"]
    staging_bytes: int | str | None
    fast: str | os.PathLike[str] | None
    fast_bytes: int | str | None
    drain_bytes_per_second: float | str | None
    host_copies: str | os.PathLike[str] | None
    threads: int | None
    schedule: SaveSchedule | str | None
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What the arguments of a store come to: quantities in bytes, defaults filled in."""

    folder: str | os.PathLike[str]
    keep: Keep
    encoding: EncodingConfig
    reference: Literal["memory", "stored"]
    staging_bytes: int | None
    fast: str | os.PathLike[str] | None
    fast_bytes: int | None
    drain_bytes_per_second: float | None
    host_copies: str | None
    threads: int
    schedule: SaveSchedule | None
    storage_options: Mapping[str, Any] | None

    @property
    def holds_reference(self) -> bool:
        """Return whether the last snapshot stays in memory: what is on a fast tier is no delta."""
        return self.reference == "memory" and self.encoding.refers and self.fast is None


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where and how snapshots are stored: all that a store is given but with whom it works and where it reports.

    folder: where snapshots stay, made by the first save; a path, or an address of fsspec (needs penstock[remote]).
    keep: what is not removed once a newer snapshot is there; 5 keeps the five latest, as is done by default.
    scheme, snap_dis: every `snap_dis`-th snapshot is full, a baseline; the others are differences, each to the
        one before ("progressive") or to the baseline ("chain"); "complete": all are full. "auto", or an
        `AutoDistance`, in place of a number follows what is stored: small early, larger near convergence.
    codec: how blocks are stored, see docs/reference/snapshots.md.
    kept_mantissa_bits: LOSSY if it is given: floats of 16 bits and more keep so many leading bits of their mantissa (a
        float32 has 23), the others become zero; what is restored is not what was saved. The snapshot says so.
    reference: where the snapshot is that the next one is a difference to: a second copy of the state in memory,
        or "stored": read again from its files, a block at a time.
    staging_bytes: memory for the copy of the state, at most, in bytes or as "2 GB"; a larger state is copied in
        waves, for which training stands still until all but the last are written. None: as large as the state.
        It needs reference="stored", unless no snapshot is a difference to one in memory: with scheme="complete",
        codec="stored", or fast=.
    fast: a folder on a small and fast tier, which every rank sees: snapshots are committed there, as they are, and
        drained to `folder` in the background.
    fast_bytes: for snapshots on the fast tier; None: what is free there. What has no space is written to `folder`.
    drain_bytes_per_second: that drains write at most; None: as fast as they can.
    host_copies: a folder that each host has for itself, in its memory, such as "/dev/shm/runs-a": there the newest
        snapshot is, too, each host's parts also on the next host, and is restored from.
    threads: that encode and decode; None: as many as there are processors, 4 at most.
    schedule: what `is_due` follows: "1000 steps", "30 min", "auto, a failure every 24 h", or a value of
        `penstock.plan.saves`.
    storage_options: of the driver where `folder` is an address such as "s3://bucket/runs/a".

    Raises: ConfigError naming the argument.
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    keep: Keep | int = Keep()  # noqa: RUF009, it is frozen
    scheme: Scheme = "progressive"
    snap_dis: SnapDistance | Literal["auto"] = 10
    codec: str = DEFAULT
    kept_mantissa_bits: int | None = None
    reference: Literal["memory", "stored"] = "memory"
    staging_bytes: int | str | None = None
    fast: str | os.PathLike[str] | None = None
    fast_bytes: int | str | None = None
    drain_bytes_per_second: float | str | None = None
    host_copies: str | os.PathLike[str] | None = None
    threads: int | None = None
    schedule: SaveSchedule | str | None = None
    storage_options: Mapping[str, Any] | None = None
    #: What they come to.
    settings: StoreSettings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", self._checked())

    def _checked(self) -> StoreSettings:
        encoding = encoding_config(self.scheme, self.snap_dis, self.codec, self.kept_mantissa_bits)
        folder = checked_folder(self.folder)
        if self.fast is not None:
            checked_path(self.fast, "fast", "a folder that every rank sees")
        reference = self.reference
        rule = "it is kept in 'memory' or read as 'stored'"
        check_given("reference", reference, is_one=reference in ("memory", "stored"), rule=rule)
        staging_bytes = checked_quantity("staging_bytes", parse_bytes, self.staging_bytes)
        fast_bytes = checked_quantity("fast_bytes", parse_bytes, self.fast_bytes)
        rate = checked_quantity("drain_bytes_per_second", parse_rate, self.drain_bytes_per_second)
        counts = {"staging_bytes": staging_bytes, "threads": self.threads, "fast_bytes": fast_bytes}
        for name, value in counts.items():
            if value is not None:
                check_count(name, value)
        if self.fast is None and (fast_bytes, rate) != (None, None):
            raise ConfigError(
                "fast_bytes and drain_bytes_per_second are of the fast tier: give its folder as fast="
            )
        copies = self.host_copies
        if copies is not None:
            copies = checked_path(copies, "host_copies", "a folder in each host's memory")
            others = {os.path.realpath(each) for each in (folder, self.fast) if each is not None}
            rule = "what lies there is removed: give a folder of its own, such as '/dev/shm/runs-a'"
            check_given("host_copies", copies, is_one=os.path.realpath(copies) not in others, rule=rule)
        settings = StoreSettings(
            self.folder,
            checked_keep(self.keep),
            encoding,
            reference,
            staging_bytes,
            self.fast,
            fast_bytes,
            rate,
            copies,
            int(self.threads or default_coders()),
            checked_schedule(self.schedule),
            checked_options(self.storage_options),
        )
        if settings.holds_reference and staging_bytes is not None:
            raise ConfigError(
                "staging_bytes bounds the memory, and reference='memory' keeps a full state there, to which the next "
                "snapshot is a difference: give reference='stored', or leave staging_bytes out"
            )
        return settings


def store_config(folder: StoreConfig | str | os.PathLike[str], arguments: Mapping[str, Any]) -> StoreConfig:
    """Return the configuration that a store was given, as one value or argument by argument. Raises: ConfigError."""
    if isinstance(folder, StoreConfig):
        if arguments:
            raise given_beside(folder, arguments)
        return folder
    known = StoreArguments.__annotations__
    for name in arguments:
        if name not in known:
            raise ConfigError(f"{name} is no argument of a store; they are {', '.join(known)}")
    return StoreConfig(folder, **arguments)
