"""A model's own name, for configs that give none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A model's identifier, not a word of prose: all-MiniLM-L6-v2 is one, "Usage" is not.
_IDENTIFIER = re.compile(r"(?=.*[-_\d])[A-Za-z0-9][\w.\-]*")
_HUB_ID = re.compile(r"([\w.\-]+/)?(?P<name>[\w.\-]+)")
_CARD_CHARACTERS = 65_536  # arbitrary; a heading after more text than this is not a title


def own_name(directory: Path, path: str, config: Mapping[str, Any]) -> str:
    """Return the name that the model goes by, never a path.

    The first of these that there is:

    1. the repository of a Hugging Face cache folder (``models--OWNER--NAME``);
    2. the first heading of the model card, if it is an identifier: ``# all-MiniLM-L6-v2``;
    3. the package, for ``package:NAME``;
    4. ``_name_or_path`` of config.json, if it is a hub id; fine-tuned models name their base there;
    5. the directory's own name.

    Args:
        directory: where the model is.
        path: the model's path as configured.
        config: content of its config.json.
    """
    for part in directory.parts:
        if part.startswith("models--"):
            return part.rsplit("--", 1)[1]
    if title := _card_title(directory / "README.md"):
        return title
    if path.startswith("package:"):
        return path.removeprefix("package:")
    base = _HUB_ID.fullmatch(str(config.get("_name_or_path") or ""))
    return base["name"] if base else directory.name


def _card_title(card: Path) -> str | None:
    """Return the first heading of a model card if it is an identifier, without its owner."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_CARD_CHARACTERS)
    except OSError:
        return None
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    heading = re.search(r"^# +(.+?) *$", body, flags=re.MULTILINE)
    title = heading[1].rsplit("/", 1)[-1] if heading else ""
    return title if _IDENTIFIER.fullmatch(title) else None
