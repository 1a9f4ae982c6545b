"""Which parameters a script's optimizers have and have stepped, and which nothing of torch's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sumgrad.base.outcome import some_of
from sumgrad.launch.script.watched.in_front import Optimizers
from sumgrad.launch.script.watched.weights import Weights
from sumgrad.subjects.script.asked import Asked
from sumgrad.subjects.script.models import Held, Models
from torch.optim.optimizer import Optimizer

MOST_STEPS = 40  # for each step that is asked for, until every optimizer was there


class Owned:
    """Of one process. optimizers: those that it makes."""

    def __init__(self, asked: Asked, models: Models, weights: Weights) -> None:
        self._asked, self._models, self._weights = asked, models, weights
        self.optimizers: Optimizers = []
        self._times: Counter[int] = Counter()  # that a parameter was stepped, by its id
        self._unowned: set[str] = set()
        self._changed_by_others: set[str] = set()

    def held_by(self, optimizer: Optimizer) -> dict[str, Held]:
        """What is known of the parameters that an optimizer has, by name."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {n: h for n, h in self._models.held.items() if id(h.param) in mine}

    def has_stepped(self, optimizer: Optimizer) -> None:
        self._times.update(id(p) for g in optimizer.param_groups for p in g["params"])

    def was_stepped(self, held: Held) -> bool:
        return bool(self._times[id(held.param)])

    def look_at_others(self) -> None:
        """Parameters with a gradient that no optimizer of torch's has in the single run, and that
        something steps all the same, which may have freed the gradient; of others, as where a model
        is trained in part, it is only said. (On ranks the optimizer of another one may have them.)
        """
        if self._asked.start is not None or self._asked.jitter:
            return
        owned = self._every()
        for n, h in self._models.held.items():
            if id(h.param) in owned or not h.param.requires_grad:
                continue
            if self._weights.is_changed(h):
                self._changed_by_others.add(n)
            elif h.param.grad is None:
                continue
            self._unowned.add(n)

    def unowned(self) -> list[str]:
        """Names of those that nothing steps."""
        return sorted(self._unowned - self._changed_by_others)

    def enough(self, calls: int) -> bool:
        """Whether what was asked for was seen: as many steps as the single run took; of that run,
        so many of every parameter that an optimizer has."""
        if self._asked.calls:
            return calls >= self._asked.calls
        if calls < self._asked.steps:
            return False
        most = self._asked.steps * max(MOST_STEPS, len(self.optimizers))
        return calls >= most or all(self._times[p] >= self._asked.steps for p in self._every())

    def troubles(self, calls: int) -> Iterator[str]:
        """What was not compared, and why, after so many calls of optimizers."""
        never = [name for p, name in self._every().items() if not self._times[p]]
        if never and self._asked.start is not None and not self._asked.jitter:
            yield (
                f"{some_of(never)} was stepped by no optimizer in the {calls} steps that were "
                f"looked at, so it was not compared: use a larger --steps"
            )
        if self._changed_by_others:
            yield (
                f"{some_of(sorted(self._changed_by_others))} is stepped by nothing that is a "
                f"torch.optim.Optimizer, so its gradient was not compared"
            )

    def _every(self) -> dict[int, str]:
        """Parameters that optimizers have, of models not called yet too: id -> name."""
        names = {id(h.param): n for n, h in self._models.held.items()}
        living = [o for ref in self.optimizers if (o := ref()) is not None]
        return {
            id(p): names.get(id(p), f"a parameter of shape {tuple(p.shape)}")
            for o in living
            for group in o.param_groups
            for p in group["params"]
            if p.requires_grad or id(p) in names
        }
