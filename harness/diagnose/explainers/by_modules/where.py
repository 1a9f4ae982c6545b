"""The first wrong modules of a failing step, as verdict.json has them."""

from __future__ import annotations

from typing import Any

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import looked, owners
from sumgrad.diagnose.modules.where.first_wrong import (
    first_wrong_backward,
    first_wrong_forward,
    first_wrong_recomputed,
)


def first_wrong_modules(case: Case) -> dict[str, Any] | None:
    """The `where` of verdict.json: in the forward, in a checkpoint's, and down the backward.

    Each None, or the module, its ranks and source, and the modules beside it that are right still:
    in the backward those that are made from it, or LOSS.
    """
    look = looked(case)
    if look is None:
        return None
    found = {
        "forward": first_wrong_forward(look),
        "recomputed": first_wrong_recomputed(look),
        "backward": first_wrong_backward(look, owners(case)),
    }
    return {
        "tier": case.tier,
        "step": case.step,
        "modules": len(look.modules),
        "forward_right": sum(look.forward(m) == "right" for m in look.modules),
        "backward_right": sum(look.backward(m) == "right" for m in look.modules),
        **{
            way: None
            if one is None
            else {
                "module": one.wrong,
                "source": look.sources.get(one.wrong),
                "ranks": list(one.ranks),
                "beside": list(one.beside),
            }
            for way, one in found.items()
        },
    }
