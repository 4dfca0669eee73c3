"""Messages between the processes of JAX, through its coordination service."""

from __future__ import annotations

import itertools
from typing import Any

from penstock.ranks.transport import TIMEOUT_SECONDS
from penstock.ranks.transport_store import StoreTransport, keep_until_taken

_made = itertools.count()  # equal in all processes, since all make their transports in the same order


def jax_transport(client: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> StoreTransport:
    """Return a new transport between the processes of jax.distributed; every process calls this, in the same order.

    client: of JAX's coordination service. timeout_seconds: after which one that does not answer is given up.
    """
    import jax

    transport = StoreTransport(
        CoordinationStore(client, f"penstock/{next(_made)}/"),
        jax.process_index(),
        jax.process_count(),
        keeper="process 0, which keeps the coordination service of JAX,",
        timeout_seconds=timeout_seconds,
    )
    keep_until_taken(transport, client)
    return transport


class CoordinationStore:
    """The keys and values of JAX's coordination service, as `StoreTransport` asks for them.

    prefix: before each key.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(self._prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether there is a value of each key."""
        try:
            for key in keys:
                self.get(key)
        except RuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return False
            raise
        return True

    def get(self, key: str) -> bytes:
        value: bytes = self._client.key_value_try_get_bytes(self._prefix + key)
        return value

    def add(self, key: str, change: int) -> int:
        """Add to a value and return it; it is 0 before."""
        value: int = self._client.key_value_increment(self._prefix + key, change)
        return value

    def delete_key(self, key: str) -> None:
        self._client.key_value_delete(self._prefix + key)
