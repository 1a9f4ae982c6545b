"""The checks: each a function from a stored run and its comparison to findings; the judge merges.

A check asks for what it needs (a plan, facts, a ledger) and finds nothing where it is not there.
Add one: a function here or in a new file, its line in CHECKS, a test that breaks what it guards.
Nothing here explains, starts a process or needs the user's code; imports judge, plan, record.
"""

from __future__ import annotations

from sumgrad.judge.checks import (
    beside,
    bitwise,
    closures,
    complete,
    ledgers,
    modes,
    replicas,
    rescaled,
    same_start,
    script,
    script_starts,
    since,
    updates,
)
from sumgrad.judge.finding import Check

# In the order in which a verdict lists what they find.
CHECKS: tuple[Check, ...] = (
    complete.nothing_left_out,
    script.the_same_rows,
    script_starts.the_same_start,
    script.one_job,
    script.something_is_exchanged,
    since.the_single_run_as_it_was_kept,
    script.as_many_steps,
    script.the_optimizers_together,
    same_start.sound_reference,
    beside.nothing_trained_elsewhere,
    beside.gradients_read_elsewhere,
    complete.every_tier,
    complete.as_it_is_written,
    complete.something_to_see,
    complete.nothing_hidden_by_a_clip,
    same_start.seen_norms,
    replicas.replicas_of_a_pool,
    same_start.counts_and_norms,
    ledgers.the_fault_struck,
    ledgers.ranks_agree,
    same_start.same_weights,
    ledgers.everybody_waits,
    ledgers.waits_before_it_touches,
    ledgers.comes_at_the_wait,
    replicas.frozen_alike,
    replicas.the_same_again,
    ledgers.as_planned,
    ledgers.sums_only,
    replicas.replicas_of_a_collective,
    beside.whole_gradients,
    beside.the_same_buffers,
    beside.said_by_the_reference,
    beside.rows_for_every_rank,
    beside.nothing_to_see_of,
    beside.hashes_of_their_own,
    rescaled.nothing_hidden_before_the_optimizer,
    rescaled.cut_off_before_the_optimizer,
    rescaled.unseen_before_the_optimizer,
    closures.closures_that_run_again,
    updates.the_same_weights_after,
    modes.modules_in_one_mode,
    script.what_was_done_to_compare,
    bitwise.the_same_bits,
)
