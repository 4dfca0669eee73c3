"""Letters between the ranks of torch.distributed, through the store by which its processes found each other."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
from typing import Any

from penstock.checkpoint.mail import MOST_PAUSE_SECONDS
from penstock.errors import RankError

#: A TCPStore closes the connection on a value above 8 MiB; longer letters are sent in pieces.
PIECE_BYTES = 4 << 20

#: How the pieces that follow are counted, before a letter's first piece.
_COUNT_BYTES = 4

#: How long rank 0 stays at its end while nobody reads its last letters; who waits for them looks far more often.
LINGER_SECONDS = 1.0

_made = itertools.count()  # equal on all ranks, since all make their mail in the same order


def torch_mail() -> StoreMail:
    """Return new mail between the ranks of torch.distributed; every rank calls this, in the same order.

    It uses the default group's store, not the group: any backend will do, and no collective
    of the training is disturbed.

    Raises: ValueError of torch.distributed if it is not initialised.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    default = distributed_c10d._get_default_store()
    # A connection of its own, where PyTorch has that (2.8): one that is shared answers one thread after the other.
    own = default.clone() if hasattr(default, "clone") else default
    store = distributed_c10d.PrefixStore(f"penstock/{next(_made)}", own)
    mail = StoreMail(store, distributed.get_rank(), distributed.get_world_size())
    if mail.rank == 0:
        atexit.register(_keep_until_taken, mail, default)
    return mail


class StoreMail:
    """Letters in a store of torch.distributed, which any `Store` is: TCPStore, FileStore, HashStore.

    The i-th letter from rank a to rank b is the value of the key "a>b/i" until b has taken it.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._sent = [0] * size
        self._received = [0] * size

    def send(self, to: int, letter: bytes) -> None:
        key = f"{self.rank}>{to}/{self._sent[to]}"
        first, *more = [letter[at : at + PIECE_BYTES] for at in range(0, max(1, len(letter)), PIECE_BYTES)]
        try:
            for number, piece in enumerate(more, start=1):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, len(more).to_bytes(_COUNT_BYTES, "little") + first)  # last: now it is seen
        except RuntimeError as error:
            raise _unreachable(error) from error
        self._sent[to] += 1

    def receive(self, sender: int) -> bytes | None:
        key = f"{sender}>{self.rank}/{self._received[sender]}"
        try:
            if not self._store.check([key]):
                return None
            head = self._store.get(key)
            keys = [
                f"{key}/{number}" for number in range(1, 1 + int.from_bytes(head[:_COUNT_BYTES], "little"))
            ]
            letter = b"".join([head[_COUNT_BYTES:], *map(self._store.get, keys)])
            for taken in [key, *keys]:
                self._store.delete_key(taken)
        except RuntimeError as error:
            raise _unreachable(error) from error
        self._received[sender] += 1
        return letter

    def untaken(self) -> list[int]:
        """Return the ranks that have not received all letters from this one. Raises: RankError."""
        try:
            return [
                rank
                for rank, sent in enumerate(self._sent)
                if sent and self._store.check([f"{self.rank}>{rank}/{sent - 1}"])
            ]
        except RuntimeError as error:
            raise _unreachable(error) from error


def _keep_until_taken(mail: StoreMail, server: Any) -> None:
    """Stay until all have read what rank 0 wrote: the store may live in this process, and its letters end with it.

    server: keeps the store running, which the end of the process group would close.
    """
    with contextlib.suppress(RankError):
        untaken, last_taken = mail.untaken(), time.monotonic()
        while untaken and time.monotonic() - last_taken < LINGER_SECONDS:
            time.sleep(MOST_PAUSE_SECONDS)
            before, untaken = untaken, mail.untaken()
            if untaken != before:
                last_taken = time.monotonic()


def _unreachable(error: RuntimeError) -> RankError:
    reason = str(error).partition("\n")[0]
    return RankError(
        f"the store of torch.distributed, which rank 0 or the launcher keeps, cannot be reached: {reason}; look "
        "whether that process ended"
    )
