"""The error a user can mend, as against an error of ours.

Anything wrong with what the user wrote (a file, a flag, a workload) raises `UserError` with every
problem found, each naming its place; the command line prints them and exits 2. Errors of ours are
assertions with values; what fails around us (a process that was killed) is a `LaunchError`.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROBLEMS = 20


class UserError(ValueError):
    """Bad input: one line per problem, each starting with the place where it can be mended.

    Of very many problems the first are kept, and how many more there are.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        listed = (problems,) if isinstance(problems, str) else tuple(problems)
        more = len(listed) - MAX_PROBLEMS
        self.problems = (*listed[:MAX_PROBLEMS], f"and {more} more") if more > 0 else listed
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[str, ...]]]:
        return (type(self), (self.problems,))


class Broken(Exception):
    """A method of a user's step does not do what it must; the text says which and how."""


class LaunchError(RuntimeError):
    """The fork server could not start, or is gone: one line that says how."""
