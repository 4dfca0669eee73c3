"""`penstock simulate bundles`: which bundle_ratio suits a data set and a cache, and the bundle paper's table."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import parsed, parsed_share, refuse_together
from penstock.cli.output import Table, add_output_options, progress, show
from penstock.errors import ConfigError
from penstock.units import format_seconds, parse_bytes, parse_rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.measure.convergence import Comparison, Study
    from penstock.simulate.bundles import Choice, HitCurve, NodeHits, Recommendation, Setting

_DESCRIPTION = """\
Recommends the size of bundles for `BundleShuffle`: how many reads a buffer cache saves, and how much randomness is
lost for it. Everything is of one rank: its share of the samples, its cache, its batch.
"""
_EPILOG = """\
examples:
  penstock simulate bundles --samples 1281167 --cache 30% --epochs 20 --tolerate 0.1
  penstock simulate bundles --data photos/train --cache "8 GB" --epochs 20 --store-rate "200 MB/s" --plot bundles.png
  penstock simulate bundles --samples 100000 --cache 30% --epochs 90 --reach 25%
  penstock simulate bundles --study table1 --plot table1.png

JSON: setting, bound_hit_ratio, recommended and beside[] of bundle_ratio, bundle_samples, bundles, hit_ratio (expected,
of all reads), counted_hit_ratio (by replay, or null), randomness_lost, store_read_seconds (or null); reason; ids of
noise_growth and scatter (null where labels are unknown); accuracy[] by ids and bundle_ratio of what was trained.
--study prints its rows with hit ratios as shares.
"""
_STUDIES = ("table1", "effective-cache", "sizes")
#: Up to so many reads the recommendation is counted as well as computed: some seconds.
_MOST_COUNTED_READS = 5_000_000
_CACHE_SHARES = (0.5, 0.49)
_SIZES_SAMPLES = 20_000


def add(commands: Any) -> None:
    """Add the command to the parser of `penstock simulate`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bundles",
        help="which bundle_ratio suits a data set and a cache",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("the data set")
    data.add_argument("--samples", type=int, metavar="F", help="samples that the rank shuffles")
    data.add_argument("--data", type=Path, metavar="SOURCE", help="an image folder or list file instead")
    data.add_argument(
        "--classes", type=int, metavar="K", help="ids are sorted by so many classes of one size"
    )
    data.add_argument("--sample-size", metavar="BYTES", help='of one sample on average, such as "110 kB"')
    run = parser.add_argument_group("the training")
    run.add_argument("--cache", metavar="SIZE", help='30%% or 0.3 of the samples, their number, or "8 GB"')
    run.add_argument("--epochs", type=int, metavar="E", help="epochs to read (20; a study: 5)")
    run.add_argument("--batch-size", type=int, metavar="B", help="samples the rank reads per step (64)")
    run.add_argument("--headroom", metavar="SHARE", help="of the cache that other data takes (2%%)")
    run.add_argument(
        "--store-rate", metavar="RATE", help='of the store, such as "200 MB/s": hits become seconds'
    )
    wish = parser.add_argument_group("the wish, one of them")
    wish.add_argument("--tolerate", metavar="SHARE", help="of the randomness, at most lost (10%%)")
    wish.add_argument("--reach", metavar="SHARE", help="of all reads that are to hit")
    parser.add_argument(
        "--accuracy", type=Path, metavar="FILE", help="of benchmarks/bundles.py, to show instead"
    )
    parser.add_argument(
        "--study", choices=_STUDIES, help="a ready-made study beside the paper's numbers instead"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="SEED", help="of what is counted (%(default)s)"
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.study is None:
        _recommend(options)
        return
    of_a_choice = (
        *("samples", "data", "classes", "sample_size", "cache", "batch_size", "headroom", "store_rate"),
        *("tolerate", "reach", "accuracy"),
    )
    refuse_together(options, "study", of_a_choice)
    epochs = 5 if options.epochs is None else options.epochs
    if epochs < 2:
        raise ConfigError(f"--epochs is {epochs}; the first epoch never hits: study at least 2")
    {"table1": _table_1, "effective-cache": _effective_cache, "sizes": _sizes}[options.study](options, epochs)


# The recommendation


def _recommend(options: argparse.Namespace) -> None:
    from penstock.measure.convergence import compare, read_study
    from penstock.simulate.bundles import recommend

    study = read_study(options.accuracy)
    setting, labels, sample_bytes = _setting(options)
    found = recommend(
        setting,
        tolerate=None if options.tolerate is None else parsed_share("--tolerate", options.tolerate),
        reach=None if options.reach is None else parsed_share("--reach", options.reach),
    )
    rate = None if options.store_rate is None else parsed("--store-rate", parse_rate, options.store_rate)
    if rate is not None and sample_bytes is None:
        raise ConfigError("--store-rate needs the size of a sample: give --sample-size, or --data")
    comparisons = compare(study)
    of_ratio = {ratio: _choice_of(setting, study, ratio) for ratio in study.ratios}
    counted = _counted(setting, [*found.beside, *of_ratio.values()], options.seed)

    def seconds(choice: Choice) -> float | None:
        if rate is None or sample_bytes is None:
            return None
        return (1 - choice.hit_ratio) * setting.samples * setting.epochs * sample_bytes / rate

    def written(choice: Choice) -> dict[str, Any]:
        return {
            "bundle_ratio": choice.bundle_ratio,
            "bundle_samples": choice.bundle,
            "bundles": choice.bundles,
            "hit_ratio": choice.hit_ratio,
            "counted_hit_ratio": counted.get(choice.bundle),
            "randomness_lost": choice.randomness_lost,
            "store_read_seconds": seconds(choice),
        }

    growth = _growth(found.chosen, labels)
    scatter = None if growth is None else _is_noisy(growth)
    data = {
        "setting": asdict(setting) | {"effective_cache": setting.effective_cache},
        "bound_hit_ratio": setting.bound,
        "recommended": written(found.chosen),
        "reason": found.reason,
        "beside": [written(each) for each in found.beside],
        "ids": {"noise_growth": growth, "scatter": scatter},
        "accuracy": [asdict(row) | {"is_within_noise": row.is_within_noise} for row in comparisons],
    }
    tables = [
        _choice_table(found, counted, {each.bundle: seconds(each) for each in found.beside}),
        _accuracy_table(study, comparisons, of_ratio),
    ]
    show(options, data, tables, _notes(found, setting, growth, study))
    if options.plot is not None:
        from penstock.measure.picture import save_picture
        from penstock.measure.plot_bundles import draw_recommendation

        points = [(each, counted[each.bundle]) for each in of_ratio.values() if each.bundle in counted]
        save_picture(draw_recommendation(found, points, study), options.plot)


def _setting(options: argparse.Namespace) -> tuple[Setting, NDArray[np.int64] | None, float | None]:
    """Return the setting, the labels by id where they are known, and the bytes of a sample where they are."""
    import numpy as np

    from penstock.simulate.bundles import HEADROOM, Setting

    if (options.samples is None) == (options.data is None):
        raise ConfigError("give the data set by --samples or by --data, one of them")
    if options.cache is None:
        raise ConfigError("--cache is not given: how much of the data set does memory hold? for example 30%")
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
        _cache(options.cache, samples, sample_bytes),
        20 if options.epochs is None else options.epochs,
        min(64, samples) if options.batch_size is None else options.batch_size,
        HEADROOM if options.headroom is None else parsed_share("--headroom", options.headroom),
    )
    return setting, labels, sample_bytes


