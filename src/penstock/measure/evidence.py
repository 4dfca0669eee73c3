"""How many reads, by how many numbers of readers, a machine can be made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.measure.fit import Level, is_still_growing
from penstock.units import format_count, format_rate, format_seconds

#: One reader alone reads each sample once at most.
LEAST_SAMPLES = 8
# Of eight reads, a single one that met another client's burst does not decide. Each reader reads twice: the first time
# all start together.
_LEAST_READS, _LEAST_READS_EACH = LEAST_SAMPLES, 2
# One reader's reads have a sixth of the time or more (two of eight slices, of what is left by memory and decoder).
_TIMES_FIRST_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Evidence:
    """levels: those with enough reads, by increasing readers, the first with one reader.

    not_measured: planned numbers of readers that read too little, or not at all.
    """

    levels: tuple[Level, ...]
    not_measured: tuple[int, ...]


def reads_needed(readers: int) -> int:
    """Return how many reads make a level."""
    return max(_LEAST_READS, _LEAST_READS_EACH * readers)


def seconds_needed(readers: int, levels: Sequence[Level]) -> float:
    """Return how long so many readers will take for the reads that make a level.

    levels: measured so far, by increasing readers, each twice the one before; at least one. They are taken to gain by
        the next doubling as much as they did by the last.
    """
    last = levels[-1]
    gain = 2.0 if len(levels) == 1 else last.bytes_per_second / levels[-2].bytes_per_second
    return reads_needed(readers) * last.mean_bytes / (last.bytes_per_second * min(2.0, max(1.0, gain)))


def weigh(
    tried: Sequence[Level], planned: Sequence[int], max_seconds: float, failures: Sequence[Exception] = ()
) -> Evidence:
    """Return the levels that can be trusted, and what is missing.

    tried: by increasing readers, those with too few reads among them.
    planned: numbers of readers that were to read, increasing from 1.
    max_seconds, failures: what the caller gave, and the reads that failed, for the message.
    Raises: ConfigError saying what was measured and what is needed, if one reader has too few reads to tell a
        latency, or if the store still got faster with every doubling of its readers and the next one is missing:
        then nothing shows how many readers it needs, nor what it delivers.
    """
    levels = tuple(level for level in tried if level.reads >= reads_needed(level.readers))
    measured = {level.readers for level in levels}
    not_measured = tuple(readers for readers in planned if readers not in measured)
    advice = "give more time, --seconds"
    if failures:
        advice = f"{format_count(len(failures), 'read')} failed ({failures[0]}): mend that, or {advice}"
    if 1 not in measured:
        reads = sum(level.reads for level in tried if level.readers == 1)
        each = f", {format_seconds(tried[0].mean_seconds)} each" if reads else ""
        seconds = _TIMES_FIRST_LEVEL * _LEAST_READS * tried[0].mean_seconds if reads else 0.0
        raise ConfigError(
            f"one reader got through {format_count(reads, 'read')} in its share of {max_seconds:g} seconds{each}; a "
            f"machine takes at least {_LEAST_READS}: {advice} {_more_than(max_seconds, seconds)}"
        )
    if not_measured and (len(levels) == 1 or is_still_growing(levels)):
        rates = ", ".join(
            f"{format_count(level.readers, 'reader')} {format_rate(level.bytes_per_second)}"
            for level in levels
        )
        raise ConfigError(
            f"{max_seconds:g} seconds were over before the store showed what limits it ({rates}; more readers were "
            f"not measured): {advice} {_more_than(max_seconds, 0.0)}"
        )
    return Evidence(levels, not_measured)


def _more_than(given_seconds: float, needed_seconds: float) -> int:
    """Return whole seconds, twice the given ones at least."""
    return max(math.ceil(needed_seconds), math.ceil(2 * given_seconds))
