"""What a script's ranks draw at random otherwise than its single run: then they compute another
function, and unlike gradients are no mistake that could be told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.base.outcome import IN_WORKERS, spans
from sumgrad.record.directory import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDraws:
    """Of one step: where ranks drew what the single run did not."""

    step: int
    place: str
    ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        return (
            f"{self.place} draws random numbers, at step {self.step} on rank "
            f"{spans(list(self.ranks))} others than in the single run, so the runs compute two "
            f"functions: draw them for the whole batch from one seed, and take each rank's rows "
            f"of it"
        )


def other_draws(record: Record, tier: str) -> Iterator[OtherDraws]:
    """The first place of each step whose draws are not the single run's."""
    script = record.spec.script
    before: dict[str, list[int]] = {}  # by other processes, for whatever step they are
    for step, single in enumerate(script.draws if script else ()):
        unlike = {place: [*ranks] for place, ranks in before.items()}
        for rank, held in record.ranks.items():
            mine = held.info.get((tier, step), {}).get("draws", {})
            for place, drawn in mine.items():
                if place in single and not set(drawn) <= set(single[place]):
                    unlike.setdefault(place, []).append(rank)
        before |= {place: ranks for place, ranks in unlike.items() if place.endswith(IN_WORKERS)}
        for place, ranks in sorted(unlike.items(), key=lambda item: item[0].startswith("the "))[:1]:
            yield OtherDraws(step=step, place=place, ranks=tuple(sorted(ranks)))
