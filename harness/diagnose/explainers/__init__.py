"""The explainers: each a function from a failed step to explanations; one rule chooses.

An explainer asks for what it needs (a plan, partials of rows, a ledger, a clean run) and finds
nothing where it is not there. They are asked in this order, the most direct evidence first.
Add one: a function here or in a new file, its line in EXPLAINERS, a test with a fault it names.
Nothing here starts a process or needs the user's code; imports diagnose, judge, plan, record.
"""

from __future__ import annotations

from sumgrad.diagnose.explainers import clean_run, factors, free_factors, last, ledger, plan_edges
from sumgrad.diagnose.explanation import Explainer

EXPLAINERS: tuple[Explainer, ...] = (
    plan_edges.edges_of_the_plan,
    free_factors.fewest_factors,
    factors.factors_with_a_cause,
    clean_run.changed_operation,
    ledger.shown_by_the_ledger,
    factors.telling_factors,
    last.unlike_each_time,
    clean_run.changed_values,
    factors.any_factors,
)
LAST_RESORT: tuple[Explainer, ...] = (last.low_digits, last.open_end)
