"""The examples of the how-to page on remote stores run as they are written, from a web server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.store.web_server import serving
from tests.stories.test_source_howto import HOWTO, write_shards


@pytest.mark.usefixtures("obstore_threads")
def test_the_examples_read_from_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shards(tmp_path / "shards")
    objects = {f"shards/{file.name}": file.read_bytes() for file in (tmp_path / "shards").iterdir()}
    objects["tokens.bin"] = np.arange(1000, dtype=np.uint16).tobytes()
    objects |= {f"train/{label}/{number}.jpg": b"1" for label in ("cat", "dog") for number in range(3)}
    given: dict[str, Any] = {}
    printed = []

    with serving(objects) as server:
        for example in re.findall(
            r"```python\n(.*?)```", (HOWTO / "remote-stores.md").read_text(), re.DOTALL
        ):
            exec(example.replace("https://data.example.org", server.address), given)
            printed.append(capsys.readouterr().out.splitlines()[-1].replace(server.address, ""))

    assert printed == [
        "(32, 3, 64, 64) (32,)",
        "Tokens('/tokens.bin'): 15 samples of uint16[65]",
        "ImageFolder('/train'): 6 samples, 2 classes",
    ]
