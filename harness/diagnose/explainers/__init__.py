"""The explainers: each a function from a failed step to explanations; one rule chooses.

An explainer asks for what it needs (a plan, partials of rows, a ledger, a clean run) and finds
nothing where it is not there. They are asked in this order, the most direct evidence first.
Add one: a function here or in a new file, its line in EXPLAINERS, a test with a fault it names.
Nothing here starts a process or needs the user's code; imports diagnose, judge, plan, record.
"""

from __future__ import annotations

from sumgrad.diagnose.explainers.clean_run import changed_operation, changed_values
from sumgrad.diagnose.explainers.factors import any_factors, factors_with_a_cause, telling_factors
from sumgrad.diagnose.explainers.free_factors import fewest_factors
from sumgrad.diagnose.explainers.last import low_digits, open_end, unlike_each_time
from sumgrad.diagnose.explainers.ledger import shown_by_the_ledger
from sumgrad.diagnose.explainers.plan_edges import edges_of_the_plan
from sumgrad.diagnose.explanation import Explainer

EXPLAINERS: tuple[Explainer, ...] = (
    edges_of_the_plan,
    fewest_factors,
    factors_with_a_cause,
    changed_operation,
    shown_by_the_ledger,
    telling_factors,
    unlike_each_time,
    changed_values,
    any_factors,
    low_digits,
)
LAST_RESORT: tuple[Explainer, ...] = (open_end,)
