"""A line that autograd passes on the ranks and not in the single process, or the other way."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import in_words, lines_of_another_graph
from sumgrad.diagnose.explainers.by_modules.in_code.solved import solved_from_gradients
from sumgrad.diagnose.explainers.by_modules.leading import PLACES, led_by

# Where the forward is right, and no more is said than that gradients are not.
KINDS = (*(kind for kind in PLACES if kind != "forward"), "term_factor", "factor", "param_factors",
         "term_by_rows")  # fmt: skip


def with_another_graph(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where gradients are wrong, behind the line where their way is another; not
    where they would be right with another number beside them: then their way is meant."""
    if diagnosis.kind not in KINDS:
        return diagnosis
    if solved := solved_from_gradients(case):
        more = [text for text in solved[1:] if text not in diagnosis.because]
        led = led_by(diagnosis, solved[0])
        return replace(led, because=(*more, *led.because))
    found = lines_of_another_graph(case)
    said = [text for text in in_words(found) if text not in diagnosis.cause]
    for text in reversed(said):
        others = tuple(other for other in diagnosis.because if other != text)
        diagnosis = led_by(replace(diagnosis, because=others), text)
    return diagnosis
