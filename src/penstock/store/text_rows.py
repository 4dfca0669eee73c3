"""Reading rows of text files: CSV, files with tabs, JSON lines. Whatever is wrong is an error with file and line."""

from __future__ import annotations

import csv
import io
import json
from typing import IO, Any

from penstock.errors import DataError
from penstock.store.remote import Objects

#: How files of JSON lines end.
JSON_LINES = (".jsonl", ".ndjson")

#: The number of a line, the first is 1, and what it has.
Rows = list[tuple[int, list[str]]]
Records = list[tuple[int, dict[str, Any]]]


def read_rows(path: str, objects: Objects | None = None) -> Rows:
    """Return the fields of each line of a CSV file that is not empty, without spaces around them.

    objects: what reads an address.
    Where the first line has a tab, tabs separate and commas are ordinary. Raises: DataError.
    """
    try:
        with _opened(path, objects) as text:
            first = text.readline()
            text.seek(0)
            reader = csv.reader(text, delimiter="\t" if "\t" in first else ",", strict=True)
            try:
                return [
                    (reader.line_num, [field.strip() for field in fields]) for fields in reader if any(fields)
                ]
            except csv.Error as error:
                raise DataError(f"{path}, line {reader.line_num}: {error}; correct the line") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    except DataError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _opened(path: str, objects: Objects | None) -> IO[str]:
    if objects is None:
        return open(path, encoding="utf-8-sig", newline="")
    content = objects.content(objects.facts([path])[0])
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")


def read_records(path: str) -> Records:
    """Return the JSON object of each line that is not empty. Raises: DataError."""
    records: Records = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
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


def read_text(path: str) -> str:
    """Return the content of a file in UTF-8. Raises: DataError naming the line that is not."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as text:
            return text.read()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}")


def _not_utf8(path: str, error: UnicodeDecodeError) -> DataError:
    """Return what to raise for a file that is not text, with its first line that is not."""
    number = 0
    with open(path, "rb") as content:
        for number, line in enumerate(content, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as first:
                return DataError(
                    f"{path}, line {number}: is no text in UTF-8 ({first.reason}): write it in UTF-8"
                )
    return DataError(f"{path}, line {number}: is no text in UTF-8 ({error.reason}): write it in UTF-8")