def _cache(text: str, samples: int, sample_bytes: float | None) -> int:
    """Return the cache in samples, from a share of them, their number, or bytes."""
    from penstock.simulate.caches import share_of

    if text.strip().endswith("%") or re.fullmatch(r"\s*0?\.\d+\s*", text):
        return share_of(samples, parsed_share("--cache", text))
    if re.fullmatch(r"\s*[\d_,]+\s*", text):
        return int(text.replace(",", ""))
    nbytes = parsed("--cache", parse_bytes, text)
    if sample_bytes is None:
        raise ConfigError(f"--cache {text} needs the size of a sample: give --sample-size, or --data")
    return math.floor(nbytes / sample_bytes)


def _choice_of(setting: Setting, study: Study, ratio: float) -> Choice:
    """What a ratio of the study means here; its bundle of one sample is a bundle of one sample here too."""
    from penstock.plan import BundleShuffle
    from penstock.simulate.bundles import Choice

    if ratio * study.training_samples <= 1.5:
        return Choice(setting, 1)
    return Choice(setting, BundleShuffle(setting.samples, bundle_ratio=ratio).bundle)


def _counted(setting: Setting, choices: Sequence[Choice], seed: int) -> dict[int, float]:
    """Hit ratio by bundle, counted, where that takes no more than seconds."""
    from penstock.plan import BundleShuffle
    from penstock.simulate.bundles import replayed_hit_ratios

    bundles = {each.bundle: each.bundle_ratio for each in choices}
    if setting.samples * setting.epochs > _MOST_COUNTED_READS:
        return {}
    counted = {}
    with progress("counting", len(bundles)) as done:
        for bundle, ratio in bundles.items():
            order = BundleShuffle(setting.samples, seed, ratio)
            hits = replayed_hit_ratios(order, setting.epochs, [setting.effective_cache])
            counted[bundle] = float(hits[0])
            done(len(counted))
    return counted


