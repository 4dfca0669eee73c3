"""What a source of samples must do, as tests for pytest: for sources of one's own, and for those here.

In a test file of yours, a fixture named `stored` returns a source, and what its samples are:

    @pytest.fixture
    def stored(tmp_path):
        contents = [b"one", b"another"]
        return Stored(MySource(write(contents, tmp_path)), contents)

    class TestMySource(SourceContract):
        pass
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from penstock.policy import merge_reads
from penstock.store.group import Bytes, Ids, read_group
from penstock.store.labels import Labels
from penstock.store.ranged import extents_of, read_all_merged
from penstock.store.source import Source


@dataclass(frozen=True, slots=True)
class Stored:
    """A source, and the bytes of its samples, by number: two of them at least."""

    source: Source
    contents: Sequence[bytes]


class AnyStored(Protocol):
    """What the fixture `stored` returns: a `Stored`, or more."""

    @property
    def source(self) -> Source: ...

    @property
    def contents(self) -> Sequence[bytes]: ...


class SourceContract:
    """What a loader relies on. Derive a class from it whose name begins with Test; see the module."""

    def test_it_has_what_a_source_has(self, stored: AnyStored) -> None:
        missing = [name for name in _MEMBERS if not hasattr(stored.source, name)]

        assert not missing, f"{type(stored.source).__name__} has no {', '.join(missing)}"

    def test_sizes_are_known_before_anything_is_read(self, stored: AnyStored) -> None:
        source, wanted = stored.source, list(map(len, stored.contents))
        sizes = source.sizes_bytes

        assert len(source) == len(wanted), f"len() is {len(source)}, of {len(wanted)} samples"
        assert isinstance(sizes, np.ndarray), f"sizes_bytes is a {type(sizes).__name__}, no NumPy array"
        assert sizes.dtype == np.int64, f"sizes_bytes has dtype {sizes.dtype}, not int64"
        assert sizes.tolist() == wanted, f"sizes_bytes is {sizes.tolist()}, and contents have {wanted}"

    def test_every_sample_has_its_labels(self, stored: AnyStored) -> None:
        source, labels = stored.source, stored.source.labels

        if isinstance(labels, Mapping):
            lengths = {name: len(each) for name, each in labels.items()}
            assert set(lengths.values()) <= {len(source)}, f"of {len(source)} samples labels have {lengths}"
            return
        assert labels.shape == (len(source),), f"labels have shape {labels.shape}, of {len(source)} samples"
        if labels.dtype.names is None and source.classes:
            known = {-1, *range(len(source.classes))}
            assert set(labels.tolist()) <= known, "a label is -1, for none, or an index into classes"

    def test_a_sample_is_read_whole(self, stored: AnyStored) -> None:
        for sample, content in enumerate(stored.contents):
            assert bytes(stored.source.read(sample)) == content, f"read({sample}) gave other bytes"

    def test_a_sample_is_read_to_the_front_of_a_buffer(self, stored: AnyStored) -> None:
        for sample, content in enumerate(stored.contents):
            for more in (10, 0):
                buffer = bytearray(b"\xaa" * (len(content) + more))

                size = stored.source.read_into(sample, memoryview(buffer))

                assert size == len(content), f"read_into({sample}, ...) returned {size}, of {len(content)}"
                assert buffer[:size] == content, f"read_into({sample}, ...) gave other bytes"
                assert buffer[size:] == b"\xaa" * more, "read_into wrote behind the sample"

    def test_a_buffer_that_is_too_small_is_refused(self, stored: AnyStored) -> None:
        sample = int(np.argmax(stored.source.sizes_bytes))
        buffer = memoryview(bytearray(len(stored.contents[sample]) - 1))

        _raised(Exception, lambda: stored.source.read_into(sample, buffer))

    def test_a_sample_that_does_not_exist_is_an_index_error_that_names_it(self, stored: AnyStored) -> None:
        buffer = memoryview(bytearray(max(map(len, stored.contents))))
        for sample in (-1, len(stored.contents)):
            for read in (stored.source.read, lambda each: stored.source.read_into(each, buffer)):
                error = _raised(IndexError, lambda read=read, sample=sample: read(sample))  # type: ignore[misc]
                assert str(sample) in str(error), f"the error does not name sample {sample}: {error}"

    def test_a_sample_is_described_for_messages(self, stored: AnyStored) -> None:
        texts = list(map(stored.source.describe, range(len(stored.contents))))

        assert len(set(texts)) == len(texts), f"describe() gives two samples the same text: {texts}"

    def test_many_threads_read_at_once(self, stored: AnyStored) -> None:
        samples = list(range(len(stored.contents))) * 40

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(stored.source.read, samples))

        wrong = [k for k, data in zip(samples, found, strict=True) if bytes(data) != stored.contents[k]]
        assert not wrong, f"with eight threads, samples {sorted(set(wrong))} were other bytes"

    def test_a_pickled_source_reads_the_same(self, stored: AnyStored) -> None:
        copy: Source = pickle.loads(pickle.dumps(stored.source))

        found = [bytes(copy.read(sample)) for sample in range(len(copy))]
        assert found == list(stored.contents), "a copy, as a worker process has one, gave other bytes"
        assert _listed(copy.labels) == _listed(stored.source.labels)
        assert copy.classes == stored.source.classes

    def test_a_group_is_read_at_once(self, stored: AnyStored) -> None:
        ids = np.array([len(stored.contents) - 1, *range(len(stored.contents))])
        into, begins = _space_for(ids, stored)

        failed = read_group(stored.source, ids, into, begins)

        assert not failed, f"a group of samples failed: {failed}"
        assert _pieces(into, begins) == [stored.contents[sample] for sample in ids]

    def test_samples_lie_where_it_says_that_they_do(self, stored: AnyStored) -> None:
        found = extents_of(stored.source, np.arange(len(stored.contents)))
        if found is None:  # it does not say
            return
        extents, wrong = found
        assert not wrong, f"extents() cannot be: {wrong}"
        reads = merge_reads(extents, lambda requests, nbytes: requests + 1e-9 * nbytes)
        into, begins = _space_for(reads.which, stored)

        failed = read_all_merged(stored.source, reads, reads.which, into, begins)

        assert not failed, f"reads of where samples lie failed: {failed}"
        wanted = [stored.contents[sample] for sample in reads.which]
        assert _pieces(into, begins) == wanted, "other bytes are where extents() has samples"


_MEMBERS = ("sizes_bytes", "labels", "classes", "__len__", "read", "read_into", "describe")


def _space_for(ids: Ids, stored: AnyStored) -> tuple[Bytes, Ids]:
    """Return space for samples one behind the other, and where each begins and the last one ends."""
    begins = np.cumsum([0, *(len(stored.contents[sample]) for sample in ids)])
    return np.zeros(begins[-1], np.uint8), begins


def _pieces(into: Bytes, begins: Ids) -> list[bytes]:
    return [into[begin:end].tobytes() for begin, end in pairwise(begins.tolist())]


def _listed(labels: Labels) -> Any:
    return (
        {name: each.tolist() for name, each in labels.items()}
        if isinstance(labels, Mapping)
        else labels.tolist()
    )


def _raised(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Return what a call raises. Raises: AssertionError where that is nothing, or of another kind."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"it raises {error!r}, which is no {kind.__name__}") from error
    raise AssertionError(f"it raises no {kind.__name__}")
