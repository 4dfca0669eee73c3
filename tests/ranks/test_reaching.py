"""What a look finds at an address where nobody answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.ranks import reaching


def test_what_is_at_an_address_is_something_else_unless_it_greets_as_zeromq() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                server.accept()[0].close()

        answering = threading.Thread(target=answer)
        answering.start()
        assert reaching.look_at(f"tcp://127.0.0.1:{server.getsockname()[1]}")[0] == reaching.At.OTHER
        answering.join()
    assert reaching.look_at("tcp://no host:1")[0] == reaching.At.UNREACHED


def test_a_look_takes_half_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = [0.0], list[float]()

    class Ending(contextlib.nullcontext[None]):
        def settimeout(self, seconds: float) -> None:
            given.append(seconds)

        def recv(self, nbytes: int) -> bytes:
            now[0] += 0.2
            return b""

        def __enter__(self) -> Any:
            return self

    def connect(place: tuple[str, int], seconds: float) -> Ending:
        given.append(seconds)
        now[0] += 0.2
        return Ending()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(reaching, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(reaching, "socket", SimpleNamespace(create_connection=connect))
    assert reaching.look_at("tcp://[::1]:7448") == (reaching.At.OTHER, "")
    assert given == pytest.approx([0.5, 0.3, 0.05, 1e-3])
