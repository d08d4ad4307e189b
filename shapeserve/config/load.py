"""Read configuration data and say precisely what is wrong with it.

Pydantic reports places as tuples such as ``("models", 0, "policy", "seq")``; here they
become dotted keys and, for YAML, the line of the offending key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from shapeserve.errors import ConfigError

_Path = tuple[str | int, ...]

# Rule and remedy for what pydantic finds by itself, in the words of YAML instead of Python's; an
# empty rule keeps pydantic's. Our own errors bring their remedy with them.
_SECTION = ("must be keys with values", "write them below it, or remove it")
_RULES = {
    "int_type": ("must be a whole number", "write it without quotes"),
    "float_type": ("must be a number", "write it without quotes"),
    "bool_type": ("must be true or false", "write it without quotes"),
    "string_type": ("must be a word", "put it in quotes if YAML reads it as something else"),
    "tuple_type": ("must be a list", "write it in brackets"),
    "literal_error": ("", "choose one of them"),
    "dict_type": _SECTION,
    "mapping_type": _SECTION,
    "model_type": _SECTION,
}


@dataclass(frozen=True)
class Document:
    """Plain data together with where it came from."""

    data: object
    file: Path | None = None
    node: yaml.Node | None = None

    @classmethod
    def from_yaml(cls, path: str | Path) -> Document:
        """Parse one YAML document.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or repeats a key.
        """
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}; give a YAML file") from error
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            _refuse_repeated_keys(node, file)
            # Merge keys (<<) are written into the nodes here, so that lines() sees them too.
            data = None if node is None else loader.construct_document(node)
        except yaml.YAMLError as error:
            raise ConfigError(_yaml_problem(error, file)) from error
        finally:
            loader.dispose()
        return cls(data, file, node)

    def explain(self, error: ValidationError) -> ConfigError:
        """Turn what pydantic found into one ConfigError, a line for each place."""
        found: dict[_Path, list[str]] = {}
        for item in error.errors(include_url=False):
            path, message = self._describe(item)
            messages = found.setdefault(path, [])
            if message not in messages:  # a union reports once for each of its members
                messages.append(message)
        lines = [f"{self._prefix(path)}{' or '.join(m)}" for path, m in found.items()]
        return ConfigError("\n".join(lines))

    def _describe(self, item: Any) -> tuple[_Path, str]:
        context = item.get("ctx", {})
        path = _existing(self.data, (*item["loc"], *context.get("at", ())))
        if item["type"] == "shapeserve":
            return path, context["message"]
        if item["type"] == "missing":
            return (*path, item["loc"][-1]), "this key is required; add it"
        rule, remedy = _RULES.get(item["type"], ("", "change it"))
        rule = rule or item["msg"].replace("Input should", "must").replace("String should", "must")
        return path, f"got {_shorten(item['input'])}, {rule}; {remedy}"

    def _prefix(self, path: _Path) -> str:
        line = _line(self.node, path)
        place = "" if self.file is None else f"{self.file}:{line}: "
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        return f"{place}{key}: " if key else place


def _existing(data: object, loc: _Path) -> _Path:
    """Return ``loc`` without the parts that are not in the data, such as names of types."""
    path = []
    for part in loc:
        if (isinstance(data, Mapping) and part in data) or (
            isinstance(data, Sequence)
            and not isinstance(data, str)
            and isinstance(part, int)
            and part < len(data)
        ):
            data = data[part]  # type: ignore[index]
            path.append(part)
    return tuple(path)


def _line(node: yaml.Node | None, path: _Path) -> int:
    """Return the line (from 1) of the key or list member at ``path``, or of its parent."""
    if node is None:
        return 1
    line = node.start_mark.line
    for part in path:
        step = next((pair for key, *pair in _children(node) if key == str(part)), None)
        if step is None:
            break
        at, node = step
        line = at.start_mark.line
    return int(line) + 1


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield (key, node that marks its line, value node)."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((str(i), item, item) for i, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        # Backwards, because merged keys stand before the keys that override them.
        yield from ((str(key.value), key, value) for key, value in reversed(node.value))


def _refuse_repeated_keys(root: yaml.Node | None, file: Path) -> None:
    """Raise ConfigError for a key that is given twice; plain YAML keeps the last in silence."""
    todo, visited = [root] if root else [], set()
    while todo:
        node = todo.pop()
        if id(node) in visited:  # anchors make the tree a graph
            continue
        visited.add(id(node))
        first: dict[str, int] = {}
        for key, at, value in reversed(list(_children(node))):
            line = at.start_mark.line + 1
            if isinstance(node, yaml.MappingNode) and key in first:
                raise ConfigError(
                    f"{file}:{line}: the key {key!r} is already given on line {first[key]}; "
                    "remove one of them"
                )
            first[key] = line
            todo.append(value)


def _yaml_problem(error: yaml.YAMLError, file: Path) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    what = getattr(error, "problem", None) or str(error)
    return f"{file}{line}: not valid YAML: {what}; correct the syntax"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
