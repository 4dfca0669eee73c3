"""A tier on any fsspec target, object stores included: `s3://bucket/runs/a`, `gs://...`, `sftp://...`.

An object cannot be renamed, so an attempt to write a snapshot has a folder of its own and the manifest, put last and
in one piece, makes it a snapshot:

    ROOT/step-000000000100.attempt-3f9c/part-00000.pst
    ROOT/step-000000000100.attempt-3f9c/manifest.json      put last: from here on it is listed
    ROOT/step-000000000200.attempt-b01e/part-00000.pst     no manifest: unfinished, seen by `sweep` alone

What an attempt that died left, or is still sending, can so never be taken for part of a later one.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from penstock.checkpoint.state.tensors import Bytes
from penstock.checkpoint.tiers.tier import MANIFEST
from penstock.errors import ConfigError, DataError

#: Targets where putting an object shows it whole or not at all, and where folders are only names. On all others a
#: manifest is renamed into place and folders are made.
OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "tosfs", "memory"}
)

_MIB = 2**20
#: To a driver at once: it is copied, so more would be memory and less would be calls.
_PIECE_BYTES = _MIB
#: From a target at once, for the same reason.
_READ_BYTES = 8 * _MIB
#: An upload in blocks has at most 10,000 of them on S3: larger files get larger ones.
_BLOCK_BYTES = 8 * _MIB
_BLOCKS_OF_A_SIZE = 2_000

Answer = TypeVar("Answer")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ATTEMPT = re.compile(r"(?P<folder>[A-Za-z0-9_][A-Za-z0-9._-]*)\.attempt-(?P<uid>[A-Za-z0-9]+)")


class RemoteTier:
    """Snapshots on an fsspec target.

    Any thread may use it. A process that was forked makes its own: fsspec's connections do not survive a fork. One
    process at a time (of a job of many ranks, all together) writes to an address; there is no lock to hold it to that,
    and a second one that sweeps makes the first one's commit fail.
    Nothing is retried here: drivers do that for what passes (s3fs 5 times), and their options say how often.
    What it writes is as durable as the target makes it: a finished upload is, on an object store; a folder of this
    machine's disks is better given as a path to a tier that syncs.

    url: of the folder that holds the snapshots, such as "s3://bucket/runs/a"; the bucket must exist.
    options: of the fsspec driver: `endpoint_url=`, `key=`, `token=` and so on.
    Raises: ConfigError if the address or an option cannot work, or the driver is not installed; nothing is asked of
        the target yet.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._filesystem, self._root = _opened(url, options)
        #: Names of them; what they are may be secret.
        self._options = sorted(options)
        #: Its address, without a password.
        self.name = re.sub(r"//([^/:@]*):[^/@]*@", r"//\1:***@", url).rstrip("/")
        protocols = self._filesystem.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._is_object_store = bool(names & OBJECT_STORES)
        #: Attempt by committed folder, as last listed; replaced whole, so that any thread may read it.
        self._committed: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"RemoteTier({self.name!r})"

    def where(self, folder: str) -> str:
        # The attempt, as its keys begin: whoever looks for a file that a message names finds it.
        return f"{self.name}/{self._committed.get(folder, folder)}"

    def folders(self) -> list[str]:
        self._look()
        return sorted(self._committed)

    def read(self, folder: str, file: str) -> bytes:
        def ask(path: str) -> bytes:
            with self._named_errors("read", path):
                return bytes(self._filesystem.cat_file(path))

        return self._of_snapshot(folder, file, ask)

    def open(self, folder: str, file: str) -> _RemoteReader:
        def ask(path: str) -> _RemoteReader:
            with self._named_errors("open", path):
                return _RemoteReader(self, path, int(self._filesystem.info(path)["size"]))

        return self._of_snapshot(folder, file, ask)

    def begin(self, folder: str, uid: str, *, join: bool = False) -> _RemoteDraft:
        attempt = f"{_checked(folder)}.attempt-{_checked(uid)}"
        if not _ATTEMPT.fullmatch(attempt):
            raise ConfigError(f"uid is {uid!r}; letters and digits alone can name an attempt")
        if not join:
            self._look()
            if folder in self._committed:
                raise DataError(f"{self.name} already holds {folder}: delete it first")
        if not self._is_object_store:
            path = f"{self._root}/{attempt}"
            with self._named_errors("make the folder", path):
                self._filesystem.makedirs(path, exist_ok=True)
        return _RemoteDraft(self, attempt)

    def delete(self, folder: str) -> None:
        doomed = {
            attempt: files
            for attempt, files in self._look().items()
            if _folder_of(attempt) == folder and MANIFEST in files
        }
        if not doomed:
            raise FileNotFoundError(f"{self.name} holds no snapshot {folder}")
        for attempt, files in doomed.items():
            self._remove_attempt(attempt, files)
        self._committed = {other: attempt for other, attempt in self._committed.items() if other != folder}

    def free_bytes(self) -> None:
        return None

    def sweep(self) -> list[str]:
        unfinished = {attempt: files for attempt, files in self._look().items() if MANIFEST not in files}
        for attempt, files in unfinished.items():
            self._remove_attempt(attempt, files)
        return sorted(unfinished.keys() | self._stop_uploads())

    # -- What the target is asked ------------------------------------------------------------------------

    def _look(self) -> dict[str, list[str]]:
        """List the target: the files of each attempt, finished or not; one request on an object store."""
        self._filesystem.invalidate_cache()  # another process writes here too
        attempts: dict[str, list[str]] = {}
        with self._named_errors("list", self._root):
            for attempt, names in self._listed():
                attempts.setdefault(attempt, []).extend(names)
        # Two attempts with a manifest: two writers raced. The same one is taken whoever looks.
        finished = sorted((attempt for attempt, files in attempts.items() if MANIFEST in files), reverse=True)
        self._committed = {_folder_of(attempt): attempt for attempt in finished}
        return attempts

    def _listed(self) -> Iterator[tuple[str, list[str]]]:
        """Yield attempts and some of their files; other people's names are passed over."""
        if self._is_object_store:
            for path in self._filesystem.find(self._root):
                attempt, _, file = path[len(self._root) + 1 :].partition("/")
                if file and _ATTEMPT.fullmatch(attempt):
                    yield attempt, [file]
            return
        # Not `find`: on a file system it passes over folders that it may not read, as if they were empty.
        for attempt in self._names_in(self._root):
            if _ATTEMPT.fullmatch(attempt):
                yield attempt, self._names_in(f"{self._root}/{attempt}")

    def _names_in(self, path: str) -> list[str]:
        try:
            paths = self._filesystem.ls(path, detail=False)
        except FileNotFoundError:  # not made yet, or removed just now
            return []
        return [inside.rstrip("/").rpartition("/")[2] for inside in paths]

    def _of_snapshot(self, folder: str, file: str, ask: Callable[[str], Answer]) -> Answer:
        """Ask for a file by its path. Raises: FileNotFoundError, DataError, and what `ask` does."""
        attempt = self._committed.get(_checked(folder))
        _checked(file)
        if attempt is not None:
            with suppress(FileNotFoundError):  # removed since it was listed, and perhaps saved again
                return ask(f"{self._root}/{attempt}/{file}")
        self._look()
        if folder not in self._committed:
            raise FileNotFoundError(f"{self.name} holds no snapshot {folder}")
        return ask(f"{self._root}/{self._committed[folder]}/{file}")

    def _put(self, path: str, data: bytes) -> None:
        """Make a small file appear whole or not at all."""
        if self._is_object_store:
            self._filesystem.pipe_file(path, data)
            return
        unnamed = f"{path}.unfinished"
        self._filesystem.pipe_file(unnamed, data)
        self._filesystem.mv(unnamed, path)

    def _remove_attempt(self, attempt: str, files: list[str]) -> None:
        """Remove what lies in an attempt's folder, the manifest first: from then on it is no snapshot."""
        path = f"{self._root}/{attempt}"
        with self._named_errors("remove", path):
            if MANIFEST in files:
                _unless_gone(self._filesystem.rm_file, f"{path}/{MANIFEST}")
            if self._is_object_store:
                left = [f"{path}/{file}" for file in files if file != MANIFEST]
                if left:
                    _unless_gone(self._filesystem.rm, left)
            else:
                _unless_gone(functools.partial(self._filesystem.rm, recursive=True), path)

    def _stop_uploads(self) -> set[str]:
        """Give up what was half uploaded to S3 in unfinished attempts: it costs money and no listing shows it."""
        if not hasattr(self._filesystem, "list_multipart_uploads"):
            return set()
        bucket, root, _ = self._filesystem.split_path(self._root)
        inside = f"{root}/" if root else ""
        finished = set(self._committed.values())
        stopped: set[str] = set()
        with self._named_errors("list the uploads of", self._root):
            try:
                uploads = self._filesystem.list_multipart_uploads(bucket)
            except PermissionError:  # not everybody who may write may ask: a rule of the bucket does it then
                return stopped
            for upload in uploads:
                attempt = upload["Key"].removeprefix(inside).partition("/")[0]
                is_ours = upload["Key"].startswith(inside) and _ATTEMPT.fullmatch(attempt)
                if is_ours and attempt not in finished:
                    _unless_gone(self._filesystem.abort_mpu, bucket, upload["Key"], upload["UploadId"])
                    stopped.add(attempt)
        return stopped

    def _url_of(self, path: str) -> str:
        return f"{self.name}{path[len(self._root) :]}"

    @contextmanager
    def _named_errors(self, verb: str, path: str) -> Iterator[None]:
        """Translate what drivers raise, which is of their own kinds, not all of them OSError."""
        url = self._url_of(path)
        try:
            yield
        except DataError:
            raise
        except FileNotFoundError as error:
            if verb in ("read", "open"):
                raise FileNotFoundError(f"{url} does not exist") from error
            advice = "; does the bucket exist?" if self._is_object_store else ""
            raise DataError(f"cannot {verb} {url}: {_reason(error)}{advice}") from error
        except Exception as error:
            # Drivers pass on what they do not know, to whom it fails on first use.
            if self._options and isinstance(error, TypeError) and "keyword argument" in str(error):
                raise ConfigError(
                    f"storage_options is of {', '.join(self._options)}, and the driver of {url} does not know all of "
                    f"them ({error}): take out what is no option of it"
                ) from error
            raise DataError(f"cannot {verb} {url}: {_reason(error)}") from error


