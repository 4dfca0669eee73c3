"""What must be true of a store's folder after its process, or the machine, has died."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.checkpoint.crash.injection import Trial
from tests.checkpoint.crash.subject import OpenStore, Subject

Answer = TypeVar("Answer")


class Lost(AssertionError):
    """The store did not keep its promise."""


def check_aftermath(subject: Subject, folder: Path, reported: list[int], next_step: int) -> None:
    """Open the store and save once more.

    reported: the steps that had been reported saved, ascending. next_step: one that nobody tried to save.
    Raises: Lost, saying which promise was not kept.
    """
    store = _told("the store does not open", lambda: subject.open(folder))
    try:
        _check_whole(subject, store, folder, reported)
        _told("the next save fails", lambda: store.save(next_step, subject.state(next_step)))
        _told("what goes on in the background fails", store.settle)
        _check_whole(subject, store, folder, [*reported, next_step])
    finally:
        store.close()
    if left := subject.leftovers(folder, subject.steps(folder)):
        raise Lost(f"the space of what is no snapshot did not come back: {sorted(left)}")


def check_trial(subject: Subject, folder: Path, trial: Trial, steps: list[int]) -> None:
    """Check what a series of saves that met a fault reported and left. Raises: Lost."""
    for place, visible in enumerate(trial.seen):
        _check_kept(subject, visible, trial.saved[: place + 1])
    if trial.was_killed:
        check_aftermath(subject, folder, trial.saved, steps[-1] + 1)
        return
    failed = [packet["failed"] for packet in trial.failed]
    if len(failed) > 1:
        raise Lost(f"a save failed although the fault was over: {trial.failed[1:]}")
    for packet in trial.failed:
        if not _names_a_file(packet["message"], folder):
            raise Lost(f"the error names no file of the store: {packet}")
    if sorted(trial.saved + [step for step in failed if step is not None]) != steps:
        raise Lost(f"of the steps {steps} nothing is known of some: {trial}")
    check_aftermath(subject, folder, trial.saved, steps[-1] + 1)


def _names_a_file(message: str, folder: Path) -> bool:
    """Say whether a message has the path of something in a folder, of the folder, or of one that it is in."""
    paths = re.findall(r"/[^\s:'\",;]*", message)
    return any(path.startswith(str(folder)) or folder.is_relative_to(path) for path in paths)


def _check_whole(subject: Subject, store: OpenStore, folder: Path, reported: list[int]) -> None:
    """Check that the store restores what is visible, bit for bit, and that what must be is."""
    visible = subject.steps(folder)
    for step in visible:
        restored = _told(f"the snapshot of step {step} is listed and damaged", partial(store.restore, step))
        if dict(restored) != dict(subject.state(step)):
            raise Lost(f"step {step} is restored as something else than was saved")
    _check_kept(subject, visible, reported)


def _check_kept(subject: Subject, visible: list[int], reported: list[int]) -> None:
    """Check that the latest snapshots that were reported saved are there.

    An unreported one may be there too, and retention may have acted once it was; hence the latest of all.
    """
    latest = sorted({*visible, *reported})[-subject.keep :]
    for step in reported:
        if step in latest and step not in visible:
            raise Lost(f"step {step} was reported saved and is gone; there are {visible}")


def _told(what: str, attempt: Callable[[], Answer]) -> Answer:
    try:
        return attempt()
    except Exception as failure:
        raise Lost(f"{what}: {type(failure).__name__}: {failure}") from failure
