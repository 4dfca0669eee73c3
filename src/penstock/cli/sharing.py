"""`penstock simulate sharing`: how often N ranks read the shared store, each other and themselves."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from penstock.cli.options import check_memory
from penstock.cli.output import Table, add_output_options, progress, show
from penstock.errors import ConfigError
from penstock.units import parse_share

if TYPE_CHECKING:
    from penstock.plan import AccessPlan
    from penstock.simulate.sharing import ReadCounts

_DESCRIPTION = """\
Counts, read by read, where N ranks that keep part of the data set find their samples: in their own tiers, with a peer,
or only in the shared store. One row per scheme, from one home by hash to samples handed on to their next user, beside
the bound that no scheme can beat: F + (E - 1) max(0, F - N C) reads of the store.
"""
_EPILOG = """\
examples:
  penstock simulate sharing --memory 1
  penstock simulate sharing --ranks 32 --batch-size 2048 --samples 200000 --epochs 10 --memory 0.5,1 --plot sharing.png

JSON: results[], one per share, each with memory_share, samples_held, least_store_reads_share and policies{}: by name
the counts reads, local, moved, store (these three make all reads), handed, filled (ahead of reads), the same as
..._share of all reads, store_reads_share (store and filled), peer_reads_share (moved and handed), and
store_reads_by_epoch[], local_by_rank[]. policies{} at the top says what each name means.
"""
_SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.0)


def add(commands: Any) -> None:
    """Add the command to the parser of `penstock simulate`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "sharing",
        help="how many reads are local, moved between ranks, or from the shared store",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shown = "(%(default)s)"
    parser.add_argument("--samples", type=int, default=20_000, metavar="F", help=shown)
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help=shown)
    parser.add_argument("--epochs", type=int, default=50, metavar="E", help=shown)
    parser.add_argument(
        "--batch-size", type=int, default=128, metavar="B", help=f"samples of all ranks {shown}"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help=f"of the shuffle {shown}")
    parser.add_argument(
        "--memory",
        type=_shares,
        default=_SHARES,
        metavar="SHARES",
        help=f"shares of the data set that all ranks together hold: N C / F ({','.join(map(str, _SHARES))}); "
        "as much as the number of ranks: every rank holds all samples; more changes nothing",
    )
    add_output_options(parser)
    parser.set_defaults(run=_run)


