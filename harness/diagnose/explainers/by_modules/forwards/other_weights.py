"""Modules that compute with other weights than the model's: what a gather left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import between, is_in, right_up_to
from sumgrad.diagnose.explainers.by_modules.looked import (
    line_and_code,
    looked,
    named,
    unless_it_fails,
)
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.weights.adapted_weights import weights_of_calls
from sumgrad.diagnose.modules.weights.weights_used import (
    OtherWeight,
    When,
    how,
    other_weights,
    uncalled_state,
)
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, first_wrong_forward
from sumgrad.diagnose.modules.where.look import Look

GATHERED = "look at what gathers them, or changes them, before it is called"
MOVED = "it is no trained parameter: look at what changes it, between micro-batches or on a rank"


def computed_with_other_weights(case: Case, left: Left) -> Iterator[Explanation]:
    """The first module of the forward whose weights are not the model's, and no other wrong before.

    Not where its outputs are right all the same: then they stand in another order there.
    """
    look = looked(case)
    wrong = None if look is None else first_wrong_forward(look)
    for module in _until(look, wrong) if look is not None else ():
        assert look is not None
        odd = {s.rank for s in look.seen[module] if s.forward != "right"}
        found = [w for w in weights_there(case, [module], "forward") if w.rank in odd]
        if found:
            yield explained(case, _cause(case, look, module, found))
            return


def _until(look: Look, wrong: FirstWrong | None) -> Sequence[str]:
    """The modules up to the first wrong one, and those around it, which have begun before it."""
    if wrong is None:
        return look.modules
    at = look.modules.index(wrong.wrong)
    return [*look.modules[: at + 1], *(m for m in look.modules[at + 1 :] if is_in(wrong.wrong, m))]


def _cause(case: Case, look: Look, module: str, found: Sequence[OtherWeight]) -> Diagnosis:
    held, how_they_are = weights_in_words(found)
    ranks = tuple(sorted({w.rank for w in found}))
    below = look.paths.next_below(module, lambda m: look.forward(m) == "right")
    beside = tuple(sorted(below, key=look.modules.index))
    traces = case.traces
    moved = traces is not None and not {w.name for w in found} & traces.single.params.keys()
    kind, what, hint = "gathered_weights", "with other weights than the model's", GATHERED
    if moved:
        kind, what, hint = "moved_state", "with another state than the single process's", MOVED
    because = [*how_they_are, hint]
    seen = tuple(s for s in look.seen[module] if s.rank in ranks and not s.call.recomputed)
    first = FirstWrong(wrong=module, seen=seen, beside=beside)
    known = right_up_to(look, first)
    head = f"{known}; " if known else ""
    if seen:
        because += between(case, first, back=False)
    return Diagnosis(
        cause=f"{head}{named(look, module)} computes {what}: {held}",
        kind=kind,
        ranks=ranks,
        because=tuple(because),
    )


def weights_there(case: Case, modules: Sequence[str], when: When) -> list[OtherWeight]:
    """Parameters that these modules compute with and that are not the model's, in float64.

    Later steps of a script start from weights that its own optimizer made, on each side.
    """
    traces, spec = case.traces, case.record.spec
    if traces is None or spec.tiers[case.tier] != "float64" or (spec.script and case.step):
        return []
    return [found for module in modules for found in other_weights(traces, module, when)]


@unless_it_fails
def handed_other_weights(case: Case, found: FirstWrong) -> str | None:
    """Where the first wrong call gets what is right, and computes with a weight that is made in the
    step and is none that the single process has there."""
    traces, dtype = case.traces, case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64":
        return None
    for rank in found.ranks:
        wrong = {s.call.number for s in found.seen if s.rank == rank}
        told = [o for o in weights_of_calls(traces, found.wrong, rank) if o.call in wrong]
        if not told:
            continue
        one = told[0]
        made = f", made at {line_and_code(*one.made)}," if one.made[0] else ""
        its = "the model's own" if one.of_the_model else "another"
        there = f" made at {line_and_code(*one.there)}" if one.there[0] else ""
        there = "" if one.there == one.made else there
        more = f"; so in {len(told) - 1} more of its calls" if len(told) > 1 else ""
        calls = "the single process's call that gets the same, which has"
        if one.num > 1:
            calls = (f"any of the single process's {one.num} calls that get the same, of which "
                     f"the first has")  # fmt: skip
        return (
            f"in call {one.call} on rank {rank} it computes with another weight{made} than {calls} "
            f"{its}{there}{more}: it may be left of what ran before"
        )
    return None


def held_beside(case: Case, ranks: Sequence[int]) -> list[str]:
    """What modules that nobody calls hold otherwise on the wrong ranks alone."""
    traces, spec = case.traces, case.record.spec
    if traces is None or spec.tiers[case.tier] != "float64" or (spec.script and case.step):
        return []
    found: dict[str, dict[int, None]] = {}
    for one in uncalled_state(traces):
        found.setdefault(one.name, {})[one.rank] = None
    names = [name for name, held in found.items() if {*held} == {*ranks}]
    return [f"{some_of(names)} holds other values on rank {spans(sorted(ranks))} than in the "
            f"single process"] if names else []  # fmt: skip


def weights_in_words(found: Sequence[OtherWeight]) -> tuple[str, list[str]]:
    """What modules compute with, and how it differs; of one parameter, and the others' names."""
    first = found[0]
    names = list(dict.fromkeys(f.name for f in found))
    ranks = sorted({f.rank for f in found if f.name == first.name})
    more = f" (and {some_of(names[1:])})" if len(names) > 1 else ""
    shown: dict[str, list[int]] = {}
    for one in found:
        if one.name == first.name:
            shown.setdefault(how(one), []).append(one.rank)
    told = [f"of {first.name}, on rank {spans(r)}, {text}" for text, r in list(shown.items())[:3]]
    return f"{first.name}{more} on rank {spans(ranks)}", told
