"""`penstock snapshots study`: how alike your snapshots are, and what each way of storing them would take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import given, parsed_size
from penstock.cli.output import Table, add_command, add_output_options, progress, show
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.measure.snapshot_study import SnapshotStudy
    from penstock.simulate.snapshots import Method, SnapshotTimes, StoredRun

_DESCRIPTION = """\
Compares the snapshots of a training with each other, stores them in eight ways, the seven of the delta-snapshot paper
and Penstock's own, and shows what each would write, need and cost. Nothing is changed; every block is encoded, decoded
and compared.
"""
_EPILOG = """\
examples:
  penstock snapshots study runs/a
  penstock snapshots study s3://bucket/runs/a --fast /local/nvme/a
  penstock snapshots study checkpoints/ --only "model/*" --storage "10 GB" --plot study.png

DIR is a snapshot store, or has a file for each snapshot, in the order of the numbers in their names: .safetensors, .pt,
.pth, .bin, .ckpt, .npy, .npz, or folders with Hugging Face's model.safetensors. Without --only all floating-point
tensors are compared: weights, and the optimizer's where they are saved with them. Memory: a few blocks of each
snapshot. Time: gzip's, some 20 MB/s a processor, three times.

JSON, all explained in docs/howto/study-your-snapshots.md: snapshots[], tensors, parameters, bytes, left_out[];
likeness[]; exponents{}; results[]; storage[]; processor[]; advice[]; drive{}.
"""
_SAME_BITS = range(12, 3, -1)
_MOST_LEFT_OUT = 3


def add(commands: Any) -> None:
    summary = "how alike your snapshots are, and what each way of storing them would take"
    parser = add_command(commands, "study", _run, summary, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "folder", metavar="DIR", help="a snapshot store, also as s3://bucket/runs/a, or a folder of files"
    )
    parser.add_argument("--fast", type=Path, metavar="DIR", help="the store's fast tier, if it has one")
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help='tensors whose names fit, as "model/*"; may be repeated (all floating-point ones)',
    )
    parser.add_argument(
        "--storage", metavar="SIZE", help='space for snapshots, as "10 GB", for the advice on snap_dis'
    )
    add_output_options(parser)


def _run(options: argparse.Namespace) -> None:
    from penstock.measure.plot_snapshot_study import draw_study
    from penstock.measure.snapshot_sequences import common_layouts, open_snapshots
    from penstock.measure.snapshot_study import count_blocks, drive_for, study_snapshots
    from penstock.simulate.snapshots import (
        METHODS,
        OWN_METHOD,
        SNAP_DISTANCES,
        TIMED_SNAP_DIS,
        compare_methods,
        time_snapshots,
    )

    storage = given(options, "storage", parsed_size)
    snapshots = open_snapshots(options.folder, options.fast)
    try:
        layouts, left_out = common_layouts(snapshots, options.only)
        with progress(f"{len(snapshots.names)} snapshots", 2 * count_blocks(layouts)) as done:
            study = study_snapshots(snapshots, layouts, name=Path(options.folder).name, done=done)
    finally:
        snapshots.close()
    drive, times_as_large = drive_for(study)
    methods = (*METHODS, OWN_METHOD)
    timed = {}
    with progress("drive", (len(methods) + 1) * len(SNAP_DISTANCES)) as done:
        runs = compare_methods(drive, [study.sizes], methods, SNAP_DISTANCES, done=done)
        for index, method in enumerate((*METHODS[-2:], OWN_METHOD)):
            timed[method] = time_snapshots(drive, study.sizes, method, TIMED_SNAP_DIS)
            done(len(runs) + index + 1)
    likeness = _likeness_data(study)
    written = _written_data(study, runs)
    kept = {method: _storage_data(study, method, times) for method, times in timed.items()}
    processor = _processor_data(study)
    advice = [_advice_data(study, method, storage) for method in timed]
    data = {
        "snapshots": list(study.names),
        "tensors": len(layouts),
        "parameters": study.sizes.parameters,
        "bytes": study.nbytes,
        "left_out": list(left_out),
        "likeness": likeness,
        "exponents": _exponents_data(study),
        "results": written,
        "storage": [row for rows in kept.values() for row in rows],
        "processor": processor,
        "advice": advice,
        "storage_bytes": storage,
        "drive": {"exported_bytes": drive.ssd.exported_pages * drive.ssd.page_bytes, "times": times_as_large},
    }
    tables = [
        _likeness_table(likeness),
        _exponents_table(study),
        _written_table(written),
        *(_storage_table(method, rows) for method, rows in kept.items()),
        _processor_table(processor),
    ]
    notes = _notes(options, study, left_out, times_as_large, advice)
    show(options, data, tables, notes, lambda: draw_study(study, runs))


# -- How alike they are ----------------------------------------------------------------------------------


def _likeness_data(study: SnapshotStudy) -> list[dict[str, Any]]:
    return [
        {
            "earlier": likeness.names[0],
            "later": likeness.names[1],
            "same_heading_bits": {str(bits): likeness.share(bits) for bits in _SAME_BITS},
            "equal_parameters": likeness.equal_words,
            "equal_pages": likeness.equal_pages,
            "pages": likeness.pages,
        }
        for likeness in study.likenesses
    ]


def _likeness_table(rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        "Like the one before: parameters with so many equal first bits (Table 1), all bits (7); 4-KiB pages (6)",
        ["snapshot", *(f"{bits} bits" for bits in _SAME_BITS), "equal", f"of {rows[0]['pages']:,} pages"],
        [
            [
                row["later"],
                *(f"{100 * share:.2f} %" for share in row["same_heading_bits"].values()),
                f"{row['equal_parameters']:,}",
                f"{row['equal_pages']:,}",
            ]
            for row in rows
        ],
    )


def _exponents_data(study: SnapshotStudy) -> dict[str, dict[str, int]]:
    return {
        dtype: {str(exponent): int(counts[exponent]) for exponent in counts.nonzero()[0]}
        for dtype, counts in study.exponents.items()
    }


def _exponents_table(study: SnapshotStudy) -> Table:
    import numpy as np

    from penstock.checkpoint.codecs.paper import huffman_lengths

    rows = []
    for dtype, counts in study.exponents.items():
        shares = counts / counts.sum()
        used = shares[shares > 0]
        low, high = np.searchsorted(np.cumsum(shares), [0.05, 0.95])
        rows.append(
            [
                dtype,
                f"{counts.sum():,}",
                f"{used.size} of {counts.size}",
                f"{low} to {high}",
                f"{-float(used @ np.log2(used)):.2f}",
                f"{float(shares @ huffman_lengths(counts)):.2f} of {counts.size.bit_length() - 1}",
            ]
        )
    return Table(
        f"Exponents of the last snapshot (Figure 8): {study.names[-1]}",
        ["type", "parameters", "exponents in use", "nine in ten", "entropy (bits)", "Huffman (bits)"],
        rows,
    )


# -- What is written and kept ----------------------------------------------------------------------------


def _written_data(study: SnapshotStudy, runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    from penstock.measure.snapshot_study import codec_for

    complete = study.nbytes * len(study.names)
    rows = []
    for run in runs:
        assert run.result is not None, "a study has all sizes"
        assert run.stored_bytes is not None, "a study has all sizes"
        rows.append(
            {
                "encoding": run.method.name,
                "codec": codec_for(run.method),
                "scheme": run.method.scheme,
                "snap_dis": run.snap_dis,
                "stored_bytes": run.stored_bytes,
                "stored_share": run.stored_bytes / complete,
                "erases": run.result.work.erases,
                "written_pages": run.result.work.written_pages,
                "write_amplification": run.result.work.write_amplification,
            }
        )
    return rows


def _written_table(rows: Sequence[dict[str, Any]]) -> Table:
    from penstock.units import format_bytes

    complete = {row["snap_dis"]: row["erases"] for row in rows if row["encoding"] == "complete"}
    return Table(
        "Written by all snapshots (Figure 9), and blocks of the drive erased (Figure 10)",
        ["codec, scheme", "snap_dis", "written", "change", "erases", "change"],
        [
            [
                f"{row['codec']}, {row['scheme']}",
                str(row["snap_dis"]),
                format_bytes(row["stored_bytes"]),
                _change(row["stored_share"]),
                f"{row['erases']:,}",
                _change(row["erases"] / complete[row["snap_dis"]]) if complete[row["snap_dis"]] else "-",
            ]
            for row in rows
        ],
    )


def _change(share: float) -> str:
    return f"{100 * (share - 1):+.1f} %"


def _storage_data(
    study: SnapshotStudy, method: Method, times: Sequence[SnapshotTimes]
) -> list[dict[str, Any]]:
    from penstock.measure.snapshot_study import codec_for
    from penstock.policy.snap_distance import useful_bytes
    from penstock.simulate.snapshots import TIMED_SNAP_DIS

    stored = study.sizes.stored_bytes(method, TIMED_SNAP_DIS)
    assert stored is not None, "a study has these sizes"
    useful = useful_bytes(method.scheme, stored, TIMED_SNAP_DIS)
    return [
        {
            "encoding": method.name,
            "codec": codec_for(method),
            "scheme": method.scheme,
            "snap_dis": TIMED_SNAP_DIS,
            "snapshot": name,
            "stored_bytes": stored[own.snapshot],
            "useful_bytes": useful[own.snapshot],
            "useful_pages": own.useful_pages,
            "save_seconds": own.save_seconds,
            "save_processor_seconds": study.save_seconds(method, own.snapshot, TIMED_SNAP_DIS),
            "restore_seconds": own.restore_seconds,
            "restore_processor_seconds": study.restore_seconds(method, own.snapshot, TIMED_SNAP_DIS),
        }
        for name, own in zip(study.names, times, strict=True)
    ]


def _storage_table(method: Method, rows: Sequence[dict[str, Any]]) -> Table:
    from penstock.measure.snapshot_study import stored_as
    from penstock.units import format_bytes, format_seconds

    return Table(
        f"{stored_as(method)}, snap_dis {rows[0]['snap_dis']}: storage needed, time of drive and processor (Table 9)",
        ["snapshot", "own", "needed", "pages", "save: drive", "processor", "restore: drive", "processor"],
        [
            [
                row["snapshot"],
                format_bytes(row["stored_bytes"]),
                format_bytes(row["useful_bytes"]),
                f"{row['useful_pages']:,}",
                format_seconds(row["save_seconds"]),
                format_seconds(row["save_processor_seconds"]),
                format_seconds(row["restore_seconds"]),
                format_seconds(row["restore_processor_seconds"]),
            ]
            for row in rows
        ],
    )


# -- What it costs, and what to do -----------------------------------------------------------------------


def _processor_data(study: SnapshotStudy) -> list[dict[str, Any]]:
    import numpy as np

    rows = []
    for codec, tensors in study.tensor_seconds.items():
        parameters, seconds = tensors.T
        line = np.polyfit(parameters, seconds, 1) if parameters.size > 2 and np.ptp(parameters) else None
        straight = (
            None if line is None or not np.ptp(seconds) else np.corrcoef(parameters, seconds)[0, 1] ** 2
        )
        deltas = [spent for (_, earlier), spent in study.seconds[codec].items() if earlier is not None]
        decode = float(np.mean([spent.decode for spent in deltas]))
        rows.append(
            {
                "codec": codec,
                "encode_seconds": float(seconds.sum()),
                "decode_seconds": decode,
                "seconds_per_parameter": float(seconds.sum() / parameters.sum()),
                "encode_bytes_per_second": study.nbytes / float(seconds.sum()),
                "decode_bytes_per_second": study.nbytes / decode,
                "line": None
                if line is None
                else {"seconds_per_parameter": float(line[0]), "seconds_per_tensor": float(line[1])},
                "r_squared": None if straight is None else float(straight),
            }
        )
    return rows


def _processor_table(rows: Sequence[dict[str, Any]]) -> Table:
    from penstock.units import format_seconds

    return Table(
        "Time of one processor for a snapshot's delta (5.7.3)",
        ["codec", "encode", "a parameter", "in", "decode", "out", "a straight line over tensors (r²)"],
        [
            [
                row["codec"],
                format_seconds(row["encode_seconds"]),
                f"{1e9 * row['seconds_per_parameter']:.2f} ns",
                f"{row['encode_bytes_per_second'] / 1e9:.2f} GB/s",
                format_seconds(row["decode_seconds"]),
                f"{row['decode_bytes_per_second'] / 1e9:.2f} GB/s",
                "-" if row["r_squared"] is None else f"{row['r_squared']:.3f}",
            ]
            for row in rows
        ],
    )


def _advice_data(study: SnapshotStudy, method: Method, storage: int | None) -> dict[str, Any]:
    from penstock.measure.snapshot_study import advise, codec_for

    data: dict[str, Any] = {
        "encoding": method.name,
        "codec": codec_for(method),
        "scheme": method.scheme,
        "snap_dis": None,
    }
    try:
        advice = advise(study, method, storage)
    except ConfigError as error:
        return data | {"reason": str(error)}
    return data | {"snap_dis": advice.snap_dis, "reason": advice.reason}


def _notes(
    options: argparse.Namespace,
    study: SnapshotStudy,
    left_out: Sequence[str],
    times_as_large: int,
    advice: Sequence[dict[str, Any]],
) -> list[str]:
    from penstock.units import format_bytes, format_count, format_names

    which = "floating point" if options.only is None else f"what fits {' or '.join(options.only)}"
    notes = [
        f"Compared: {which}, {format_count(len(study.layouts), 'tensor')}, "
        f"{format_count(study.sizes.parameters, 'parameter')}, {format_bytes(study.nbytes)} a snapshot, "
        f"{format_count(len(study.names), 'snapshot')}."
    ]
    if left_out:
        some = format_names(left_out, _MOST_LEFT_OUT)
        notes.append(f"Left out, since not all snapshots have them alike: {some}.")
    if times_as_large > 1:
        notes.append(f"The drive is the paper's, {times_as_large} times as large, so that the snapshots fit.")
    space = "without a limit of storage" if options.storage is None else f"within {options.storage}"
    notes.append(f"Which snap_dis (Table 10), {space}:")
    notes += [
        f"  {row['codec']}, {row['scheme']}: {'none' if row['snap_dis'] is None else row['snap_dis']}, {row['reason']}."
        for row in advice
    ]
    if len(study.names) in {row["snap_dis"] for row in advice}:
        notes.append("  A distance as long as the sequence means: at least that long.")
    return notes
