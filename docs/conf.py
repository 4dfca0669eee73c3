"""Sphinx configuration. Pages are Markdown (MyST); the reference comes from the docstrings."""

from __future__ import annotations

import re
import tomllib
from enum import Enum
from pathlib import Path

from sphinx.application import Sphinx

_PROJECT = tomllib.loads(Path(__file__).parent.with_name("pyproject.toml").read_text("utf-8"))["project"]

project = "Penstock"
version = release = _PROJECT["version"]
project_copyright = "the Penstock authors, Apache License 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "literal"

html_theme = "furo"
html_title = f"Penstock {version}"
html_show_sphinx = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "member-order": "bysource"}
autoclass_content = "both"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
# A third of the time that everything else takes to import, and in no signature.
autodoc_mock_imports = ["tensorflow"]
autodoc_type_aliases = {name: name for name in ("ArrayLike", "JSON", "Spans")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

# A reference into Penstock must lead somewhere; other projects' pages are not at hand while this is built.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!penstock\.).*"),
    ("py:.*", r"penstock\.(.*\.)?_.*"),
    ("py:.*", r"penstock\.(.*\.)?[A-Z]"),  # type variables
    ("py:.*", r"penstock\.checkpoint\.saving\.BackgroundSave"),  # of which only the store makes a Saving
    ("py:.*", r"penstock\.loader\.source_samples\.Mapped(WithDraws)?"),  # which only `map` makes
    (
        "py:.*",
        r"penstock\.graph\.(state\.(resources\.Resources|saves\.HasState)|run\.(timeline\.Lane|executor\.Step))",
    ),  # which only sessions make
    ("py:.*", r"penstock\.measure\.snapshot_study\.SnapshotStudy"),  # which a paper and a command look at
    ("py:.*", r"penstock\.machine\.tables\.Table"),  # of which only the readers of files know
    (
        "py:.*",
        r"penstock\.loader\.transforms\.(jpeg\.JpegHeader|memory\.(Memory|Need)|group\.Later|stages\.Beside)",
    ),  # its own
    (
        "py:.*",
        r"penstock\.loader\.transforms\.(augment\.Border|geometry\.StepNumbers|pixels\.Pixels)",
    ),  # so are these
    ("py:.*", r"penstock\.loader\.transforms\.sink\.ByteValues"),
    ("py:.*", r"penstock\.graph\.workers\.config\.SessionArguments"),  # the fields of SessionConfig
    ("py:.*", r"penstock\.loader\.decode_work\.StoredSamples"),  # which a decode server opens
]

_FIELD = re.compile(r"([A-Za-z_]\w*(?:, [a-z_]\w*)*): (.*)")
_ARRAY = re.compile(r"~?numpy\.ndarray\[tuple\[~?typing\.Any, \.\.\.\], ~?numpy\.dtype\[(~?[\w.]+)\]\]")
_ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")
_CODE = re.compile(r"(``.+?``|`.+?`)")


def _docstring_to_rst(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turn the plain text of our docstrings into the markup that shows what it looks like.

    A line `name: text` or `name, other: text` at the margin is a parameter, or with a capital (`Returns:`,
    `Raises:`) a field; a table, or an indented block after an empty line, is kept as it is drawn; everything
    else is text with `code` in it.
    """
    source, lines[:] = list(lines), []
    drawing = in_fields = False
    item_indent = -1  # of the list item that is being read, -1 outside of a list
    for index, line in enumerate(source):
        indent = len(line) - len(line.lstrip())
        after_gap = index == 0 or not source[index - 1].strip()
        is_drawn = indent > 0 or line.startswith("|")
        if not line.strip():
            lines.append("")
            in_fields, item_indent = False, -1
        elif line.startswith((">>>", "...")):
            lines.append(line)
        elif is_drawn and (drawing or after_gap):
            if not drawing:
                lines += ["::", ""]
            drawing = True
            lines.append("    " + line)
        elif match := _FIELD.fullmatch(line):
            drawing, item_indent = False, -1
            if not in_fields:
                lines.append("")
            in_fields = True
            names = match[1].replace(" ", "")
            field = names if names[0].isupper() else f"param {names}"
            lines.append(f":{field}: {_escape(match[2])}")
        else:
            drawing = False
            is_item = line.lstrip().startswith("- ")
            list_begins = is_item and item_indent < 0
            list_ends = not is_item and indent <= item_indent
            if list_begins or list_ends:
                lines.append("")
                item_indent = indent if is_item else -1
            lines.append(("    " if in_fields and not indent else "") + _escape(line))


def _escape(text: str) -> str:
    parts = _CODE.split(text)
    for index, part in enumerate(parts):
        if index % 2:
            word_follows = re.match(r"\w", parts[index + 1])
            parts[index] = f"``{part.strip('`')}``" + (r"\ " if word_follows else "")
        else:
            parts[index] = re.sub(r"([*|]|_(?!\w))", r"\\\1", part)
    return "".join(parts)


def _keep_enum_members(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Show the members of an enumeration even where their names say all."""
    return False if isinstance(obj, Enum) else None


def _plain_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Write arrays as they are written in the source, and a default that is made anew as three dots."""

    def plain(text: str | None) -> str | None:
        return text and _ALIAS.sub(r"\1", _ARRAY.sub(r"NDArray[\1]", text)).replace("<factory>", "...")

    return plain(signature), plain(returns)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _docstring_to_rst)
    app.connect("autodoc-skip-member", _keep_enum_members)
    app.connect("autodoc-process-signature", _plain_signature)
