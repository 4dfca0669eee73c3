"""`penstock pack`: write a data set anew, as shards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_count, parsed_size
from penstock.cli.output import Table, add_command, add_output_options, long_work, print_line, show
from penstock.cli.source_options import add_source, opened_source
from penstock.units import format_bytes, format_count

if TYPE_CHECKING:
    from penstock.store import Source

_DESCRIPTION = """\
Writes a data set anew as shards, in the order of its samples: tar as WebDataset reads it, or records (MDS, as
MosaicML's Streaming reads it; .npy for rows of numbers). Shards are read back and compared; OUT appears when all of it
is there. After Ctrl-C or a kill the same command continues. A line reports whether it pays:
docs/howto/check-and-pack.md.
"""
_EPILOG = """\
examples:
  penstock pack photos/train --to tar shards
  penstock pack photos/train --to records packed --shard-size "200 MB" --shuffle-seed 1 --machine machine.toml

JSON: source, out, open (the expression that opens it), pays (a sentence, or null without --machine); and results[], of
each shard name, samples, file_bytes, xxh3_128, endings[].
"""
#: Epochs that a training may have, where --epochs does not say.
_EPOCHS = 90
#: Reads that are counted to say whether it pays.
_COUNTED_READS = 2_000_000
_BATCH = 256


def add_pack(commands: Any) -> None:
    summary = "write a data set anew as tar shards or records"
    parser = add_command(commands, "pack", _run, summary, _DESCRIPTION, _EPILOG)
    add_source(parser)
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument("--to", choices=("tar", "records"), required=True, help="format of the shards")
    parser.add_argument("--shard-size", metavar="SIZE", help="largest size of a shard (500 MB)")
    parser.add_argument("--shuffle-seed", type=int, metavar="N", help="write the samples in a random order")
    parser.add_argument(
        "--skip", type=Path, metavar="FILE", help="leave out what `penstock check` listed there"
    )
    parser.add_argument(
        "--machine", type=Path, metavar="FILE", help="machine with the store, to report whether packing pays"
    )
    parser.add_argument(
        "--epochs", metavar="E", help=f"epochs of the training, to report whether packing pays ({_EPOCHS})"
    )
    add_output_options(parser, plot=False)


def _run(options: argparse.Namespace) -> None:
    from penstock.loader.packing import SHARD_BYTES, pack
    from penstock.loader.skips import without_bad
    from penstock.store.calls import Calls

    shard_bytes = given(options, "shard_size", parsed_size) or SHARD_BYTES
    source = opened_source(options)
    if options.skip is not None:
        source = without_bad(source, options.skip, Calls().one)
    pays = None if options.machine is None else _pays(options, source)
    if not options.json:
        print_line(pays or "Whether it pays: --machine FILE says, which penstock calibrate SOURCE writes.")
    try:
        with long_work(f"packing {options.source}", len(source), "samples") as done:
            shards, how = pack(
                source,
                options.out,
                to=options.to,
                shard_bytes=shard_bytes,
                shuffle_seed=options.shuffle_seed,
                done=done,
            )
    except KeyboardInterrupt:
        print("the same command continues", file=sys.stderr)
        raise
    data = {
        "source": options.source,
        "out": options.out,
        "open": how,
        "pays": pays,
        "results": [
            {
                "name": shard.name,
                "samples": shard.samples,
                "file_bytes": shard.file_bytes,
                "xxh3_128": shard.xxh3_128,
                "endings": list(shard.endings),
            }
            for shard in shards
        ],
    }
    nbytes = sum(shard.file_bytes for shard in shards)
    note = (
        f"packed {format_count(len(source), 'sample')} into {format_count(len(shards), 'shard')} of "
        f"{format_bytes(nbytes)} in all, read back and compared: {how}"
    )
    show(options, data, list[Table](), [note])


def _pays(options: argparse.Namespace, source: Source) -> str:
    """Return in a sentence whether it pays, as `penstock simulate layout` says it."""
    import numpy as np

    from penstock.loader.setup import read_machine
    from penstock.plan import AccessPlan, FullShuffle
    from penstock.simulate.layout import compare_layouts
    from penstock.simulate.layout_verdict import verdict_on
    from penstock.store import extents_of
    from penstock.store.calls import Calls

    epochs = given(options, "epochs", parsed_count) or _EPOCHS
    machine = read_machine(options.machine, Calls())
    assert machine is not None, "a file was given"
    batch = min(_BATCH, len(source))
    plan = AccessPlan(FullShuffle(len(source), 0), batch, epochs)
    is_packed = extents_of(source, np.zeros(1, np.int64)) is not None
    comparison = compare_layouts(
        plan, machine, source.sizes_bytes, is_packed=is_packed, counted_reads=_COUNTED_READS
    )
    return verdict_on(comparison, "rewritten" if is_packed else "packed")
