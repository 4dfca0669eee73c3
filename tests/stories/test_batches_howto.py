"""The examples of the page about batches and mixtures run as they are written."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "batches-and-mixtures.md"


def test_the_examples_of_the_page_run_one_after_the_other() -> None:
    given: dict[str, object] = {}

    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for example in examples:
        exec(example, given)

    assert examples
