"""`penstock simulate caches`: how often a buffer cache hits, by order, eviction policy and size."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import ORDERS, check_memory, is_given, parsed, parsed_names, refuse_together
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from penstock.plan.parse_order import OrderName
    from penstock.simulate.cache_study import Curve, Job

_EVICTIONS = "lru,lfu,mru,clock,fifo,min"
_DESCRIPTION = """\
Replays the requests of a training, or of a recorded trace, through a cache, for every size at once where the policy
allows. Beside the curves stands the bound: (E - 1) / E times the cache's size, which no policy and no order exceeds.
"""
_EPILOG = """\
examples:
  penstock simulate caches --samples 50000 --epochs 10 --plot caches.png
  penstock simulate caches --ranks 8 --subsets --order full,bundle:0.02 --evictions lru,min --sizes 1..10%
  penstock simulate caches --order torch,my-order.npy --epochs 3
  penstock simulate caches --recording requests.csv --sizes 100,1000,10000 --json

JSON: results[] of order, eviction and hit_share[], one for each of cache_share[] (relative to a rank's share of the
samples, or to the trace's objects or bytes), with lowest_rank_hit_share[], highest_rank_hit_share[] and, where a
formula is known, expected_hit_share[]; bound_hit_share[].
"""
#: More sizes than this are thinned out in tables.
_MOST_ROWS = 25
_EASY_PERCENT = (1, 2, 5, *range(10, 101, 10))


def add(commands: Any) -> None:
    text = "how often a buffer cache hits, by order, policy and size"
    parser = add_command(commands, "caches", _run, text, _DESCRIPTION, _EPILOG)
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
    job.add_argument("--seed", type=int, metavar="SEED", help="seed of the shuffles (0)")
    trace = parser.add_argument_group("or a recorded trace")
    trace.add_argument(
        "--recording", type=Path, metavar="FILE", help="file of requests in a format of libCacheSim"
    )
    trace.add_argument(
        "--format", metavar="NAME", help="txt, csv, oracleGeneral or vscsi (by the file's name)"
    )
    trace.add_argument("--columns", metavar="NAMES", help="columns of a csv file, for example time,-,id,size")
    trace.add_argument(
        "--bytes", action="store_true", help="sizes are bytes, of unequal objects (lru and fifo)"
    )
    parser.add_argument(
        "--evictions",
        metavar="NAMES",
        help=f"eviction policies, with commas ({_EVICTIONS}); also perfect-lfu",
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZES",
        help="cache sizes, with commas: 1..100%%, or objects (with --bytes: 10 GB)",
    )
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    _check_together(options)
    if options.recording is not None:
        _run_trace(options)
    else:
        _run_job(options)


def _check_together(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    job = ("samples", "epochs", "order", "ranks", "subsets", "batch_size", "seed")
    trace = ("format", "columns", "bytes")
    refuse_together(options, "recording", job)
    for other in trace:
        if is_given(options, other) and options.recording is None:
            raise ConfigError(f"--{other} is about a recording: name its file by --recording")


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
    evictions = _evictions(_or(options.evictions, _EVICTIONS))
    shares = _shares(_or(options.sizes, "1..100%"), job.own_samples(0))
    curves = _curves(job, orders, evictions, shares)
    bound = job.bound(shares)
    sizes = [job.cache_samples(0, share) for share in shares]
    tables = []
    drawn: dict[str, dict[str, NDArray[np.float64]]] = {}
    for order in orders:
        columns = {curve.eviction.upper(): curve.hit_share for curve in curves if curve.order == order.name}
        if len(evictions) == 1:
            drawn.setdefault(evictions[0].upper(), {})[_label(order)] = columns[evictions[0].upper()]
        else:
            drawn[_label(order)] = dict(columns)
        expected = job.expected(order, shares) if "lru" in evictions else None
        if expected is not None:
            columns["LRU by formula"] = expected
        tables.append(_table(_label(order), shares, sizes, "samples", columns | {"bound": bound}))

    def draw() -> Figure:
        from penstock.measure.plot_caches import cache_panel, draw_caches

        behind = f"bound: {job.epochs - 1}/{job.epochs} of the cache", bound
        panels = [cache_panel(title, shares, lines, behind) for title, lines in drawn.items()]
        return draw_caches(panels, "samples" if job.ranks == 1 else "a rank's share")

    show(options, _job_data(job, shares, curves, bound), tables, _job_notes(job, orders), draw)


def _check_memory(samples: int, epochs: int, ranks: int) -> None:
    """Refuse a run of which one rank's reads, and when each comes back, have no space."""
    check_memory("--samples", samples, 16 * max(epochs, 1) / max(ranks, 1))


def _job_notes(job: Job, orders: Sequence[OrderName]) -> list[str]:
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
            notes.append(
                "Caches that ranks agree on: penstock simulate loading SCENARIO --policies "
                "hash-home,cover,cover+local,push (docs/reference/sharing.md)"
            )
    return notes


def _who(job: Job) -> str:
    if job.ranks == 1:
        return "one rank"
    how = (
        "each shuffling its own subset" if job.own_subsets else f"sharing one order, {job.batch_size} a batch"
    )
    return f"{job.ranks} ranks {how} (sizes are of a rank's share, hit rates of all ranks together)"


def _curves(
    job: Job, orders: Sequence[OrderName], evictions: Sequence[str], shares: Sequence[float]
) -> list[Curve]:
    from penstock.simulate.cache_study import job_curve

    curves = []
    with progress("replaying", len(orders) * len(evictions)) as done:
        for order in orders:
            for eviction in evictions:
                curves.append(job_curve(job, order, eviction, shares))
                done(len(curves))
    return curves


def _job_data(
    job: Job, shares: Sequence[float], curves: Sequence[Curve], bound: NDArray[np.float64]
) -> dict[str, Any]:
    from penstock.plan.parse_order import OrderName

    written = []
    for curve in curves:
        data = _curve_data(curve)
        expected = job.expected(OrderName(curve.order), shares) if curve.eviction == "lru" else None
        written.append(data | {"expected_hit_share": None if expected is None else expected.tolist()})
    return {
        "job": asdict(job),
        "cache_share": list(shares),
        "cache_samples": [job.cache_samples(0, share) for share in shares],
        "bound_hit_share": bound.tolist(),
        "results": written,
    }


def _curve_data(curve: Curve) -> dict[str, Any]:
    return {
        "order": curve.order,
        "eviction": curve.eviction,
        "hit_share": curve.hit_share.tolist(),
        "lowest_rank_hit_share": curve.lowest.tolist(),
        "highest_rank_hit_share": curve.highest.tolist(),
    }


# A trace


def _run_trace(options: argparse.Namespace) -> None:
    import numpy as np

    from penstock.recordings.references import read_references
    from penstock.simulate.cache_study import string_curve
    from penstock.simulate.caches import share_of

    columns = None if options.columns is None else options.columns.split(",")
    references = read_references(options.recording, options.format, columns=columns)
    if not len(references):
        raise ConfigError(f"{options.recording} has no requests")
    objects, first = np.unique(references.ids, return_index=True)
    total_bytes = int(references.sizes_bytes[first].sum())
    sizes_bytes = references.sizes_bytes if options.bytes else None
    whole = total_bytes if options.bytes else objects.size
    evictions = _evictions(_or(options.evictions, "lru,fifo" if options.bytes else _EVICTIONS))
    shares = _shares(_or(options.sizes, "1..100%"), whole, is_bytes=options.bytes)
    sizes = [share_of(whole, share) for share in shares]
    curves = []
    with progress("replaying", len(evictions)) as done:
        for eviction in evictions:
            curves.append(string_curve(references.ids, eviction, sizes, sizes_bytes=sizes_bytes))
            done(len(curves))
    unit = "bytes" if options.bytes else "objects"
    data = {
        "recording": {
            "file": str(options.recording),
            "requests": len(references),
            "objects": int(objects.size),
            "objects_bytes": total_bytes,
        },
        "cache_share": shares,
        f"cache_{unit}": sizes,
        "results": [_curve_data(curve) for curve in curves],
    }
    named = {curve.eviction.upper(): curve for curve in curves}
    table = _table(
        options.recording.name, shares, sizes, unit, {name: each.hit_share for name, each in named.items()}
    )
    first_uses = objects.size / len(references)
    notes = [
        f"{len(references):,} requests for {objects.size:,} objects; {first_uses:.1%} are an object's first, which no "
        f"cache hits. Sizes are of all {unit}."
    ]
    if references.first_text:
        line, text = references.first_text
        notes.append(
            f"Ids are text, numbered by first appearance: line {line} has {text[:40]!r}, which is no integer."
        )
    if "min" in evictions:
        notes.append("MIN is the bound for this string.")

    def draw() -> Figure:
        from penstock.measure.plot_caches import cache_panel, draw_caches

        lines = {name: each.hit_share for name, each in named.items()}
        return draw_caches([cache_panel(options.recording.name, shares, lines)], f"the trace's {unit}")

    show(options, data, [table], notes, draw)


# What all share


def _orders(text: str) -> list[OrderName]:
    from penstock.plan.parse_order import OrderName

    return [OrderName(name) for name in parsed_names(text, "--order")]


def _evictions(text: str) -> list[str]:
    from penstock.simulate.caches import check_eviction

    names = parsed_names(text, "--evictions")
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
