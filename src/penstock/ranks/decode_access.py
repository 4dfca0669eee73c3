"""How a training finds its decode servers, and both prove that they belong together."""

from __future__ import annotations

from penstock.ranks.access import Address, SecretFile
from penstock.ranks.access import address_of as any_address_of

#: Unless an address names another one.
PORT = 7447
#: What keys are made for, of one secret.
SERVER, TRAINING = "server", "training"

KEY = SecretFile("decode servers", "penstock decode-server", "PENSTOCK_DECODE_KEY", "decode-servers.key")


def address_of(text: object) -> Address:
    """Return the address of a decode server that a text says. Raises: ConfigError."""
    return any_address_of(text, "decode server", PORT)
