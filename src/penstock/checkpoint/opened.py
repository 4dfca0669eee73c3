"""What a process has open of a store: its tiers, what lies there, and what saves, prunes and drains.

`SnapshotStore` saves by it, and so does `penstock.torch.dcp`, whose ranks meet elsewhere.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.checkpoint.config import StoreSettings
from penstock.checkpoint.drain.drain_process import ProcessDrainer
from penstock.checkpoint.drain.draining import Drainer
from penstock.checkpoint.files.catalog import Catalog, describe_mistaken_folder, describe_snapshot_folder
from penstock.checkpoint.files.manifest import bytes_beside
from penstock.checkpoint.housekeeping import Housekeeping, describe_little_space
from penstock.checkpoint.state.tensors import Layout
from penstock.checkpoint.tiers.local import LocalTier
from penstock.checkpoint.tiers.throttle import Cap
from penstock.checkpoint.tiers.tier import Tier
from penstock.checkpoint.writer import SnapshotWriter
from penstock.compiling import Lease
from penstock.errors import ConfigError, printable
from penstock.flow.snapshot_spans import SnapshotSpans
from penstock.ranks import Ranks, alone
from penstock.trace.schema import Kind
from penstock.trace.trace import JSON


def quiet(report: Callable[[str], None] | None) -> Callable[[object], None]:
    """Return what reports a line and never fails: what was done is done whether or not it could be reported.

    report: such as `print_report`, which fails where standard error is closed; None: nothing is reported.
    """

    def report_line(line: object) -> None:
        if report is not None:
            with suppress(Exception):
                report(printable(str(line)))

    return report_line


def open_tier(folder: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Tier:
    """Return the tier at a path or, with "://" in it, at an address. Raises: ConfigError, DataError."""
    if isinstance(folder, str) and folder.startswith("file://"):
        # Synced, as what fsspec writes is not.
        folder = folder.removeprefix("file://")
    if isinstance(folder, str) and "://" in folder:
        from penstock.checkpoint.tiers.remote import RemoteTier

        return RemoteTier(folder, **(options or {}))
    if options:
        raise ConfigError(f"storage_options are of an address such as s3://bucket/runs; {folder} is a path")
    return LocalTier(folder)


class OpenedStore:
    """The tiers of a store, and what saves, prunes and drains there, on one rank."""

    def __init__(
        self, settings: StoreSettings, ranks: Ranks, report: Callable[[str], None], spans: SnapshotSpans
    ) -> None:
        """ranks: those that write together. report: never fails, and keeps no owner of this alive. spans: closed
            with this.

        Raises: ConfigError naming a folder that is none of its own; DataError.
        """
        self.settings, self.spans = settings, spans
        self._report = report
        #: Whether the free space was checked before the first save.
        self.is_space_checked = False
        tiers = open_tiers(settings)
        main = tiers[-1]
        self.catalog = Catalog(tiers)
        self.housekeeping = Housekeeping(self.catalog, settings.keep, settings.fast_bytes, report)
        self.drainer: Drainer | None = None
        drains: SnapshotWriter | None = None
        if settings.fast is not None:
            drains, self.drainer = self._made_drainer()
        self.writer = SnapshotWriter(
            self.catalog,
            settings.encoding,
            self.housekeeping,
            ranks,
            holds_reference=settings.holds_reference,
            drains=drains,
            threads=settings.threads,
            spans=spans,
        )
        #: While it is open another process compiles the codec, and blocks are stored as they are until it is done.
        self._lease = Lease(report)
        if warning := describe_little_space(main):
            report(warning)
        if isinstance(main, LocalTier) and (instead := describe_mistaken_folder(main.path)):
            report(f"{main.name} {instead}")
        # A store that nobody closes is not written by anybody any more: its folders are others'.
        weakref.finalize(self, _let_go_unclosed, os.getpid(), self.housekeeping, self.drainer).atexit = False

    def _made_drainer(self) -> tuple[SnapshotWriter, Drainer]:
        """Return the writer of drains, and what drains by it."""
        settings = self.settings
        fast, slow = self.catalog.tiers
        assert isinstance(fast, LocalTier), "it is a folder"
        stop = threading.Event()
        rate = settings.drain_bytes_per_second
        writer = SnapshotWriter(
            self.catalog,
            settings.encoding,
            self.housekeeping,
            alone(),
            cap=None if rate is None else Cap(slow.name, rate, stop=stop),
            spans=self.spans,
            span=Kind.DRAIN,
        )
        apart = None
        # Object stores are reached by a client of this process, with its credentials.
        if isinstance(slow, LocalTier) and os.name == "posix":
            apart = ProcessDrainer(
                fast.path, slow.path, settings.encoding, settings.threads, stop, self._report, rate
            )
        return writer, Drainer(
            self.catalog, self.housekeeping, writer, settings.threads, self._report, stop, apart
        )

    def check_first(self, step: int, tree: JSON, layouts: Sequence[Layout], least_seconds: float) -> None:
        """Check the free space before the first save; rank 0 calls it, for the tensors of all ranks.

        least_seconds: between two saves; 0 where it is not known.
        Reports that later snapshots may not fit. Raises: ConfigError if this one does not.
        """
        if self.is_space_checked:
            return
        self.housekeeping.open_for_writing()
        state_bytes = sum(layout.nbytes for layout in layouts) + bytes_beside(tree, layouts)
        warning = self.housekeeping.check_first(step, state_bytes, self.settings.encoding, least_seconds)
        if warning:
            self._report(warning)
        self.is_space_checked = True

    def raise_of_drain(self) -> None:
        """Raise what a drain failed with, once: on the rank that drains."""
        # From a fast tier that refuses, drains fail, too: that is reported, and raised at the end, and stops no save.
        if self.drainer is not None and not self.housekeeping.fast_refuses:
            self.drainer.raise_error()

    def drain(self) -> None:
        """Return once all that is to be is on the slow tier, what a process that died left included.

        Raises: ConfigError if there is no fast tier; what a drain failed with.
        """
        drainer = self.drainer
        if drainer is None:
            raise ConfigError("there is no fast tier to drain: give its folder as fast=")
        drainer.raise_error()
        self.housekeeping.open_for_writing()
        drainer.go_on()
        drainer.wait()

    def finish(self) -> None:
        """Drain what is to be drained, and close. Raises: what a drain failed with."""
        try:
            if self.drainer is not None:
                self.drainer.finish()
        finally:
            if self.drainer is not None:
                self.drainer.stop()
            self.close()

    def close(self) -> None:
        """Let go of the folders; twice is harmless. Nothing may be written any more."""
        self.writer.held = None
        self.housekeeping.close()
        self._lease.close()
        self.spans.close()


def open_tiers(settings: StoreSettings) -> list[Tier]:
    """Return the tiers of a store, the nearest first. Raises: ConfigError, DataError."""
    main = open_tier(settings.folder, settings.storage_options)
    # A store inside a snapshot would be deleted with it.
    if isinstance(main, LocalTier) and (instead := describe_snapshot_folder(main.path)):
        raise ConfigError(f"{main.name} {instead}")
    if settings.fast is None:
        return [main]
    near = LocalTier(settings.fast)
    if isinstance(main, LocalTier) and near.path.resolve() == main.path.resolve():
        raise ConfigError(
            f"both tiers are one folder: fast is {settings.fast!s} and folder {settings.folder!s}; give fast= a folder "
            "of its own, on a disk that is quicker, or leave it out"
        )
    return [near, main]


def _let_go_unclosed(process: int, housekeeping: Housekeeping, drainer: Drainer | None) -> None:
    """Let go of a store's folders once what is being drained, is. process: that the store belongs to."""
    if os.getpid() != process:
        return  # forked: the threads are not here, and their locks may be held for ever
    if drainer is None:
        housekeeping.close()
    else:
        drainer.leave(housekeeping.close)
