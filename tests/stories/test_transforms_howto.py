"""The examples of the page about transforms that are whole run as they are written."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "transforms.md"


def test_the_examples_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    whole = [example for example in examples if "import penstock as ps" in example]
    for number, example in enumerate(whole):
        (folder := tmp_path / str(number)).mkdir()
        exec(example, {"folder": folder})

    assert whole