class _RemoteReader:
    """An object; each read is a request of its own, so threads do not wait for each other."""

    #: One of S3's streams carries some 100 MB/s after a pause of tens of milliseconds.
    reads_at_once = 6

    def __init__(self, tier: RemoteTier, path: str, nbytes: int) -> None:
        self._tier = tier
        self._path = path
        self.nbytes = nbytes

    def read_into(self, offset: int, out: Bytes) -> None:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.nbytes:
            raise DataError(
                f"{self._tier._url_of(self._path)} has {self.nbytes} bytes; {offset} to {end} were asked for"
            )
        view = out.data
        with self._tier._named_errors("read from", self._path):
            for start in range(offset, end, _READ_BYTES):
                stop = min(start + _READ_BYTES, end)
                data = self._tier._filesystem.cat_file(self._path, start=start, end=stop)
                if len(data) != stop - start:
                    raise OSError(f"{len(data)} of the {stop - start} bytes from {start} on came back")
                view[start - offset : stop - offset] = data

    def close(self) -> None:
        """Nothing is held."""


class _RemoteWriter:
    """An upload in blocks. One thread uses it. After a failure it can only be abandoned."""

    def __init__(self, tier: RemoteTier, path: str) -> None:
        self._tier = tier
        self._path = path
        self.file = path.rpartition("/")[2]
        self._written_bytes = 0
        self._is_over = False
        self.is_finished = False
        with tier._named_errors("write", path):
            self._file = tier._filesystem.open(path, "wb", block_size=_BLOCK_BYTES)
        # Whoever forgets it: an upload that is collected would be finished, and one that is there when the interpreter
        # ends would wait for a thread that has ended.
        self._discard = weakref.finalize(self, _discard, os.getpid(), self._file)
        #: Some stores want all blocks of an upload equally large; an option of this name asks s3fs for it.
        self._blocks_may_grow = hasattr(self._file, "blocksize") and not getattr(
            tier._filesystem, "fixed_upload_size", False
        )

    def write(self, *pieces: Bytes) -> None:
        with self._attempt():
            for data in pieces:
                for start in range(0, data.size, _PIECE_BYTES):
                    piece = bytes(data.data[start : start + _PIECE_BYTES])
                    self._file.write(piece)
                    self._written_bytes += len(piece)
                    if self._blocks_may_grow:
                        self._file.blocksize = block_bytes_after(self._written_bytes)

    def finish(self) -> None:
        with self._attempt():
            self._file.close()
        self._discard.detach()
        self._is_over = self.is_finished = True

    def abandon(self) -> None:
        self._is_over = True
        self._discard()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        if self._is_over:
            raise DataError(f"{self._tier._url_of(self._path)} was finished or given up: begin another")
        try:
            with self._tier._named_errors("write", self._path):
                yield
        except DataError:
            self.abandon()
            raise


