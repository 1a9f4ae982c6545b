"""Where a user's own step goes wrong: the first module, in the forward or down the backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, looked, named, owners
from sumgrad.diagnose.explainers.by_modules.rows_used import reading, uneven_rows
from sumgrad.diagnose.explainers.factors import explained, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.first_wrong import (
    FirstWrong,
    first_wrong_backward,
    first_wrong_forward,
    first_wrong_recomputed,
)
from sumgrad.diagnose.modules.look import Look, Seen, constant
from sumgrad.diagnose.modules.loss_weights import is_untold, same
from sumgrad.diagnose.modules.matching import SAME_FACTOR
from sumgrad.diagnose.names import factor_symbols

MAX_OPERATIONS = 4
SAME_LOSS = 1e-9


def first_wrong_modules(case: Case) -> dict[str, Any] | None:
    """The `where` of verdict.json: in the forward, in a checkpoint's, and down the backward.

    Each None, or the module, its ranks and source, and the modules beside it that are right still:
    in the backward those that are made from it, or LOSS.
    """
    look = looked(case)
    if look is None:
        return None
    found = {
        "forward": first_wrong_forward(look),
        "recomputed": first_wrong_recomputed(look),
        "backward": first_wrong_backward(look, owners(case)),
    }
    return {
        "tier": case.tier,
        "step": case.step,
        "modules": len(look.modules),
        "forward_right": sum(look.forward(m) == "right" for m in look.modules),
        "backward_right": sum(look.backward(m) == "right" for m in look.modules),
        **{
            way: None
            if one is None
            else {
                "module": one.wrong,
                "source": look.sources.get(one.wrong),
                "ranks": list(one.ranks),
                "beside": list(one.beside),
            }
            for way, one in found.items()
        },
    }


def recomputed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """An output that is right in the forward, and another when a checkpoint computes it again."""
    look = looked(case)
    found = None if look is None else first_wrong_recomputed(look)
    if look is None or found is None:
        return
    text = f"{named(look, found.wrong)} gives something else when it is computed again in the "
    text += f"backward, on rank {spans(found.ranks)}"
    yield explained(
        case,
        Diagnosis(
            cause=f"{text}: what a checkpoint recomputes is not what the forward was",
            kind="recomputed",
            ranks=found.ranks,
            because=("in the forward its output is the single process's",),
        ),
    )


def forward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """An output that is no slice of the single process's, and nothing right after it."""
    look = looked(case)
    found = None if look is None else first_wrong_forward(look)
    if look is not None and found is not None:
        yield explained(case, _forward(case, look, found))


def backward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """A gradient that is not right any more at some module, and at none further down."""
    look = looked(case)
    if look is None or first_wrong_forward(look) is not None:
        return
    found = first_wrong_backward(look, owners(case))
    if found is None:
        return
    uneven = None if found.modules else uneven_rows(case)
    yield explained(case, uneven[0] if uneven else _backward(case, look, found))


def _forward(case: Case, look: Look, found: FirstWrong) -> Diagnosis:
    told = [m for m in look.modules if look.forward(m) == "right"]
    near = _listed(look, found.beside)
    before = f"the forward is right up to {near} and" if near else "the forward"
    start = "" if near else "; no module whose output could be compared leads to it"
    because = [f"its output is no slice of the single process's: {_places(found.seen)}"]
    if not found.beside and _is_the_lesser_part(found.seen):
        because.append("what goes into it there may be padding that is right to differ; then what "
                       "follows from it is wrong")  # fmt: skip
    below = look.paths.next_below(found.wrong, lambda m: look.forward(m) == "right")
    shared = [m for m in below if look.shared(m)]
    if shared:
        because.append(
            f"{some_of(shared)} is found by its values, which are those of all rows: whether this "
            f"rank takes the positions that are its own, they do not tell"
        )
    whole = sorted({s.rank for s in look.seen[found.wrong]} - set(found.ranks))
    if whole:
        because.append(f"on rank {spans(whole)} it is right")
    because += _between(case, found, back=False)
    because += reading(case)
    return Diagnosis(
        cause=f"{before} goes wrong in {named(look, found.wrong)} on rank {spans(found.ranks)}"
        + (start if told else "; no module's output is the single process's"),
        kind="forward",
        ranks=found.ranks,
        because=tuple(because),
    )


