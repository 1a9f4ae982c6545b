"""What a parameter's gradient lacks, and that reached a copy of it: a leaf with its numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.gradient_of_others import copies_in_words
from sumgrad.diagnose.modules.weights.copies import lost_of

ELSEWHERE = ("forward", "recomputed", "run_to_run", "saved_input", "frozen")
MOST = 8  # wrong gradients that are looked at


def with_copies_of_parameters(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause, and the first wrong gradient that lacks exactly what copies of its parameter got, as
    those that experts are lent by."""
    traces = case.traces
    if traces is None or case.has_plan:
        return diagnosis
    if diagnosis.kind in ELSEWHERE or not case.exact:
        return diagnosis
    for cell in case.failing_cells[:MOST]:
        whole = traces.single.params.get(cell.name)
        numel = cell.measured.numel()
        index = torch.arange(numel) if cell.index is None else cell.index.reshape(-1)
        if whole is None or whole.dtype != torch.float64 or int(index.max()) >= whole.numel():
            continue
        lacks = (cell.wanted.value - cell.measured).double().reshape(-1)
        try:
            lost = lost_of(traces, whole.reshape(-1)[index], lacks)
        except (RuntimeError, ValueError, LookupError):
            return diagnosis  # as in looked(): a cause is not lost by a hint
        if lost:
            text = f"{cell.name} on rank {cell.rank} lacks exactly what reached "
            because = (text + copies_in_words(lost), *diagnosis.because)
            return replace(diagnosis, because=because)
    return diagnosis