class _RemoteDraft:
    """An attempt: files may be created by several threads, and by several ranks that named the same uid."""

    def __init__(self, tier: RemoteTier, attempt: str) -> None:
        self._tier = tier
        self._attempt = attempt
        self._writers: list[_RemoteWriter] = []
        self._is_committed = False

    def create(self, file: str) -> _RemoteWriter:
        if _checked(file) == MANIFEST:
            raise ConfigError(f"{MANIFEST} is what a commit writes; give the file another name")
        writer = _RemoteWriter(self._tier, f"{self._tier._root}/{self._attempt}/{file}")
        self._writers.append(writer)
        return writer

    def commit(self, manifest: bytes) -> None:
        path = f"{self._tier._root}/{self._attempt}/{MANIFEST}"
        # Nothing here can lock: a second writer that came and swept took this attempt for a dead one.
        missing = {writer.file for writer in self._writers if writer.is_finished} - set(
            self._tier._look().get(self._attempt, [])
        )
        if missing:
            raise DataError(
                f"{self._tier._url_of(path)} is not committed: {', '.join(sorted(missing))} was removed meanwhile, "
                "perhaps by a second training that saves to this address; give each its own"
            )
        with self._tier._named_errors("commit", path):
            self._tier._put(path, manifest)
        self._is_committed = True

    def abort(self) -> None:
        if self._is_committed:
            return
        for writer in self._writers:
            writer.abandon()
        with suppress(DataError):  # what cannot be removed now is swept later
            self._tier._remove_attempt(self._attempt, self._tier._look().get(self._attempt, []))


