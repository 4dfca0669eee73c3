"""An object store on loopback: it answers after a latency, over a link of a rate that all answers share.

    python benchmarks/loader/object_store.py --port 9123 --latency 0.02 --rate 125e6 --objects 64 --samples 160

It has one bucket, "bucket", with objects `part-00.bin` ... of records of 100,000 bytes, each beginning with its number
(int64), each record once more as `samples/000000.bin` ..., and a folder as further objects. It speaks as much of S3 as
reading takes: lists, HEAD, and GET with ranges. Signatures are not looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

import numpy as np

SAMPLE_BYTES = 100_000
BUCKET = "bucket"


def write_parts(objects: int, samples: int) -> dict[str, memoryview]:
    """Return objects by name, each of so many records."""
    random = np.random.default_rng(0)
    parts = {}
    for part in range(objects):
        content = random.integers(0, 256, (samples, SAMPLE_BYTES), np.uint8)
        numbers = np.arange(part * samples, (part + 1) * samples, dtype="<i8")
        content[:, :8] = numbers.view(np.uint8).reshape(samples, 8)
        parts[f"part-{part:02}.bin"] = content.reshape(-1).data
        for number, sample in zip(numbers.tolist(), content, strict=True):
            parts[f"samples/{number:06}.bin"] = sample.data
    return parts


class Store:
    """What is served. free: when the link is. The rest: since `statistics` was asked for."""

    def __init__(self, objects: dict[str, memoryview], latency: float, rate: float) -> None:
        self.objects, self.latency, self.rate = objects, latency, rate
        self.free = 0.0
        self.requests = self.under_way = self.most = self.nbytes = 0


class Connection(asyncio.Protocol):
    def __init__(self, store: Store) -> None:
        self._store, self._received = store, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=1 << 30)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, self._received = self._received[:end], self._received[end + 4 :]
            store, loop = self._store, asyncio.get_running_loop()
            store.requests += 1
            store.under_way += 1
            store.most = max(store.most, store.under_way)
            loop.call_later(store.latency, self._link, *self._answer(head))

    def _link(self, head: bytes, body: memoryview | bytes) -> None:
        store, loop = self._store, asyncio.get_running_loop()
        store.free = max(store.free, loop.time()) + len(body) / store.rate
        store.nbytes += len(body)
        loop.call_at(store.free, self._send, head, body)

    def _send(self, head: bytes, body: memoryview | bytes) -> None:
        self._store.under_way -= 1
        if not self._transport.is_closing():
            self._transport.write(head)
            self._transport.write(body)

    def _answer(self, head: bytes) -> tuple[bytes, memoryview | bytes]:
        method, target, _ = head[: head.index(b"\r\n")].decode().split(" ")
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        if bucket == "statistics":
            body = f"{self._store.requests} {self._store.most} {self._store.nbytes}".encode()
            self._store.requests = self._store.most = self._store.nbytes = 0
            return _head("200 OK", len(body)), body
        if not key:
            body = self._list(parse_qs(query))
            return _head("200 OK", len(body), "Content-Type: application/xml\r\n"), body
        content = self._store.objects.get(key)
        if content is None:
            return _head("404 Not Found", 0), b""
        facts = f'ETag: "{abs(hash(key)):x}"\r\nLast-Modified: Tue, 24 Nov 2026 00:00:00 GMT\r\n'
        facts += "Accept-Ranges: bytes\r\n"
        found = re.search(rb"\r\n[Rr]ange: bytes=(\d+)-(\d*)", head)
        if found is None:
            return _head("200 OK", len(content), facts), b"" if method == "HEAD" else content
        begin = int(found[1])
        end = min(int(found[2]) + 1 if found[2] else len(content), len(content))
        facts += f"Content-Range: bytes {begin}-{end - 1}/{len(content)}\r\n"
        return _head("206 Partial Content", end - begin, facts), content[begin:end]

    def _list(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-24T00:00:00.000Z</LastModified>"
            f'<ETag>"{abs(hash(key)):x}"</ETag><Size>{len(content)}</Size><StorageClass>STANDARD</StorageClass></Contents>'
            for key, content in sorted(self._store.objects.items())
            if key.startswith(prefix)
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>100000</MaxKeys>"
            f"<KeyCount>{entries.count('<Key>')}</KeyCount><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        ).encode()


def _head(status: str, length: int, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{extra}\r\n".encode()


async def serve(store: Store, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(store), "127.0.0.1", port, backlog=4096
    )
    print(f"serves on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds before each answer")
    parser.add_argument("--rate", type=float, default=125e6, help="bytes a second of the link")
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--samples", type=int, default=160, help="in each object")
    parser.add_argument("--folder", type=Path, help="served as objects, too")
    options = parser.parse_args(argv)
    objects = write_parts(options.objects, options.samples)
    if options.folder is not None:
        for file in options.folder.rglob("*"):
            if file.is_file():
                objects[str(file.relative_to(options.folder))] = memoryview(file.read_bytes())
    asyncio.run(serve(Store(objects, options.latency, options.rate), options.port))


if __name__ == "__main__":
    main()
