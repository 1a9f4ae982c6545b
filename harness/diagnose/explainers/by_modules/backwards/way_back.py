"""On the way back from what is right to what is wrong: calls, parts and terms, in words."""

from __future__ import annotations

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.explainers.by_modules.looked import ordinals
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import is_untold
from sumgrad.record.trace import Trace, Traces


def in_some_calls(look: Look, found: FirstWrong) -> str:
    """Where a rank calls a module several times, and only some of the calls get no gradient."""
    rank = found.seen[0].rank
    every = {s.call.number for s in look.seen[found.wrong] if s.rank == rank}
    without = {s.call.number for s in found.seen if s.rank == rank}
    others = [s for s in look.seen[found.wrong] if s.rank == rank and s.call.number not in without]
    if not others:
        return ""
    calls = f"call {spans(sorted(without))} of {len(every)} on rank {rank}"
    reached = all(s.call.operation_back is not None for s in others)
    return f", in {calls}" + ("; in the others one does" if reached else "")


def untold_between(look: Look, found: FirstWrong) -> list[str]:
    """What lies on the way and could not be told, so it may be wrong there already."""
    above = look.paths.all_above(found.wrong)
    right = {m for module in found.modules for m in (module, *look.paths.all_above(module))}
    near = [m for m in look.modules if m in above and m not in right and is_untold(look, m)]
    if not near:
        return []
    return [f"on the way, whether the gradient that reaches {some_of(near)} is right could not be "
            f"told: it has too few directions"]  # fmt: skip


def parts_between(look: Look, found: FirstWrong, *, near: bool = False) -> list[str]:
    """What is there in parts on the way, which may be meant or be the fault itself. near: only of
    what is made from the wrong one and nothing in between."""
    paths = look.paths
    above = paths.next_above(found.wrong, lambda _: True) if near else paths.all_above(found.wrong)
    parts = [m for m in look.modules if m in above and look.backward(m) == "part"]
    if not parts:
        return []
    axis = next(s.axis for s in look.seen[parts[0]] if s.backward == "part")
    text = f"the gradient that reaches {some_of(parts)}"
    text += ", which is made from it," if near else ""
    return [f"on the way {text} is a part, whole only when summed over {axis}"]


def parts_of_output(look: Look, found: FirstWrong) -> list[str]:
    """Which of a module's several outputs it is."""
    every = look.seen[found.wrong]
    parts, wrong = {s.call.part for s in every}, {s.call.part for s in found.seen}
    others = [s for s in every if s.call.part not in wrong and s.rank in found.ranks]
    if len(parts) < 2 or not others or any(s.backward != "right" for s in others):
        return []
    return [f"of its {len(parts)} outputs the {ordinals(wrong)} alone"]


def outputs_used_otherwise(traces: Traces, found: FirstWrong) -> list[str]:
    """Which of a module's several outputs get a gradient on the wrong ranks alone, and which in the
    single process alone: a loss of another output than the one that is meant."""
    there = _parts_reached(traces.single, found.wrong)
    here = [_parts_reached(traces.ranks[rank], found.wrong) for rank in found.ranks]
    if len(there) < 2 or any(set(own) != set(there) for own in here):
        return []
    more = [p for p in there if not there[p] and all(own[p] for own in here)]
    less = [p for p in there if there[p] and not any(own[p] for own in here)]
    on, said = f"on rank {spans(found.ranks)}", []
    of = f"of its {len(there)} outputs the"
    if more:
        said.append(f"{of} {ordinals(more)} gets a gradient {on}, and none in the "
                    f"single process: look at which output the loss is made of")  # fmt: skip
    if less:
        said.append(f"{of} {ordinals(less)} gets none {on}, and one in the single "
                    f"process")  # fmt: skip
    return said


def _parts_reached(trace: Trace, module: str) -> dict[int, bool]:
    """Part of a module's output -> whether any call's got a gradient that is not zero."""
    out: dict[int, bool] = {}
    for call, gradient in zip(trace.calls, trace.gradients, strict=True):
        if call.module == module:
            reached = gradient is not None and bool(gradient.any())
            out[call.part] = out.get(call.part, False) or reached
    return dict(sorted(out.items()))


def terms_there(look: Look, found: FirstWrong) -> str:
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
