"""Writing a data set anew, as shards: read by a loader, checked when written, begun again where it was killed.

Everything is written to `OUT.unfinished`, which becomes OUT when all of it is there and was read back. In there each
shard gets its name when it is whole on the disk, and a line in the journal then; what the journal does not name is
written again. A kill at any moment leaves either no OUT or a complete one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.errors import ConfigError, DataError
from penstock.files import sync_folder
from penstock.flow.work import Failed
from penstock.loader.loader import Loader
from penstock.loader.opened import reader_of
from penstock.loader.resume import describe_data
from penstock.plan import FullShuffle
from penstock.policy.merge import cut_windows
from penstock.store import Source
from penstock.store.group import Ids
from penstock.store.labels import Labels
from penstock.store.object_store import is_address, without_secrets
from penstock.store.pack_file import PACK_NAME, TITLE, VERSION
from penstock.store.pairs import masks_of
from penstock.store.shard_formats import Part, ShardFormat, format_for
from penstock.units import format_bytes
from penstock.validate import check_count

#: How large a shard is: large enough to be read in sequence, small enough to be written again.
SHARD_BYTES = 500_000_000
#: Read at a time, by one thread.
_CHUNK_BYTES = 8 << 20
_JOURNAL = "journal.jsonl"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class PackedShard:
    """A shard that is whole on the disk. xxh3_128: of its bytes. endings: of its members, where it has members."""

    name: str
    samples: int
    file_bytes: int
    xxh3_128: str
    endings: tuple[str, ...] = ()


class _Chunk(NamedTuple):
    """What is read at a time: samples of one shard, at these places of the order."""

    shard: int
    first: int
    last: int


class _Chunks:
    """The source as a data set of chunks, each as one array of bytes, so that a loader's threads read them."""

    def __init__(self, source: Source, order: Ids, chunks: Sequence[_Chunk]) -> None:
        self._source, self._order, self._chunks = source, order, chunks
        sizes = source.sizes_bytes[order]
        self._bytes = max(int(sizes[chunk.first : chunk.last].sum()) for chunk in chunks)
        self._fetcher = reader_of(source)

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        chunk = self._chunks[index]
        ids = self._order[chunk.first : chunk.last].tolist()
        found = self._fetcher.read(ids)
        content = np.empty(self._bytes, np.uint8)
        at = 0
        for data in found:
            if isinstance(data, Failed):
                raise data.error
            content[at : at + data.size] = data
            at += data.size
        return content

    def close(self) -> None:
        self._fetcher.close()


def pack(
    source: Source,
    out: str | os.PathLike[str],
    *,
    to: str = "tar",
    shard_bytes: int = SHARD_BYTES,
    shuffle_seed: int | None = None,
    done: Callable[[int], None] = lambda samples: None,
) -> tuple[list[PackedShard], str]:
    """Write a source to a new folder of shards; return these, and the expression that opens them.

    to: "tar" as WebDataset reads it, or "records": MDS shards, and .npy for rows of numbers.
    shard_bytes: of a shard, unless one sample is larger.
    shuffle_seed: writes the samples in a random order, of a full shuffle; the source's order unless given.
    done: called with how many samples are written.
    The same source and arguments give the same bytes. After an error, Ctrl-C or a kill, the same call continues.
    Raises: ConfigError if the folder exists, another process writes it, or an unfinished one is of other arguments;
        DataError naming a sample that cannot be read, or a disk that is full or does not keep what is written.
    """
    if is_address(os.fspath(out)):
        raise ConfigError(
            f"{without_secrets(os.fspath(out))} is an address: pack into a folder, and copy that there"
        )
    folder = Path(os.path.abspath(os.path.expanduser(out)))
    if folder.exists():
        raise ConfigError(f"{folder} exists: give a folder that does not")
    if not folder.parent.is_dir():
        raise ConfigError(f"there is no folder {folder.parent}: make it first")
    if masks_of(source) is not None:
        raise ConfigError(
            "images with masks have two files a sample: pack images and masks apart, as they are"
        )
    check_count("shard_bytes", shard_bytes)
    work = folder.with_name(f"{folder.name}.unfinished")
    packing = _Packing(source, work, to, shard_bytes, shuffle_seed, done)
    try:
        return packing.run(folder), packing.format.how_to_open(str(folder))
    except DataError:
        raise
    except OSError as error:
        raise DataError(
            f"{error.filename or work}: {error.strerror or error}; correct that, and the same command continues"
        ) from error


