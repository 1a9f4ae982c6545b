"""In which order small edits of a user's code are tried.

In: the files, what their functions hold, which of their lines are under suspicion. Out: edits.
"""

from __future__ import annotations

import ast
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from pathlib import PurePath

from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.trying.edits.pieces import Edits
from sumgrad.diagnose.modules.trying.edits.source import reaching_outside
from sumgrad.diagnose.modules.trying.edits.taken_over import told_once
from sumgrad.record.trial import Edit, edited_source

MOST_LOOKING_S = 2.0
MOST_EDITS = 480  # each is a step of all ranks
# Of a line that is not named, in a function that has one that is, or is called in one that has;
# twice that in others.
LATER = 1
SUSPECT, RIGHT = {"part": 0, "wrong": 0, "untold": 1}, 3
TURN = 6  # of one line, before some of others that come later
Soon = tuple[int, int]
UNKNOWN: Soon = 1, 0


def edits_to_try(
    texts: Mapping[str, str],
    names: Mapping[str, Mapping[str, str]],
    single: Set[str],
    axes: Sequence[str],
    said: str,
    suspicion: Mapping[str, Soon],
    feeding: Set[str] = frozenset(),
    taken: Callable[[Edit], bool] = lambda _: True,
) -> list[Edit]:
    """Those to try first at the front. texts: of files, by path. names: of each function that a
    rank runs, `PATH:10 NAME`, of what kind is what stands under a name in it. single: functions
    that the single process runs, too, of which those alone are tried that the cause names. said: of
    the cause. suspicion: by line, `PATH:12`, the smaller, the sooner it is tried, and of equals
    where in the step it is. feeding: functions that made what lines take that the cause names.
    taken: which of the edits are."""
    named = {int(line) for line in re.findall(r":(\d+)\b", said)}
    trees = {}
    for file, text in texts.items():
        with contextlib.suppress(SyntaxError, ValueError):
            trees[file] = ast.parse(text)
    left_alone = reaching_outside([*trees.values()])
    run: dict[str, set[int]] = {file: set() for file in trees}
    for file, first in map(function_at, {*names, *single}):
        run.setdefault(file, set()).add(first)
    of_files = {file: Edits(file, texts[file], axes, left_alone, run[file]) for file in trees}
    found: dict[Edit, Soon] = {}
    within: dict[Edit, range] = {}  # the lines of the function that it is in
    named_in: dict[str, set[int]] = {}  # function -> lines
    called = set[str]()
    for function in names:
        file, first = function_at(function)
        if file in of_files and PurePath(file).name in said:
            named_in[function] = named & {*of_files[file].lines_of(first)}
            called |= of_files[file].called_in(first) if named_in[function] else set()
    known = told_once(
        one
        for file, first in map(function_at, sorted(single))
        if file in of_files
        for one in of_files[file].known_in(first)
    )
    for function, kinds in {**names, **_helpers(of_files, names, single)}.items():
        file, first = function_at(function)
        own = named_in.get(function, set())
        if file not in of_files or (function in single and not own):
            continue
        near = bool(own) or function in feeding or _name_of(function) in called
        every = of_files[file].in_function(first, kinds, known)
        for soon, edit in ((soon, edit) for soon, edit in every if taken(edit)):
            at = range(edit.start[0], edit.end[0] + 1)
            suspect, place_in_step = min(suspicion.get(f"{file}:{line}", UNKNOWN) for line in at)
            later = 0 if not own.isdisjoint(at) else LATER + suspect + (0 if near else LATER)
            key = soon + later, place_in_step
            found[edit] = min(found.get(edit, key), key)
            within[edit] = of_files[file].lines_of(first)
    seen = set[str]()
    shown = (_shown(texts[edit.file], edit, within[edit], seen) for edit in _in_turns(found))
    return [*islice((edit for edit in shown if edit is not None), MOST_EDITS)]


