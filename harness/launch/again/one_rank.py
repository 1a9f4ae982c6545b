"""A step that failed, on one rank, where there is nothing to distribute: asked for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.files import write_json
from sumgrad.base.verdict import Verdict
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.judging import is_right_in_float64
from sumgrad.record.trial import Change, read_trials
from sumgrad.topology.pools import load_topology, topology_to_json

Again = Callable[[CheckOptions, str], tuple[Verdict, Path]]  # and what it is, to be shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """verdict: of the step on one rank. right, wrong: changes that were tried there, by whether
    they made every gradient right, as they must to be a cause where it fails there, too."""

    verdict: Verdict
    right: tuple[Change, ...] = ()
    wrong: frozenset[Change] = frozenset()

    @property
    def agrees(self) -> bool:
        """Whether every gradient is right there, in float64."""
        return is_right_in_float64(self.verdict)

    @property
    def fails(self) -> bool:
        """Whether a gradient is wrong there."""
        return self.verdict.status == "fail" and any(
            tensor["status"] == "fail" for tensor in self.verdict.data["tensors"]
        )


class OnOneRank:
    """The same step on one rank, run when it is first asked for. again: a check.

    Planted faults are left out of it.
    """

    def __init__(self, options: CheckOptions, directory: Path, again: Again) -> None:
        self._options, self._directory, self._again = options, directory, again

    @cached_property
    def ended(self) -> Ended | None:
        """None where it is on one rank already, or on several pools, of which each is a rank."""
        topology = load_topology(self._options.topology)
        whole = topology_to_json(topology)
        if len(whole["pools"]) > 1 or topology.world_size == 1:
            return None
        pools = {
            name: {"axes": dict.fromkeys(entry["axes"], 1), "role": entry["role"]}
            for name, entry in whole["pools"].items()
        }
        place = self._directory / "one_rank"
        place.mkdir()
        path = place / "topology.yaml"
        data = {k: v for k, v in whole.items() if v is not None}
        write_json(path, {**data, "pools": pools})
        alone = replace(
            self._options, topology=path, fault=None, tiers=("structure",), out=place / "run"
        )
        try:
            verdict, directory = self._again(alone, "the same on one rank")
        except UserError:
            return None
        trials = read_trials(directory)
        return Ended(
            verdict=verdict,
            right=tuple(one.change for one in trials if one.right),
            wrong=frozenset(one.change for one in trials if not one.right),
        )
