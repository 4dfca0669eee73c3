"""The examples of pages run as they are written, one after the other."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "howto"


@pytest.mark.parametrize("page", ["batches-and-mixtures", "decode-once", "local-disk", "samples"])
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, object] = {}

    examples = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    for example in examples:
        exec(example, given)

    assert examples