def _helpers(
    of_files: Mapping[str, Edits], names: Mapping[str, Mapping[str, str]], single: Set[str]
) -> dict[str, Mapping[str, str]]:
    """Functions that only those of the ranks alone call, by their names, and in which nothing of
    torch's runs, as what gives a seed or a place, those that these call, and methods of which there
    are several that are called so. What stands under a name in them is not known."""
    of_ranks, of_single = set[str](), set[str]()
    for function in {*names, *single}:
        file, first = function_at(function)
        if file in of_files:
            called = of_files[file].calls_in(first)
            (of_single if function in single else of_ranks).update(called)
    seen = {function_at(function) for function in {*names, *single}}
    every = [name for edits in of_files.values() for name in edits.first_lines().values()]
    replaced = {name for name in of_ranks | of_single if every.count(name) > 1}
    wanted, before = (of_ranks - of_single) | replaced, set[str]()
    while wanted != before:  # those that such a one calls, too
        before = {*wanted}
        for edits in of_files.values():
            own = [line for line, name in edits.first_lines().items() if name in before]
            wanted |= {name for line in own for name in edits.calls_in(line)} - of_single
    return {
        f"{file}:{line} {name}": {}
        for file, edits in of_files.items()
        for line, name in edits.first_lines().items()
        if name in wanted and (file, line) not in seen
    }


def feeding_what_is_named(lines: Lines, said: str) -> set[str]:
    """Functions whose lines made, on a rank, what a line takes that the cause names."""
    named = set(re.findall(r":(\d+)\b", said))
    found = set[str]()
    for rank in lines.states.ranks:
        every = lines.computed(rank).computations
        makers = {n: c.within for c in reversed(every) for n in c.gives}
        for c in every:
            file, _, line = c.line.rpartition(":")
            if line in named and PurePath(file).name in said:
                found |= {makers[t] for t in c.takes if t in makers and makers[t] != c.within}
    return found - {""}


def suspicion_of(lines: Lines) -> dict[str, Soon]:
    """By line of what the ranks run, how soon it is suspected: by whether what it gives, or the
    gradient of what it takes, is known to be right, and first wrong in it; of equals the last."""
    found: dict[str, Soon] = {}
    until = time.monotonic() + MOST_LOOKING_S
    for rank in lines.states.ranks:
        for place, c in enumerate(lines.computed(rank).computations):
            if time.monotonic() > until:
                break
            forward = [lines.states.forward(rank, n) for n in c.gives]
            taken = [t for t in c.takes if isinstance(t, int)]
            backward = [lines.states.backward(rank, n) for n in taken]
            wrong = any(lines.states.forward(rank, n) == "wrong" for n in taken)
            own = min((SUSPECT.get(state, RIGHT) for state in (*forward, *backward)), default=RIGHT)
            key = min(own + wrong, RIGHT), -place
            found[c.line] = min(found.get(c.line, key), key)
    return found


def _name_of(function: str) -> str:
    """Of one that is called as a Computation's `within`, without the class that it is in."""
    return function.rpartition(".")[2].rpartition(" ")[2]


def function_at(function: str) -> tuple[str, int]:
    """The file and the first line of one that is called as a Computation's `within`."""
    place = function.rpartition(" ")[0]
    file, _, line = place.rpartition(":")
    return file, int(line)


def _in_turns(found: Mapping[Edit, Soon]) -> list[Edit]:
    """In order, but of a line some, then some of the others': one may have a hundred."""
    of_lines: dict[tuple[str, int], list[Edit]] = {}
    for edit in sorted(found, key=lambda edit: found[edit]):
        of_lines.setdefault((edit.file, edit.start[0]), []).append(edit)
    keys = {
        edit: (found[edit][0] + num // TURN, found[edit][1])
        for own in of_lines.values()
        for num, edit in enumerate(own)
    }
    return sorted(keys, key=lambda edit: keys[edit])


def _shown(text: str, edit: Edit, within: range, known: set[str]) -> Edit | None:
    """With the lines that it is in, as they are and as they become; None where that is no code, or
    code that is known already. within: the function that is read again, and not all of the file."""
    one = slice(within.start - 1, within.stop - 1)
    try:
        both = [source.split("\n") for source in (text, edited_source(text, edit))]
        function = f"{edit.file}:{within.start}"
        if function not in known:
            known.update((function, f"{function} {_read(both[0][one])}"))
        code = f"{function} {_read(both[1][one])}"
    except (SyntaxError, ValueError):
        return None
    if code in known:
        return None
    known.add(code)
    lines = slice(edit.start[0] - 1, edit.end[0])
    was, becomes = (_in_one_line(one[lines]) for one in both)
    once = " once, after the loop" if was == becomes else ""  # it is indented otherwise
    return replace(edit, was=was, becomes=becomes + once)


def _read(function: Sequence[str]) -> str:
    """What a function's lines say, whatever its brackets and its indent."""
    begin = "if True:\n" if function[0][:1].isspace() else ""
    return ast.dump(ast.parse(begin + "\n".join(function)))


def _in_one_line(lines: Sequence[str]) -> str:
    return " ".join(stripped for line in lines if (stripped := line.strip()))