class _Packing:
    def __init__(
        self,
        source: Source,
        work: Path,
        to: str,
        shard_bytes: int,
        shuffle_seed: int | None,
        done: Callable[[int], None],
    ) -> None:
        self._source, self._work, self._done = source, work, done
        samples = np.arange(len(source))
        self._order = (
            samples if shuffle_seed is None else FullShuffle(len(source), shuffle_seed).at(0, samples)
        )
        self.format: ShardFormat = format_for(to, source)
        self._stored = self.format.stored_bytes()[self._order]
        most = min(shard_bytes, self.format.most_bytes or shard_bytes)
        if self.format.most_bytes is not None and self._stored.max() > self.format.most_bytes // 2:
            raise ConfigError(
                f"a sample has {int(self._stored.max()):,} bytes, too many for MDS: use --to tar"
            )
        #: The shard of each place of the order, and where each shard begins, and the last one ends.
        shard_of = cut_windows(self._stored, most)
        self._bounds = np.searchsorted(shard_of, np.arange(int(shard_of[-1]) + 2))
        #: What the journal begins with; as JSON has it.
        self._about: dict[str, Any] = {
            "penstock": TITLE,
            "version": VERSION,
            "to": to,
            "shard_bytes": shard_bytes,
            "shuffle_seed": shuffle_seed,
            "source": describe_data(source),
            "samples": len(source),
        }
        self._shards: list[PackedShard] = []

    @property
    def _count(self) -> int:
        return self._bounds.size - 1

    def run(self, folder: Path) -> list[PackedShard]:
        self._work.mkdir(exist_ok=True)
        with self._opened_journal():
            self._shards = self._read_journal()
            first = len(self._shards)
            self._check_space(first)
            begun = int(self._bounds[first])
            self._done(begun)
            if first < self._count:
                self._write_shards(first)
            self._finish()
            (self._work / _JOURNAL).unlink()
            sync_folder(self._work)
            self._work.rename(folder)
            sync_folder(folder.parent)
        return self._shards

    # The journal

    @contextlib.contextmanager
    def _opened_journal(self) -> Iterator[None]:
        """Open the journal, which one process has at a time."""
        descriptor = os.open(
            self._work / _JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigError(f"{self._work} is being written by another process: wait for it") from error
            yield
        finally:
            os.close(descriptor)

    def _read_journal(self) -> list[PackedShard]:
        """Return the shards that are there; begin the journal where there is none. Raises: ConfigError."""
        path = self._work / _JOURNAL
        *lines, torn = path.read_bytes().split(b"\n")
        if torn:  # a kill came while it was written
            os.truncate(path, path.stat().st_size - len(torn))
        try:
            about, *found = map(json.loads, lines) if lines else self._from_pack_file()
            shards = [PackedShard(**{**each, "endings": tuple(each["endings"])}) for each in found]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"{path} is damaged: remove {self._work}, and begin anew") from error
        if not lines:
            for line in (about, *found):
                self._note(line)
        if about != self._about:
            if shards:
                raise ConfigError(
                    f"{self._work} was begun from another source, or with other arguments: remove it, or give those"
                )
            os.truncate(path, 0)  # nothing is lost
            self._note(self._about)
            return []
        whole = []
        by_name = {shard.name: shard for shard in shards}  # one that was lost has another line
        for number in range(self._count):
            shard = by_name.get(name := self.format.file_name.format(number))
            file = self._work / name
            if shard is None or not file.is_file() or file.stat().st_size != shard.file_bytes:
                break
            whole.append(shard)
            self.format.endings.update(shard.endings)
        return whole

    def _from_pack_file(self) -> list[dict[str, Any]]:
        """Return the lines of a journal that is not there: those of all shards, after a kill before the last rename."""
        path = self._work / PACK_NAME
        if not path.exists():
            return [self._about]
        about = json.loads(path.read_bytes())
        shards = about.pop("shards")
        del about["classes"]
        return [about, *shards]

    def _note(self, line: Mapping[str, Any]) -> None:
        with open(self._work / _JOURNAL, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _check_space(self, first: int) -> None:
        needed = int(self._stored[self._bounds[first] :].sum()) + (self._count - first) * (1 << 15)
        free = shutil.disk_usage(self._work).free
        if needed > free:
            raise DataError(
                f"{self._work.parent} has {format_bytes(free)} left, and what is to be written takes up to "
                f"{format_bytes(needed)}: free some, or give another folder"
            )

    # Shards

    def _write_shards(self, first: int) -> None:
        chunks = self._chunks(first)
        data = _Chunks(self._source, self._order, chunks)
        try:
            with (
                contextlib.closing(data),
                Loader(
                    data, batch_size=1, epochs=1, shuffle=False, rank=0, world_size=1, report=None
                ) as loader,
            ):
                contents = zip(chunks, loader, strict=True)
                for number, of_shard in groupby(contents, lambda each: each[0].shard):
                    self._shards.append(self._write_shard(number, of_shard))
                    self._note(asdict(self._shards[-1]))
        except DataError as error:
            raise DataError(
                f"{error}; penstock check finds all such samples, and --skip leaves them out"
            ) from error

    def _chunks(self, first: int) -> list[_Chunk]:
        """Return what is read, in the order in which it is written."""
        sizes = self._source.sizes_bytes[self._order]
        chunks = []
        for shard in range(first, self._count):
            begin, end = self._bounds[shard : shard + 2].tolist()
            chunk_of = cut_windows(sizes[begin:end], _CHUNK_BYTES)
            cuts = begin + np.searchsorted(chunk_of, np.arange(int(chunk_of[-1]) + 2))
            chunks += [_Chunk(shard, *each) for each in pairwise(cuts.tolist())]
        return chunks

    def _write_shard(self, number: int, contents: Iterable[tuple[_Chunk, NDArray[np.uint8]]]) -> PackedShard:
        """Write a shard, read it back, and give it its name. contents: its chunks, and the bytes of each."""
        ids = self._order[self._bounds[number] : self._bounds[number + 1]]
        name = self.format.file_name.format(number)
        unfinished = self._work / f".{name}.unfinished"
        with open(unfinished, "wb", buffering=_READ_BYTES) as file:
            written = _Written(file)
            written.put([self.format.begin(ids)])
            for chunk, content in contents:
                at = 0
                for sample in self._order[chunk.first : chunk.last].tolist():
                    size = int(self._source.sizes_bytes[sample])
                    written.put(self.format.sample(sample, content[0, at : at + size]))
                    at += size
                self._done(chunk.last)
            written.put([self.format.end(written.nbytes)])
            file.flush()
            os.fsync(file.fileno())
            # What is read back comes from the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if (found := _digest_of_file(unfinished)) != written.hexdigest():
            raise DataError(
                f"{unfinished} has the checksum {found}, and {written.hexdigest()} was written: the disk does not keep "
                "what it is given"
            )
        os.replace(unfinished, self._work / name)
        sync_folder(self._work)
        endings = tuple(sorted(self.format.endings))
        return PackedShard(name, ids.size, written.nbytes, written.hexdigest(), endings)

    # The end

    def _finish(self) -> None:
        """Write what stands beside the shards, and compare what a reader finds with the source."""
        names = [shard.name for shard in self._shards]
        parts = [self._order[begin:end] for begin, end in pairwise(self._bounds.tolist())]
        files = self.format.beside(names, [shard.file_bytes for shard in self._shards], parts)
        about = self._about | {
            "classes": list(self._source.classes),
            "shards": [asdict(shard) for shard in self._shards],
        }
        files[PACK_NAME] = json.dumps(about, indent=1).encode()
        for name, content in files.items():
            with open(self._work / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sizes, labels = self.format.read_back([str(self._work / name) for name in names])
        is_right = np.array_equal(sizes, self._source.sizes_bytes[self._order])
        if labels is not None:
            is_right &= _are_equal(labels, self.format.labels, self._order)
        if not is_right:
            raise DataError(
                f"{self._work} has other samples or labels than the source, which changed meanwhile"
            )


def _are_equal(found: Labels, written: Labels, order: Ids) -> bool:
    """Return whether labels were read as they were written. In JSON, numbers have no type: fractions are float32."""
    if not isinstance(written, Mapping) or not isinstance(found, Mapping):
        found, written = {"": np.asarray(found)}, {"": np.asarray(written)}
    return found.keys() == written.keys() and all(
        np.array_equal(each, written[name][order].astype(each.dtype), equal_nan=each.dtype.kind == "f")
        for name, each in found.items()
    )


class _Written:
    """A file that is written, with the checksum of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self.nbytes = file, xxhash.xxh3_128(), 0

    def put(self, parts: Iterable[Part]) -> None:
        for part in parts:
            content = part if isinstance(part, bytes) else part.data
            self._file.write(content)
            self._digest.update(content)
            self.nbytes += len(content)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _digest_of_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            digest.update(content)
    return digest.hexdigest()
