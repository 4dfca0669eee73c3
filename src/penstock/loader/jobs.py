"""What separate jobs of a host keep for each other: they find the same memory by what their data are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import xxhash

from penstock.arena import Arena
from penstock.loader.local_disk import Content, content_of, place_ids
from penstock.ranks.rendezvous import Rendezvous
from penstock.store import Source
from penstock.store.job_memory import JobMemory, new_arenas


def content_of_host(
    source: Source, pixels: Mapping[str, object] | None = None, crop_bytes: int = -1
) -> Content:
    """Return what jobs of this host keep of a source: as `content_of`, and of the folder that a link leads to now."""
    content = content_of(source, pixels, crop_bytes)
    where = repr(place_ids(source)).encode("utf-8", "surrogateescape")
    return content._replace(fingerprint=xxhash.xxh3_128_digest(content.fingerprint + where))


class JobsOfHost:
    """This process's part of the memory that the jobs of a host have for one data set, or for its pixels.

    content: what they keep there. pixels: another one, of the same data, that is closed with this.
    memory: where samples are read. is_first: whether no other job had any.
    capacity_bytes: of the memory, if this process is the first; else that is what the first one said.
    Raises: ConfigError where there can be no socket or no such memory, or nobody answers.
    """

    def __init__(self, content: Content, capacity_bytes: int, pixels: JobsOfHost | None = None) -> None:
        self.pixels = pixels
        with ExitStack() as closing:
            made: list[Arena] = []

            def make() -> list[int]:
                made.extend(new_arenas(capacity_bytes, content.sizes_bytes))
                for each in made:
                    closing.callback(each.close)
                return [each.descriptor for each in made]

            self._meeting = Rendezvous(content.fingerprint.hex(), make)
            closing.callback(self._meeting.close)
            self.is_first = self._meeting.is_first
            if not self.is_first:
                for descriptor in self._meeting.descriptors:
                    made.append(Arena.attach(descriptor))
                    closing.callback(made[-1].close)
            table, memory = made
            self.memory = JobMemory(table, memory, content.sizes_bytes)
            self._closing = closing.pop_all()

    def close(self) -> None:
        """Leave: the others keep what is there. Twice is harmless."""
        self._closing.close()
        self.memory.close()
        if self.pixels is not None:
            self.pixels.close()
