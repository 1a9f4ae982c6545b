"""The explainers: each a function from a failed step to explanations; one rule chooses.

An explainer asks for what it needs (a plan, partials of rows, a ledger, a clean run) and finds
nothing where it is not there. They are asked in this order, the most direct evidence first. What
else a run shows beside a cause is added to it, step by step, in the order of BESIDE_A_CAUSE.
Add one: a function here or in a new file, its line in EXPLAINERS, a test with a fault it names.
Nothing here starts a process or needs the user's code; imports diagnose, judge, plan, record.
"""

from __future__ import annotations

from collections.abc import Callable

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers import last
from sumgrad.diagnose.explainers.by_modules import backward, forward
from sumgrad.diagnose.explainers.by_modules.backwards import own_backward
from sumgrad.diagnose.explainers.by_modules.backwards.derivatives import with_formulas
from sumgrad.diagnose.explainers.by_modules.backwards.hooks import with_hooks
from sumgrad.diagnose.explainers.by_modules.backwards.not_finite import with_what_is_not_finite
from sumgrad.diagnose.explainers.by_modules.backwards.other_graph import with_another_graph
from sumgrad.diagnose.explainers.by_modules.beside import beside
from sumgrad.diagnose.explainers.by_modules.forwards import other_weights
from sumgrad.diagnose.explainers.by_modules.forwards.settings import with_settings
from sumgrad.diagnose.explainers.by_modules.in_code import recomputed, run_again
from sumgrad.diagnose.explainers.by_modules.in_code.branches import with_branches
from sumgrad.diagnose.explainers.by_modules.in_code.computed import with_the_line
from sumgrad.diagnose.explainers.by_modules.in_code.left_undone import with_what_is_left_undone
from sumgrad.diagnose.explainers.by_modules.in_code.written_over import with_what_was_written_over
from sumgrad.diagnose.explainers.by_modules.in_code.wrong_later import with_the_turn
from sumgrad.diagnose.explainers.by_modules.rows import paired, put_together, rows_used
from sumgrad.diagnose.explainers.by_modules.rows.looked_up import with_rows_looked_up
from sumgrad.diagnose.explainers.by_modules.weighing import weights
from sumgrad.diagnose.explainers.by_modules.weighing.count_divided_by import by_another_count
from sumgrad.diagnose.explainers.by_modules.weighing.factor_lines import with_the_factors_line
from sumgrad.diagnose.explainers.left_over import left_by_a_line, not_zeroed, zeroed_after
from sumgrad.diagnose.explainers.left_over.frozen import with_frozen
from sumgrad.diagnose.explainers.left_over.history import with_history
from sumgrad.diagnose.explainers.left_over.kept_otherwise import with_what_was_kept
from sumgrad.diagnose.explainers.left_over.uncleared import with_what_was_not_cleared
from sumgrad.diagnose.explainers.of_factors import blocks, by_rank, by_use, factors, terms
from sumgrad.diagnose.explainers.of_ledgers import clean_run, exchanged, ledger
from sumgrad.diagnose.explainers.of_others import (
    given_to_others,
    lacking_rows,
    one_sum_for_all,
    other_parts,
    other_rows,
    own_value,
    replaced,
    ties,
)
from sumgrad.diagnose.explainers.of_others.copies_of_parameters import with_copies_of_parameters
from sumgrad.diagnose.explainers.of_plans import free_factors, plan_edges
from sumgrad.diagnose.explanation import Explainer

EXPLAINERS: tuple[Explainer, ...] = (
    plan_edges.edges_of_the_plan,
    free_factors.fewest_factors,
    recomputed.recomputed_otherwise,
    run_again.lines_run_otherwise,
    last.unlike_each_time,
    ties.tie_that_was_cut,
    exchanged.reductions_by_value,
    ledger.runs_narrow,
    other_weights.computed_with_other_weights,
    forward.forward_goes_wrong,
    by_rank.a_backward_is_left_in,
    left_by_a_line.left_by_a_line,
    zeroed_after.zeroed_after,
    rows_used.rows_not_read_once,
    factors.one_term_by_rows,
    weights.terms_weighed_otherwise,
    weights.tokens_weighed_otherwise,
    backward.backward_goes_wrong,
    put_together.put_together,
    clean_run.zeros_put_in,
    clean_run.which_step_it_is,
    own_value.own_value_added,
    replaced.held_elsewhere,
    replaced.one_of_several,
    blocks.blocks_of_elements,
    factors.factors_with_a_cause,
    weights.rows_weighed_otherwise,
    clean_run.changed_operation,
    ledger.shown_by_the_ledger,
    factors.telling_factors,
    terms.terms_by_parameter,
    replaced.mixed_up,
    given_to_others.given_to_others,
    one_sum_for_all.one_sum_for_all,
    by_use.counted_by_uses,
    by_rank.put_together_by_rank,
    lacking_rows.rows_lack_ranks,
    other_rows.rows_of_other_numbers,
    rows_used.rows_read_unevenly,
    clean_run.changed_values,
    factors.any_factors,
)
LAST_RESORT: tuple[Explainer, ...] = (
    not_zeroed.gradient_where_zero_belongs,
    other_parts.other_parts_were_added,
    last.low_digits,
    own_backward.another_input_was_saved,
    paired.inputs_of_other_calls,
    own_backward.own_backward_goes_wrong,
    own_backward.a_line_goes_wrong,
    last.open_end,
)
BESIDE_A_CAUSE: tuple[Callable[[Case, Diagnosis], Diagnosis], ...] = (
    beside,
    with_the_line,
    with_another_graph,
    with_the_turn,
    by_another_count,
    with_the_factors_line,
    with_formulas,
    with_history,
    with_what_was_kept,
    with_what_was_not_cleared,
    with_frozen,
    with_copies_of_parameters,
    with_what_is_not_finite,
    with_hooks,
    with_what_was_written_over,
    with_settings,
    with_branches,
    with_what_is_left_undone,
    with_rows_looked_up,
)
