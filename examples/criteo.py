"""A streaming reader of the Criteo click log format, which finds fault by file and line.

A row is a label, 13 integers and 26 categories in up to 8 hex digits, with tabs between; an empty
field is a missing value. Files may be plain, .gz or .xz.
"""

import gzip
import lzma
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

INTEGERS, CATEGORIES = 13, 26
COLUMNS = 1 + INTEGERS + CATEGORIES
ALL_COLUMNS = np.arange(CATEGORIES)
INTEGER = rb"(?:-?[0-9]{1,18})?"  # 18 digits always fit into 64 bits
CATEGORY = rb"[0-9a-fA-F]{0,8}"
ROW = re.compile(rb"[01](?:\t" + INTEGER + rb"){13}(?:\t" + CATEGORY + rb"){26}")
COLUMN_SHIFT = 40  # a key is the column above, the category's 32 bits (plus one) below
SHOWN_BYTES = 20  # of a bad field, in the error
OPENERS = {".gz": gzip.open, ".xz": lzma.open}  # by the end of the name
BROKEN_ARCHIVE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class UserError(Exception):
    """A mistake that the user can mend: the text says which, and needs no traceback."""


class Batch(NamedTuple):
    """Rows of a click log.

    Attributes:
        labels: float32[n], 1 for a click.
        integers: float32[n, 13], NaN where missing.
        keys: uint64[n, k], each naming its column; k is 26, or more in multi-hot logs. That one is
            missing may say something about the click, so "missing" is a key in every column.
        skipped: bad rows that were passed over while these were read.
    """

    labels: np.ndarray
    integers: np.ndarray
    keys: np.ndarray
    skipped: int = 0


def pack_keys(values: np.ndarray, columns: np.ndarray = ALL_COLUMNS) -> np.ndarray:
    """Returns the table's keys of categories int64[n, k], each 32 bits or -1 where missing.

    Packing is enough to keep columns apart: mixing the bits is the table's own hash's work.
    """
    above = columns.astype(np.uint64) << np.uint64(COLUMN_SHIFT)
    return above | (values + 1).astype(np.uint64)


@dataclass(frozen=True)
class CriteoFile:
    """A click log in a file; `rows` counts its lines, good and bad."""

    path: Path
    skip_bad_rows: bool
    rows: int

    @classmethod
    def scan(cls, path: Path, skip_bad_rows: bool) -> "CriteoFile":
        """Counts the rows of a file, which says where its last part begins.

        Raises:
            UserError: if the file is missing, empty or, unless bad rows are skipped, cut short.
        """
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: not a regular file, which can be read more than once")
        rows = 0
        for rows, line in enumerate(read_lines(path), 1):
            if isinstance(line, UserError) and not skip_bad_rows:
                raise UserError(f"{path}:{rows}: {_fault(line)}")
        if rows == 0:
            raise UserError(f"{path}: the file is empty, expected rows of {COLUMNS} columns")
        return cls(path, skip_bad_rows, rows)

    def batches(self, start: int, stop: int, size: int) -> Iterator[Batch]:
        """Yields the good rows among the lines `start` to `stop`, `size` at a time.

        Raises:
            UserError: naming file and line, at a bad row, unless bad rows are skipped.
        """
        rows, skipped = [], 0
        for number, line in enumerate(islice(read_lines(self.path), start, stop), start + 1):
            if isinstance(line, UserError) or not ROW.fullmatch(line):
                if not self.skip_bad_rows:
                    raise UserError(f"{self.path}:{number}: {_fault(line)}")
                skipped += 1
                continue
            rows.append(line)
            if len(rows) == size:
                yield _batch(rows, skipped)
                rows, skipped = [], 0
        if rows or skipped:
            yield _batch(rows, skipped)


def read_lines(path: Path) -> Iterator[bytes | UserError]:
    """Yields a file's lines without their ends; a broken archive's last item is the reason."""
    try:
        with OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            for line in file:
                yield line.rstrip(b"\r\n")
    except BROKEN_ARCHIVE as error:
        yield UserError(f"the archive is damaged or cut short here ({error})")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def _batch(lines: list[bytes], skipped: int) -> Batch:
    """Parses good rows."""
    rows = [line.split(b"\t") for line in lines]
    counts = [[float(field or b"nan") for field in row[1 : 1 + INTEGERS]] for row in rows]
    categories = [[int(field or b"-1", 16) for field in row[1 + INTEGERS :]] for row in rows]
    return Batch(
        np.array([row[0] == b"1" for row in rows], np.float32),
        np.array(counts, np.float32).reshape(-1, INTEGERS),
        pack_keys(np.array(categories, np.int64).reshape(-1, CATEGORIES)),
        skipped,
    )


def _fault(line: bytes | UserError) -> str:
    """Says what is wrong with a bad row."""
    if isinstance(line, UserError):
        return str(line)
    fields = line.split(b"\t")
    if len(fields) != COLUMNS:
        return f"{len(fields)} columns between tabs, expected {COLUMNS}"
    if fields[0] not in (b"0", b"1"):
        return f"the label is {_shown(fields[0])}, expected 0 or 1"
    for number, field in enumerate(fields[1:], 2):
        is_integer = number <= 1 + INTEGERS
        if not re.fullmatch(INTEGER if is_integer else CATEGORY, field):
            expected = "a whole number" if is_integer else "a category of 1 to 8 hex digits"
            return f"column {number} is {_shown(field)}, expected {expected} or nothing"
    raise AssertionError("a row that fits every column's pattern fits the whole row's")


def _shown(field: bytes) -> str:
    return repr(field[:SHOWN_BYTES].decode("ascii", "backslashreplace"))
