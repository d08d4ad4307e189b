"""Recording the shapes of traffic."""

from __future__ import annotations

from shapeserve.config.base import Frozen, Int, Name, field


class Record(Frozen):
    """Writes when each accepted row came and how large it was, and nothing else of it.

    ``shapeserve tune --trace DIR/MODEL`` reads what the replicas have written.
    """

    path: Name = field(
        "Directory, relative to the config file; each replica writes into the one of the model's "
        "name in it.",
        "path",
    )
    max_bytes: Int = field(
        "Most that the files of one replica take; the oldest half goes first. A row is about 20.",
        "bytes",
        67_108_864,
        ge=8192,
    )
