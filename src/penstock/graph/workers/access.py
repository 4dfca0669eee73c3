"""How the processes of a cluster find each other, and prove that they belong together."""

from __future__ import annotations

from penstock.ranks.access import Address, SecretFile
from penstock.ranks.access import address_of as any_address_of

#: Unless an address names another one.
PORT = 7448

KEY = SecretFile("graph's workers", "penstock graph worker", "PENSTOCK_GRAPH_KEY", "graph.key")


def address_of(text: object) -> Address:
    """Return the address of a worker that a text says. Raises: ConfigError."""
    return any_address_of(text, "worker", PORT)