def _with_factors(seen: Seen) -> bool:
    """Whether the vectors that are right are so only up to factors that differ."""
    told = seen.factors is not None and not bool(seen.factors.isnan().all())
    return told and constant(seen.factors) is None


def _is_the_lesser_part(seen: Sequence[Seen]) -> bool:
    """Of each call's vectors less than all are wrong."""
    return all(s.wrong is not None and len(s.wrong) < math.prod(s.shape[:-1]) for s in seen)


def _backward(case: Case, look: Look, found: FirstWrong) -> Diagnosis:
    at, above = named(look, found.wrong), _listed(look, found.modules)
    what = f"the gradient that reaches the output of {at}"
    if above:
        what += ", which goes into it,"
    shown = None
    symbols: list[str] = []
    if found.lost:
        cause = f"no gradient reaches the output of {at} on rank {spans(found.ranks)}"
        cause += _in_some_calls(look, found)
    elif found.ratio is not None:
        shown = fraction_of(found.ratio)
        symbols = factor_symbols(case, found.ratio)
        cause = f"{what} is {shown} times what it should be on rank {spans(found.ranks)}"
        cause += f", which equals {symbols[0]}" if symbols else ""
    else:
        cause = f"{what} is wrong on rank {spans(found.ranks)}"
    told = sum(look.forward(module) == "right" for module in look.modules)
    head = f"the forward is right in all {told} modules that could be compared; "
    lacking = next(iter(look.lacking), None)
    if lacking is not None:
        few, every = look.lacking[lacking]
        right = all(look.forward(m) != "wrong" for m in look.modules)
        head = "what the ranks' modules give is right, but " if right else ""
        head += (
            f"{few} of the {every} vectors that {named(look, lacking)} gives the single process "
            f"are on no rank (padding that is cut off, or a pass that is missing or another); "
        )
    if above:
        head += f"the backward is right down to {above}; "
    else:
        head += "the loss itself, outside of the modules, is another or has another gradient: "
    least = "at least " if len(look.terms) > 1 else ""  # the rest fits factors of several terms
    because = [] if found.lost or found.ratio else [f"wrong are {least}{_places(found.seen)}"]
    if because and any(_with_factors(s) for s in found.seen):
        because.append("the others there are right but for factors of their own")
    because += _parts_of_output(look, found)
    alike = [m for m in found.alike if not _is_in(found.wrong, m)]
    if alike:
        because.append(f"so is that of {_listed(look, alike)}, which goes into the same")
    loss = len(found.modules) < len(found.beside)
    between = f"the backward of {above}, and of what runs between {at} and there" if above else (
        f"what follows {at}: the loss, and its backward")  # fmt: skip
    because.append(f"look at {between}" + (", and at the loss, which uses it too" if loss and above
                                            else ""))  # fmt: skip
    if not above:
        because += losses_beside(case)
    because += _untold_between(look, found)
    because += _weighed(look, found)
    because += _parts_between(look, found)
    because += _between(case, found, back=True)
    because += in_the_gradients(case)
    return Diagnosis(
        cause=head + cause + _terms_there(look, found),
        kind="backward",
        ranks=found.ranks,
        factor=shown,
        symbol=symbols[0] if symbols else None,
        because=tuple(because),
    )


