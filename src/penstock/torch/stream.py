"""Penstock's codec for baselines as one line for those who stay with DCP's own files:

    writer = FileSystemWriter("ckpt", _extensions=[PenstockStream()])
    dcp.save(state, storage_writer=writer)
    dcp.load(state, storage_reader=FileSystemReader("ckpt", _extension_registry=with_penstock()))

The stream is cut into frames, each stored as the type of float that makes it smallest, with checksums: DCP hands over
bytes without saying what numbers they are.

    magic "PENSTSTR", version u32
    frame: kind u8, type u8, raw bytes u32, stored bytes u32, xxh3-64 of the raw bytes u64; the stored bytes
    ...
    the last frame has no bytes
"""

from __future__ import annotations

import io
import struct
from typing import IO, Any, cast

import numpy as np
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from penstock.checkpoint.codecs import DEFAULT, codec_named, decode_block
from penstock.checkpoint.codecs.codec import BLOCK_VALUES, NEEDS_REFERENCE, SLACK_BYTES, Kind, Pair
from penstock.checkpoint.dtypes import DTYPES, DType
from penstock.checkpoint.parts import raw_checksum_of
from penstock.errors import ConfigError, FormatError

_MAGIC = b"PENSTSTR"
_HEAD = struct.Struct("<8sI")
_FRAME = struct.Struct("<BBIIQ")
_VERSION = 1
#: A number of frames begins with one: all types fit into it a whole number of times.
_FRAME_BYTES = 2 * BLOCK_VALUES
#: Numbers are for ever: they are in files. Bytes that are no floats are stored as they are.
_TYPES: tuple[DType, ...] = tuple(DTYPES[name] for name in ("bfloat16", "float16", "float32", "float64"))
#: Of a frame, looked at to find its type.
_SAMPLE_BYTES = 1 << 14


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
        self._coder = codec_named(DEFAULT).coder(lambda: iter(()))
        self._out = np.empty(_FRAME_BYTES + SLACK_BYTES, np.uint8)
        output.write(_HEAD.pack(_MAGIC, _VERSION))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        self._pending += given
        if len(self._pending) >= _FRAME_BYTES:
            whole = len(self._pending) // _FRAME_BYTES * _FRAME_BYTES
            pending = np.frombuffer(bytes(self._pending[:whole]), np.uint8)
            del self._pending[:whole]
            for begin in range(0, whole, _FRAME_BYTES):
                self._write_frame(pending[begin : begin + _FRAME_BYTES])
        return len(given)

    def _write_frame(self, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        number, kind, payload = 0, Kind.STORED, raw
        sizes = []
        for index, dtype in enumerate(_TYPES):
            sample = raw[: min(raw.size, _SAMPLE_BYTES) // dtype.item_bytes * dtype.item_bytes]
            if sample.size:
                _, length = self._coder.encode(Pair(sample, dtype, None), self._out)
                sizes.append((length / sample.size, index))
        best = _TYPES[min(sizes)[1]] if sizes else _TYPES[0]
        if raw.size and raw.size % best.item_bytes == 0:
            kind, length = self._coder.encode(Pair(raw, best, None), self._out)
            if kind != Kind.STORED:
                number, payload = _TYPES.index(best), self._out[:length]
        self._output.write(_FRAME.pack(int(kind), number, raw.size, payload.size, raw_checksum_of(raw)))
        self._output.write(payload.tobytes())

    def close(self) -> None:
        if not self.closed:
            if self._pending:
                self._write_frame(np.frombuffer(bytes(self._pending), np.uint8))
                self._pending.clear()
            self._output.write(_FRAME.pack(int(Kind.STORED), 0, 0, 0, 0))
            super().close()
            # DCP opens and closes streams from the outside in.
            self._output.close()


class _Decoding(io.RawIOBase):
    def __init__(self, stored: IO[bytes]) -> None:
        self._stored = stored
        self._ready = memoryview(b"")
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

    def _read_frame(self) -> None:
        kind, number, raw_bytes, stored_bytes, checksum = _FRAME.unpack(self._exactly(_FRAME.size))
        if not raw_bytes:
            self._is_over = True
            return
        if (
            raw_bytes > _FRAME_BYTES
            or stored_bytes > raw_bytes
            or number >= len(_TYPES)
            or kind in NEEDS_REFERENCE
        ):
            raise FormatError(
                "a stream of the checkpoint is damaged: a frame is not as PenstockStream writes it"
            )
        payload = np.frombuffer(self._exactly(stored_bytes), np.uint8)
        raw = np.empty(raw_bytes, np.uint8)
        decode_block(kind, payload, _TYPES[number], None, raw)
        if raw_checksum_of(raw) != checksum:
            raise FormatError("a stream of the checkpoint is damaged: a frame does not have its checksum")
        self._ready = memoryview(raw.tobytes())

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self._stored.read(nbytes - len(data))
            if not more:
                raise FormatError("a stream of the checkpoint ends early")
            data += more
        return bytes(data)
