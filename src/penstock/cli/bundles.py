"""`penstock simulate bundles`: which bundle_ratio suits a data set and a cache."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed, parsed_share
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.errors import ConfigError
from penstock.units import format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.simulate.bundle_choice import Choice, Recommendation, Setting

_DESCRIPTION = """\
Recommends the size of bundles for `BundleShuffle`: how many reads a buffer cache saves, and how much randomness is
lost for it. Everything is of one rank: its share of the samples, its cache, its batch.
"""
_EPILOG = """\
examples:
  penstock simulate bundles --samples 1281167 --memory 30% --epochs 20 --tolerate 0.1
  penstock simulate bundles --data photos/train --memory "8 GB" --epochs 20 --store-rate "200 MB/s" --plot bundles.png
  penstock simulate bundles --samples 100000 --memory 30% --epochs 90 --reach 25%

JSON: setting, bound_hit_share, recommended and results[] of bundle_ratio, bundle_samples, bundles, hit_share (expected,
of all reads), counted_hit_share (by replay, or null), randomness_lost, store_read_seconds (or null); reason; ids of
noise_growth and scatter (null where labels are unknown).
"""
#: Up to so many reads the recommendation is counted as well as computed: some seconds.
_MOST_COUNTED_READS = 5_000_000


def add(commands: Any) -> None:
    summary = "which bundle_ratio suits a data set and a cache"
    parser = add_command(commands, "bundles", _run, summary, _DESCRIPTION, _EPILOG)
    data = parser.add_argument_group("the data set")
    data.add_argument("--samples", type=int, metavar="F", help="samples that the rank shuffles")
    data.add_argument("--data", type=Path, metavar="SOURCE", help="an image folder or list file instead")
    data.add_argument(
        "--classes", type=int, metavar="K", help="ids are sorted by so many classes of one size"
    )
    data.add_argument("--sample-size", metavar="BYTES", help='mean size of a sample, such as "110 kB"')
    run = parser.add_argument_group("the training")
    run.add_argument("--memory", metavar="SIZE", help='30%% or 0.3 of the samples, their number, or "8 GB"')
    run.add_argument("--epochs", type=int, metavar="E", default=20, help="epochs to read (%(default)s)")
    run.add_argument("--batch-size", type=int, metavar="B", help="samples the rank reads per step (64)")
    run.add_argument(
        "--store-rate", metavar="RATE", help='rate of the store, such as "200 MB/s": hits become seconds'
    )
    wish = parser.add_argument_group("the wish, one of them")
    wish.add_argument("--tolerate", metavar="SHARE", help="share of the randomness that may be lost (10%%)")
    wish.add_argument("--reach", metavar="SHARE", help="share of all reads that should hit")
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    from penstock.measure.plot_bundles import draw_recommendation
    from penstock.simulate.batch_noise import NOISY
    from penstock.simulate.bundle_choice import recommend

    setting, labels, sample_bytes = _setting(options)
    found = recommend(
        setting,
        tolerate=given(options, "tolerate", parsed_share),
        reach=given(options, "reach", parsed_share),
    )
    rate: float | None = given(options, "store_rate", parsed, parse_rate)
    if rate is not None and sample_bytes is None:
        raise ConfigError("--store-rate needs the size of a sample: give --sample-size, or --data")
    counted = _counted(setting, found.beside)

    def seconds(choice: Choice) -> float | None:
        if rate is None or sample_bytes is None:
            return None
        return (1 - choice.hit_share) * setting.samples * setting.epochs * sample_bytes / rate

    def written(choice: Choice) -> dict[str, Any]:
        return {
            "bundle_ratio": choice.bundle_ratio,
            "bundle_samples": choice.bundle,
            "bundles": choice.bundles,
            "hit_share": choice.hit_share,
            "counted_hit_share": counted.get(choice.bundle),
            "randomness_lost": choice.randomness_lost,
            "store_read_seconds": seconds(choice),
        }

    growth = _growth(found.chosen, labels)
    is_noisy = growth is not None and growth > NOISY
    data = {
        "setting": asdict(setting) | {"effective_cache": setting.effective_cache},
        "bound_hit_share": setting.bound,
        "recommended": written(found.chosen),
        "reason": found.reason,
        "results": [written(each) for each in found.beside],
        "ids": {"noise_growth": growth, "scatter": None if growth is None else is_noisy},
    }
    table = _choice_table(found, counted, {each.bundle: seconds(each) for each in found.beside})
    notes = _notes(found, setting, growth, is_noisy)
    show(options, data, [table], notes, lambda: draw_recommendation(found, counted))


def _setting(options: argparse.Namespace) -> tuple[Setting, NDArray[np.int64] | None, float | None]:
    """Return the setting, the labels by id where they are known, and the bytes of a sample where they are."""
    import numpy as np

    from penstock.simulate.bundle_choice import Setting

    if (options.samples is None) == (options.data is None):
        raise ConfigError("give the data set by --samples or by --data, one of them")
    if options.memory is None:
        raise ConfigError("--memory is not given: how much of the data set does memory hold? for example 30%")
    labels, sample_bytes = None, None
    samples = options.samples
    if options.data is not None:
        if options.classes is not None or options.sample_size is not None:
            raise ConfigError("--classes and --sample-size are read from --data: leave them out")
        from penstock.store import open_source

        source = open_source(options.data)
        samples, sample_bytes = len(source), float(source.sizes_bytes.mean())
        labels = np.asarray(source.labels, np.int64)
    elif options.sample_size is not None:
        sample_bytes = float(parsed("--sample-size", parse_bytes, options.sample_size))
        if sample_bytes == 0:
            raise ConfigError("--sample-size is 0; a sample has at least a byte")
    if options.classes is not None:
        if not 1 <= options.classes <= max(samples, 1):
            raise ConfigError(
                f"--classes is {options.classes}; of {samples:,} samples there are 1 to {samples:,}"
            )
        labels = np.arange(samples, dtype=np.int64) * options.classes // samples
    setting = Setting(
        samples,
        _cache(options.memory, samples, sample_bytes),
        options.epochs,
        min(64, samples) if options.batch_size is None else options.batch_size,
    )
    return setting, labels, sample_bytes


def _cache(text: str, samples: int, sample_bytes: float | None) -> int:
    """Return the cache in samples, from a share of them, their number, or bytes."""
    from penstock.simulate.caches import share_of

    if text.strip().endswith("%") or re.fullmatch(r"\s*0?\.\d+\s*", text):
        return share_of(samples, parsed_share("--memory", text))
    if re.fullmatch(r"\s*[\d_,]+\s*", text):
        return int(text.replace(",", ""))
    nbytes = parsed("--memory", parse_bytes, text)
    if sample_bytes is None:
        raise ConfigError(f"--memory {text} needs the size of a sample: give --sample-size, or --data")
    return math.floor(nbytes / sample_bytes)


def _counted(setting: Setting, choices: Sequence[Choice]) -> dict[int, float]:
    """Hit ratio by bundle, counted, where that takes no more than seconds."""
    from penstock.plan import BundleShuffle
    from penstock.simulate.bundles import replayed_hit_shares

    bundles = {each.bundle: each.bundle_ratio for each in choices}
    if setting.samples * setting.epochs > _MOST_COUNTED_READS:
        return {}
    counted = {}
    with progress("counting", len(bundles)) as done:
        for bundle, ratio in bundles.items():
            order = BundleShuffle(setting.samples, 0, ratio)
            hits = replayed_hit_shares(order, setting.epochs, [setting.effective_cache])
            counted[bundle] = float(hits[0])
            done(len(counted))
    return counted


def _growth(chosen: Choice, labels: NDArray[np.int64] | None) -> float | None:
    from penstock.simulate.batch_noise import batch_noise, label_variance

    if labels is None:
        return None
    setting = chosen.setting
    between = max(label_variance(labels, max(chosen.bundle, setting.batch_size)), 0.0)
    return batch_noise(setting.samples, chosen.bundle, setting.batch_size, between).growth


def _choice_table(
    found: Recommendation, counted: dict[int, float], seconds: dict[int, float | None]
) -> Table:
    rows = []
    for choice in found.beside:
        spent = seconds[choice.bundle]
        rows.append(
            (
                f"{choice.bundle_ratio:g}" + (" <- take this" if choice == found.chosen else ""),
                f"{choice.bundles:,}",
                f"{choice.bundle:,}",
                f"{choice.hit_share:.2%}",
                f"{counted[choice.bundle]:.2%}" if choice.bundle in counted else "-",
                f"{choice.randomness_lost:.2%}",
                "-" if spent is None else format_seconds(spent),
            )
        )
    setting = found.chosen.setting
    return Table(
        f"Bundles for {setting.samples:,} samples, a cache of {setting.cache:,}, {setting.epochs} epochs; "
        f"no order hits more than {setting.bound:.2%}",
        ("bundle_ratio", "bundles", "samples each", "hits", "counted", "randomness lost", "store reads"),
        rows,
    )


def _notes(found: Recommendation, setting: Setting, growth: float | None, is_noisy: bool) -> list[str]:
    chosen = found.chosen
    notes = [f"bundle_ratio {chosen.bundle_ratio:g}: {found.reason}."]
    if chosen.bundles > 1:
        notes.append(
            f"Randomness lost: {chosen.randomness_lost:.2%} of the noise of a batch's mean (batches of "
            f"{setting.batch_size}) comes back in every epoch."
        )
        scattering = "Scattered(BundleShuffle(...)) permutes the ids once, at no cost in hits"
        if growth is None:
            notes.append(
                f"This holds for ids in random order. A folder is sorted by class: {scattering}; see --classes."
            )
        elif is_noisy:
            notes.append(
                f"Do not use these bundles on the ids as they are: neighbours are alike, and a batch's mean would be "
                f"{growth:.1f} times as noisy. {scattering}."
            )
        else:
            notes.append(f"The ids can stay as they are: a batch's mean is {growth:.2f} times as noisy.")
    return notes
