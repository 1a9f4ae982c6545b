"""What leads a report that else says no more than where it goes wrong."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis

# Causes that say where it goes wrong, or how much, and not by what.
PLACES = ("forward", "backward", "own_backward", "open", "loss_weights", "loss_at_tokens",
          "row_factors")  # fmt: skip


def led_by(diagnosis: Diagnosis, text: str) -> Diagnosis:
    """A cause that says where, behind what the ranks do otherwise there; what is proved, or says by
    what, stays ahead of it."""
    if diagnosis.kind not in PLACES or diagnosis.standing == "proved":
        return replace(diagnosis, because=(text, *diagnosis.because))
    because = (diagnosis.cause.removeprefix("open: "), *diagnosis.because)
    return replace(diagnosis, cause=text, because=because, standing="likely")
