"""Letters between the ranks of torch.distributed, through the store by which its processes found each other."""

from __future__ import annotations

import itertools
from typing import Any

from penstock.errors import RankError

#: A TCPStore closes the connection on a value above 8 MiB; longer letters are sent in pieces.
PIECE_BYTES = 4 << 20

#: How the pieces that follow are counted, before a letter's first piece.
_COUNT_BYTES = 4

_made = itertools.count()  # equal on all ranks, since all make their mail in the same order


def torch_mail() -> StoreMail:
    """Return new mail between the ranks of torch.distributed; every rank calls this, in the same order.

    It uses the default group's store, not the group: any backend will do, and no collective
    of the training is disturbed.

    Raises: ValueError of torch.distributed if it is not initialised.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if hasattr(
        store, "clone"
    ):  # a connection of its own: one that is shared answers one thread after the other
        store = store.clone()
    store = distributed_c10d.PrefixStore(f"penstock/{next(_made)}", store)
    return StoreMail(store, distributed.get_rank(), distributed.get_world_size())


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


def _unreachable(error: RuntimeError) -> RankError:
    reason = str(error).partition("\n")[0]
    return RankError(
        f"the store of torch.distributed, which rank 0 or the launcher keeps, cannot be reached: {reason}; look "
        "whether that process ended"
    )
