"""What becomes of a batch that lacks samples: by on_error= the loop raises the error, or goes without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError, printable, reason_of
from penstock.flow.batches import StagedBatch
from penstock.loader.config import OnError


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that could not be had and was left out of its batch."""

    epoch: int
    step: int
    sample: int
    #: As the source describes it: a path that opens the file, be it printable or not.
    name: str
    #: What the error says, of which type it is unless Penstock raised it, and in which transform.
    error: str


def judge(
    staged: StagedBatch, on_error: OnError, describe: Callable[[int], str]
) -> tuple[Sequence[int], list[SkippedSample], Exception | None]:
    """Return the places of a batch that can be handed out, what is skipped, and what is to be raised instead.

    describe: names a sample. Raises: ConfigError for another answer of `on_error`; what that raises.
    """
    places = range(len(staged.samples))
    if not staged.failed:
        return places, [], None
    skipped: list[SkippedSample] = []
    for sample in staged.samples[list(staged.failed)].tolist():
        error, traceback = staged.errors[sample]
        decision = on_error(error, sample) if callable(on_error) else on_error
        if decision == "raise":
            # Without the traceback of an earlier time that it was raised, which refers to the caller's batches.
            return [], [], _placed(error.with_traceback(traceback), staged.epoch, staged.step)
        if decision != "skip":
            raise ConfigError(f'on_error returned {decision!r}; it must return "raise" or "skip"')
        name = describe(sample)
        skipped.append(SkippedSample(staged.epoch, staged.step, sample, name, _said(error, name)))
        _forget_frames(error)
    return [place for place in places if place not in staged.failed], skipped, None


def _said(error: Exception, name: str) -> str:
    """Return what an error says, with its notes but for those that name its sample."""
    notes = map(printable, getattr(error, "__notes__", ()))
    return ", ".join([printable(reason_of(error)), *(note for note in notes if printable(name) not in note)])


def _placed(error: Exception, epoch: int, step: int) -> Exception:
    """Return what to raise out of `__next__` for a sample's error, with a note about its place."""
    if isinstance(error, StopIteration):  # it would end the loop as if all had been read
        stopped = RuntimeError(f"a sample's own code raised {error!r}")
        stopped.__cause__ = error
        error = stopped
    place = f"in the batch of epoch {epoch}, step {step}"
    if place not in getattr(error, "__notes__", ()):
        error.add_note(place)
    return error


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what a traceback holds: the local variables of a worker, a sample's bytes among them."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
