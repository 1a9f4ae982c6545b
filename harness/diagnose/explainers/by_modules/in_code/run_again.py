"""Lines that are not what they were when the backward runs them again, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    line_and_code,
    looked,
    named,
    ordinal,
    owners,
)
from sumgrad.diagnose.explainers.of_factors.by_rank import wrong_before_it_is_reduced
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.in_code.run_again import RunAgain, run_otherwise
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.computed import MODULE


def lines_run_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """All is right in the forward, and a line of it that autograd passes gives something else when
    the backward runs it again."""
    look = looked(case)
    if look is None or first_wrong_forward(look):
        return
    if not first_wrong_backward(look, owners(case)) and not wrong_before_it_is_reduced(case):
        return
    firsts = {
        rank: next((o for o in own if _is_passed(case, rank, o)), None)
        for rank, own in _of_ranks(case).items()
    }
    found = {r: o for r, o in firsts.items() if o is not None and not _comes_wrong(look, o)}
    if not found:
        return
    sites = [one.again.site for one in found.values()]
    usual = max(sites, key=sites.count)
    ranks = tuple(rank for rank, one in found.items() if one.again.site == usual)
    one = found[ranks[0]]
    inside = f" in {named(look, one.first.inside[-1])}" if one.first.inside else ""
    yield explained(
        case,
        Diagnosis(
            cause=f"{_what(look, one)}{inside} {_how(one)}, on rank {spans(ranks)}",
            kind="recomputed",
            ranks=ranks,
            because=(
                *(
                    ["what is kept for the second run was changed in between"]
                    if one.changes
                    else ()
                ),
                "the forward is right in all modules that could be compared",
            ),
        ),
    )


@as_a_hint
def how_it_ran_otherwise(case: Case, look: Look, module: str, ranks: Sequence[int]) -> list[str]:
    """Of a module of torch's own that gives something else when it is computed again: what went
    into it then, or the line that ran otherwise last before it in the modules around it."""
    traces = case.traces
    if traces is None:
        return []
    for rank in ranks:
        again = traces.ranks[rank].computed.again
        first = next((i for i, c in enumerate(again) if c.function == f"{MODULE}{module}"), -1)
        around = [
            o for o in _of_ranks(case).get(rank, [])
            if o.at <= first and (_module_of(o) == module or _is_around(o, module))
        ]  # fmt: skip
        if around:
            one = around[-1]
            kept = ": what is kept for the second run was changed" if one.changes else ""
            return [f"{_what(look, one)} {_how(one)}{kept}"]
    return []


def _is_around(one: RunAgain, module: str) -> bool:
    inside = one.again.inside
    return bool(inside) and not _module_of(one) and is_in(module, inside[-1])


def _of_ranks(case: Case) -> dict[int, list[RunAgain]]:
    traces = case.traces
    if "run_otherwise" not in case.known:
        ranks = {} if traces is None else traces.ranks
        case.known["run_otherwise"] = {
            rank: list(run_otherwise(trace.computed)) for rank, trace in ranks.items()
        }
    found: dict[int, list[RunAgain]] = case.known["run_otherwise"]
    return found


def _is_passed(case: Case, rank: int, one: RunAgain) -> bool:
    traces = case.traces
    return traces is not None and not traces.ranks[rank].computed.with_graph.isdisjoint(
        one.first.gives
    )


def _comes_wrong(look: Look, one: RunAgain) -> bool:
    """Whether what reaches the module around it is wrong already."""
    inside = one.first.inside
    return bool(inside) and inside[-1] in look.seen and look.backward(inside[-1]) == "wrong"


def _module_of(one: RunAgain) -> str:
    name = one.again.function
    return name.removeprefix(MODULE) if name.startswith(MODULE) else ""


def _what(look: Look, one: RunAgain) -> str:
    if module := _module_of(one):
        return named(look, module)
    text = line_and_code(one.again.line, one.again.code)
    return text if one.again.part in ("", one.again.code) else f"{text}, in it `{one.again.part}`"


def _how(one: RunAgain) -> str:
    by = [line_and_code(c.line, c.code) for c in one.changes]
    if not by:
        return "gives something else of the same arguments when the backward runs it again"
    made = f"what {some_of([*dict.fromkeys(by)])} had made of it in place"
    if one.argument < 0:
        return (f"gives, when the backward runs it again, not what it gave in the forward but "
                f"{made}")  # fmt: skip
    which = "" if _module_of(one) else f" as its {ordinal(one.argument)} argument"
    return (f"takes{which}, when the backward runs it again, not what it took in the forward but "
            f"{made}")  # fmt: skip
