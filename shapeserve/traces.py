"""Read recorded traffic: traces of arrivals, and histograms of lengths.

Both are CSV files with a header line, plain or gzipped (a name that ends in ``.gz``):

* a trace, ``t_s,len``: seconds since the first row (never decreasing), length in tokens;
* a trace of shapes, ``t_s,height,width``: the same with a size along each axis that it names;
* a histogram, ``tokens,count``: length in tokens, number of rows that have it.

Every line is checked; the first bad one raises ``ConfigError`` with its file and number.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shapeserve.errors import ConfigError

TRACE_HEADER = ("t_s", "len")
HISTOGRAM_HEADER = ("tokens", "count")

# One numbered data line: (line number, its fields).
_Line = tuple[int, list[str]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time; row i came ``times_s[i]`` after the first."""

    times_s: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """How many rows have which sizes.

    Attributes:
        axes: names of the axes; () for one axis that the file does not name (``len``, ``tokens``).
        rows: size along each axis -> rows, ascending.
    """

    axes: tuple[str, ...]
    rows: Mapping[tuple[int, ...], int]


def read_trace(path: str | Path) -> Trace:
    """Read a ``t_s,len`` trace.

    Raises:
        ConfigError: The file cannot be read, has another header, no rows, or a bad line.
    """
    header, lines = _read(path)
    if header != TRACE_HEADER:
        raise ConfigError(f"{path}:1: header is {_shown(header)}; a trace has t_s,len")
    times_s, sizes = _arrivals(path, header, lines)
    return Trace(times_s, tuple(length for (length,) in sizes))


def read_lengths(path: str | Path) -> dict[int, int]:
    """Return length (tokens) -> rows, ascending, of a trace or of a histogram.

    Raises:
        ConfigError: As for ``read_trace``.
    """
    shapes = read_shapes(path)
    if shapes.axes:
        raise ConfigError(
            f"{path}:1: sizes along {', '.join(shapes.axes)}; a trace of lengths has t_s,len"
        )
    return {length: rows for (length,), rows in shapes.rows.items()}


def read_shapes(path: str | Path) -> Shapes:
    """Count the row shapes of a trace, with named axes or without, or of a histogram.

    Raises:
        ConfigError: As for ``read_trace``.
    """
    header, lines = _read(path)
    counts: Counter[tuple[int, ...]] = Counter()
    if header == HISTOGRAM_HEADER:
        for line, (tokens, count) in lines:
            counts[(_size(path, line, "tokens", tokens),)] += _size(path, line, "count", count)
    else:
        counts.update(_arrivals(path, header, lines)[1])
    unnamed = header in (TRACE_HEADER, HISTOGRAM_HEADER)
    return Shapes(() if unnamed else header[1:], dict(sorted(counts.items())))


def _arrivals(
    path: str | Path, header: tuple[str, ...], lines: list[_Line]
) -> tuple[tuple[float, ...], list[tuple[int, ...]]]:
    times_s: list[float] = []
    shapes: list[tuple[int, ...]] = []
    for line, (t_s, *sizes) in lines:
        times_s.append(_time(path, line, t_s, not_before=times_s[-1] if times_s else 0.0))
        named = zip(header[1:], sizes, strict=True)
        shapes.append(tuple(_size(path, line, name, size) for name, size in named))
    return tuple(times_s), shapes


def _read(path: str | Path) -> tuple[tuple[str, ...], list[_Line]]:
    """Return the header and the numbered data lines; there is at least one."""
    try:
        rows = list(_csv_rows(Path(path)))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        # gzip reports damage as BadGzipFile (an OSError) or EOFError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{path}: cannot be read: {reason}; give a CSV file (.csv or .csv.gz)"
        ) from error
    header = tuple(name.strip() for name in rows[0][1]) if rows else ()
    named = len(header) > 1 and header[0] == TRACE_HEADER[0] and len(set(header)) == len(header)
    if header != HISTOGRAM_HEADER and not (named and all(map(str.isidentifier, header))):
        raise ConfigError(
            f"{path}:1: header is {_shown(header)}; a trace has t_s,len (or t_s and its axes, as "
            "t_s,height,width), a histogram tokens,count"
        )
    lines: list[_Line] = []
    for line, fields in rows[1:]:
        if len(fields) != len(header):
            raise ConfigError(
                f"{path}:{line}: {len(fields)} fields; every line has {len(header)}: "
                f"{','.join(header)}"
            )
        lines.append((line, fields))
    if not lines:
        raise ConfigError(f"{path}: has a header but no rows; at least one is needed")
    return header, lines


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        for fields in reader:
            if fields:  # the csv module gives [] for a blank line
                yield reader.line_num, fields


def _size(path: str | Path, line: int, name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{path}:{line}: {name}={text!r}; a whole number of at least 1 is needed")
    return value


def _time(path: str | Path, line: int, text: str, *, not_before: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < not_before:
        raise ConfigError(
            f"{path}:{line}: t_s={text!r}; seconds of at least {not_before:g} are needed: "
            "a trace starts at 0 or later and is sorted by time"
        )
    return value


def _shown(header: tuple[str, ...]) -> str:
    return repr(",".join(header)[:60])
