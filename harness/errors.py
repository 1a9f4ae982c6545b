"""The error a user can mend, as against an error of ours.

Anything wrong with what the user wrote (a file, a flag, a workload) raises `UserError` with every
problem found, each naming its place; the command line prints them and exits 2. Errors of ours are
assertions with values.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROBLEMS = 20
MAX_SHOWN = 60


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


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A user's value in a message: on one line, bounded, whatever it is."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no decimal text
        text = f"a huge {type(value).__name__}"
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."
