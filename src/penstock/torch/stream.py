"""Penstock's codec for baselines as one line for those who stay with DCP's own files:

    writer = FileSystemWriter("ckpt", _extensions=[PenstockStream()])
    dcp.save(state, storage_writer=writer)
    dcp.load(state, storage_reader=FileSystemReader("ckpt", _extension_registry=with_penstock()))

The stream is cut into frames, each stored as the type of float that makes it smallest, with checksums: DCP hands over
bytes without saying what numbers they are.

    magic "PENSTSTR", version u32
    frame: kind u8, type u8, raw bytes u32, stored bytes u32; the stored bytes; xxh3-64 of these and of the frame's
        number u64
    ...
    the last frame has no bytes, and nothing follows it
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any, cast

import numpy as np
import xxhash
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from penstock.checkpoint.codecs import DEFAULT, codec_named, decode_block
from penstock.checkpoint.codecs.codec import NEEDS_REFERENCE, SLACK_BYTES, Kind, Pair
from penstock.checkpoint.state.dtypes import DTYPES, DType
from penstock.checkpoint.state.tensors import BLOCK_VALUES, Bytes
from penstock.errors import ConfigError, FormatError

_MAGIC = b"PENSTSTR"
_HEAD = struct.Struct("<8sI")
_FRAME = struct.Struct("<BBII")
_CHECKSUM_BYTES = 8
_VERSION = 1
#: A number of frames begins with one: all types fit into it a whole number of times.
_FRAME_BYTES = 2 * BLOCK_VALUES
#: Numbers are for ever: they are in files. Bytes that are no floats are stored as they are.
_TYPES: tuple[DType, ...] = tuple(DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64"))
#: Of a frame, looked at to find its type.
_SAMPLE_BYTES = 1 << 14
_LARGEST_ITEM_BYTES = 8
#: A frame's share that is greater by that than the one before is looked into.
_MOST_WORSE = 0.02


class PenstockStream(StreamTransformExtension):
    """Compresses what DCP writes, without references to earlier checkpoints."""

    @staticmethod
    def registry_name() -> str:
        """Return what DCP's metadata calls it."""
        return "stream.penstock"

    @staticmethod
    def from_descriptor(version: str) -> PenstockStream:
        """Return the extension that wrote a file. Raises: ConfigError if it was a later one."""
        if version.partition(".")[0] != str(_VERSION):
            raise ConfigError(
                f"the checkpoint was written by stream.penstock {version}; this Penstock reads {_VERSION}"
            )
        return PenstockStream()

    def get_descriptor(self) -> str:
        """Return name and version."""
        return f"{self.registry_name()}/{_VERSION}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that writes to another what it is given, encoded."""
        return cast(IO[bytes], _Encoding(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002, as it is called there
        """Return a stream that reads what another has, decoded. Its reads raise FormatError."""
        return cast(IO[bytes], _Decoding(input))


def with_penstock() -> ExtensionRegistry:
    """Return DCP's registry of extensions with ours in it."""
    registry = ExtensionRegistry()
    registry.register(PenstockStream)
    return registry


class _Encoding(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._pending = bytearray()
        self._frames = 0
        self._coder = codec_named(DEFAULT).coder(lambda: iter(()))
        self._out = np.empty(_FRAME_BYTES + SLACK_BYTES, np.uint8)
        #: Of the frame before: number of its type, and stored bytes to bytes. All of a tensor's are of one type.
        self._type = 0
        self._share = -1.0
        output.write(_HEAD.pack(_MAGIC, _VERSION))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        begin = 0
        if self._pending:
            begin = min(len(given), _FRAME_BYTES - len(self._pending))
            self._pending += given[:begin]
            if len(self._pending) == _FRAME_BYTES:
                self._write_pending()
        while len(given) - begin >= _FRAME_BYTES:
            self._write_frame(np.frombuffer(given[begin : begin + _FRAME_BYTES], np.uint8))
            begin += _FRAME_BYTES
        self._pending += given[begin:]
        return len(given)

    def _write_pending(self) -> None:
        frame, self._pending = self._pending, bytearray()
        self._write_frame(np.frombuffer(frame, np.uint8))

    def _write_frame(self, raw: Bytes) -> None:
        number, kind, payload = 0, Kind.STORED, raw
        if raw.size:
            kind, length = self._encoded(raw)
            if length > (self._share + _MOST_WORSE) * raw.size:
                # The first frame, or other numbers than those before.
                self._type = self._best_type(raw)
                kind, length = self._encoded(raw)
            self._share = length / raw.size
            if kind != Kind.STORED:
                number, payload = self._type, self._out[:length]
        header = _FRAME.pack(int(kind), number, raw.size, payload.size)
        self._output.write(header)
        self._output.write(payload.data)
        self._output.write(_checksum(self._frames, header, payload))
        self._frames += 1

    def _encoded(self, raw: Bytes) -> tuple[Kind, int]:
        dtype = _TYPES[self._type]
        return (
            (Kind.STORED, raw.size)
            if raw.size % dtype.item_bytes
            else self._coder.encode(Pair(raw, dtype, None), self._out)
        )

    def _best_type(self, raw: Bytes) -> int:
        """Return the number of the type as which a frame's beginning is smallest."""
        lengths = []
        for number, dtype in enumerate(_TYPES):
            sample = raw[: min(raw.size, _SAMPLE_BYTES) // _LARGEST_ITEM_BYTES * _LARGEST_ITEM_BYTES]
            if sample.size:
                _, length = self._coder.encode(Pair(sample, dtype, None), self._out)
                lengths.append((length, number))
        return min(lengths, default=(0, 0))[1]

    def close(self) -> None:
        if not self.closed:
            if self._pending:
                self._write_pending()
            self._write_frame(np.empty(0, np.uint8))
            super().close()
            # DCP opens and closes streams from the outside in.
            self._output.close()


class _Decoding(io.RawIOBase):
    def __init__(self, stored: IO[bytes]) -> None:
        self._stored = stored
        self._ready = memoryview(b"")
        self._frames = 0
        self._is_over = False
        if self._exactly(_HEAD.size) != _HEAD.pack(_MAGIC, _VERSION):
            raise FormatError("a stream of the checkpoint does not begin as PenstockStream writes it")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        while not self._ready and not self._is_over:
            self._read_frame()
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def readall(self) -> bytes:
        frames = []
        while not self._is_over:
            frames.append(self._ready)
            self._ready = memoryview(b"")
            self._read_frame()
        return b"".join(frames)

    def _read_frame(self) -> None:
        header = self._exactly(_FRAME.size)
        kind, number, raw_bytes, stored_bytes = _FRAME.unpack(header)
        if raw_bytes > _FRAME_BYTES or stored_bytes > raw_bytes:
            raise FormatError("a stream of the checkpoint is damaged: a frame is longer than any")
        payload = np.frombuffer(self._exactly(stored_bytes), np.uint8)
        if self._exactly(_CHECKSUM_BYTES) != _checksum(self._frames, header, payload):
            raise FormatError("a stream of the checkpoint is damaged: a frame does not have its checksum")
        self._frames += 1
        if not raw_bytes:
            if self._stored.read(1):
                raise FormatError("a stream of the checkpoint is damaged: there are bytes after its end")
            self._is_over = True
            return
        is_whole = number < len(_TYPES) and raw_bytes % _TYPES[number].item_bytes == 0
        if kind in NEEDS_REFERENCE or not (kind == Kind.STORED or is_whole):
            raise FormatError("a stream of the checkpoint has a frame that PenstockStream does not write")
        raw = np.empty(raw_bytes, np.uint8)
        decode_block(kind, payload, _TYPES[number if is_whole else 0], None, raw)
        self._ready = memoryview(raw.data)

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._stored.read(nbytes - len(data))
            if not more:
                raise FormatError("a stream of the checkpoint ends early")
            data += more
        return bytes(data)


def _checksum(number: int, header: bytes, payload: Bytes) -> bytes:
    checksum = xxhash.xxh3_64(struct.pack("<Q", number) + header)
    checksum.update(payload.data)
    return checksum.digest()
