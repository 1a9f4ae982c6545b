"""Which functions autograd passes between the tensors of modules, with the lines that called them.

Lines come from autograd's own anomaly mode, which keeps of every function where it was called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sumgrad.record.trace import INTO, LOSS
from sumgrad.record.ways import MOVES, Passed, Ways
from sumgrad.subjects.users_line import is_users
from torch import Tensor

Node = Any  # torch.autograd.graph.Node: what made a tensor

MOST_NODES = 20_000  # of one way
MOST_PASSED = 64
MOST_IN_ALL = 200_000
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+)[^\n]*\n(?: +(?P<code>[^\n]*))?')
_NUMBER = re.compile(r"Backward\d*$")


def ways_between(made: Sequence[tuple[str, Node]]) -> Ways:
    """Whose tensor -> of which modules' outputs it is made -> what is passed, the earliest first.

    made: whose tensor, and the node that made it: outputs of modules, what goes into them, LOSS.
    """
    ends: dict[Node, dict[str, int]] = {}  # with the place where it was seen first
    for i, (name, node) in enumerate(made):
        if name != LOSS and not name.startswith(INTO):
            ends.setdefault(node, {}).setdefault(name, i)
    out: dict[str, dict[str, dict[Passed, None]]] = {}
    known: dict[Node, Passed] = {}
    places: dict[tuple[str, Node], int] = {}
    for i, key in enumerate(made):
        places.setdefault(key, i)
    for (name, node), place in places.items():
        own = {n: i for n, i in ends.get(node, {}).items() if i <= place}
        for other in own.keys() - {name}:  # a module and the last one inside it give the same
            out.setdefault(name, {})[other] = {}
        if own and name not in own:
            continue
        for end, nodes in _nodes_between(node, ends, place):
            passed = [known.setdefault(n, passed_by(n)) for n in nodes]
            for start, seen_at in ends[end].items():
                if start == name or seen_at > place:
                    continue
                out.setdefault(name, {}).setdefault(start, {}).update(dict.fromkeys(passed))
    return {
        to: {start: tuple(passed)[:MOST_PASSED] for start, passed in found.items()}
        for to, found in out.items()
    }


def makers_of(
    losses: Sequence[Node], name_of: Callable[[Tensor], str | None]
) -> dict[str, tuple[Passed, ...]]:
    """Parameter -> the functions whose backwards give its gradient; through what only moves it.

    name_of: of what autograd accumulates the gradient of, the parameter's name.
    """
    above: dict[Node, list[Node]] = {}
    todo, seen = list(losses), set(losses)
    while todo and len(seen) < MOST_IN_ALL:
        at = todo.pop()
        for below, _ in at.next_functions:
            if below is None:
                continue
            above.setdefault(below, []).append(at)
            if below not in seen:
                seen.add(below)
                todo.append(below)
    out: dict[str, dict[Passed, None]] = {}
    for leaf in seen:
        name = name_of(leaf.variable) if hasattr(leaf, "variable") else None
        if name is None:
            continue
        found = _that_compute(leaf, above)
        passed = (passed_by(at) for at in sorted(found, key=lambda n: n._sequence_nr()))
        out.setdefault(name, {}).update(dict.fromkeys(passed))
    return {name: tuple(passed)[:MOST_PASSED] for name, passed in out.items()}


def _that_compute(leaf: Node, above: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """The first above a leaf that do not only move numbers."""
    found: dict[Node, None] = {}
    up, met = [leaf], {leaf}
    while up:
        for at in above.get(up.pop(), ()):
            if at in met:
                continue
            met.add(at)
            if _NUMBER.sub("", at.name()) in MOVES:
                up.append(at)
            else:
                found[at] = None
    return list(found)


def _nodes_between(
    node: Node, ends: Mapping[Node, Mapping[str, int]], place: int
) -> Iterator[tuple[Node, list[Node]]]:
    """The nearest ends on every way from a node towards the leaves, each with what lies between.

    place: when the node was seen: what is given only later, as by an outer module once more, is no
    end before it.
    """
    above: dict[Node, list[Node]] = {}
    found: dict[Node, None] = {}
    todo, seen = [node], {node}
    while todo and len(seen) < MOST_NODES:
        at = todo.pop()
        if at is not node and any(seen_at < place for seen_at in ends.get(at, {}).values()):
            found[at] = None
            continue
        for below, _ in at.next_functions:
            if below is None:
                continue
            above.setdefault(below, []).append(at)
            if below not in seen:
                seen.add(below)
                todo.append(below)
    for end in found:
        between: dict[Node, None] = {}
        back = [end]
        while back:
            for at in above.get(back.pop(), ()):
                if at not in between:
                    between[at] = None
                    back.append(at)
        yield end, sorted(between, key=lambda n: n._sequence_nr())


def passed_by(node: Node) -> Passed:
    """What a node is, and which line called it."""
    path, line, code = _users_frame(node.metadata.get("traceback_", ()))
    cls = getattr(type(node), "_forward_cls", None)
    function = _NUMBER.sub("", node.name()) if cls is None else cls.__name__
    written = "" if cls is None else _where_written(cls)
    own = bool(written) and is_users(written.rpartition(":")[0])
    return Passed(
        function=function,
        line=f"{path}:{line}" if path else "",
        code=code,
        written=written,
        own=own,
    )


def _where_written(cls: type) -> str:
    code = getattr(getattr(cls, "backward", None), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _users_frame(stack: Sequence[str]) -> tuple[str, str, str]:
    """Path, line and code of the innermost frame that is a user's."""
    for words in reversed(stack):
        found = _FRAME.match(words)
        if found is not None and is_users(found["path"]) and not found["path"].startswith("<"):
            return found["path"], found["line"], (found["code"] or "").strip()
    return "", "", ""
