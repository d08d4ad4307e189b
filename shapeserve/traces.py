"""Read recorded traffic: traces of arrivals, and histograms of lengths.

CSV files with a header line, or JSONL files (a name that ends in ``.jsonl``) with the same names as
keys; plain or gzipped (``.gz``):

* a trace, ``t_s,len``: seconds since the first row (never decreasing), length in tokens. Other
  columns are ignored, wherever they are;
* a trace of several axes, ``t_s,height,width``: every name but ``t_s`` is an axis;
* a histogram, ``tokens,count``: length in tokens, number of rows that have it.

A directory stands for the traces in it, such as those of a service's replicas: their times are of
one clock, and their rows are merged by time.

Every line is checked; the first bad one raises ``ConfigError`` with its file and number.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TextIO

import numpy as np

from shapeserve.errors import ConfigError

TIME, LENGTH = "t_s", "len"
HISTOGRAM_HEADER = ("tokens", "count")
SEQ = "seq"
"""The axis of a trace or histogram that names none."""

# Far above what any model takes or anybody counts; keeps sums of products exact in a double.
_MAX_SIZE = 2**31 - 1
_MAX_COUNT = 10**12
_EXACT_ROWS = 10**9

# One numbered data line: (line number, its fields as text).
_Line = tuple[int, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows that came, or how many there are of each length.

    Attributes:
        axes: names of the row axes.
        sizes: [rows, axes] int64, each at least 1; in order of arrival if ``times_s`` is there.
        counts: [rows] float64, how many rows each line stands for: 1 in a trace.
        times_s: [rows] float64, seconds since the first row; None for a histogram.
        named: whether the file names its axes; ``len`` and ``tokens`` could be along any.
    """

    axes: tuple[str, ...]
    sizes: np.ndarray
    counts: np.ndarray
    times_s: np.ndarray | None = None
    named: bool = False

    @property
    def rows(self) -> int:
        """How many rows came."""
        return int(self.counts.sum())

    @property
    def longest(self) -> dict[str, int]:
        """Axis -> largest size."""
        return dict(zip(self.axes, map(int, self.sizes.max(axis=0)), strict=True))

    def renamed(self, *axes: str) -> Self:
        """Return the same traffic with other names of its axes."""
        return replace(self, axes=axes, named=True)

    def clipped(self, ends: Mapping[str, int]) -> Self:
        """Return the same rows with no size above ``ends`` (axis -> size)."""
        most = np.array([ends[axis] for axis in self.axes])
        return replace(self, sizes=np.minimum(self.sizes, most))

    def halves(self, seed: int = 0) -> tuple[Self, Self]:
        """Return the first and the second half by row order; the second may have one row more.

        A histogram has no order: its rows are dealt out at random, the same way for one ``seed``.

        Raises:
            ConfigError: there are fewer than two rows.
        """
        if self.rows < 2:
            raise ConfigError("the traffic has 1 row; at least 2 are needed, one for each half")
        if self.times_s is not None:
            middle = len(self.sizes) // 2
            return self._part(slice(None, middle)), self._part(slice(middle, None))
        rng = np.random.default_rng(seed)
        whole = self.counts.astype(np.int64)
        if self.rows < _EXACT_ROWS:
            first = rng.multivariate_hypergeometric(whole, self.rows // 2, method="marginals")
        else:  # numpy deals no more; a coin for each row gives halves equal to 1 in 10,000
            first = rng.binomial(whole, 0.5)
        return self._counted(first), self._counted(whole - first)

    def _part(self, part: slice) -> Self:
        times_s = None if self.times_s is None else self.times_s[part]
        return replace(self, sizes=self.sizes[part], counts=self.counts[part], times_s=times_s)

    def _counted(self, counts: np.ndarray) -> Self:
        there = counts > 0
        return replace(self, sizes=self.sizes[there], counts=counts[there].astype(np.float64))


@dataclass(frozen=True, slots=True)
class Shapes:
    """How many rows have which sizes.

    Attributes:
        axes: names of the axes; () for one axis that the file does not name (``len``, ``tokens``).
        rows: size along each axis -> rows, ascending.
    """

    axes: tuple[str, ...]
    rows: Mapping[tuple[int, ...], int]


def read_traffic(path: str | Path) -> Traffic:
    """Read a trace or a histogram; the axis of one that only says ``len`` or ``tokens`` is seq.

    Args:
        path: a file, or a directory of traces: of those the first row comes at 0 s.

    Raises:
        ConfigError: the file cannot be read, has another header, no rows, or a bad line; the
            directory has no trace, or some that do not go together.
    """
    if Path(path).is_dir():
        return _merged(path, _traces_in(Path(path)))
    return _read_file(path)


def _traces_in(directory: Path) -> list[Path]:
    names = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz")
    paths = sorted(p for p in directory.iterdir() if p.name.endswith(names) and p.is_file())
    if not paths:
        raise ConfigError(
            f"{directory}: has no trace ({', '.join(names)}); give a directory of one model's "
            "traces, or a file"
        )
    return paths


def _merged(directory: str | Path, paths: Sequence[Path]) -> Traffic:
    parts = [_read_file(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if part.times_s is None or part.axes != parts[0].axes:
            what = "a histogram" if part.times_s is None else f"of {', '.join(part.axes)}"
            raise ConfigError(
                f"{directory}: {path.name} is {what}; a directory has traces of one model, all of "
                f"the same axes (here {', '.join(parts[0].axes)})"
            )
    times_s = np.concatenate([part.times_s for part in parts if part.times_s is not None])
    order = np.argsort(times_s, kind="stable")
    sizes = np.concatenate([part.sizes for part in parts])[order]
    times_s = times_s[order] - times_s[order[0]]
    return replace(parts[0], sizes=sizes, counts=np.ones(len(sizes)), times_s=times_s)


def _read_file(path: str | Path) -> Traffic:
    header, lines = _read(path)
    if header == HISTOGRAM_HEADER:
        sizes, counts = [], []
        for line, (tokens, count) in lines:
            sizes.append([_whole(path, line, "tokens", tokens)])
            counts.append(_whole(path, line, "count", count, most=_MAX_COUNT))
        return Traffic((SEQ,), np.array(sizes, np.int64), np.array(counts, np.float64))
    times_s: list[float] = []
    sizes = []
    for line, (t_s, *fields) in lines:
        times_s.append(_time(path, line, t_s, not_before=times_s[-1] if times_s else 0.0))
        sizes.append([_whole(path, line, *pair) for pair in zip(header[1:], fields, strict=True)])
    named = header[1:] != (LENGTH,)
    axes = header[1:] if named else (SEQ,)
    ones = np.ones(len(sizes))
    return Traffic(axes, np.array(sizes, np.int64), ones, np.array(times_s), named)


def read_lengths(path: str | Path) -> dict[int, int]:
    """Return length (tokens) -> rows, ascending, of a trace or of a histogram.

    Raises:
        ConfigError: As for ``read_traffic``, or the file names its axes.
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
        ConfigError: As for ``read_traffic``.
    """
    traffic = read_traffic(path)
    shapes, places = np.unique(traffic.sizes, axis=0, return_inverse=True)
    counts = np.bincount(places.ravel(), traffic.counts)
    rows = dict(zip(map(tuple, shapes.tolist()), map(int, counts), strict=True))
    return Shapes(traffic.axes if traffic.named else (), rows)


def _read(path: str | Path) -> tuple[tuple[str, ...], list[_Line]]:
    """Return the names that matter and the numbered data lines; there is at least one."""
    name = Path(path).name.removesuffix(".gz")
    try:
        with _open(Path(path)) as file:
            read = _json_lines if name.endswith(".jsonl") else _csv_lines
            header, lines = read(path, file)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        # gzip reports damage as BadGzipFile (an OSError) or EOFError.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{path}: cannot be read: {reason}; give a CSV or JSONL file (.csv, .jsonl, or either "
            "with .gz)"
        ) from error
    if not lines:
        raise ConfigError(f"{path}: has a header but no rows; at least one is needed")
    return header, lines


def _open(path: Path) -> TextIO:
    encoding = "utf-8-sig"  # spreadsheets begin a file with a byte order mark
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def _csv_lines(path: str | Path, file: Iterable[str]) -> tuple[tuple[str, ...], list[_Line]]:
    rows = _csv_rows(file)
    _, first = next(rows, (0, []))
    names = [name.strip() for name in first]
    header = _header(path, names)
    columns = [names.index(name) for name in header]
    lines: list[_Line] = []
    for line, fields in rows:
        if len(fields) != len(names):
            raise ConfigError(
                f"{path}:{line}: {len(fields)} fields; every line has {len(names)}: "
                f"{','.join(names)}"
            )
        lines.append((line, [fields[column] for column in columns]))
    return header, lines


def _csv_rows(file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file)
    for fields in reader:
        if fields:  # the csv module gives [] for a blank line
            yield reader.line_num, fields


def _json_lines(path: str | Path, file: Iterable[str]) -> tuple[tuple[str, ...], list[_Line]]:
    """Read objects; the keys of the first one say what the file is."""
    header: tuple[str, ...] = ()
    lines: list[_Line] = []
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: {text.strip()[:40]!r}; a JSON object is needed")
        header = header or _header(path, [*row])
        missing = [name for name in header if name not in row]
        if missing:
            raise ConfigError(
                f"{path}:{number}: has no {', '.join(missing)}; every line has {', '.join(header)}"
            )
        # As JSON text, so that 1.5, true and "8" are told apart from a whole number.
        lines.append((number, [json.dumps(row[name]) for name in header]))
    return header or _header(path, []), lines


def _header(path: str | Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns that are read, the time first."""
    header = _read_names(names)
    axes = header[1:]
    good = header[:1] == (TIME,) and axes and all(name.isidentifier() for name in axes)
    once = all(names.count(name) == 1 for name in header)
    if not once or not (good or header == HISTOGRAM_HEADER):
        raise ConfigError(
            f"{path}:1: header is {','.join(names)[:60]!r}; a trace has t_s,len, or t_s and its "
            "axes as t_s,height,width; a histogram tokens,count; each name once"
        )
    return header


def _read_names(names: Sequence[str]) -> tuple[str, ...]:
    if TIME not in names and {*HISTOGRAM_HEADER} <= {*names}:
        return HISTOGRAM_HEADER
    if LENGTH in names:  # such as t_s,user,len: the user is no axis
        return tuple(name for name in (TIME, LENGTH) if name in names)
    return tuple(sorted(names, key=lambda name: name != TIME))


def _whole(path: str | Path, line: int, name: str, text: str, *, most: int = _MAX_SIZE) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= most:
        rule = "at least 1" if value < 1 else f"at most {most}"
        raise ConfigError(
            f"{path}:{line}: {name}={text[:40]!r}; a whole number of {rule} is needed"
        )
    return value


def _time(path: str | Path, line: int, text: str, *, not_before: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < not_before:
        raise ConfigError(
            f"{path}:{line}: t_s={text[:40]!r}; seconds of at least {not_before:g} are needed: "
            "a trace starts at 0 or later and is sorted by time"
        )
    return value
