"""The examples of the how-to pages on snapshots run as they are written, one after the other."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from penstock.checkpoint import SnapshotStore

PAGES = Path(__file__).parents[2] / "docs" / "howto"


def examples(page: str) -> list[str]:
    """Return the Python of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def training() -> dict[str, Any]:
    """Return what the examples take as given."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_save_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save, epochs, keep, stop, damaged = examples("save-and-resume.md")

    first = training()
    exec(save, first | {"steps": 1000})
    again = training() | {"steps": 2500}
    exec(save, again)

    assert again["first"] == 1000
    assert torch.equal(again["model"].weight, first["model"].weight)
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in told] == [["penstock", "step 1000"], ["penstock", "step 2000"]]
    assert all(re.search(r"blocked .* durable after .* wrote .* of .*%\), ", line) for line in told)

    for number in range(4):
        (tmp_path / "photos/train/one").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / f"photos/train/one/{number}.png")
    short = (
        epochs.replace("90", "3").replace("batch_size=64", "batch_size=2").replace("1000 steps", "2 steps")
    )
    short = short.replace(
        "    ...  # one step of the training\n", "    seen.append(images.numpy().tobytes())\n"
    )
    full: dict[str, Any] = again | {"seen": []}
    exec(short, full)
    with SnapshotStore("runs/b") as store:
        assert [one.step for one in store.list()] == [2, 4, 6]
        store.delete(6)
        store.delete(4)
    killed: dict[str, Any] = again | {"seen": []}
    exec(short, killed)
    assert killed["seen"] == full["seen"][2:]

    exec(keep, again)
    again |= {"first": 0, "steps": 3}
    with pytest.raises(SystemExit) as ended:
        exec(stop, again)
    assert not ended.value.code
    again["store"] = SnapshotStore("runs/a")
    exec(damaged, again)


def test_a_burst_buffer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples("burst-buffer.md")
    for place in ("/lustre", "/local"):
        assert place in example
        example = example.replace(place, f"{tmp_path}{place}")

    exec(example.replace("    ...\n", "    store.save(1000, {'weights': [1, 2]})\n"), {})

    # A small one may be drained before the line of its save is told.
    line, drained = sorted(capsys.readouterr().err.splitlines())
    assert line.startswith("penstock: step 1000: blocked")
    assert drained.startswith("penstock: step 1000: drained after")
    assert drained.endswith(f"to {tmp_path}/lustre/me/runs/a")


class Socket:
    """Keeps messages apart, and in order."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def recv(self) -> bytes | None:
        return self.messages.popleft() if self.messages else None


def test_refresh_inference_workers(tmp_path: Path) -> None:
    send, receive, ask = examples("refresh-workers.md")
    trainer, worker = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with SnapshotStore(tmp_path, report=None) as store:
        socket = Socket()
        given: dict[str, Any] = {"store": store, "socket": socket, "model": worker}
        for step in (100, 120):
            torch.nn.init.uniform_(trainer.weight)
            store.save(step, {"model": trainer.state_dict()}).wait()
            if step == 100:
                exec(send.replace("(100, 120,", "(None, 100,"), given)
                exec(receive, given)

        exec(send, given)
        refreshed = given["refresher"].apply(iter(socket.recv, None))

    assert refreshed.step == 120
    assert torch.equal(worker.weight, trainer.weight)

    asked: list[int | None] = []

    def ask_for(at: int | None) -> None:
        asked.append(at)
        if len(asked) == 4:
            raise InterruptedError
        messages = list(store.refresh(at))
        if len(asked) == 2:
            messages[0] = messages[0][:-1] + bytes([messages[0][-1] ^ 1])
        for message in messages:
            socket.send(message)

    with pytest.raises(InterruptedError):
        exec(ask, given | {"ask_for": ask_for})
    assert asked == [None, 120, None, 120]


def test_predicted_saves_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples("predict-saves.md")
    exec(example, {})
    assert f"```text\n{capsys.readouterr().out}```" in (PAGES / "predict-saves.md").read_text()