def _growth(chosen: Choice, labels: NDArray[np.int64] | None) -> float | None:
    from penstock.simulate.bundles import batch_noise, label_variance

    if labels is None:
        return None
    setting = chosen.setting
    between = max(label_variance(labels, max(chosen.bundle, setting.batch_size)), 0.0)
    return batch_noise(setting.samples, chosen.bundle, setting.batch_size, between).growth


def _is_noisy(growth: float) -> bool:
    from penstock.simulate.bundles import NOISY

    return growth > NOISY


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
                f"{choice.hit_ratio:.2%}",
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


def _accuracy_table(study: Study, rows: Sequence[Comparison], of_ratio: dict[float, Choice]) -> Table:
    cells = []
    for ratio in study.ratios:
        own = [row for row in rows if row.bundle_ratio == ratio]
        cells.append(
            (
                f"{ratio:g}" if ratio * study.training_samples > 1.5 else "one sample",
                f"{of_ratio[ratio].hit_ratio:.2%}",
                *(text for row in own for text in _accuracy_cells(row)),
            )
        )
    columns = [text for each in study.numberings for text in (f"ids {each}", "less full shuffle", "")]
    return Table(
        f"What a model learns in {study.epochs} epochs ({study.data}; test accuracy)",
        ("bundle_ratio", "hits", *columns),
        cells,
    )


def _accuracy_cells(row: Comparison) -> tuple[str, str, str]:
    difference = f"{100 * row.difference:+.2f} ± {100 * row.standard_error:.2f}"
    verdict = "" if row.bundle_ratio == 1 else ("within noise" if row.is_within_noise else "differs")
    return f"{row.mean:.2%} ± {row.spread:.2%}", difference if verdict else "", verdict


def _notes(found: Recommendation, setting: Setting, growth: float | None, study: Study) -> list[str]:
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
        elif _is_noisy(growth):
            notes.append(
                f"Do not use these bundles on the ids as they are: neighbours are alike, and a batch's mean would be "
                f"{growth:.1f} times as noisy. {scattering}."
            )
        else:
            notes.append(f"The ids can stay as they are: a batch's mean is {growth:.2f} times as noisy.")
    seeds = study.final(study.numberings[0], 1.0).size
    notes.append(
        f"Accuracies: mean and standard deviation of {seeds} seeds, differences seed by seed with their standard "
        f"error; {study.training_samples:,} samples, batches of {study.batch_size}, {study.model}."
    )
    return notes