def block_bytes_after(written_bytes: int) -> int:
    """Return how large the next block of an upload is.

    8 MiB, doubled after each 2,000 blocks of a size: a file of 16 GiB needs no more memory than a small one, and one
    of 480 GiB stays within the 10,000 blocks that S3 allows.
    Source: Amazon S3 user guide, "Amazon S3 multipart upload limits".
    """
    size_bytes = _BLOCK_BYTES
    end_bytes = _BLOCKS_OF_A_SIZE * size_bytes
    while written_bytes >= end_bytes:
        size_bytes *= 2
        end_bytes += _BLOCKS_OF_A_SIZE * size_bytes
    return size_bytes


def _opened(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return the file system of an address, which nobody else shares, and the path on it."""
    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError as error:
        raise ConfigError(
            f"{url} needs fsspec: pip install 'penstock[remote]' and the target's driver"
        ) from error
    protocol, separator, path = url.partition("://")
    if not separator or "::" in url:
        raise ConfigError(
            f"{url!r} is no address such as s3://bucket/runs/a; chains of '::' would answer from caches"
        )
    if set(path) & set("*?[]") or ".." in path.split("/"):
        raise ConfigError(f"{url!r} has '..' or one of * ? [ ]; give the plain address of a folder")
    try:
        filesystem, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
        driver = "and what it names" if package == "fsspec" else package
        raise ConfigError(
            f"{url} needs a driver that is not installed ({error}): pip install 'penstock[remote]' {driver}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot be opened with storage_options of {', '.join(sorted(options)) or 'none'}: {error}"
        ) from error
    except Exception as error:  # drivers that connect at once
        raise DataError(f"cannot open {url}: {_reason(error)}") from error
    return filesystem, str(root).rstrip("/")


def _discard(process: int, file: Any) -> None:
    """Let go of a driver's file that is being written, without finishing an upload.

    process: whose it is; in one that was forked and ends, nothing may be done to it.
    Whoever does this has an error of their own to raise, or is the garbage collector; what stays, `sweep` removes.
    """
    from fsspec.spec import AbstractBufferedFile

    with suppress(Exception):
        if os.getpid() != process:
            pass
        elif not isinstance(file, AbstractBufferedFile):
            file.close()
        elif not file.closed:
            file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True  # else it would finish its upload when it is collected


def _checked(name: str) -> str:
    """Return a name of one folder or file. Raises: ConfigError if it could lead anywhere else."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} names no file of a snapshot; letters, digits, '-', '_' and inner '.' alone can"
        )
    return name


def _folder_of(attempt: str) -> str:
    match = _ATTEMPT.fullmatch(attempt)
    assert match is not None, "only attempts are listed"
    return match["folder"]


def _unless_gone(remove: Callable[..., Any], *arguments: Any) -> None:
    with suppress(FileNotFoundError):
        remove(*arguments)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
