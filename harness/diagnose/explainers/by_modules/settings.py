"""What is set on modules near what is wrong otherwise than in the single process, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import looked, owners
from sumgrad.diagnose.modules.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.diagnose.modules.settings import SetOtherwise, set_otherwise
from sumgrad.judge.joint import sizes_of

MOST_SHOWN = 3
MOST_VALUES = 6  # that are written out


def with_settings(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause, and what the first wrong module, those around it or those that own what is wrong
    have set that the single process has not."""
    traces, look = case.traces, looked(case)
    if traces is None or look is None:
        return diagnosis
    first = first_wrong_forward(look) or first_wrong_backward(look, owners(case))
    accused = [first.wrong] if first is not None else owners(case)
    around = [m for m in traces.single.settings if any(is_in(a, m) for a in accused)]
    around.sort(key=lambda m: -m.count(".") - bool(m))
    near: dict[str, int] = {}
    for distance, modules in enumerate((accused, owners(case), around)):
        for module in modules:
            near.setdefault(module, distance)
    found = set_otherwise(traces, near, sizes_of(case.record).values())
    switched = [one for one in found if one.is_switched and one.ranks == diagnosis.ranks]
    others = [one for one in found if one not in switched]
    front, behind = (tuple(map(_in_words, some[:MOST_SHOWN])) for some in (switched, others))
    return replace(diagnosis, because=(*front, *diagnosis.because, *behind))


def _in_words(one: SetOtherwise) -> str:
    modules = some_of([m or "the model itself" for m in one.modules])
    has = "has" if len(one.modules) == 1 else "have"
    return (
        f"{modules} {has} {one.attribute} = {_values(one.now)} on rank {spans(one.ranks)}, and "
        f"{_values(one.was)} in the single process"
    )


def _values(values: tuple[str, ...]) -> str:
    more = ", ..." if len(values) > MOST_VALUES else ""
    return ", then ".join(values[:MOST_VALUES]) + more
