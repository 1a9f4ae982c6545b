"""A line that autograd passes on the ranks and not in the single process, or the other way."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.leading import PLACES, led_by
from sumgrad.diagnose.explainers.by_modules.lines import in_words, lines_of_another_graph

# Where the forward is right, and no more is said than that gradients are not.
KINDS = (*(kind for kind in PLACES if kind != "forward"), "term_factor", "factor", "param_factors",
         "term_by_rows")  # fmt: skip


def with_another_graph(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where gradients are wrong, behind the line where their way is another."""
    found = lines_of_another_graph(case) if diagnosis.kind in KINDS else []
    said = [text for text in in_words(found) if text not in diagnosis.cause]
    for text in reversed(said):
        others = tuple(other for other in diagnosis.because if other != text)
        diagnosis = led_by(replace(diagnosis, because=others), text)
    return diagnosis
