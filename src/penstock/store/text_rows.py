"""Reading rows of text files: CSV, files with tabs, JSON lines. Whatever is wrong is an error with file and line."""

from __future__ import annotations

import codecs
import csv
import io
import json
from typing import Any

from penstock.errors import DataError
from penstock.store.object_store import is_address
from penstock.store.remote import Objects

#: How files of JSON lines end.
JSON_LINES = (".jsonl", ".ndjson")
#: What to do with another file of JSON.
JSON_ADVICE = (
    "open COCO's with penstock.store.CocoImages(annotations, folder), and write any other as one object a line, in a "
    "file called .jsonl"
)

#: The number of a line, the first is 1, and what it has.
Rows = list[tuple[int, list[str]]]
Records = list[tuple[int, dict[str, Any]]]


def read_rows(path: str, objects: Objects | None = None) -> Rows:
    """Return the fields of each line of a CSV file that is not empty, without spaces around them.

    Where the first line has a tab, tabs separate and commas are ordinary. objects: what reads an address.
    Raises: DataError.
    """
    text = io.StringIO(read_text(path, objects), newline="")
    first = text.readline()
    text.seek(0)
    reader = csv.reader(text, delimiter="\t" if "\t" in first else ",", strict=True)
    try:
        return [(reader.line_num, [field.strip() for field in fields]) for fields in reader if any(fields)]
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; correct the line") from error


def read_records(path: str, objects: Objects | None = None) -> Records:
    """Return the JSON object of each line that is not empty. objects: what reads an address. Raises: DataError."""
    records: Records = []
    for number, line in enumerate(read_text(path, objects).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: is no JSON ({error}): correct the line") from error
        if not isinstance(record, dict):
            raise DataError(
                f'{path}, line {number}: is {line:.40}; a line is an object, such as {{"file": "1.jpg"}}'
            )
        records.append((number, record))
    return records


def read_text(path: str, objects: Objects | None = None) -> str:
    """Return the content of a file in UTF-8. objects: what reads an address.

    Raises: DataError naming the line that is not.
    """
    if objects is not None and is_address(path):
        content = objects.content(objects.facts([path])[0])
    else:
        try:
            with open(path, "rb") as file:
                content = file.read()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: is no text in UTF-8 ({error.reason}): write it in UTF-8"
        ) from error
