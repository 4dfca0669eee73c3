"""A web server for tests: objects in memory, index pages, ranges, and whatever may go wrong with an answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, unquote


@dataclass
class Request:
    """What was asked for. between: begin and end of the range, None for all."""

    method: str
    path: str
    headers: dict[str, str]
    between: tuple[int, int] | None


@dataclass
class Answer:
    """What is answered in place of the object. None: as it should be.

    body: what follows a status. reset: the connection is broken. cut: the body ends so many bytes early. added: it has
    more. sizeless: it comes in chunks, without a word of its size. whole: of a range all is sent, with status 200.
    shifted: another range is sent, and said to be. silent: no answer.
    """

    status: int | None = None
    location: str = ""
    body: bytes = b""
    reset: bool = False
    cut: int = 0
    added: int = 0
    whole: bool = False
    sizeless: bool = False
    shifted: int = 0
    silent: bool = False


@dataclass
class WebServer:
    """Serves `objects`, by path without the first "/".

    fault: asked for each request; what it returns is answered. seconds: before each answer.
    together: nothing is answered before so many requests were under way at once. holds: which requests that is said of.
    requests: all that were made. most_at_once: that were under way.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    fault: Callable[[Request], Answer | None] = lambda request: None
    seconds: float = 0.0
    together: int = 1
    holds: Callable[[Request], bool] = lambda request: True
    lists: bool = True
    requests: list[Request] = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def read(self, path: str) -> list[Request]:
        """Return the requests for the content of an object."""
        return [each for each in self.requests if each.path == path and each.method == "GET"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    if not await self._answer(_request(head), writer):
                        break
        finally:
            writer.transport.abort()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer; return whether the connection stays."""
        self.requests.append(request)
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        try:
            if self.seconds:
                await asyncio.sleep(self.seconds)
            while self.most_at_once < self.together and self.holds(request):
                await asyncio.sleep(0.001)
            fault = self.fault(request) or Answer()
            if fault.silent:
                await asyncio.sleep(3600)
            if fault.reset:
                connection: socket.socket = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
            writer.write(self._written(request, fault))
            await writer.drain()
            if fault.cut:  # what was sent arrives before the end does
                writer.write_eof()
                await asyncio.sleep(0.05)
            return not fault.cut
        finally:
            self.under_way -= 1

    def _written(self, request: Request, fault: Answer) -> bytes:
        if fault.status is not None:
            extra = f"Location: {fault.location}\r\n" if fault.location else ""
            lines = f"HTTP/1.1 {fault.status} Fault\r\n{extra}Content-Length: {len(fault.body)}\r\n\r\n"
            return lines.encode() + fault.body
        content = self.objects.get(request.path)
        if content is None:
            page = self._page(request.path)
            if page is None:
                return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page
        status, extra, body = "200 OK", "", content
        if request.between is not None and not fault.whole:
            begin, end = (place + fault.shifted for place in request.between)
            body = content[begin:end]
            if not body:
                return b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\n\r\n"
            status = "206 Partial Content"
            extra = f"Content-Range: bytes {begin}-{begin + len(body) - 1}/{len(content)}\r\n"
        body += b"+" * fault.added
        if fault.sizeless:
            head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{extra}\r\n".encode()
            return head + (b"" if request.method == "HEAD" else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n"
            f'ETag: "{hashlib.md5(content).hexdigest()}"\r\n{extra}\r\n'
        ).encode()
        return head + (b"" if request.method == "HEAD" else body[: len(body) - fault.cut])

    def _page(self, path: str) -> bytes | None:
        folder = path.rstrip("/") + "/" if path.strip("/") else ""
        inside = [name[len(folder) :] for name in self.objects if name.startswith(folder)]
        if not inside or not self.lists:
            return None
        names = sorted({first + slash for first, slash, _ in (name.partition("/") for name in inside)})
        links = "".join(f'<a href="{quote(name)}">{name}</a>\n' for name in ["../", *names])
        return f'<html><a href="?C=M">sort</a>{links}</html>'.encode()


def _request(head: str) -> Request:
    first, *lines = head.rstrip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
    between = (int(found[1]), int(found[2]) + 1) if found else None
    return Request(method, unquote(path).lstrip("/"), headers, between)


@contextlib.contextmanager
def serving(objects: dict[str, bytes] | None = None) -> Iterator[WebServer]:
    """Serve objects in a thread while the context is open."""
    server = WebServer(dict(objects or {}))
    loop = asyncio.new_event_loop()
    started = threading.Event()

    stop = asyncio.Event()

    async def run() -> None:
        listener = await asyncio.start_server(server._serve, "127.0.0.1", 0, backlog=1024)
        server.port = listener.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # for the connections to close

    def work() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=work, name="web-server")
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
