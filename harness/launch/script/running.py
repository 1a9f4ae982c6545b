"""A comparison that is running: its runs of the script, each from the same files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sumgrad.base.files import write_json
from sumgrad.base.outcome import first_to_fail
from sumgrad.launch.script.options import DiffOptions
from sumgrad.launch.script.sides import Ended, end_all, new_mark, run_side
from sumgrad.launch.script.watched.look import SINGLE
from sumgrad.launch.script.watched.user_files import put_back
from sumgrad.record.spec import DAMAGED, Since
from sumgrad.record.trace import FOLDER
from sumgrad.subjects.script.asked import Asked
from sumgrad.subjects.script.reference import Single, read_single
from sumgrad.subjects.users_line import is_of_users_own

FLOAT64, OWN = ("structure", True), ("precision", False)  # tier, and whether it is lifted
NO_STEP = (
    "the single run ended without an optimizer's step: nothing to compare (an optimizer that is no "
    "torch.optim.Optimizer is not seen)"
)
Progress = Callable[[str], object]


@dataclass(slots=True, kw_only=True)
class Diff:
    """What is known so far, and one run more."""

    options: DiffOptions
    directory: Path
    progress: Progress
    tier: str = FLOAT64[0]
    lift: bool = True
    said: list[str] = field(default_factory=list)
    touches_files: bool = False
    calls: int = 0  # of an optimizer, that the single run observed
    reference: Path | None = None  # a stored single run in place of one of now
    since: Since | None = None  # the single run beside one that was kept as projections
    mark: str = field(default_factory=new_mark)
    folders: list[Path] = field(default_factory=list)

    def end(self) -> None:
        """End what runs, and put the user's files back."""
        end_all(self.mark)
        for folder in self.folders:
            put_back(folder)

    def side(self, name: str, *, jitter: int = 0, many: bool = False) -> Ended:
        """One run, and the user's files as they were before it."""
        options, single = self.options, self.reference or self.directory / "single"
        folder = self.directory if many else self.directory / name
        asked = Asked(
            directory=str(folder.resolve()),
            steps=options.steps,
            tier=self.tier,
            lift=self.lift,
            start=str(single.resolve()) if many or jitter else None,
            jitter=jitter,
            seconds=options.timeout_s,
            calls=self.calls if many or jitter else 0,
        )
        folder.mkdir(exist_ok=True)
        self.folders.append(folder)
        command = options.command("many" if many else "single")
        try:
            return run_side(
                command, asked, mark=self.mark, progress=lambda at: self.progress(f"{name}: {at}")
            )
        finally:
            changed, made = put_back(folder)
            self.touches_files = self.touches_files or bool(changed or made)
            if changed and many:
                self.said.append(f"the script changed {_some(changed)}: put back as it was")
            if made and many:
                self.said.append(f"the script made {_some(made)}: kept in {folder / 'files'}")

    def look(self, step: int) -> None:
        """A failing step once more, on both sides, with eyes on the modules."""
        options, single = self.options, self.reference or self.directory / "single"
        folder = self.directory / FOLDER
        (folder / "ranks").mkdir(parents=True)
        ok = True
        for name, side, place in (("looking, single", "single", folder / SINGLE),
                                  ("looking, ranks", "many", folder)):  # fmt: skip
            own = self.directory / name
            own.mkdir()
            self.folders.append(own)
            asked = Asked(
                directory=str(own.resolve()),
                steps=step + 1,
                tier=self.tier,
                lift=self.lift,
                start=str(single.resolve()),
                jitter=0,
                seconds=options.timeout_s,
                calls=step + 1,
                look=step,
                trace=str(place.resolve()),
            )
            try:
                self.progress(f"{name}: step {step}")
                ok &= run_side(options.command(side), asked, mark=self.mark).ok
            finally:
                put_back(own)
        if ok:
            write_json(folder / "asked.json", {"tier": self.tier, "step": step})

    def single(self) -> Single | str:
        """The single run as it was stored, or why there is none."""
        ended = self.side("single")
        try:
            run = read_single(self.directory / "single", self.tier)
        except (*DAMAGED, FileNotFoundError):
            return how_it_ended(ended)
        if not run.steps and run.unknown:
            return "; ".join(["no optimizer stepped a model's parameters", *run.unknown])
        if not run.steps:
            return NO_STEP if ended.ok else how_it_ended(ended)
        if not run.params:
            return "; ".join(["no parameter of the single run was seen", *run.unknown])
        self.calls = len(run.steps)
        return run


def how_it_ended(ended: Ended) -> str:
    bad = [o for o in ended.outcomes if not o.ok]
    if not bad:
        tail = ended.output.read_text(errors="replace")[-2000:] if ended.output.exists() else ""
        return "no process of it called a model" + (f"; it printed: {_last(tail)}" if tail else "")
    worst = first_to_fail(bad)
    text = f"{worst.status}: {worst.detail or ''}"
    if worst.stack and (place := _place_in(worst.stack)):
        text += f", at {place}"
    elif worst.output:
        text += f"; it printed last: {_last(worst.output)}"
    return text


def _place_in(stack: str) -> str | None:
    """The last line of a traceback that is a user's own: not Python's, torch's or ours."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', stack)
    own = [(f, n) for f, n in lines if is_of_users_own(f)]
    return f"{own[-1][0]}:{own[-1][1]}" if own else None


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(Path(p).name for p in paths[:3])
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
