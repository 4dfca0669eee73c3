"""A server for tests that answers as HDFS does: its name node (Hadoop's RPC, version 9) and a data node (version 28).

No more than a client asks that lists and reads. Messages are protocol buffers, whose fields are those of Hadoop's
`hdfs.proto`, `ClientNamenodeProtocol.proto`, `datatransfer.proto` and `RpcHeader.proto`.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.units import format_count

BLOCK_BYTES, PACKET_BYTES, SUMMED_BYTES = 10_000, 4096, 512
_LAST_CHANGE = 1_320_171_722_771

Message = dict[int, "int | bytes"]
Take = Callable[[int], bytes]


@dataclass
class Cluster:
    """Files by path, and when each was changed (ms). refused: by method of the name node, the Java exception."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    #: Bytes that each read of a block asked for.
    reads: list[int] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def status(self, path: str, name: str = "") -> bytes:
        """Return a HdfsFileStatusProto, where its blocks lie included; empty where there is nothing."""
        content = self.files.get(path)
        if content is None and not any(each.startswith(path.rstrip("/") + "/") for each in self.files):
            return b""
        size, time = len(content or b""), self.changed.get(path, _LAST_CHANGE)
        facts = _number(1, 1 if content is None else 2) + _bytes(2, name) + _number(3, size)
        facts += _bytes(4, _number(1, 0o644)) + _bytes(5, "me") + _bytes(6, "us") + _number(7, time)
        facts += _number(8, time) + _number(10, 1) + _number(11, BLOCK_BYTES)
        return facts if content is None else facts + _bytes(12, self._blocks(path, content))

    def _blocks(self, path: str, content: bytes) -> bytes:
        blocks = _number(1, len(content)) + _number(3, 0) + _number(5, 1)
        node = _bytes(1, "127.0.0.1") + _bytes(2, "localhost") + _bytes(3, "node")
        node = _bytes(1, node + _number(4, self.port) + _number(5, 0) + _number(6, 0))
        token = b"".join(_bytes(each, "") for each in (1, 2, 3, 4))
        number = list(self.files).index(path) << 20
        for begin in range(0, len(content), BLOCK_BYTES):
            block = _bytes(1, "pool") + _number(2, number + begin // BLOCK_BYTES) + _number(3, 1)
            block += _number(4, min(BLOCK_BYTES, len(content) - begin))
            blocks += _bytes(
                2, _bytes(1, block) + _number(2, begin) + _bytes(3, node) + _number(4, 0) + _bytes(5, token)
            )
        return blocks

    def block(self, number: int) -> bytes:
        begin = (number & (1 << 20) - 1) * BLOCK_BYTES
        return list(self.files.values())[number >> 20][begin : begin + BLOCK_BYTES]

    def answer(self, method: str, path: str) -> bytes:
        """Return what the name node answers. Raises: LookupError for what it refuses."""
        if method in self.refused:
            raise LookupError(self.refused[method])
        if method == "getServerDefaults":
            numbers = enumerate((1 << 27, SUMMED_BYTES, 1 << 16, 1, 4096, 0, 0, 1), 1)
            return _bytes(1, b"".join(_number(place, each) for place, each in numbers))
        found = self.status(path)
        if method in ("getFileInfo", "getLocatedFileInfo"):
            return _bytes(1, found) if found else b""
        if method == "getBlockLocations":
            return _bytes(1, self._blocks(path, self.files[path])) if path in self.files else b""
        if method != "getListing":
            raise LookupError("java.lang.UnsupportedOperationException")
        base = path.rstrip("/") + "/"
        names = sorted({each[len(base) :].partition("/")[0] for each in self.files if each.startswith(base)})
        inside = [found] if path in self.files else [self.status(base + name, name) for name in names]
        return _bytes(1, b"".join(_bytes(1, each) for each in inside) + _number(2, 0)) if found else b""


@contextlib.contextmanager
def serving() -> Iterator[Cluster]:
    """Answer as both nodes at one port while the context is open."""
    cluster = Cluster()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(EOFError, OSError):
                _serve(cluster, self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as server:
        cluster.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, name="hdfs")
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()


def _serve(cluster: Cluster, connection: socket.socket) -> None:
    def take(count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if not (more := connection.recv(count - len(found))):
                raise EOFError(f"{format_count(count - len(found), 'byte')} did not come")
            found += more
        return bytes(found)

    begun = take(2)
    if begun == b"hr":
        take(5)  # "pc", version, class, and that nobody proves who asks
        while True:
            _answer_call(cluster, connection, take(struct.unpack(">I", take(4))[0]))
    while True:
        assert (struct.unpack(">H", begun)[0], take(1)[0]) == (28, 81), "a block is read"
        _send_block(cluster, connection, _delimited(take))
        _delimited(take)  # how the client fared
        begun = take(2)


def _answer_call(cluster: Cluster, connection: socket.socket, call: bytes) -> None:
    messages = memoryview(call)
    begin = 0

    def take(count: int) -> bytes:
        nonlocal begin
        begin += count
        return bytes(messages[begin - count : begin])

    number = _int(_delimited(take)[3])
    if number & 1:  # zigzag: negative, what a connection begins with
        return
    method, asked = _text(_delimited(take)[1]), _delimited(take)
    head = _number(1, number >> 1)
    try:
        found = cluster.answer(method, _text(asked.get(1, b"")))
        answer = _sized(head + _number(2, 0)) + _sized(found)
    except LookupError as error:
        answer = _sized(head + _number(2, 1) + _bytes(4, str(error.args[0])) + _bytes(5, "refused"))
    connection.sendall(struct.pack(">I", len(answer)) + answer)


def _send_block(cluster: Cluster, connection: socket.socket, asked: Message) -> None:
    offset, length = _int(asked[2]), _int(asked[3])
    block = _fields(asked[1], 1, 1)
    content = cluster.block(_int(block[2]))
    cluster.reads.append(length)
    begin = offset // SUMMED_BYTES * SUMMED_BYTES
    end = min(len(content), -(-(offset + length) // SUMMED_BYTES) * SUMMED_BYTES)
    sums = _bytes(1, _number(1, 1) + _number(2, SUMMED_BYTES)) + _number(2, begin)
    connection.sendall(_sized(_number(1, 0) + _bytes(4, sums)))
    for number, at in enumerate([*range(begin, end, PACKET_BYTES), end]):
        data = content[at : min(at + PACKET_BYTES, end)]
        pieces = [data[each : each + SUMMED_BYTES] for each in range(0, len(data), SUMMED_BYTES)]
        crcs = b"".join(struct.pack(">I", zlib.crc32(piece)) for piece in pieces)
        head = struct.pack("<BqBq", 1 << 3 | 1, at, 2 << 3 | 1, number) + _number(3, at == end)
        head += struct.pack("<Bi", 4 << 3 | 5, len(data))
        sizes = struct.pack(">IH", 4 + len(crcs) + len(data), len(head))
        connection.sendall(sizes + head + crcs + data)


# -- Protocol buffers ----------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _number(place: int, value: int) -> bytes:
    return _varint(place << 3) + _varint(value)


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _bytes(place: int, content: bytes | str) -> bytes:
    return _varint(place << 3 | 2) + _sized(content.encode() if isinstance(content, str) else content)


def _taken(take: Take) -> int:
    number = shift = 0
    while (byte := take(1)[0]) > 127:
        number |= (byte & 127) << shift
        shift += 7
    return number | byte << shift


def _delimited(take: Take) -> Message:
    """Return a message that comes behind its length, by field."""
    return _fields(take(_taken(take)))


def _fields(message: int | bytes, *inner: int) -> Message:
    """Return a message by field. inner: the fields in which the wanted message lies."""
    assert isinstance(message, bytes)
    found, begin = Message(), 0

    def take(count: int) -> bytes:
        nonlocal begin
        begin += count
        return message[begin - count : begin]

    while begin < len(message):
        place, kind = divmod(_taken(take), 8)
        found[place] = _taken(take) if kind == 0 else take(_taken(take) if kind == 2 else {1: 8, 5: 4}[kind])
    return _fields(found[inner[0]], *inner[1:]) if inner else found


def _int(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value


def _text(value: int | bytes) -> str:
    assert isinstance(value, bytes)
    return value.decode()
