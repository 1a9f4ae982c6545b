"""What `sumgrad diff` is asked, checked and filled in for each side."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sumgrad.base.commands import command_line
from sumgrad.base.errors import UserError
from sumgrad.launch.script.baseline import check_name
from sumgrad.launch.script.sides import Command, interpreter

DEFAULT_STEPS, DEFAULT_TIMEOUT_S = 3, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A script started otherwise: with more in its environment, by another Python, with more
    arguments."""

    name: str
    environment: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    words: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """As it was asked."""
        said = [f"{key}={value}" for key, value in self.environment]
        said += [f"@{self.python}"] if self.python else []
        return f"{self.name}: {command_line([*said, *self.words])}"


AS_GIVEN = Variant(name="as given")


def read_variant(text: str) -> Variant:
    """Of `NAME: KEY=VALUE ... @PYTHON ARGUMENTS`, each part but the name optional.

    Raises UserError where it says nothing, or names a Python that is not there.
    """
    name, colon, rest = text.partition(":")
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UserError(f"--variant {text!r}: {error}") from None
    if not (colon and name.strip() and words):
        raise UserError(
            f"--variant {text!r}: expected `NAME: KEY=VALUE ... @PYTHON ARGUMENTS`, as in "
            f"`compiled: COMPILE=1` or `no checkpoints: --checkpoint 0`"
        )
    environment = []
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        key, _, value = words.pop(0).partition("=")
        environment.append((key, value))
    python = words.pop(0)[1:] if words and words[0].startswith("@") else None
    if python is not None and shutil.which(python) is None:
        raise UserError(f"--variant {text!r}: {python} is no program")
    return Variant(
        name=name.strip(), environment=tuple(environment), python=python, words=tuple(words)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The flags. script: with its arguments, `{ranks}` and `{24/ranks}` filled in for each side.

    a, b: whole commands instead, b's run is what a's is compared with. lift: float64 is tried.
    zero: patterns of names of parameters whose gradient may be zero in every step.
    save: the name under which the single run is kept; baseline: of one that was, to compare with.
    save_as: whole, as projections, or auto, by its size. variant: how the ranks are started
    otherwise than the single run.
    """

    script: tuple[str, ...] = ()
    ranks: int = 0
    against: int = 1
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    steps: int = DEFAULT_STEPS
    zero: tuple[str, ...] = ()
    lift: bool = True
    timeout_s: float = DEFAULT_TIMEOUT_S
    out: Path | None = None
    save: str | None = None
    save_as: str = "auto"
    baseline: str | None = None
    variant: Variant = AS_GIVEN

    def command(self, side: str) -> Command:
        """What the `many` or the `single` side runs."""
        own = self.a if side == "many" else self.b
        if own:
            return Command(words=own, ranks=0)
        count = self.ranks if side == "many" else self.against
        words = tuple(fill_in(word, count) for word in self.script)
        other = self.variant if side == "many" else AS_GIVEN
        own_python, words = without_python(words)
        return Command(
            words=(
                other.python or own_python,
                *words,
                *(fill_in(word, count) for word in other.words),
            ),
            ranks=count,
            environment=dict(other.environment),
        )


def check_options(options: DiffOptions) -> None:
    if bool(options.a) != bool(options.b):
        raise UserError("sumgrad diff: --a and --b belong together: a is compared with b")
    if options.save and options.baseline:
        raise UserError("sumgrad diff: --save keeps a run of now, --against NAME takes another")
    if options.save_as != "auto" and not options.save:
        raise UserError("sumgrad diff: --save-as says how --save NAME keeps a run; it needs one")
    if options.save:
        check_name(options.save)
    if options.a and options.baseline:
        raise UserError("sumgrad diff: a is compared with --b, so --against NAME has no place")
    if options.a:
        if options.script or options.ranks:
            raise UserError("sumgrad diff: either --a and --b, or --ranks N -- script.py args")
        return
    if not options.script:
        raise UserError("sumgrad diff: no script; use sumgrad diff --ranks 4 -- train.py args")
    if options.ranks < 1:
        raise UserError("sumgrad diff: --ranks N is missing: how many ranks the script is run on")
    if options.against < 1:
        raise UserError("sumgrad diff: --against 0: the other run needs a rank")
    for count in (options.ranks, options.against):
        _ = [fill_in(word, count) for word in options.script]
    script = next((w for w in options.script if w.endswith(".py")), None)
    if script is not None and not Path(script).is_file():
        raise UserError(f"{script}: no such file")


def single_command(options: DiffOptions) -> str:
    return command_line(options.command("single").words)


def script_of(options: DiffOptions) -> str:
    """The script's file, or the module that `-m` runs."""
    words = options.a or without_python(options.script)[1]
    if words[0].startswith("-") and "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((word for word in words if word.endswith(".py")), words[0])


def without_python(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The interpreter, and what it is to run: `python` in front of a script is this one, a path to
    another is that."""
    own = words[0] == interpreter()
    if len(words) < 2 or not (own or re.fullmatch(r"python[\d.]*", Path(words[0]).name)):
        return interpreter(), words
    return (words[0] if "/" in words[0] else interpreter()), words[1:]


def fill_in(word: str, ranks: int) -> str:
    """`{ranks}` and `{24/ranks}` in an argument. Raises UserError where it does not divide."""

    def value(match: re.Match[str]) -> str:
        total = match.group(1)
        if total is None:
            return str(ranks)
        if int(total) % ranks:
            raise UserError(f"sumgrad diff: {match.group(0)}: {total} is no multiple of {ranks}")
        return str(int(total) // ranks)

    filled = re.sub(r"\{(?:(\d+)/)?ranks\}", value, word)
    near = re.search(r"\{(\w+/)?rank\w*\}", filled)
    if near is not None:
        meant = f"{{{near.group(1) or ''}ranks}}"
        raise UserError(f"sumgrad diff: {near.group(0)}: did you mean {meant}?")
    return filled


def flags_of(options: DiffOptions) -> list[Any]:
    flags: list[Any] = ["--steps", options.steps]
    flags += [word for pattern in options.zero for word in ("--zero", pattern)]
    if not options.lift:
        flags += ["--no-lift"]
    if options.timeout_s != DEFAULT_TIMEOUT_S:
        flags += ["--timeout", f"{options.timeout_s:g}"]
    if options.a:
        return [*flags, "--a", command_line(options.a), "--b", command_line(options.b)]
    against = options.baseline or options.against
    flags += ["--save", options.save] if options.save else []
    flags += ["--save-as", options.save_as] if options.save_as != "auto" else []
    return [*flags, "--ranks", options.ranks, "--against", against, "--", *options.script]
