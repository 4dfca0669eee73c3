"""By what bytes travel between the hosts of a job: MPI where its ranks know each other by MPI, else ZeroMQ."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.ranks.access import needing_zmq
from penstock.ranks.descriptors import host_id
from penstock.ranks.transport import RankTransport
from penstock.ranks.transport_mpi import MpiTransport

if TYPE_CHECKING:  # of an extra
    from penstock.ranks.carrier_mpi import MpiCarrier
    from penstock.ranks.carrier_zmq import ZmqCarrier


def free_tag(transport: RankTransport) -> int:
    """Return the tag of MPI messages that this rank could give a carrier; 0 in a job of another kind."""
    return transport.free_tag if isinstance(transport, MpiTransport) else 0


def carrier_of_job(
    transport: RankTransport,
    tag: int,
    networks: Collection[str],
    most_part_bytes: int,
    *,
    what: str,
    otherwise: str,
) -> MpiCarrier | ZmqCarrier:
    """Return what connects this rank to those of other hosts, once it is given their offers.

    tag: the largest `free_tag` of all ranks. networks: `host_id` of those ranks. what: needs it, and what to do
    otherwise, for messages.
    Raises: ConfigError where pyzmq is missing, or there is no address by which other hosts reach this one.
    """
    if isinstance(transport, MpiTransport):
        return transport.carrier(tag, most_part_bytes)
    with needing_zmq(f"{what} needs pyzmq on several hosts", f", or {otherwise}"):
        from penstock.ranks.carrier_zmq import INTERFACE, ZmqCarrier, address_of_this_host
    address = address_of_this_host()
    if ipaddress.ip_address(address).is_loopback and any(each != host_id() for each in networks):
        raise ConfigError(
            f"this host has the address {address} for other ranks, by which no other host reaches it: set {INTERFACE} "
            "to the network interface that the hosts have in common, such as eth0, or to its address"
        )
    return ZmqCarrier(address, most_part_bytes)
