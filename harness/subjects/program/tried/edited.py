"""Functions of a user's with other code in place of a piece of theirs; the file stays as it is."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType

from sumgrad.record.trial import Edit, edited_source

Key = tuple[int, str]  # the line where it begins, and its name


class UsersFunctions:
    """Those that live, by file: looked for once."""

    def __init__(self) -> None:
        self._of: dict[str, list[FunctionType]] = {}
        self._codes: dict[str, Mapping[Key, CodeType | None]] = {}

    @contextlib.contextmanager
    def edited(self, edit: Edit, given: Mapping[str, object] = {}) -> Iterator[None]:
        """All that has the piece in it, between `with` and its end. given: names that the other
        code may use besides. SyntaxError where it is none; ValueError where no function that runs
        is what stands in the file."""
        source = Path(edit.file).read_text()
        if edit.file not in self._codes:
            self._codes[edit.file] = codes_in(source, edit.file)
        usual, other = self._codes[edit.file], codes_in(edited_source(source, edit), edit.file)
        changed = []
        for function in self.of(edit.file):
            there, new = (held.get(_key(function.__code__)) for held in (usual, other))
            runs = there is not None and _computes(there) == _computes(function.__code__)
            if runs and new is not None and new != there:
                changed.append((function, new))
        if not changed:
            raise ValueError(f"nothing that runs has line {edit.start[0]} of {edit.file} in it")
        with contextlib.ExitStack() as undo:
            for function, code in changed:
                for name, value in given.items():
                    undo.callback(function.__globals__.pop, name, None)
                    function.__globals__[name] = value
                undo.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = code
            yield

    def of(self, file: str) -> Sequence[FunctionType]:
        if file not in self._of:
            self._of[file] = [
                one for one in gc.get_objects()
                if type(one) is FunctionType and one.__code__.co_filename == file
            ]  # fmt: skip
        return self._of[file]


def codes_in(source: str, file: str) -> Mapping[Key, CodeType | None]:
    """Of all functions in it, and those in these; None where several are called the same."""
    found: dict[Key, CodeType | None] = {}
    waiting = [compile(source, file, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        found[_key(code)] = None if _key(code) in found else code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def _computes(code: CodeType) -> tuple[object, ...]:
    """What it runs, but for functions in it, which are told apart by themselves."""
    constants = tuple(one for one in code.co_consts if not isinstance(one, CodeType))
    return code.co_code, code.co_names, repr(constants)


def _key(code: CodeType) -> Key:
    return code.co_firstlineno, code.co_qualname
