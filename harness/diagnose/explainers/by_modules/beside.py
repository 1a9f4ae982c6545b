"""What right modules say beside a cause that something else shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.passed import own_makers
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    looked_by_rows,
    named,
    owners,
)
from sumgrad.diagnose.explainers.of_factors.by_rank import on_which_side_of_the_reduction
from sumgrad.diagnose.explainers.of_factors.uniform import NEITHER
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from sumgrad.diagnose.modules.values.seen import Seen, constant
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import same, shares_at_the_loss
from sumgrad.record.trace import INTO, LOSS

# Causes that say how much is wrong, or where, and not what was done.
HOW_MUCH = ("open", "factor", "param_factors", "row_factors", "block_factor", "held_elsewhere")

NOT_SUMMED = ("not_reduced", "skipped_collective")


def beside(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause, and that the modules are right where they are: what is wrong comes after them."""
    look = looked_by_rows(case)
    kinds = ("forward", "backward", "recomputed", "rows_read", "loss_weights", "loss_at_tokens",
             "term_factor", "own_backward", "gathered_weights", "saved_input")  # fmt: skip
    if look is None or diagnosis.kind in kinds or first_wrong_forward(look) is not None:
        return diagnosis
    told = [m for m in look.modules if look.forward(m) == "right"]
    back = [m for m in look.modules if look.backward(m) == "right"]
    if not told or not back or first_wrong_backward(look, owners(case)) is not None:
        return diagnosis
    found = shares_at_the_loss(look)
    factors = [s.factor for s in found[1]] if found else []
    known = [f for f in factors if f is not None]
    if diagnosis.kind == "lost_rows":
        return diagnosis  # rows that are lost on their way leave zeros in the modules, too
    reached = "them" if {*told} <= {*back} else f"{len(back)} of them"
    text = (
        f"the outputs of all {len(told)} modules that could be compared are right, and so are the "
        f"gradients that reach {reached}"
    )
    inside = sorted({m or "the model" for m in owners(case) if not _told_of(look, m)})
    if not known or len(known) < len(factors) or not same(known):
        return diagnosis
    of_calls = _unlike_factors(look)
    hidden = [m for m in told if any(_is_hidden(s) for s in look.seen[m])]
    if hidden:
        text += of_calls or ("" if abs(known[0] - 1) < SAME_FACTOR else _up_to(known[0]))
        text += (
            f", but for what reaches the output of {some_of(hidden)} in some calls, which is not "
            f"known"
        )
        return replace(diagnosis, because=(*diagnosis.because, text))
    if diagnosis.kind == "open" and on_which_side_of_the_reduction(case) is not None:
        return replace(diagnosis, because=(*diagnosis.because, text))  # it is said already
    after = of_calls or _after_the_modules(case, diagnosis, known[0])
    if "what follows multiplies" in after:  # a division by hand, or DDP's, is none of the ledger's
        kept = (line for line in diagnosis.because if not line.startswith(NEITHER))
        diagnosis = replace(diagnosis, because=tuple(kept))
    text += after
    if _terms_differ([s for m in look.modules for s in look.seen[m]]):
        return diagnosis
    # Where others are wrong, too, it is none of theirs.
    if diagnosis.kind in HOW_MUCH and len(inside) == len(set(owners(case))):
        names = list(dict.fromkeys(cell.name for cell in case.failing_cells))
        functions = own_makers(case, names)
        text += "; or in " if after else ": look at what follows them, or in "
        text += f"the backward of {functions}" if functions else (
            f"how {some_of(inside)} makes its own parameters' gradients, which no module's output "
            f"shows"
        )  # fmt: skip
    is_told, parts = _in_parts(case, look, diagnosis)
    if is_told:
        return replace(diagnosis, because=(*parts, *diagnosis.because, text))
    return replace(diagnosis, because=(*diagnosis.because, text, *parts))


def _in_parts(case: Case, look: Look, diagnosis: Diagnosis) -> tuple[bool, list[str]]:
    """That gradients are whole only as a sum over ranks; and whether it says where that sum is
    missing."""
    parts = [m for m in look.modules if look.backward(m) == "part"]
    if not parts:
        return False, []
    axis = next(s.axis for s in look.seen[parts[0]] if s.backward == "part")
    border = _border(case, look, parts) if diagnosis.kind in NOT_SUMMED else ""
    text = f"the gradient that reaches {some_of(parts)} is a part, whole only when summed over "
    return bool(border), [f"{text}{axis}{border}"]


