"""The last step of a rank once more: what gives something else the second time, or read too early.

It differs from the first run in two ways that a right step does not notice: gradients are as an
optimizer's zero_grad() leaves them, and what operations give comes when it is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sumgrad.base.tensors import bits, is_in_a_buffer, to_local
from sumgrad.ledger.late import Late
from sumgrad.record.ranks import AGAIN
from torch import Tensor

if TYPE_CHECKING:
    from sumgrad.subjects.program.tier_run import TierRun

Told = tuple[dict[str, Tensor], dict[str, Any]]


def second_run(run: TierRun, step: int, gave: str) -> Told:
    """Its gradients, and what was seen. gave: bits of its gradients before; where they are others
    now, and the same as before where operations are not late, something was read too early; that it
    is more than rounding, whoever judges it has to see."""
    ledger = run.seat.ledger
    late = ledger.late = Late()
    try:
        grads, info = _from_no_gradients(run, step)
    finally:
        ledger.late = None
    info |= late.taken()
    if run.on_any(bool(info["late"]) and bits_of(grads) != gave):
        # Twice: a step may do one thing and another by turns.
        plain = [bits_of(_from_no_gradients(run, step)[0]) for _ in range(2)]
        if plain == [gave, gave]:
            info["read_early"] = info["late"]
    return grads, info


def bits_of(grads: dict[str, Tensor]) -> str:
    """Of all gradients together."""
    return bits([to_local(grad).detach().cpu() for _, grad in sorted(grads.items())])


def _from_no_gradients(run: TierRun, step: int) -> Told:
    """A step from where an optimizer's zero_grad() leaves it by default: gradients that a step has
    put into a buffer of its own are gone, and what is in the buffer is not. From zeros after all
    where the step does not put them there again."""
    lent = {
        p: p.grad
        for p in run.model.parameters()
        if id(p) not in run.brought and p.grad is not None and is_in_a_buffer(p.grad)
    }
    grads, info = run.step(step, label=AGAIN, gone={id(param) for param in lent})
    given = all(p.grad is not None and is_in_a_buffer(p.grad) for p in lent)
    if run.on_any(not given):
        for param, grad in lent.items():
            param.grad = grad
        grads, info = run.step(step, label=AGAIN)
    return grads, info
