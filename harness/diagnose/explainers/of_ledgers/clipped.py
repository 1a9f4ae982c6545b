"""One factor on every gradient that clipping makes, declared or not."""

from __future__ import annotations

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.names import factor_symbols
from sumgrad.diagnose.reductions import CLOSE
from sumgrad.record.spec import CLIP_EPS, After

CLIP_DIGITS, CLIP_NEAR = 1e-9, 1e-4


def clipped(case: Case, value: float, shown: str, what: str) -> Diagnosis | None:
    """A factor below 1 that leaves a norm of two digits at most: what clipping to it does.

    torch divides by the norm plus 1e-6; nobody else's factor gives such a number to nine digits.
    """
    norm = case.reference.norm
    if not 0 < value < 1 or not case.exact:
        return None
    for total in (norm + CLIP_EPS, norm):
        limit = value * total
        rounded = float(f"{limit:.1e}")
        if rounded and abs(limit / rounded - 1) < CLIP_DIGITS:
            return Diagnosis(
                cause=f"{what} is clipped inside the step: the global norm is {rounded:g}, the "
                f"reference's is {norm:.6g}",
                kind="clipped",
                factor=shown,
                symbol="max_norm/norm",
                because=(
                    f"every gradient is the reference's times {shown} = {rounded:g}/{norm:.9g} on "
                    f"all ranks, within the threshold",
                ),
                however=("gradients are compared as they are before clipping: end the step "
                         "before it",),
            )  # fmt: skip
    return None


def declared_clip(case: Case) -> After | None:
    facts = case.record.spec.facts
    after = facts.after if facts is not None else None
    return after if after is not None and after.kind == "clip" else None


def without_clipping(case: Case, value: float) -> float | None:
    """The factor on gradients so small by it that the declared clip leaves them as they are."""
    clip = declared_clip(case)
    if clip is None:
        return None
    own = value * case.reference.factor
    small = 0 < own * case.reference.norm < clip.value * (1 - CLOSE)
    return own if small else None


def clipped_otherwise(case: Case, value: float, shown: str) -> Diagnosis | None:
    """A step that says it clips, and clips by another norm than the reference's, or not at all."""
    clip = declared_clip(case)
    if clip is None:
        return None
    norm, limit, own = case.reference.norm, clip.value, value * case.reference.factor
    if not 0 < own <= 1 + CLOSE:
        return None
    says = f"the global norm is {norm:.6g} and max_norm {limit:g}"
    if abs(own - 1) < CLOSE:
        symbols = list[str]()
        cause = (
            f"the step does not clip, or not by the global norm (a rank's own may be below "
            f"max_norm): {says}"
        )
    else:
        theirs = limit / own - clip.eps
        behind = limit / own - norm  # a common factor is gone behind a clip, but for its eps
        if clip.eps and behind > 0 and abs(theirs / norm - 1) < CLIP_NEAR and case.exact:
            return _factor_before_clipping(case, clip.eps, clip.eps / behind)
        cause = f"the step clips by a norm of {theirs:.6g}"
        if without_clipping(case, value) is not None:
            cause += f", or gradients are {own:.6g} times what they should be and no clip acts"
        cause += f", where {says}"
        symbols = factor_symbols(case, (theirs / norm) ** 2)
        if symbols:
            cause += f": the sum of squares is {(theirs / norm) ** 2:.6g} times too large, which "
            cause += f"equals {symbols[0]}"
    return Diagnosis(
        cause=cause,
        kind="clipped",
        factor=shown,
        symbol=f"sqrt(1/({symbols[0]}))" if symbols else None,
        because=(f"every gradient is the declared one's times {shown}, within the threshold",),
    )


def _factor_before_clipping(case: Case, eps: float, value: float) -> Diagnosis:
    fraction, symbols = as_fraction(value, CLIP_NEAR * value), factor_symbols(case, value)
    shown = str(fraction) if fraction is not None else f"{value:.6g}"
    named = f", which equals {symbols[0]}" if symbols else ""
    return Diagnosis(
        cause=f"every gradient is multiplied by {shown}{named}, before the step clips it",
        kind="factor",
        factor=shown,
        symbol=symbols[0] if symbols else None,
        because=(f"behind the clip only its eps shows it: {eps:g} beside a norm",),
    )
