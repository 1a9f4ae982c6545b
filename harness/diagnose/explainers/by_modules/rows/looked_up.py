"""Lines of ranks that look up other rows of a table than its module does there, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.leading import PLACES
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, source_from_here
from sumgrad.diagnose.modules.inputs.looked_up import looked_up_beside


def with_rows_looked_up(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says no more than a place, and rows that are looked up beside the right ones."""
    if diagnosis.kind not in PLACES or diagnosis.standing == "proved":
        return diagnosis
    return replace(diagnosis, because=(*_in_words(case), *diagnosis.because))


@as_a_hint
def _in_words(case: Case) -> list[str]:
    traces = case.traces
    found = None if traces is None else next(looked_up_beside(traces), None)
    if traces is None or found is None:
        return []
    source = traces.single.sources.get(found.module)
    of = f" ({source_from_here(source)})" if source else ""
    further = (
        f", {abs(found.by)} {'behind' if found.by > 0 else 'before'} these" if found.by else ""
    )
    return [f"{expression(found.made)} looks up rows {spans(found.here)} of {found.module}.weight "
            f"on rank {spans(found.ranks)}, and {found.module}{of} in the single process rows "
            f"{spans(found.there)}{further}: it is called on no rank, so look at what its forward "
            f"does besides"]  # fmt: skip