def _shares(text: str) -> list[float]:
    """Return the shares between commas, of which 1.5 and 150% are two ways to write one."""
    try:
        return [_share(part.strip()) for part in text.split(",")]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    if text.endswith("%"):
        return parse_share(text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no share of the data set: write for example 0.5 or 50%") from None


def _run(options: argparse.Namespace) -> None:
    from penstock.measure.plot_sharing import draw_sharing
    from penstock.simulate.sharing import SCHEMES, compare_schemes, in_memory, least_store_reads

    shares_held = options.memory
    for share in shares_held:
        if not (math.isfinite(share) and share >= 0):
            raise ConfigError(f"--memory is {share:g}; it is a share of the data set: 1 holds all of it once")
    plan = in_memory(_plan(options))
    held = [round(min(share, options.ranks) * options.samples) for share in shares_held]
    counted, bounds = [], []
    with progress("counting", len(held)) as done:
        for index, samples_held in enumerate(held):
            counted.append(compare_schemes(plan, samples_held))
            bounds.append(least_store_reads(plan, samples_held) / _reads(plan))
            done(index + 1)
    data = {
        **{name: getattr(options, name) for name in ("samples", "ranks", "epochs", "seed")},
        "batch_size": options.batch_size,
        "policies": dict(SCHEMES),
        "results": [
            {
                "memory_share": share,
                "samples_held": samples_held,
                "least_store_reads_share": bound,
                "policies": {name: _as_data(shares) for name, shares in by_scheme.items()},
            }
            for share, samples_held, bound, by_scheme in zip(shares_held, held, bounds, counted, strict=True)
        ],
    }
    if len(counted) == 1:
        tables = [_one_size(shares_held[0], counted[0], bounds[0])]
    else:
        tables = _all_sizes(shares_held, counted, bounds)
    show(options, data, tables, _notes(options), lambda: draw_sharing(shares_held, counted, bounds))


def _plan(options: argparse.Namespace) -> AccessPlan:
    """Return the plan that the options mean, a full shuffle. Raises: ConfigError naming the option or the field."""
    from penstock.plan import AccessPlan, FullShuffle

    if options.ranks < 1:
        raise ConfigError(f"--ranks is {options.ranks}; at least one rank reads the samples: raise it")
    if options.batch_size < options.ranks:
        raise ConfigError(
            f"--batch-size is {options.batch_size}, and each of {options.ranks} ranks reads at least one sample a "
            "step: raise it"
        )
    # Where the sample is, and who has it.
    check_memory("--samples", options.samples, 16)
    order = FullShuffle(options.samples, options.seed)
    return AccessPlan(order, options.batch_size, options.epochs, options.ranks)


def _reads(plan: AccessPlan) -> int:
    return sum(plan.length(epoch) for epoch in range(plan.epochs))


def _one_size(share: float, counted: dict[str, ReadCounts], bound: float) -> Table:
    rows = [
        [
            name,
            *(
                _percent(shares.share(count))
                for count in (
                    *(shares.local, shares.moved, shares.store),
                    *(shares.handed, shares.filled, shares.store_reads),
                )
            ),
        ]
        for name, shares in counted.items()
    ]
    rows.append(["no scheme below", "", "", "", "", "", _percent(bound)])
    columns = [
        *("% of all reads", "local", "moved", "store"),
        *("ahead: handed on", "ahead: store", "store in all"),
    ]
    return Table(f"All ranks together hold {share:g} of the data set", columns, rows)


def _all_sizes(
    shares_held: list[float], counted: list[dict[str, ReadCounts]], bounds: list[float]
) -> list[Table]:
    names = list(counted[0])
    store = [
        [f"{share:g}", *(_percent(s.share(s.store_reads)) for s in by_scheme.values()), _percent(bound)]
        for share, by_scheme, bound in zip(shares_held, counted, bounds, strict=True)
    ]
    local = [
        [f"{share:g}", *(_percent(s.share(s.local)) for s in by_scheme.values())]
        for share, by_scheme in zip(shares_held, counted, strict=True)
    ]
    moved = [
        [f"{share:g}", *(_percent(s.share(s.peer_reads)) for s in by_scheme.values())]
        for share, by_scheme in zip(shares_held, counted, strict=True)
    ]
    return [
        Table("Read from the shared store, % of all reads", ["N C / F", *names, "bound"], store),
        Table("Local when read, % of all reads", ["N C / F", *names], local),
        Table("Sent from rank to rank, for a read or ahead, % of all reads", ["N C / F", *names], moved),
    ]


def _notes(options: argparse.Namespace) -> list[str]:
    return [
        f"{options.samples:,} samples of equal size, {options.epochs} epochs, {options.ranks} ranks, "
        f"{options.batch_size:,} samples a step, seed {options.seed}. A read finds its sample local, moves it from "
        "another rank or takes it from the store, which makes 100 %. Besides reads, samples are handed on to another "
        "rank and fetched from the store ahead, so that no read waits for it.",
        '"local" pays where reads from other ranks make the training wait, and the more the larger the batch per rank. '
        "The global batch stays as it is, but samples that one rank holds meet in its local batch more often: "
        "statistics over a local batch (BatchNorm, unless synchronised) change. It is never chosen by itself.",
    ]


def _as_data(shares: ReadCounts) -> dict[str, Any]:
    counts = {name: getattr(shares, name) for name in ("local", "moved", "store", "handed", "filled")}
    relative = counts | {"store_reads": shares.store_reads, "peer_reads": shares.peer_reads}
    return {
        "reads": int(shares.reads.sum()),
        **{name: int(count.sum()) for name, count in counts.items()},
        **{f"{name}_share": shares.share(count) for name, count in relative.items()},
        "store_reads_by_epoch": shares.store_reads.sum(axis=1).tolist(),
        "local_by_rank": shares.local.sum(axis=0).tolist(),
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
