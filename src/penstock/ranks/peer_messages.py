"""What ranks and decode servers say to each other about samples: a few kinds of messages, of numbers of 64 bits.

    kind     numbers                                       sent
    ASK      the ids that are wanted                       to who keeps them; none: a probe
    ANSWER   id, size, checksum of each, in that order     back; then a part for each with its bytes
    FOLLOW                                                 to who keeps samples: send news from `number` on
    NEWS     ids that are kept, from the `number`-th on;   back, and whenever there are more
             -t: tier t gets no more
    LEAVE                                                  back: nothing is answered any more
    GREET                                                  before the first ASK, and as a probe: a part that describes
                                                           what will be asked for; ANSWER without ids: it is known
    REFUSE                                                 back: a part that says why it will never be answered

A head comes before: a mark, the version, the kind, `number` (of the request; of the first id), and the generation of
the log that the samples are kept by, which tells a rank from an earlier one at the same address; to a decode server, a
digest of the description. Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
NO_IDS = np.empty(0, np.int64)

_HEAD = struct.Struct("<4sHHQQ")
_MARK, _VERSION = b"PNST", 1

ASK, ANSWER, FOLLOW, NEWS, LEAVE, GREET, REFUSE = range(1, 8)
#: Size of a sample that is not there.
ABSENT = -1
#: Numbers of a sample in an ANSWER.
ANSWER_COLUMNS = 3
#: Ids in one message at most; more are cut.
MOST_IDS = 1 << 16
#: Bytes of samples in one message, about: what a carrier need not take more of. A single sample may be larger.
MOST_SAMPLES_BYTES = 256 << 20
#: Bytes of a message's first part at most, so that a longer one need not be received.
MOST_HEAD_BYTES = _HEAD.size + 8 * ANSWER_COLUMNS * MOST_IDS


class Message(NamedTuple):
    """A message without the bytes of samples. numbers: int64[n]."""

    kind: int
    number: int
    generation: int
    numbers: Ids


def packed(message: Message) -> bytes:
    """Return the first part of a message."""
    head = _HEAD.pack(_MARK, _VERSION, message.kind, message.number, message.generation)
    return head + message.numbers.astype("<i8", copy=False).tobytes()


def unpacked(data: Any) -> Message | None:
    """Return what a first part says; None for one that is malformed, or of another version. data: a buffer."""
    view = memoryview(data)
    numbers_bytes = view.nbytes - _HEAD.size
    if numbers_bytes < 0 or numbers_bytes % 8 or view.nbytes > MOST_HEAD_BYTES:
        return None
    mark, version, kind, number, generation = _HEAD.unpack_from(view)
    if (mark, version) != (_MARK, _VERSION) or not ASK <= kind <= REFUSE:
        return None
    numbers = np.frombuffer(view, "<i8", offset=_HEAD.size).astype(np.int64, copy=False)
    if kind == ANSWER and numbers.size % ANSWER_COLUMNS:
        return None
    return Message(kind, number, generation, numbers)


def answered(
    number: int, generation: int, ids: Ids, found: Sequence[tuple[NDArray[np.uint8], int] | None]
) -> list[Any]:
    """Return the parts of an ANSWER. found: of each id, its bytes and their checksum; None for what is not there."""
    records = np.empty((ids.size, ANSWER_COLUMNS), np.int64)
    records[:, 0] = ids
    records[:, 1] = [ABSENT if each is None else each[0].size for each in found]
    records[:, 2] = np.array([0 if each is None else each[1] for each in found], np.uint64).view(np.int64)
    parts = [b"" if each is None else each[0].reshape(-1).data for each in found]
    return [packed(Message(ANSWER, number, generation, records.ravel())), *parts]
