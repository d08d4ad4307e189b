"""Merges the expositions of all replicas into one, for ``/metrics``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

log = logging.getLogger("shapeserve.metrics")

# Line by line on purpose: prometheus_client's parser takes about 40 us a line, which for a grid of
# 96 buckets and 4 replicas would hold up the requests of the replica that merges for 0.3 s.
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)"  # name
    rf"(?:\{{({_LABEL}(?:,{_LABEL})*)?,?\}})?"  # labels
    r" ([^ ]+)(?: -?\d+)?"  # value, timestamp
)
_META = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) ?(.*)")
_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum", "")}


@dataclass
class _Family:
    """One metric: its HELP and TYPE lines and its sample lines."""

    name: str
    meta: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def owns(self, sample: str) -> bool:
        suffixes = _SUFFIXES.get(self.meta.get("TYPE", ""), ("",))
        return any(sample == self.name + suffix for suffix in suffixes)


def merge_texts(parts: Mapping[str, str | None]) -> str:
    """Return one exposition of several replicas, each series with a ``replica`` label.

    Args:
        parts: replica -> its text in Prometheus' text format, or None if it did not answer.

    Each metric appears once, with the HELP and TYPE of the first replica that has it. A replica
    without a readable text is left out, logged, and named in a comment: one that dies must not
    take the others' scrape with it.
    """
    merged: dict[str, _Family] = {}
    skipped = []
    for replica, text in parts.items():
        try:
            families = list(_families(text, replica))
        except ValueError as exc:
            log.warning("no metrics from replica %s: %s", replica, exc)
            skipped.append(f"# no metrics from replica {_escape(replica)}\n")
            continue
        for family in families:
            merged.setdefault(family.name, _Family(family.name, family.meta)).lines += family.lines
    return "".join([*skipped, *map(_render, merged.values())])


def _families(text: str | None, replica: str) -> Iterator[_Family]:
    """Parse one text; raise ValueError if any line of it cannot be one."""
    if text is None:
        raise ValueError("it did not answer")
    if not text.endswith("\n"):
        raise ValueError("its text is empty or cut off")
    label = f'replica="{_escape(replica)}"'
    family: _Family | None = None
    for line in text.split("\n"):
        if meta := _META.fullmatch(line):
            if family is None or family.name != meta[2]:
                if family is not None:
                    yield family
                family = _Family(meta[2])
            family.meta[meta[1]] = meta[3]
        elif line and not line.startswith("#"):
            name, labelled = _label_sample(line, label)
            if family is None or not family.owns(name):
                raise ValueError(f"sample {name} does not belong to the metric above it")
            family.lines.append(labelled)
    if family is not None:
        yield family


def _label_sample(line: str, label: str) -> tuple[str, str]:
    """Return a sample line's name, and the line with one more label."""
    sample = _SAMPLE.fullmatch(line)
    if sample is None:
        raise ValueError(f"cannot read the line {line[:80]!r}")
    float(sample[3])
    labels = f"{label},{sample[2]}" if sample[2] else label
    return sample[1], f"{sample[1]}{{{labels}}}{line[sample.start(3) - 1 :]}\n"


def _render(family: _Family) -> str:
    head = [f"# {word} {family.name} {rest}\n" for word, rest in family.meta.items()]
    return "".join([*head, *family.lines])


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
