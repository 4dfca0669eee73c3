"""`penstock simulate caches`: how often a buffer cache hits, by order, policy and size."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import ORDERS, check_memory, is_given, parsed, parsed_names, refuse_together
from penstock.cli.output import Table, add_output_options, progress, show
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.measure.plot_caches import Panel
    from penstock.plan.named import OrderName
    from penstock.simulate.cache_study import Curve, Improvement, Job, PaperGain

_POLICIES = "lru,lfu,mru,clock,fifo,min"
_DESCRIPTION = """\
Replays the requests of a training, or of a recorded trace, through a cache, for every size at once where the policy
allows. Beside the curves stands the bound: (E - 1) / E times the cache's size, which no policy and no order exceeds.
"""
_EPILOG = """\
examples:
  penstock simulate caches --samples 50000 --epochs 10 --plot caches.png
  penstock simulate caches --ranks 8 --subsets --order full,bundle:0.02 --policies lru,min --sizes 1..10%
  penstock simulate caches --order torch,my-order.npy --epochs 3
  penstock simulate caches --trace requests.csv --sizes 100,1000,10000 --json
  penstock simulate caches --figure 10 --plot figure-10.png

JSON: curves[] of order, policy and hit_ratio[], one for each of cache_share[] (relative to a rank's share of the
samples, or to the trace's objects or bytes), with lowest_rank_hit_ratio[], highest_rank_hit_ratio[] and, where a
formula is known, expected_hit_ratio[]; bound_hit_ratio[]. --figure and --small print panels[] of these.
"""
#: More sizes than this are thinned out in tables.
_MOST_ROWS = 25
_EASY_PERCENT = (1, 2, 5, *range(10, 101, 10))
_SMALL_ROWS = ("1 %", "2 %", "5 %", "10 %")
#: Under data parallelism, where sizes are a share of what each of them reads.
_SMALL_RANKS = (2, 4, 8, 16)
_SMALL_BATCH = 64


def add(commands: Any) -> None:
    """Add the command to the parser of `penstock simulate`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "caches",
        help="how often a buffer cache hits, by order, policy and size",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = parser.add_argument_group("a training")
    job.add_argument("--samples", type=int, metavar="F", help="samples of the data set (20000)")
    job.add_argument("--epochs", type=int, metavar="E", help="epochs to read (5)")
    job.add_argument("--order", metavar="NAMES", help=f"{ORDERS}, by commas (full,bundle)")
    job.add_argument("--ranks", type=int, metavar="N", help="ranks, each with a cache of its own (1)")
    job.add_argument(
        "--subsets",
        action="store_true",
        help="each rank shuffles a subset of its own, not its part of one order",
    )
    job.add_argument("--batch-size", type=int, metavar="B", help="samples of a global batch (64 a rank)")
    job.add_argument("--seed", type=int, metavar="SEED", help="of the shuffles (0)")
    trace = parser.add_argument_group("or a recorded trace")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="in a format of libCacheSim")
    trace.add_argument(
        "--format", metavar="NAME", help="txt, csv, oracleGeneral or vscsi (by the file's name)"
    )
    trace.add_argument("--columns", metavar="NAMES", help="of a csv file, for example time,-,id,size")
    trace.add_argument(
        "--bytes", action="store_true", help="sizes are bytes, of unequal objects (lru and fifo)"
    )
    ready = parser.add_argument_group("or a ready-made study")
    ready.add_argument(
        "--figure", choices=("5", "10"), help="that figure of the bundle paper, beside its numbers"
    )
    ready.add_argument("--small", action="store_true", help="caches of 1 to 10 %% under data parallelism")
    parser.add_argument("--policies", metavar="NAMES", help=f"({_POLICIES}); also perfect-lfu")
    parser.add_argument(
        "--sizes", metavar="SIZES", help="1..100%%, or objects (with --bytes: 10 GB), by commas"
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    _check_together(options)
    if options.trace is not None:
        _run_trace(options)
    elif options.figure is not None:
        _run_figure(options)
    elif options.small:
        _run_small(options)
    else:
        _run_job(options)


def _check_together(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    job = ("samples", "epochs", "order", "ranks", "subsets", "batch_size", "seed")
    trace = ("format", "columns", "bytes")
    excluded = {
        "trace": (*job, "figure", "small"),
        "figure": ("samples", "order", "ranks", "subsets", "batch_size", "small", "policies", "sizes"),
        "small": ("ranks", "subsets", "batch_size", "policies", "sizes"),
    }
    for mode, others in excluded.items():
        refuse_together(options, mode, others)
    for other in trace:
        if is_given(options, other) and options.trace is None:
            raise ConfigError(f"--{other} is about a trace: name its file by --trace")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# A training


def _run_job(options: argparse.Namespace) -> None:
    from penstock.simulate.cache_study import Job

    ranks = _or(options.ranks, 1)
    samples, epochs = _or(options.samples, 20_000), _or(options.epochs, 5)
    _check_memory(samples, epochs, ranks)
    job = Job(
        samples=samples,
        epochs=epochs,
        ranks=ranks,
        own_subsets=options.subsets,
        batch_size=_or(options.batch_size, 64 * max(ranks, 1)),
        seed=_or(options.seed, 0),
    )
    orders = _orders(_or(options.order, "full,bundle"))
    policies = _policies(_or(options.policies, _POLICIES))
    shares = _shares(_or(options.sizes, "1..100%"), job.own_samples(0))
    curves = _curves(job, orders, policies, shares)
    bound = job.bound(shares)
    tables = []
    panels = []
    for order in orders:
        lines = [curve for curve in curves if curve.order == order.name]
        expected = job.expected(order, shares) if "lru" in policies else None
        columns = {curve.policy.upper(): curve.hit_ratio for curve in lines}
        if expected is not None:
            columns["LRU by formula"] = expected
        sizes = [job.cache_samples(0, share) for share in shares]
        tables.append(_table(_label(order), shares, sizes, "samples", columns | {"bound": bound}))
        panels.append(
            _panel(_label(order), shares, {each.policy.upper(): each for each in lines}, bound, job)
        )
    show(options, _job_data(job, shares, curves, bound), tables, _job_notes(job, orders, shares))
    _plot(options, panels, _of_what(job))


def _check_memory(samples: int, epochs: int, ranks: int) -> None:
    """Refuse a run of which one rank's reads, and when each comes back, have no room."""
    check_memory("--samples", samples, 16 * max(epochs, 1) / max(ranks, 1))


def _job_notes(job: Job, orders: Sequence[OrderName], shares: Sequence[float]) -> list[str]:
    notes = [
        f"{job.samples:,} samples, {job.epochs} epochs, {_who(job)}, seed {job.seed}. "
        "Hit rates in % of all requests, the first epoch's included."
    ]
    if job.ranks > 1 and not job.own_subsets:
        notes.append(
            "The bound is that of ranks that know what the others hold; a cache that serves its own rank alone "
            "is bounded by MIN."
        )
        if job.batch_size % job.ranks == 0 and any(order.name == "full" for order in orders):
            notes += _agreed_caches(job, shares)
    return notes


def _agreed_caches(job: Job, shares: Sequence[float]) -> list[str]:
    """Say how caches of these sizes are counted where the ranks agree on who keeps what."""
    easy = [share for share in shares if round(100 * share, 9) in _EASY_PERCENT]
    chosen = easy or [*shares[:: -(-len(shares) // len(_EASY_PERCENT))]]
    # Both commands call the size of a cache its share of the data: c of each rank's share is N C / F of all of it.
    return [
        "Caches that ranks agree on (hash, frequency, cover, push, cover + local), under the same job's full shuffle:",
        f"  penstock simulate sharing --samples {job.samples} --ranks {job.ranks} --epochs {job.epochs} "
        f"--batch {job.batch_size // job.ranks} --seed {job.seed} --cache {' '.join(f'{c:.10g}' for c in chosen)}",
    ]


def _who(job: Job) -> str:
    if job.ranks == 1:
        return "one rank"
    how = (
        "each shuffling its own subset" if job.own_subsets else f"sharing one order, {job.batch_size} a batch"
    )
    return f"{job.ranks} ranks {how} (sizes are of a rank's share, hit rates of all ranks together)"


def _of_what(job: Job) -> str:
    return "samples" if job.ranks == 1 else "a rank's share"


def _curves(
    job: Job, orders: Sequence[OrderName], policies: Sequence[str], shares: Sequence[float]
) -> list[Curve]:
    from penstock.simulate.cache_study import job_curve

    curves = []
    with progress("replaying", len(orders) * len(policies)) as done:
        for order in orders:
            for policy in policies:
                curves.append(job_curve(job, order, policy, shares))
                done(len(curves))
    return curves


def _job_data(
    job: Job, shares: Sequence[float], curves: Sequence[Curve], bound: NDArray[np.float64]
) -> dict[str, Any]:
    from penstock.plan.named import OrderName

    written = []
    for curve in curves:
        data = _curve_data(curve)
        expected = job.expected(OrderName(curve.order), shares) if curve.policy == "lru" else None
        written.append(data | {"expected_hit_ratio": None if expected is None else expected.tolist()})
    return {
        "job": asdict(job),
        "cache_share": list(shares),
        "cache_samples": [job.cache_samples(0, share) for share in shares],
        "bound_hit_ratio": bound.tolist(),
        "curves": written,
    }


def _curve_data(curve: Curve) -> dict[str, Any]:
    return {
        "order": curve.order,
        "policy": curve.policy,
        "hit_ratio": curve.hit_ratio.tolist(),
        "lowest_rank_hit_ratio": curve.lowest.tolist(),
        "highest_rank_hit_ratio": curve.highest.tolist(),
    }


# A trace


def _run_trace(options: argparse.Namespace) -> None:
    import numpy as np

    from penstock.simulate.cache_study import string_curve
    from penstock.simulate.caches import share_of
    from penstock.trace.references import read_references

    columns = None if options.columns is None else options.columns.split(",")
    references = read_references(options.trace, options.format, columns=columns)
    if not len(references):
        raise ConfigError(f"{options.trace} has no requests")
    objects, first = np.unique(references.ids, return_index=True)
    total_bytes = int(references.sizes_bytes[first].sum())
    sizes_bytes = references.sizes_bytes if options.bytes else None
    whole = total_bytes if options.bytes else objects.size
    policies = _policies(_or(options.policies, "lru,fifo" if options.bytes else _POLICIES))
    shares = _shares(_or(options.sizes, "1..100%"), whole, is_bytes=options.bytes)
    sizes = [share_of(whole, share) for share in shares]
    curves = []
    with progress("replaying", len(policies)) as done:
        for policy in policies:
            curves.append(string_curve(references.ids, policy, sizes, sizes_bytes=sizes_bytes))
            done(len(curves))
    unit = "bytes" if options.bytes else "objects"
    data = {
        "trace": {
            "file": str(options.trace),
            "requests": len(references),
            "objects": int(objects.size),
            "objects_bytes": total_bytes,
        },
        "cache_share": shares,
        f"cache_{unit}": sizes,
        "curves": [_curve_data(curve) for curve in curves],
    }
    named = {curve.policy.upper(): curve for curve in curves}
    table = _table(
        options.trace.name, shares, sizes, unit, {name: each.hit_ratio for name, each in named.items()}
    )
    first_uses = objects.size / len(references)
    notes = [
        f"{len(references):,} requests for {objects.size:,} objects; {first_uses:.1%} are an object's first, which no "
        f"cache hits. Sizes are of all {unit}."
    ]
    if references.first_text:
        line, text = references.first_text
        notes.append(
            f"Ids are text, numbered by first appearance: line {line} has {text[:40]!r}, which is no whole number."
        )
    if "min" in policies:
        notes.append("MIN is the bound for this string.")
    show(options, data, [table], notes)
    _plot(options, [_panel(options.trace.name, shares, named, None, None)], f"the trace's {unit}")


# Ready-made studies


def _run_figure(options: argparse.Namespace) -> None:
    from penstock.plan.named import OrderName
    from penstock.simulate import cache_study as study

    shares = [percent / 100 for percent in range(101)]
    orders = [OrderName("full"), OrderName("bundle")]
    setting = {"epochs": _or(options.epochs, 5), "seed": _or(options.seed, 0)}
    if options.figure == "5":
        of_name = {"ImageNet100": study.IMAGENET100_SAMPLES, "Food101": study.FOOD101_SAMPLES}
        parts = [
            (f"{name}, LRU", study.Job(samples, **setting), "lru", study.PAPER_FIGURE_5[name])
            for name, samples in of_name.items()
        ]
    else:
        job = study.Job(study.FOOD101_SAMPLES, **setting)
        parts = [
            (f"Food101, {policy.upper()}", job, policy, paper)
            for policy, paper in study.PAPER_FIGURE_10.items()
        ]
    tables, panels, data = [], [], []
    compared: dict[str, tuple[Improvement, PaperGain]] = {}
    for title, job, policy, paper in parts:
        curves = _curves(job, orders, [policy], shares)
        bound = job.bound(shares)
        sizes = [job.cache_samples(0, share) for share in shares]
        columns = {_label(order): curve.hit_ratio for order, curve in zip(orders, curves, strict=True)}
        expected = {
            f"{_label(order)}, by formula": ratios
            for order in orders
            if policy == "lru" and (ratios := job.expected(order, shares)) is not None
        }
        tables.append(_table(title, shares, sizes, "samples", columns | expected | {"bound": bound}))
        lines = {_label(order): curve for order, curve in zip(orders, curves, strict=True)}
        panels.append(_panel(title, shares, lines, bound, job))
        # The paper's axis has a mark every 10 %.
        every_tenth = slice(10, None, 10)
        gained = study.improvement(*(curve.hit_ratio[every_tenth] for curve in curves))
        compared[title] = (gained, paper)
        data.append(
            {"name": title}
            | _job_data(job, shares, curves, bound)
            | {"improvement": asdict(gained), "paper_improvement": asdict(paper)}
        )
    tables.append(_improvement_table(compared))
    show(options, {"figure": options.figure, "panels": data}, tables, _IMPROVEMENT_NOTES)
    _plot(options, panels, "samples")


_IMPROVEMENT_NOTES = (
    "Improvements: mean (most) over cache sizes 10, 20, ... 100 %. The paper does not say how its own are computed, "
    "nor over which sizes.",
    "Its Table 1, 12 % against 37 % at half size, is an improvement of 68 % as 1 - full/bundle, "
    "210 % as bundle/full - 1, 25 points, and 29 % of misses: only the first fits between its 40.7 % on average and "
    "74.1 % at most.",
    "In-cache LFU narrows the gap, as in the paper; LFU with counts of the whole run (perfect-lfu) would equal LRU.",
)


def _improvement_table(compared: dict[str, tuple[Improvement, PaperGain]]) -> Table:
    def both(pair: tuple[float, float], unit: str = " %") -> str:
        mean, most = (round(100 * each, 1) + 0.0 for each in pair)  # no minus before a zero
        return f"{mean:.1f} ({most:.1f}){unit}"

    rows = [
        (
            title,
            "almost the same" if paper.most is None else both((paper.mean, paper.most)),
            both(gained.of_new_hits),
            both(gained.relative),
            both(gained.difference, " points"),
            both(gained.of_old_misses),
        )
        for title, (gained, paper) in compared.items()
    ]
    columns = (
        "bundles for full shuffle",
        "paper",
        "1 - full/bundle",
        "bundle/full - 1",
        "difference",
        "misses saved",
    )
    return Table("What bundles improve", columns, rows)


def _run_small(options: argparse.Namespace) -> None:
    from penstock.simulate.cache_study import Job

    shares = [percent / 100 for percent in range(1, 11)]
    orders = _orders(_or(options.order, "full,bundle,bundle:0.02,bundle:0.01"))
    samples = _or(options.samples, 108_754)  # SUN397, with which the paper shows data parallelism
    setting = {"epochs": _or(options.epochs, 5), "seed": _or(options.seed, 0)}
    _check_memory(samples, setting["epochs"], min(_SMALL_RANKS))
    tables, panels, data = [], [], []
    shared: dict[int, tuple[Sequence[Curve], Curve, NDArray[np.float64]]] = {}
    for own_subsets in (True, False):
        way = "own subsets" if own_subsets else "one shared order"
        rows: list[list[str]] = []
        header: list[str] = []
        for ranks in _SMALL_RANKS:
            batch = _SMALL_BATCH * ranks
            job = Job(samples, ranks=ranks, own_subsets=own_subsets, batch_size=batch, **setting)
            curves = _curves(job, orders, ["lru"], shares)
            (best,) = _curves(job, orders[:1], ["min"], shares)
            bound = job.bound(shares)
            if not own_subsets:
                shared[ranks] = curves, best, bound
            lines = {_label(order): curve for order, curve in zip(orders, curves, strict=True)}
            lines[f"MIN, {_label(orders[0])}"] = best
            sizes = [job.cache_samples(0, share) for share in shares]
            columns = {name: curve.hit_ratio for name, curve in lines.items()}
            part = _table("", shares, sizes, "samples", columns | {"bound": bound})
            header = ["ranks", *part.columns]
            rows += [[str(ranks), *row] for row in part.rows if row[0] in _SMALL_ROWS]
            data.append({"name": f"{ranks} ranks, {way}"} | _job_data(job, shares, [*curves, best], bound))
            if ranks == 4:
                panels.append(_panel(f"{ranks} ranks, {way}, LRU", shares, lines, bound, job))
        tables.append(Table(f"LRU, {way}", header, rows))
    notes = [
        f"{samples:,} samples, {setting['epochs']} epochs; sizes are of a rank's share, hit rates of all ranks "
        "together.",
        "Own subsets: a small cache does as well as on one rank, if a bundle is no larger than the cache.",
        *_shared_notes(shared, shares, setting["epochs"]),
        "Caches that ranks agree on, counted for the same job:",
        f"  penstock simulate sharing --small --samples {samples} --ranks 16 --epochs {setting['epochs']} "
        f"--batch {_SMALL_BATCH} --seed {setting['seed']}",
    ]
    show(options, {"panels": data}, tables, notes)
    _plot(options, panels, "a rank's share")


def _shared_notes(
    shared: dict[int, tuple[Sequence[Curve], Curve, NDArray[np.float64]]],
    shares: Sequence[float],
    epochs: int,
) -> list[str]:
    """Say how much of the bound LRU and MIN reach where all ranks share one order.

    shared: by the number of ranks N, LRU's curve of each order, MIN's, and the bound. Sizes without a bound, and
        caches of no sample, count for nothing.
    """
    most_of_lru = 0.0
    #: By whether N is above E: the least share of the bound that MIN reaches, and where.
    least_of_min: dict[bool, tuple[float, int, float]] = {}
    for ranks, (curves, best, bound) in shared.items():
        for at, share in enumerate(shares):
            if bound[at] == 0:
                continue
            most_of_lru = max(most_of_lru, *(curve.hit_ratio[at] / bound[at] for curve in curves))
            reached = (float(best.hit_ratio[at] / bound[at]), ranks, share)
            is_seldom = ranks > epochs
            least_of_min[is_seldom] = min(reached, least_of_min.get(is_seldom, reached))
    if not least_of_min:
        return ["With one epoch nothing comes back, whatever the cache."]
    notes = [
        "One shared order: a sample comes back to the same rank after N epochs on average, so that LRU reaches at most "
        f"{100 * most_of_lru:.0f} % of the bound, whatever the order."
    ]
    if False in least_of_min:
        least, ranks, share = least_of_min[False]
        notes.append(
            f"MIN, which knows when it comes, reaches at least {100 * least:.1f} % of it ({ranks} ranks, "
            f"{100 * share:g} %) up to as many ranks as epochs: the plan is needed, not a friendlier order."
        )
    if True in least_of_min:
        least, ranks, share = least_of_min[True]
        notes.append(
            "On more ranks than epochs a rank seldom reads a sample twice, and MIN by itself reaches "
            f"{100 * least:.1f} % at the least ({ranks} ranks, {100 * share:g} %): beyond that it takes caches that "
            "ranks agree on."
        )
    return notes


# What all share


def _orders(text: str) -> list[OrderName]:
    from penstock.plan.named import OrderName

    return [OrderName(name) for name in parsed_names(text, "--order")]


def _policies(text: str) -> list[str]:
    from penstock.policy.eviction import check_eviction

    names = parsed_names(text, "--policies")
    for name in names:
        check_eviction(name)
    return names


def _label(order: OrderName) -> str:
    ids = "scattered " if order.is_scattered else ""
    if order.bundle_ratio is not None:
        return f"{ids}bundles of {100 * order.bundle_ratio:g} %"
    names = {"full": "full shuffle", "torch": "PyTorch's shuffle", "sequential": f"{ids}sequential"}
    return names.get(order.kind, Path(order.name).name)


def _shares(text: str, whole: int, *, is_bytes: bool = False) -> list[float]:
    """Return sizes relative to the whole, ascending: of "1..100%" or "5%,10%" or "1000,2000" or "1 MB,2 MB"."""
    from penstock.units import parse_bytes, parse_share

    shares: set[float] = set()
    for part in text.split(","):
        word = part.strip()
        match = re.fullmatch(r"(\d+)\.\.(\d+) *%", word)
        if match and int(match[1]) <= int(match[2]) <= 1000:
            shares.update(percent / 100 for percent in range(int(match[1]), int(match[2]) + 1))
        elif word.endswith("%") and ".." not in word:
            shares.add(parsed("--sizes", parse_share, word))
        elif is_bytes and word:
            shares.add(_relative(word, parsed("--sizes", parse_bytes, word), whole))
        elif word.isdecimal():
            shares.add(_relative(word, float(word), whole))
        else:
            raise ConfigError(
                f"--sizes has {word!r}; sizes are like 1..100%, or 5%,10%, or objects like 1000,2000 "
                "(with --bytes: 10 MB)"
            )
    return sorted(shares)


def _relative(word: str, amount: float, whole: int) -> float:
    from penstock.simulate.caches import LARGEST_CACHE

    if amount > LARGEST_CACHE:
        raise ConfigError(f"--sizes has {word!r}, larger than any cache: 100% already holds everything")
    return amount / whole


def _table(
    title: str,
    shares: Sequence[float],
    sizes: Sequence[int],
    unit: str,
    columns: dict[str, NDArray[np.float64]],
) -> Table:
    """Return hit rates by cache size, of some of the sizes where there are many."""
    shown = range(len(shares))
    if len(shares) > _MOST_ROWS:
        easy = [index for index in shown if round(100 * shares[index], 9) in _EASY_PERCENT]
        shown = easy or shown[:: -(-len(shares) // _MOST_ROWS)]  # type: ignore[assignment]
    rows = [
        [
            f"{100 * shares[at]:.4g} %",
            f"{sizes[at]:,}",
            *(f"{100 * ratios[at]:.2f}" for ratios in columns.values()),
        ]
        for at in shown
    ]
    return Table(title, ["cache", unit, *columns], rows)


def _panel(
    title: str,
    shares: Sequence[float],
    curves: dict[str, Curve],
    bound: NDArray[np.float64] | None,
    job: Job | None,
) -> Panel:
    import numpy as np

    from penstock.measure.plot_caches import Line, Panel

    cache_share = np.array(shares)
    lines = [Line(label, cache_share, curve.hit_ratio) for label, curve in curves.items()]
    if bound is None or job is None:
        return Panel(title, lines)
    return Panel(title, lines, Line(f"bound: {job.epochs - 1}/{job.epochs} of the cache", cache_share, bound))


def _plot(options: argparse.Namespace, panels: Sequence[Panel], of_what: str) -> None:
    if options.plot is None:
        return
    from penstock.measure.plot_caches import plot_caches

    plot_caches(panels, options.plot, of_what=of_what)
