"""The checks: each a function from a stored run and its comparison to findings; the judge merges.

A check asks for what it needs (a plan, facts, a ledger) and finds nothing where it is not there.
Add one: a function here or in a new file, its line in CHECKS, a test that breaks what it guards.
Nothing here explains, starts a process or needs the user's code; imports judge, plan, record.
"""

from __future__ import annotations

from sumgrad.judge.checks.beside import (
    nothing_trained_elsewhere,
    said_by_the_reference,
    the_same_buffers,
    whole_gradients,
)
from sumgrad.judge.checks.complete import every_tier, nothing_left_out
from sumgrad.judge.checks.ledgers import as_planned, everybody_waits, ranks_agree, sums_only
from sumgrad.judge.checks.replicas import (
    replicas_of_a_collective,
    replicas_of_a_pool,
    the_same_again,
)
from sumgrad.judge.checks.same_start import (
    counts_and_norms,
    same_weights,
    seen_norms,
    sound_reference,
)
from sumgrad.judge.finding import Check

# In the order in which a verdict lists what they find.
CHECKS: tuple[Check, ...] = (
    nothing_left_out,
    sound_reference,
    nothing_trained_elsewhere,
    every_tier,
    seen_norms,
    replicas_of_a_pool,
    counts_and_norms,
    ranks_agree,
    same_weights,
    everybody_waits,
    the_same_again,
    as_planned,
    sums_only,
    replicas_of_a_collective,
    whole_gradients,
    the_same_buffers,
    said_by_the_reference,
)
