"""How a loader's memory is shared out between batch slots, bytes in passing and the memory tier."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.policy.decisions import OWN_BYTES
from penstock.policy.runnable import LEAST_SLOTS, NO_QUEUE, WriteQueue, why_too_small
from penstock.units import format_bytes

#: Of several steps in one slot, at most; and that a thread reads by itself to its place there.
STAGED_TOGETHER_BYTES = 16 << 20
_USUAL_SLOTS = 8
_USUALLY_IN_PASSING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A bound on memory, in parts.

    limit_bytes: what the user gave; the parts never exceed it together.
    slots: batch slots allocated from the start, of slot_bytes each.
    undecoded_bytes: of samples read and not yet decoded; see `read_bytes`.
    tier_bytes: of samples kept for later epochs.
    decoding_bytes: of pictures while they are decoded, and of the buffers of the threads that decode.
    jobs_bytes: of samples that this job and others keep together.
    most_slots: what slots were bounded to, whatever the memory holds; 0 where nobody did.
    queued_bytes: of samples that wait to be written to disks.
    """

    limit_bytes: int
    slot_bytes: int
    slots: int
    undecoded_bytes: int
    tier_bytes: int
    decoding_bytes: int = 0
    jobs_bytes: int = 0
    most_slots: int = 0
    queued_bytes: int = 0

    @property
    def staging_bytes(self) -> int:
        """What batch slots may take, those included that are added while a caller keeps batches."""
        kept_bytes = self.tier_bytes + self.jobs_bytes
        return self.limit_bytes - self.undecoded_bytes - kept_bytes - self.decoding_bytes - self.queued_bytes

    def read_bytes(self, decoders: int, *, in_place: bool = False) -> tuple[int, int]:
        """Return the parts of undecoded_bytes: for readers, and for what each of so many decode threads reads itself.

        Decode threads together have a quarter at most, each at least one sample, whatever its size. Readers have the
        rest, more than one sample of the largest. in_place: bytes are read to their slot: those of a decode thread
        take no memory beside it.
        """
        if in_place:
            return self.undecoded_bytes, STAGED_TOGETHER_BYTES
        own_bytes = min(OWN_BYTES, self.undecoded_bytes // 4 // max(1, decoders))
        return self.undecoded_bytes - decoders * own_bytes, own_bytes


def share_memory(
    limit_bytes: int,
    *,
    slot_bytes: int,
    local_batch: int,
    readers: int,
    largest_sample_bytes: int,
    keep_bytes: int,
    picture_bytes: tuple[int, int] = (0, 0),
    decoders: int = 1,
    most_slots: int = 0,
    under_way: int = 0,
    queue: WriteQueue = NO_QUEUE,
) -> MemoryBudget:
    """Share out a limit: slots for the reads in flight first, then bytes in passing, the rest to the tier.

    keep_bytes: what a tier could use at most (the data set, or the capacity that the machine names).
    picture_bytes: what a picture takes while it is decoded: at least, and about what a large one does.
    decoders: threads that do that. They get enough for all at once, if that is a quarter of the memory at most; else
        that quarter, or enough for one, if the memory holds that. What the other parts leave is shared with growing
        slots.
    most_slots: exactly so many slots, and no others; 0 leaves them to the memory.
    under_way: samples that slots are to have space for, for others than readers.
    queue: has its part before all others.

    Raises: ConfigError where the limit does not hold three batch slots and two samples in passing, or most_slots.
    """
    if reason := why_too_small(
        "memory", limit_bytes, slot_bytes, largest_sample_bytes, picture_bytes[0], queue
    ):
        raise ConfigError(reason)
    given_bytes, queued_bytes = limit_bytes, queue.bytes_of(limit_bytes)
    limit_bytes -= queued_bytes
    least_in_passing = 2 * largest_sample_bytes
    least_bytes = LEAST_SLOTS * slot_bytes + least_in_passing
    decoding = 0
    if picture_bytes[0]:
        large_bytes = max(picture_bytes)
        wanted_bytes = max(decoders * large_bytes, limit_bytes // 32)
        decoding = min(max(min(wanted_bytes, limit_bytes // 4), large_bytes), limit_bytes - least_bytes)
    limit_bytes -= decoding
    spare_bytes = limit_bytes - least_bytes
    # Space for all readers at once, if that leaves three quarters of the memory to the rest.
    busy_bytes = min(readers * largest_sample_bytes, limit_bytes // 4)
    usual_bytes = min(limit_bytes // 16, _USUALLY_IN_PASSING_BYTES)
    in_passing = least_in_passing + min(spare_bytes, max(busy_bytes, usual_bytes))
    wanted = max(_USUAL_SLOTS, -(-max(2 * readers, under_way) // max(local_batch, 1)) + LEAST_SLOTS)
    affordable = min(limit_bytes // 4, limit_bytes - in_passing) // max(slot_bytes, 1)
    slots = most_slots or max(LEAST_SLOTS, min(wanted, affordable))
    if slots * slot_bytes > limit_bytes - in_passing:
        raise ConfigError(
            f"{slots} batch slots for prefetch= take {format_bytes(slots * slot_bytes)}, and memory= leaves "
            f"{format_bytes(limit_bytes - in_passing)}: give more memory, or read fewer batches ahead"
        )
    rest = limit_bytes - in_passing - slots * slot_bytes
    tier_bytes = max(0, min(rest, keep_bytes))
    if picture_bytes[0]:
        decoding += (rest - tier_bytes) // 2
    return MemoryBudget(
        given_bytes,
        slot_bytes,
        slots,
        in_passing,
        tier_bytes,
        int(decoding),
        most_slots=most_slots,
        queued_bytes=queued_bytes,
    )