def _in_some_calls(look: Look, found: FirstWrong) -> str:
    """Where a rank calls a module several times, and only some of the calls get no gradient."""
    rank = found.seen[0].rank
    every = {s.call.number for s in look.seen[found.wrong] if s.rank == rank}
    without = {s.call.number for s in found.seen if s.rank == rank}
    if len(every) < 2 or every == without:
        return ""
    return f" in call {spans(sorted(without))} of {len(every)}; in the others one does"


def _listed(look: Look, modules: Sequence[str]) -> str:
    """Modules by name, class and line, the nearest first; of one inside another the inner."""
    inner = [m for m in modules if not any(_is_in(other, m) for other in modules)]
    return some_of([named(look, m) for m in reversed(inner)])


def _is_in(module: str, outer: str) -> bool:
    return module != outer and (not outer or module.startswith(f"{outer}."))


def _weighed(look: Look, found: FirstWrong) -> list[str]:
    """Gradients that are right beside it but for factors, and where: one, or vectors' own."""
    out = []
    for module in found.modules:
        factors = [constant(s.factors) for s in look.seen[module] if s.backward == "right"
                   and s.factors is not None and not bool(s.factors.isnan().all())]  # fmt: skip
        if not factors:
            continue
        known = [f for f in factors if f is not None]
        if len(known) < len(factors) or not same(known):
            out.append(f"what reaches {module or 'the model'} is right but for factors of its "
                       f"vectors or ranks")  # fmt: skip
        elif abs(known[0] - 1) > SAME_FACTOR:
            out.append(f"what reaches {module or 'the model'} has the factor "
                       f"{fraction_of(known[0])} on all ranks")  # fmt: skip
    mine = [s for s in look.seen[found.wrong] if s.rank not in found.ranks]
    if any(s.backward == "right" and constant(s.factors) is None for s in mine):
        ranks = sorted({s.rank for s in mine})
        out.append(f"on rank {spans(ranks)} it is right but for factors of its vectors")
    return out


def losses_beside(case: Case) -> list[str]:
    """The ranks' losses beside that of the single process, where both are known."""
    traces = case.record.traces
    if traces is None or len(traces.single.losses) != 1:
        return []
    wanted = traces.single.losses[0]
    got = sum(sum(trace.losses) for trace in traces.ranks.values())
    ratio = got / wanted if wanted else 0.0
    if not ratio:
        return []
    times = round(ratio) if ratio > 0.5 else 1 / round(1 / ratio) if ratio > 0 else 0.0
    if times and abs(ratio / times - 1) < SAME_LOSS:
        up_to = "" if times == 1 else f", {fraction_of(times)} times"
        return [f"the losses that the ranks' backwards start from add up to that of the single "
                f"process{up_to}: its value may be right, and its gradient is not"]  # fmt: skip
    return [f"the losses that the ranks' backwards start from add up to {got:.9g}, {ratio:.6g} "
            f"times that of the single process ({wanted:.9g})"]  # fmt: skip


def _untold_between(look: Look, found: FirstWrong) -> list[str]:
    """What lies on the way and could not be told, so it may be wrong there already."""
    above = look.paths.all_above(found.wrong)
    right = {m for module in found.modules for m in (module, *look.paths.all_above(module))}
    near = [m for m in look.modules if m in above and m not in right and is_untold(look, m)]
    if not near:
        return []
    return [f"on the way, whether the gradient that reaches {some_of(near)} is right could not be "
            f"told: it has too few directions"]  # fmt: skip


def _parts_between(look: Look, found: FirstWrong) -> list[str]:
    """What is there in parts on the way, which may be meant or be the fault itself."""
    above = look.paths.all_above(found.wrong)
    near = [m for m in look.modules if m in above and look.backward(m) == "part"]
    if not near:
        return []
    axis = next(s.axis for s in look.seen[near[0]] if s.backward == "part")
    return [f"on the way the gradient that reaches {some_of(near)} is a part, whole only when "
            f"summed over {axis}"]  # fmt: skip


