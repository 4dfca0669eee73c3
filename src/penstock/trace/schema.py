"""What one line of a trace says: the span, shared by the runtime, the simulator and all that reads them.

A span is one thing that took time: a consumer's wait, a read, a decode, a save. A trace is an array of spans.
This module holds values only, so that what decides may import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Kind(IntEnum):
    """What a span measures, and so which of its fields carry a meaning.

    | kind     | from .. to                                                | sample | samples | bytes   | place |
    |----------|-----------------------------------------------------------|--------|---------|---------|-------|
    | `WAIT`   | the consumer asks for batch (epoch, step) .. has it       | -1     | of batch | 0      | none |
    | `STEP`   | the consumer has batch (epoch, step) .. asks for the next | -1     | of batch | 0      | none |
    | `READ`   | one call that reads a group of samples                    | first  | count   | read    | origin |
    | `HIT`    | a group taken from a memory tier, start == end allowed    | first  | count   | taken   | origin |
    | `DECODE` | the bytes of a group .. their places in the slot are filled | first | count  | see below | see below |
    | `SLOT`   | batch (epoch, step) wants a slot .. is granted one        | -1     | 0       | 0       | none |
    | `SAVE`   | a save begins to block the training .. no longer does     | -1     | 0       | of the state | none |
    | `WRITE`  | a piece of a snapshot is encoded and written .. is        | -1     | 0       | written | written to |
    | `DRAIN`  | a piece of a snapshot is copied to the slow tier .. is    | -1     | 0       | written | copied to |
    | `LOAD`   | a snapshot is wanted back .. its state is there           | -1     | 0       | read    | read from |
    | `RETRY`  | a request to a remote store that failed .. the next one, or it is given up | -1 | 0 | 0 | origin |
    | `LOCK`   | a worker asks for the interpreter's lock .. has it        | -1     | 0       | 0       | none |
    | `NODE` | a kernel of a graph's run begins, or asks to wait .. has ended | its name | 1 | 0 | none |
    | `THREADS` | other numbers of threads, or slots, were found better, start == end | -1 | how many | 0 | see below |
    | `START`  | the consumer asks .. worker processes are ready, or it has the batch | -1 | 0 | 0       | none |

    A group is what one call moved or loaded: one sample or many, all of one batch. `sample` is the first of them; the
    ids of the others are those recorded for its `flow`, if they were. A wait
    or step of a loader that does not tell its batch's size has 0 samples.

    Epoch and step are those of the batch that the work is for. A read that fills a tier in the background has
    step -1, and so has a wait that got no batch: the consumer asks, and learns that the epoch is over, gets an error,
    or is interrupted.

    Several steps of one size may be loaded together: they are ready at once. All spans but their `WAIT` and `STEP`
    name the first, and the `bytes` of `DECODE` are how many more steps were loaded with it: 0 where it was one,
    and in traces of versions that did not say so. Its place is -2 where jobs of the host had decoded the samples, else
    none.

    `flow` links what was done with the same bytes: the `READ` or `HIT` of a group and the `DECODE` of what it brought
    have the same number, and no other group of that rank has it. It is 0 where nothing is linked. Where it has the bit
    `AS_PLANNED`, the plan tells which samples the group is: those of its batch from `sample` on, where that first
    comes in the batch, and on into the steps that were loaded with it. The spans of one batch are linked by rank,
    epoch and step. `peer` is the rank whose tier `place` is, -1 for this rank's own.

    `RETRY` lies within the `READ` that it made longer; its step is that of some read at the time. Of a tier, this
    rank's or another's, it is a group in which that many samples were not had, as they were damaged or missing, and
    which were read from the source then.

    `LOCK` is a sample: a worker that has work asks every 20 ms at most, or every 100 ms where the trace alone wants to
    know, releasing the lock before. `CONSUMER`, the training's thread, records how late it woke, from 50 ms on: one
    call held the lock. Of what took a millisecond and more, the wait for a processor is left out.

    `THREADS` is of threads that read where its place is the source, of those that load where it is the staging buffer,
    and of the batch slots in use, by which batches are read ahead, where it has none. With how many a run began, its
    header says.

    `START` lies within the `WAIT` of its batch.

    `NODE` is a node, or a region of nodes that run as one function; its sample is the number of its name in the trace's
    names, its step the run's number. A region's number is followed by those of its nodes, whose names begin with a
    colon. Runs are the trace's steps, all of epoch 0; the last `STEP` of a run has as its bytes the most that
    its tensors took at a time.

    `SAVE` to `LOAD` are of snapshots, of which a loader knows nothing: their epoch is -1, their step the snapshot's,
    counted over the run, and their place a tier of the snapshots' store, 0 the one that is written first. `WRITE` and
    `DRAIN` run next to the training. They come in pieces of about a second at most: what is summed up during a
    run is then known in time.
    """

    WAIT = 0
    STEP = 1
    READ = 2
    HIT = 3
    DECODE = 4
    SLOT = 5
    SAVE = 6
    WRITE = 7
    DRAIN = 8
    LOAD = 9
    RETRY = 10
    LOCK = 11
    THREADS = 12
    NODE = 13
    START = 14


#: Worker of the training's own thread.
CONSUMER = 0
#: Place of the source, the data set's home.
SOURCE = -1
#: Place of the staging buffer; 1, 2, ... are the tiers in the machine's order.
STAGING = 0
#: Place of memory that jobs of a host keep samples in together.
JOBS_MEMORY = -2
#: Place of a span that takes bytes from nowhere.
NO_PLACE = -128
#: Sample of a span that belongs to a complete batch.
NO_SAMPLE = -1
#: Peer of a span that concerns this rank alone.
NO_PEER = -1
#: Flow of a span that is linked to no other.
NO_FLOW = 0
#: Bit of the flow of a group that needs no ids: its samples follow each other in the plan.
AS_PLANNED = 1 << 39
#: Step of what is for no batch: a background read, a wait that got none.
NO_STEP = -1
#: Epoch of what is of no epoch: saves and restores.
NO_EPOCH = -1

#: One span: 64 bytes, little-endian, without padding. `start` and `end` are seconds since the trace's origin;
#: `step` counts within the epoch; `worker` is the thread that recorded it, `rank` the process of the job.
SPAN = np.dtype(
    [
        ("start", "<f8"),
        ("end", "<f8"),
        ("sample", "<i8"),
        ("bytes", "<i8"),
        ("flow", "<u8"),
        ("epoch", "<i4"),
        ("step", "<i4"),
        ("samples", "<u4"),
        ("peer", "<i4"),
        ("kind", "u1"),
        ("place", "i1"),
        ("worker", "<u2"),
        ("rank", "<u4"),
    ]
)

#: An array of dtype `SPAN`. (NumPy's types cannot say more of a structured dtype.)
Spans = NDArray[np.void]

#: A span as so many bytes. NumPy copies a structured array field by field, ten times as slowly as its bytes.
_BYTES = np.dtype((np.void, SPAN.itemsize))

#: Which samples groups are, int64[samples], by (rank, flow).
GroupIds = Mapping[tuple[int, int], NDArray[np.int64]]


def join_spans(parts: Iterable[Spans]) -> Spans:
    """Return what `np.concatenate` does, quickly; of no parts, no spans."""
    views = [part.view(_BYTES) for part in parts]
    joined: Spans = (np.concatenate(views) if views else np.empty(0, _BYTES)).view(SPAN)
    return joined


def choose_spans(spans: Spans, which: NDArray[np.bool_]) -> Spans:
    """Return what `spans[which]` does, quickly."""
    chosen: Spans = spans.take(np.flatnonzero(which))
    return chosen


def batch_waits(spans: Spans) -> Spans:
    """Return the waits that got a batch, in the order in which they are."""
    return choose_spans(spans, (spans["kind"] == Kind.WAIT) & (spans["step"] != NO_STEP))
