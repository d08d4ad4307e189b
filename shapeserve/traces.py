"""Read recorded traffic: traces of arrivals, and histograms of lengths.

Both are CSV files with a header line, plain or gzipped (a name that ends in ``.gz``):

* a trace, ``t_s,len``: seconds since the first row (never decreasing), length in tokens;
* a histogram, ``tokens,count``: length in tokens, number of rows that have it.

Every line is checked; the first bad one raises ``ConfigError`` with its file and number.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shapeserve.errors import ConfigError

TRACE_HEADER = ("t_s", "len")
HISTOGRAM_HEADER = ("tokens", "count")

# One numbered data line: (line number, its two fields).
_Line = tuple[int, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time; row i came ``times_s[i]`` after the first."""

    times_s: tuple[float, ...]
    lengths: tuple[int, ...]


def read_trace(path: str | Path) -> Trace:
    """Read a ``t_s,len`` trace.

    Raises:
        ConfigError: The file cannot be read, has another header, no rows, or a bad line.
    """
    header, lines = _read(path)
    if header != TRACE_HEADER:
        raise ConfigError(f"{path}:1: header is {_shown(header)}; a trace has t_s,len")
    return _trace(path, lines)


def read_lengths(path: str | Path) -> dict[int, int]:
    """Return length (tokens) -> rows, ascending, of a trace or of a histogram.

    Raises:
        ConfigError: As for ``read_trace``.
    """
    header, lines = _read(path)
    if header == TRACE_HEADER:
        return dict(sorted(Counter(_trace(path, lines).lengths).items()))
    counts: Counter[int] = Counter()
    for line, (tokens, count) in lines:
        counts[_size(path, line, "tokens", tokens)] += _size(path, line, "count", count)
    return dict(sorted(counts.items()))


def _trace(path: str | Path, lines: list[_Line]) -> Trace:
    times_s: list[float] = []
    lengths: list[int] = []
    for line, (t_s, length) in lines:
        times_s.append(_time(path, line, t_s, not_before=times_s[-1] if times_s else 0.0))
        lengths.append(_size(path, line, "len", length))
    return Trace(tuple(times_s), tuple(lengths))


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
    if header not in (TRACE_HEADER, HISTOGRAM_HEADER):
        raise ConfigError(
            f"{path}:1: header is {_shown(header)}; a trace has t_s,len, a histogram tokens,count"
        )
    lines: list[_Line] = []
    for line, fields in rows[1:]:
        if len(fields) != 2:
            raise ConfigError(
                f"{path}:{line}: {len(fields)} fields; every line has 2: {','.join(header)}"
            )
        lines.append((line, (fields[0], fields[1])))
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