def _parts_of_output(look: Look, found: FirstWrong) -> list[str]:
    """Which of a module's several outputs it is."""
    parts = {s.call.part for s in look.seen[found.wrong]}
    wrong = {s.call.part for s in found.seen}
    if len(parts) < 2 or parts == wrong:
        return []
    return [f"of its {len(parts)} outputs number {spans(sorted(p + 1 for p in wrong))} alone"]


def _terms_there(look: Look, found: FirstWrong) -> str:
    """Which terms of a loss of several are met there first, in words; what came before is right."""
    parts = {s.call.part for s in found.seen}
    live = {t for part in parts for t in look.terms_at.get((found.wrong, part), ())}
    met = {
        term
        for module in (found.wrong, *look.paths.all_above(found.wrong))
        for s in look.seen.get(module, ())
        if s.backward == "right" and (module, s.call.part) != (found.wrong, min(parts))
        for term in look.terms_at.get((module, s.call.part), ())
    }
    new = sorted(live - met)
    if not new or len(look.terms) < 2:
        return ""
    text = f", where {some_of(new)} comes in"
    return text + (f"; {some_of(sorted(met))} is right behind it" if met else "")


def _places(seen: Sequence[Seen]) -> str:
    """Which vectors of a tensor are not right, in words."""
    s = seen[0]
    if s.wrong is None or not s.shape:
        return "all of it"
    total = math.prod(s.shape[:-1])
    calls = sorted({x.call.number for x in seen if x.rank == s.rank})
    alike = all(x.wrong is not None and set(x.wrong) == set(s.wrong)
                for x in seen if x.rank == s.rank)  # fmt: skip
    others = spans(sorted({*calls} - {s.call.number}))
    many = f", in call {s.call.number}, and others in call {others}"
    if alike or not others:
        many = "" if calls == [0] else f", in calls {spans(calls)}"
    if len(s.wrong) >= total:
        return f"all vectors of it, in part at least, on rank {s.rank}{many}"
    shape = " x ".join(map(str, s.shape))
    if len(s.shape) >= 3:
        last = s.shape[-2]
        positions = sorted({int(i) % last for i in s.wrong})
        if len(positions) < last:
            return f"positions {spans(positions)} of {last} on rank {s.rank}{many} ({shape})"
    return f"vectors {spans([int(i) for i in s.wrong])} of {total} on rank {s.rank}{many} ({shape})"


def _between(case: Case, found: FirstWrong, *, back: bool) -> list[str]:
    """The collectives that the first wrong rank issues in between."""
    traces, look = case.record.traces, looked(case)
    if traces is None or look is None:
        return []
    s = found.seen[0]
    trace = traces.ranks[s.rank]
    if not found.modules:
        return _since_the_forward(s, trace.operations) if back else []
    nearest = [x for m in found.modules for x in look.seen[m] if x.rank == s.rank]
    mine = [x for x in nearest if x.call.number == s.call.number]
    if not mine:
        return []
    times = [x.call.operation_back if back else x.call.operation for x in mine]
    known = [time for time in times if time is not None]
    b = s.call.operation_back if back else s.call.operation
    if len(known) < len(found.modules) or b is None or b < min(known):
        return []
    a = min(known)
    if a == b:
        return [f"rank {s.rank} issues no collective between these two (what else goes into it may "
                f"come from before)"]  # fmt: skip
    issued = trace.operations[a:b]
    more = f" and {len(issued) - MAX_OPERATIONS} more" if len(issued) > MAX_OPERATIONS else ""
    return [f"in between rank {s.rank} issues {'; '.join(issued[:MAX_OPERATIONS])}{more}"]


def _since_the_forward(s: Seen, operations: Sequence[str]) -> list[str]:
    a, b = s.call.operation, s.call.operation_back
    issued = list(dict.fromkeys(operations[a:b]))
    if b is None or not issued:
        return []
    shown = "; ".join(issued[:MAX_OPERATIONS])
    return [f"between that output and its gradient rank {s.rank} issues {shown}"]