# Ready-made studies


def _table_1(options: argparse.Namespace, epochs: int) -> None:
    import numpy as np

    from penstock.simulate.bundles import (
        PAPER_TABLE_1,
        SUN397_SAMPLES,
        best_hit_ratio,
        expected_hit_ratio,
        table_1,
    )

    rows = table_1(cache_shares=_CACHE_SHARES, epochs=epochs, seed=options.seed)
    whole, short = ([row for row in rows if row.cache_share == share] for share in _CACHE_SHARES)
    cells = []
    for row, less in zip(whole, short, strict=True):
        paper = PAPER_TABLE_1[row.nodes][row.node - 1]
        cells.append((f"{row.nodes}, node {row.node}", f"{row.samples:,}", *_pair_cells(paper, row, less)))
    all_paper = np.array([each for rows in PAPER_TABLE_1.values() for each in rows])
    summary = []
    for name, of in (("mean", np.mean), ("lowest", np.min), ("highest", np.max)):
        ours = [
            f"{100 * of([getattr(row, side) for row in part]):.2f}"
            for side in ("original", "proposed")
            for part in (whole, short)
        ]
        original, proposed = of(all_paper, axis=0)
        summary.append((name, "", f"{original:.2f}", *ours[:2], f"{proposed:.2f}", *ours[2:]))
    half = SUN397_SAMPLES // 4
    ideal = [
        f"{100 * expected_hit_ratio(SUN397_SAMPLES // 2, half, epochs, bundle):.2f}"
        for bundle in (SUN397_SAMPLES // 2, math.ceil(SUN397_SAMPLES / 20))
    ]
    bound = 100 * best_hit_ratio(SUN397_SAMPLES // 2, half, epochs)
    table = Table(
        f"Table 1: hit rates in %, SUN397 over nodes, {epochs} epochs, LRU, cache of 50 % (49 %) of a node's samples",
        ("nodes", "samples", "original: paper", "50 %", "49 %", "proposed: paper", "50 %", "49 %"),
        [*cells, *summary],
    )
    notes = [
        f"Computed for 50 %: original {ideal[0]}, proposed {ideal[1]}; no order and no policy exceeds {bound:.2f}.",
        "The paper's means are those of a cache that is a fiftieth smaller than it says: --study effective-cache.",
    ]
    data = {
        "epochs": epochs,
        "bound_hit_ratio": bound / 100,
        "rows": [
            asdict(row)
            | dict(
                zip(
                    ("paper_original", "paper_proposed"),
                    _as_shares(PAPER_TABLE_1[row.nodes][row.node - 1]),
                    strict=True,
                )
            )
            for row in rows
        ],
    }
    show(options, data, [table], notes)
    if options.plot is not None:
        from penstock.measure.picture import save_picture
        from penstock.measure.plot_bundles import draw_table_1

        save_picture(draw_table_1(rows, epochs), options.plot)


def _pair_cells(paper: tuple[float, float], row: NodeHits, less: NodeHits) -> tuple[str, ...]:
    return (
        *(f"{paper[0]:.2f}", f"{100 * row.original:.2f}", f"{100 * less.original:.2f}"),
        *(f"{paper[1]:.2f}", f"{100 * row.proposed:.2f}", f"{100 * less.proposed:.2f}"),
    )


def _as_shares(percent: tuple[float, float]) -> list[float]:
    return [round(value / 100, 6) for value in percent]


def _effective_cache(options: argparse.Namespace, epochs: int) -> None:
    from penstock.plan import BundleShuffle
    from penstock.simulate.bundles import (
        PAPER_RATIO,
        SUN397_SAMPLES,
        best_hit_ratio,
        hit_curves,
        implied_cache,
        paper_means,
    )
    from penstock.simulate.caches import share_of

    samples = SUN397_SAMPLES // 2
    shares = [share / 200 for share in range(90, 101)]
    caches = [share_of(samples, share) for share in shares]
    curves = hit_curves(samples, epochs, [1.0, PAPER_RATIO], caches, seed=options.seed)
    full, bundled = curves
    cells = [
        (
            f"{share:.1%}",
            f"{full.counted[place]:.2%}",
            f"{full.expected[place]:.2%}",
            f"{bundled.counted[place]:.2%}",
            f"{bundled.expected[place]:.2%}",
            f"{best_hit_ratio(samples, caches[place], epochs):.2%}",
        )
        for place, share in enumerate(shares)
    ]
    table = Table(
        f"Caches close below five of ten bundles: {samples:,} samples, {epochs} epochs, LRU",
        ("cache", "full: counted", "computed", "bundles: counted", "computed", "bound"),
        cells,
    )
    means = paper_means()
    implied = (
        [
            implied_cache(mean, samples, epochs, BundleShuffle(samples, bundle_ratio=ratio).bundle) / samples
            for mean, ratio in zip(means, (1.0, PAPER_RATIO), strict=True)
        ]
        if epochs == 5
        else None
    )
    notes = [
        "Computed: M samples too few for a bundle of b cost M (1 + H(b) - H(M)) misses, about M (1 + ln(b / M)).",
    ]
    if implied is not None:
        notes.append(
            f"The paper's means, {means[0]:.2%} and {means[1]:.2%}, are those of caches of {implied[0]:.1%} (full "
            f"shuffle) and {implied[1]:.1%} (bundles): 50 % less a fiftieth of it, for both columns at once."
        )
    data = {
        "samples": samples,
        "epochs": epochs,
        "cache_share": shares,
        "curves": [_curve_data(curve) for curve in curves],
        "paper_mean_hit_ratio": list(means),
        "implied_cache_share": implied,
    }
    show(options, data, [table], notes)
    if options.plot is not None:
        from penstock.measure.picture import save_picture
        from penstock.measure.plot_bundles import draw_effective_cache

        save_picture(draw_effective_cache(curves, epochs, samples), options.plot)


def _sizes(options: argparse.Namespace, epochs: int) -> None:
    from penstock.simulate.bundles import best_hit_ratio, hit_curves
    from penstock.simulate.caches import share_of

    ratios = (1.0, 0.5, 0.2, 0.1, 0.05, 0.01)
    shares = [share / 20 for share in range(1, 21)]
    caches = [share_of(_SIZES_SAMPLES, share) for share in shares]
    curves = hit_curves(_SIZES_SAMPLES, epochs, ratios, caches, seed=options.seed)
    cells = [
        (
            f"{share:.0%}",
            *(f"{curve.counted[place]:.2%}" for curve in curves),
            f"{best_hit_ratio(_SIZES_SAMPLES, caches[place], epochs):.2%}",
        )
        for place, share in enumerate(shares)
    ]
    table = Table(
        f"Hit rates by cache and bundle_ratio: {_SIZES_SAMPLES:,} samples, {epochs} epochs, LRU, counted",
        ("cache", *(f"ratio {ratio:g}" for ratio in ratios), "bound"),
        cells,
    )
    notes = ["Where the cache is a whole number of bundles, least-recently-used eviction reaches the bound."]
    data = {
        "samples": _SIZES_SAMPLES,
        "epochs": epochs,
        "cache_share": shares,
        "bound_hit_ratio": [best_hit_ratio(_SIZES_SAMPLES, cache, epochs) for cache in caches],
        "curves": [_curve_data(curve) for curve in curves],
    }
    show(options, data, [table], notes)
    if options.plot is not None:
        from penstock.measure.picture import save_picture
        from penstock.measure.plot_bundles import draw_curves

        save_picture(draw_curves(curves, epochs, _SIZES_SAMPLES), options.plot)


def _curve_data(curve: HitCurve) -> dict[str, Any]:
    return {
        "bundle_ratio": curve.bundle_ratio,
        "cache_samples": list(curve.caches),
        "counted_hit_ratio": list(curve.counted),
        "expected_hit_ratio": list(curve.expected),
    }
