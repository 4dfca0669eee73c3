"""Puts a store through power cuts and faults, one after the other, until one breaks it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tests.checkpoint.crash.aftermath import check_aftermath, check_trial
from tests.checkpoint.crash.injection import Savers, Sessions, Site, steps_of
from tests.checkpoint.crash.power import states
from tests.checkpoint.crash.recording import Recording
from tests.checkpoint.crash.subject import subject_named

Case = tuple[Site, str]


def record_saves(savers: Savers, subject: str, top: Path, sessions: Sessions) -> Recording:
    """Return what a clean series of saves in a store that is not there yet asks of the disk; `top` is left empty."""
    trial, log = savers.record(subject, top / "store", sessions)
    assert trial.is_clean(sessions), trial
    shutil.rmtree(top / "store")
    recording = Recording(top)
    recording.feed(log)
    return recording


def record_a_death_and_after(
    savers: Savers, subject: str, top: Path, site: Site, sessions: Sessions, later: Sessions
) -> Recording:
    """Return what a series killed at a site asks of the disk, and then another process on the same store."""
    first, log = savers.record(subject, top / "store", sessions, *site.injection("KILL"))
    assert first.was_killed or first.is_clean(sessions), first  # clean where a drain had less to do this time
    recording = Recording(top)
    recording.feed(log)
    second, log = savers.record(subject, top / "store", later)
    assert second.is_clean(later), second
    recording.feed(log)
    shutil.rmtree(top / "store")
    return recording


def survive_power_cuts(subject: str, recording: Recording, top: Path, count: int, *, seed: int = 0) -> int:
    """Show the store `count` states of the disk, or as many as there are; return how many.

    Raises: Lost, with a note that says which operations survived and how to see the state again.
    """
    store = subject_named(subject)
    shown = 0
    for state in states(recording, count, seed):
        state.write_to(top)
        try:
            check_aftermath(store, top / "store", list(state.reported), recording.last_step + 1)
        except AssertionError as failure:
            failure.add_note(f"{subject}: {state}")
            raise
        shutil.rmtree(top / "store", ignore_errors=True)
        shown += 1
    return shown


def cases(sites: list[Site], faults: Iterable[str]) -> list[Case]:
    """Return every fault at every site where it can come about.

    But for a close that fails, which is not carried out as it would be: a lock would stay held; see `closes`.
    """
    return [
        (site, fault)
        for fault in faults
        for site in sites
        if fault == "KILL" or (site.call != "close" and (fault != "ENOSPC" or site.takes_space))
    ]


def closes(sites: list[Site], faults: Iterable[str]) -> list[Case]:
    """Return every fault at every close: for a single session, that takes no lock twice."""
    return [(site, fault) for fault in faults for site in sites if site.call == "close"]


def sample(every: list[Case], count: int, *, seed: int = 0) -> list[Case]:
    """Return some of the cases, drawn so that each fault at each kind of call has its turn before one has two."""
    generator = np.random.default_rng(seed)
    kinds: dict[tuple[str, str], list[Case]] = {}
    for place in generator.permutation(len(every)):
        site, fault = every[place]
        kinds.setdefault((site.call, fault), []).append(every[place])
    turns = zip_longest(*kinds.values())
    return [case for turn in turns for case in turn if case is not None][:count]


def survive_faults(savers: Savers, subject: str, top: Path, sessions: Sessions, tried: list[Case]) -> int:
    """Put the store through each case, in a folder of its own; return how many of the faults came about.

    Raises: Lost, with a note that names the case.
    """
    store = subject_named(subject)
    met = 0
    for site, fault in tried:
        folder = top / "store"
        try:
            trial, came_about = savers.inject(subject, folder, sessions, site, fault)
            check_trial(store, folder, trial, steps_of(sessions))
        except AssertionError as failure:
            failure.add_note(
                f"{subject}: {fault} at call {site.n} of {site.call} in a thread, sessions {sessions}"
            )
            raise
        met += came_about
        shutil.rmtree(folder, ignore_errors=True)
    return met
