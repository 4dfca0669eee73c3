"""What a comparison of layouts says, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.simulate.layout import LayoutComparison, LayoutOption, Name
from penstock.units import format_bytes, format_rate, format_seconds

#: What tables and pictures call the options.
TITLES: dict[Name, str] = {
    "samples": "each sample by itself",
    "ranges": "neighbours together",
    "sieving": "and over small holes",
    "collective": "all ranks together",
    "packed": "packed once",
    "rewritten": "rewritten in order",
}
_IN_WORDS: dict[Name, str] = {
    "samples": "reading each sample by itself",
    "ranges": "reading neighbours together",
    "sieving": "reading over small holes",
    "collective": "reading together and exchanging",
    "packed": "packing the samples once",
    "rewritten": "writing the data set anew in the order of the first epoch",
}


def verdict(comparison: LayoutComparison) -> Iterator[str]:
    """Yield sentences: which option pays, and from when on."""
    samples, best = comparison.option("samples"), comparison.best
    if comparison.request_seconds <= 0 and best.run_seconds > 0.98 * samples.run_seconds:
        yield (
            "This machine does not tell scattered from consecutive reads, so nothing is gained: give the store's "
            "`sequential` rate, or what a `request` costs."
        )
        return
    yield (
        f"A request costs {format_seconds(comparison.request_seconds)} in addition to its bytes, which come at "
        f"{format_rate(comparison.sequential_bytes_per_second)}: as much as {format_bytes(comparison.hole_bytes)}; "
        f"a sample has {format_bytes(comparison.sample_bytes)}."
    )
    packed = "" if comparison.is_packed else ", once they are packed"
    yield (
        f"A window is {comparison.window_samples:,.0f} samples, of which {100 * comparison.neighbour_share:.2g} % "
        f"follow another one of it side by side{packed}."
    )
    if best.name == "samples":
        yield "Nothing beats reading each sample by itself."
    else:
        times = samples.run_seconds / best.run_seconds
        then = f" ({best.first_epoch.how})" if best.once_seconds else ""
        yield (
            f"Best is {_IN_WORDS[best.name]}{then}: {format_seconds(best.run_seconds)} for {comparison.epochs} "
            f"epochs, {times:.2f} times as fast as each sample by itself."
        )
    found = min(option.run_seconds for option in comparison.options if not option.once_seconds)
    for option in comparison.options:
        if option.once_seconds:
            yield _when(option, found / comparison.epochs)


def verdict_on(comparison: LayoutComparison, name: Name) -> str:
    """Return in a sentence whether writing the data set anew in one way pays. Raises: as `LayoutComparison.option`."""
    found = min(option.run_seconds for option in comparison.options if not option.once_seconds)
    return _when(comparison.option(name), found / comparison.epochs)


def _when(option: LayoutOption, found_seconds: float) -> str:
    """found_seconds: of an epoch of the data set as found."""
    what = _IN_WORDS[option.name].capitalize()
    cost = f"costs {format_seconds(option.once_seconds)} and {format_bytes(option.stored_bytes)}"
    if option.break_even_epochs is None:
        return f"{what} {cost}, and never pays."
    if option.break_even_epochs == 1:
        # A later epoch as slow as before: what is gained is gained in the first one.
        once = option.later_epoch is not None and option.later_epoch.seconds > 0.999 * found_seconds
        return f"{what} {cost}, and pays {'in the first epoch alone' if once else 'from the first epoch on'}."
    here = "too many for this run" if option.break_even_epochs > option.epochs else "which this run has"
    return f"{what} {cost}, and pays from {option.break_even_epochs:,} epochs on, {here}."
