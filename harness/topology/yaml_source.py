"""A YAML file read strictly: every value keeps its line, nothing is guessed.

Refused, with file and line: duplicate keys, keys that are no names, anchors and aliases (an alias
bomb is three lines), several documents, tags; and, before anything is built of them, files over
MAX_BYTES, more than MAX_VALUES values, MAX_DEPTH levels, numbers of more than MAX_DIGITS digits.
Values are what YAML's safe resolver makes of them; types are judged by whoever validates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from sumgrad.base.errors import UserError
from sumgrad.base.plain_text import shown

MAX_BYTES = 1_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 32
MAX_DIGITS = 64
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlSource:
    """One parsed file: its data, and the line of every key path."""

    path: Path
    data: Any
    lines: dict[Path_, int]

    def where(self, loc: Sequence[str | int]) -> str:
        """`file.yaml:LINE: a.b.c` for a key path; the nearest known parent gives the line."""
        loc = tuple(loc)
        known = next(
            (self.lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in self.lines), 1
        )
        return f"{self.path}:{known}: {dotted(loc)}" if loc else f"{self.path}:{known}"


def dotted(loc: Sequence[str | int]) -> str:
    """`a.b.0` for a key path, on one line whatever the keys are."""
    return ".".join(shown(str(part)) for part in loc)


def read_yaml(path: Path) -> YamlSource:
    """Read one YAML document. Raises UserError for anything a person should mend."""
    text = _read_text(path)
    try:
        _refuse_at_sight(path, text)
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = min(mark.line, max(0, len(text.splitlines()) - 1)) + 1 if mark else 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"{path}:{line}: not valid YAML: {shown(problem, 200)}") from None
    if len(nodes) != 1:
        raise UserError(f"{path}:1: got {len(nodes)} YAML documents, expected exactly one")
    walker = _Walker(path)
    data = walker.value(nodes[0], ())
    if walker.problems:
        raise UserError(walker.problems)
    return YamlSource(path=path, data=data, lines=walker.lines)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a directory, expected a YAML file")
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is no regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES} bytes; a topology fits one screen")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text") from None


def _refuse_at_sight(path: Path, text: str) -> None:
    """Read through the events, which are small, before any node is built."""
    depth, values, resolver = 0, 0, yaml.SafeLoader("")
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise UserError(f"{path}:{line}: anchors and aliases are not allowed; write it out")
        if getattr(event, "tag", None):
            raise UserError(f"{path}:{line}: tags are not allowed")
        if isinstance(event, yaml.ScalarEvent) and _is_long_number(event, resolver):
            text = shown(event.value, MAX_DIGITS // 2)
            raise UserError(f"{path}:{line}: {text} is a number of more than {MAX_DIGITS} digits")
        values += isinstance(event, yaml.NodeEvent)
        if values > MAX_VALUES:
            raise UserError(
                f"{path}:{line}: more than {MAX_VALUES} values; a topology fits one screen"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise UserError(f"{path}:{line}: nested deeper than {MAX_DEPTH} levels")


def _is_long_number(event: yaml.ScalarEvent, resolver: yaml.SafeLoader) -> bool:
    if len(event.value) <= MAX_DIGITS:
        return False
    return resolver.resolve(yaml.ScalarNode, event.value, event.implicit) in NUMBERS


class _Walker:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Path_, int] = {}
        self.problems: list[str] = []
        self._constructor = yaml.SafeLoader("")

    def value(self, node: yaml.Node, loc: Path_) -> Any:
        self.lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*loc, i)) for i, child in enumerate(node.value)]
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError):
            self.problems.append(f"{self._place(node, loc)}: cannot be read as a value")
            return None

    def _mapping(self, node: yaml.MappingNode, loc: Path_) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                what = repr(shown(key)) if isinstance(key, str) else f"a {key_node.id}"
                self.problems.append(f"{self._place(key_node, loc)}: got key {what}, not a name")
                continue
            here = (*loc, key)
            if key in out:
                self.problems.append(
                    f"{self._place(key_node, here)}: duplicate key, first given on line "
                    f"{self.lines[here]}"
                )
                continue
            self.lines[here] = key_node.start_mark.line + 1
            out[key] = self.value(value_node, here)
        return out

    def _place(self, node: yaml.Node, loc: Path_) -> str:
        return f"{self.path}:{node.start_mark.line + 1}: {dotted(loc)}"
