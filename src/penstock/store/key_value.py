"""Samples in a store of keys and values, such as Redis: a tier by a class of a few lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ClosedError, DataError
from penstock.store.group import Bytes, Failed, Ids
from penstock.store.memory import check_capacity

_CHECK_BYTES = 8


class KeyValueStore(Protocol):
    """What holds values under keys. Any thread may call anything. If a method raises, the source is read instead.

    It is made with one argument, the `path` of its storage class, such as "redis://host/0".
    """

    def get(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Return the values of keys, in their order; None where there is none."""
        ...

    def put(self, key: str, value: bytes) -> bool:
        """Store a value; return whether it is there."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Have some keys no longer; one that is not there is none already."""
        ...

    def keys(self, prefix: str) -> Iterable[str | bytes]:
        """Return the keys that begin so, in any order."""
        ...

    def close(self) -> None:
        """End. Twice is harmless."""
        ...


class KeyValueTier:
    """A tier of samples in such a store, which later runs over the same data find again, on any host.

    store: closed with this tier. capacity_bytes: most bytes of samples that it is given.
    fingerprint: of the data, 16 bytes: what another one stored is not found. sizes_bytes: int64[samples].
    number: of this rank: several ranks do not delete each other's samples.
    report: gets a line the first time that the store fails.

    A value is a checksum of 8 bytes and the sample; it is compared at every read. Keys are the same for each run over
    the data, so that jobs at once share them: such a store has nothing to claim them by. What one deletes, another
    finds missing when it reads it.
    Raises: DataError if the store cannot say what it has.
    """

    def __init__(
        self,
        store: KeyValueStore,
        capacity_bytes: int,
        fingerprint: bytes,
        sizes_bytes: NDArray[np.int64],
        *,
        number: int = 0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        check_capacity(capacity_bytes)
        self._store, self.capacity_bytes, self._sizes_bytes, self._report = (
            store,
            capacity_bytes,
            sizes_bytes,
            report,
        )
        self._prefix = f"penstock:{fingerprint.hex()}:{number}:"
        #: Guards all below.
        self._lock = threading.Lock()
        #: Samples that are there or being stored.
        self._held: set[int] = set()
        self._used_bytes = 0
        self._is_written, self._is_closed, self._is_reported = True, False, False
        try:
            self._find()
        except Exception as error:
            store.close()
            raise DataError(f"{store!r} cannot say what it keeps: {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def is_written(self) -> bool:
        """See `SlowTier.is_written`."""
        return self._is_written

    def held(self) -> Ids:
        with self._lock:
            return np.array(sorted(self._held), np.int64)

    def contains(self, sample: int) -> bool:
        return sample in self._held

    def put(self, sample: int, data: bytes | bytearray | memoryview) -> bool:
        """Store a sample; return whether it is kept. Raises: ClosedError; DataError for another number of bytes."""
        content = bytes(data)
        if len(content) != self._sizes_bytes[sample]:
            raise DataError(f"sample {sample} has {self._sizes_bytes[sample]:,} bytes, not {len(content):,}")
        with self._lock:
            self._check_open()
            if sample in self._held:
                return True
            if not self._is_written or self._used_bytes + len(content) > self.capacity_bytes:
                return False
            self._take(sample)
        try:
            if self._store.put(self._key(sample), _checksum(content) + content):
                return True
        except Exception as error:
            self._is_written = False
            self._fail(f"takes no more samples: {error}")
        self._forget([sample])
        return False

    def sizes_of(self, ids: Ids) -> Ids:
        """See `SlowTier.sizes_of`."""
        return np.array(
            [self._sizes_bytes[each] if self.contains(each) else -1 for each in ids.tolist()], np.int64
        )

    def read_group(self, ids: Ids, into: Bytes, begins: Ids) -> Failed:
        """Read samples; one that is not what was stored, or not there, is kept no longer. As of `SlowTier`."""
        self._check_open()
        samples = ids.tolist()
        try:
            values = self._store.get([self._key(sample) for sample in samples])
        except Exception as error:
            self._fail(f"cannot be read: {error}")
            return [
                (index, DataError(f"sample {sample} in {self!r}: {error}"))
                for index, sample in enumerate(samples)
            ]
        failed, lost = Failed(), []
        for index, (sample, value) in enumerate(zip(samples, values, strict=True)):
            size = int(self._sizes_bytes[sample])
            content = memoryview(value or b"")[_CHECK_BYTES:]
            if value is None or len(content) != size or _checksum(content) != value[:_CHECK_BYTES]:
                failed.append((index, DataError(f"sample {sample} in {self!r} is not what was stored")))
                lost.append(sample)
                continue
            into[begins[index] : begins[index] + size] = np.frombuffer(content, np.uint8)
        if lost:
            self._drop(lost)
        return failed

    def evict(self, ids: Ids) -> None:
        self._check_open()
        self._drop(ids.tolist())

    def close(self) -> None:
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
        if not is_closed:
            self._store.close()

    def _key(self, sample: int) -> str:
        return f"{self._prefix}{sample}"

    def _find(self) -> None:
        """Find again what earlier runs stored, as far as it fits."""
        names = (key if isinstance(key, str) else key.decode() for key in self._store.keys(self._prefix))
        numbers = (name.removeprefix(self._prefix) for name in names)
        found = sorted(int(number) for number in numbers if number.isdecimal())
        for sample in found:
            fits = sample < self._sizes_bytes.size and (
                self._used_bytes + self._sizes_bytes[sample] <= self.capacity_bytes
            )
            if fits:
                self._take(sample)
        if over := [sample for sample in found if sample not in self._held]:
            self._store.delete([self._key(sample) for sample in over])

    def _drop(self, samples: list[int]) -> None:
        there = self._forget(samples)
        try:
            if there:
                self._store.delete([self._key(sample) for sample in there])
        except Exception as error:
            self._fail(f"cannot delete: {error}")

    def _take(self, sample: int) -> None:
        self._held.add(sample)
        self._used_bytes += int(self._sizes_bytes[sample])

    def _forget(self, samples: list[int]) -> list[int]:
        with self._lock:
            there = [sample for sample in samples if sample in self._held]
            self._held.difference_update(there)
            self._used_bytes -= int(self._sizes_bytes[there].sum())
        return there

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this tier is closed; make a new one")

    def _fail(self, what: str) -> None:
        with self._lock:
            is_first, self._is_reported = not self._is_reported, True
        if is_first:
            self._report(f"{self._store!r} {what}: its samples are read from the source")


def _checksum(content: bytes | memoryview) -> bytes:
    return xxhash.xxh3_64_digest(content)
