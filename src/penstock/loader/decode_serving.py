"""A decode server's process: a data set, opened, and what is asked of it, made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.flow.cpus import cpu_limit
from penstock.loader.decode_work import StoredSamples, maker_of
from penstock.loader.opened import reader_of
from penstock.loader.transforms import RandomResizedCrop, compile_pipeline
from penstock.loader.transforms.memory import DecodeMemory
from penstock.ranks.access import Address, needing_zmq, numeric
from penstock.ranks.decode_access import KEY, SERVER, TRAINING
from penstock.ranks.decode_server import DecodeServer
from penstock.ranks.peer_messages import MOST_HEAD_BYTES
from penstock.store import Source
from penstock.store.host_memory import checksum_of
from penstock.units import format_bytes, format_count

#: Threads for each processor: some of them wait for the store.
_THREADS_A_CPU = 2
#: Of the memory that is given: to decode in, and at least. The rest keeps samples.
_DECODING_SHARE, _LEAST_DECODING_BYTES = 0.25, 64 << 20


class Serving(NamedTuple):
    """A decode server that listens. server: to be run, once. address: where it listens. report: lines about it.

    stored: the samples that it reads.
    """

    server: DecodeServer
    address: str
    report: Sequence[str]
    stored: StoredSamples


@contextlib.contextmanager
def serving(
    source: Source,
    address: Address,
    *,
    key: str | os.PathLike[str] | None = None,
    memory_bytes: int,
    threads: int | None = None,
) -> Iterator[Serving]:
    """Make a decode server; what it holds is closed in the end.

    address: port 0 is a free one. key: the file of the secret; made where it is not there.
    memory_bytes: to decode in, and for samples as stored. threads: that decode; unless given, two for each processor.
    Raises: ConfigError where it cannot listen, or the key is missing or others may read it.
    """
    with needing_zmq("a decode server needs pyzmq"):
        from penstock.ranks.carrier_zmq import KeyPair, ZmqCarrier
    path = KEY.path(key)
    report = [f"made the key {path}: a training needs this file, too"] if KEY.make(path) else []
    secret = KEY.read(path)
    threads = threads or _THREADS_A_CPU * cpu_limit().cpus
    if memory_bytes < _LEAST_DECODING_BYTES:
        raise ConfigError(
            f"memory is {format_bytes(memory_bytes)}, and a decode server takes {format_bytes(_LEAST_DECODING_BYTES)} "
            "at least: give more"
        )
    # What makes any crop is compiled before a training is heard: who is greeted has seconds to answer.
    compile_pipeline([RandomResizedCrop(32)], 0, "uint8", "NHWC").prepare_crops(1)
    decoding_bytes = max(_LEAST_DECODING_BYTES, int(_DECODING_SHARE * memory_bytes))
    keys = KeyPair.of(secret, SERVER)
    carrier = ZmqCarrier(numeric(address.host), MOST_HEAD_BYTES, keys=keys, port=address.port)
    carrier.admit(KeyPair.of(secret, TRAINING).public, 0)
    place = carrier.offer["address"].removeprefix("tcp://")
    report.append(
        f"decodes {format_count(len(source), 'sample')} at {place} by {format_count(threads, 'thread')} in at most "
        f"{format_bytes(memory_bytes)}, for who has the key {path}, of {source!r}"
    )
    stored = StoredSamples(source, reader_of(source), memory_bytes - decoding_bytes)
    accept = partial(maker_of, stored=stored, memory=DecodeMemory(decoding_bytes))
    try:
        yield Serving(DecodeServer(carrier, accept, checksum_of, threads), place, report, stored)
    finally:
        stored.close()