def _border(case: Case, look: Look, parts: Sequence[str]) -> str:
    """The one module whose gradient is a part and whose uses have whole ones."""
    found = []
    for module in parts:
        above = look.paths.next_above(module, lambda m: look.backward(m) in ("right", "part"))
        if above and not {*above} & {*parts, LOSS}:
            found.append((module, above))
    found = [(m, a) for m, a in found if not any(is_in(m, other) for other, _ in found)]
    if len(found) != 1:
        return ""
    module, above = found[0]
    near = [m for m in above if not look.paths.all_below(m) & {*above}]  # the others are behind it
    uses = some_of([m or "the model itself" for m in near or above])
    return (
        f"; the first of them on the way back is {named(look, module)}, and of what it goes into, "
        f"{uses}, they are whole: where a sum belongs in between it is missing"
        f"{_called_at(case, near or above)}{_pre_hooks(case, above)}, else where these "
        f"parameters' gradients are put together"
    )


def _called_at(case: Case, modules: Sequence[str]) -> str:
    """The one line of a user's that calls the first of these."""
    ranks = {} if case.traces is None else case.traces.ranks
    lines = {
        stack.lines[0]
        for trace in ranks.values()
        for call in trace.calls
        if call.module == modules[0] and (stack := trace.stack(call)).lines
    }
    return f" ({modules[0]} is called at {line_and_code(*lines.pop())})" if len(lines) == 1 else ""


def _pre_hooks(case: Case, modules: Sequence[str]) -> str:
    """Those that ranks run before these modules, for what goes in."""
    ranks = {} if case.traces is None else case.traces.ranks
    lines = dict.fromkeys(
        line for t in ranks.values() for m in modules for line in t.hooks.get(f"{INTO}{m}", ())
    )
    shown = [line_and_code(*line) for line in lines if line[0]]
    return f" (a forward pre-hook there: {some_of(shown)})" if shown else ""


def _is_hidden(seen: Seen) -> bool:
    """Whether a gradient came to a right output that could not be compared."""
    came = seen.call.operation_back is not None and not seen.call.recomputed
    return (
        seen.over_all == "untold" and came and seen.forward == "right" and seen.backward == "untold"
    )


def _terms_differ(seen: Sequence[Seen]) -> bool:
    """Whether terms of the loss have factors of their own in what reaches modules."""
    told: list[float] = []
    for s in seen:
        if s.terms is not None and s.backward == "right":
            told += s.terms[~s.terms.isnan()].tolist()
    return bool(told) and not same(told)


def _after_the_modules(case: Case, diagnosis: Diagnosis, of_loss: float) -> str:
    """What a factor of every rank's loss says of the factor that was measured.

    Which of the two is wrong is not known: a step may scale its loss by what it divides by later.
    """
    if diagnosis.factor is None or diagnosis.kind != "factor":
        after = (
            ": what is wrong is which gradients reach the parameters (a penalty, a second "
            "backward), or how they are put together after it (hooks, buffers, reductions)"
        )
        if diagnosis.kind != "open":
            after = ""  # it says which of these
        return after if abs(of_loss - 1) < SAME_FACTOR else _up_to(of_loss)
    try:
        behind = float(Fraction(diagnosis.factor)) / of_loss
    except (ValueError, ZeroDivisionError):
        return _up_to(of_loss)
    wrong = {cell.rank for cell in case.failing_cells}
    right = sorted({cell.rank for cell in case.cells} - wrong)
    text = f"{_up_to(of_loss)}, and what follows multiplies by {fraction_of(behind)}"
    if right and abs(of_loss - 1) > SAME_FACTOR:
        text += (f" on rank {spans(sorted(wrong))}, and by {fraction_of(1 / of_loss)} on rank "
                 f"{spans(right)}, whose gradients are right")  # fmt: skip
    return text


def _up_to(of_loss: float) -> str:
    return f", up to the factor {fraction_of(of_loss)} that every rank's loss has"


def _unlike_factors(look: Look) -> str:
    """The least and the largest factor of right gradients, where calls have others than others."""
    right = [s for m in look.modules for s in look.seen[m] if s.backward == "right"]
    found = sorted({f for s in right if (f := constant(s.factors)) is not None})
    if not found or same(found):
        return ""
    low, high = fraction_of(found[0]), fraction_of(found[-1])
    return f", each call's up to a factor of its own, of {low} to {high}"


def _told_of(look: Look, module: str) -> bool:
    """Whether a module's right output and gradient make its parameters' gradients right: torch's
    own modules do."""
    known = module in look.seen and bool(look.seen[module])
    return known and " at " not in look.sources.get(module, " at ")
