"""Every tolerance of the harness, each with its derivation. Nothing else decides what passes.

FLOOR_FACTOR 4: the distributed sum is one more order of the same additions; the noise floor is the
largest error of eight such orders. A prototype saw no alarm in 11,550 clean tensors at 4 while the
median error was at 1/4 to 1/12 of the threshold; a fixed ratio to one run failed on 1 to 27 %.
docs/data/false_alarms.json has the figures of the shipped workload.
KERNEL_CAP 4: ranks on Triton's kernels or on a GPU round in other places than torch's operators on
a CPU, which the reference has, so the floor also looks at single-process runs there. A wrong kernel
must not hide in its own error: it raises the floor to at most 4 times what torch's runs show, so
the threshold to at most 16 times, and in float64 never past STRUCTURE_CAP.
STRUCTURE_LEAST 1e-13: of the scale. In float64 no error of the algebra is so small, and rounding
may be more than the floor knows: another algorithm for the same mathematics, as a running sum that
is subtracted or a variance as the difference of two means, rounds more than any order of the
reference's own additions. A right step that pooled by a running sum over 55 cells was off by 11
eps of the scale, where 4 x the floor was 7.4.
STRUCTURE_CAP 1e-12: in float64 an algebra error is never below the weight of one row; whatever the
floor says, the structure tier must not be blinder than one part in 10^12 of the scale. Where the
partials cancel within every row (a key bias) scale and floor are both noise, and the floor holds.
ZERO_FACTOR 1e3: a term is zero by mathematics where two float64 runs differ by a thousandth of it;
any other term is 10^13 times larger than that difference. Where a reference has fewer digits there
is less room between the two: bfloat16's noise is a hundredth of what is right, so there only what
is no more than FLOOR_FACTOR times the noise is called zero, and all else must have been seen.
BLIND_STRUCTURE 0.5: a tensor in which a halved or doubled term would have passed was not checked.
BLIND_PRECISION 1.0: that tier asks whether the arithmetic is as good as its dtype allows, and needs
to see no more than a lost or doubled gradient; factors are the structure tier's question.
"""

from __future__ import annotations

import torch

FLOOR_FACTOR = 4.0
KERNEL_CAP = 4.0
ZERO_FACTOR = 1e3
STRUCTURE_LEAST = 1e-13
STRUCTURE_CAP = 1e-12
BLIND_STRUCTURE = 0.5
BLIND_PRECISION = 1.0


def zero_factor(dtype: str) -> float:
    """How often the noise of a reference in this dtype may be in what is zero by mathematics."""
    eps = float(torch.finfo(getattr(torch, dtype)).eps)
    return min(ZERO_FACTOR, max(FLOOR_FACTOR, 1e-2 / eps))


def noise_floor(floor: float, scale: float, dtype: str) -> float:
    """The measured floor, never under one rounding (eps) of the scale. All absolute."""
    return max(floor, float(torch.finfo(getattr(torch, dtype)).eps) * scale)


def with_kernels(floor: float, kernel_error: float, scale: float, dtype: str) -> float:
    """A floor that also knows runs on other kernels or another device. All absolute."""
    known = noise_floor(floor, scale, dtype)
    most = KERNEL_CAP * known
    if dtype == "float64":  # the structure tier's cap holds whatever the ranks run on
        most = min(most, max(known, STRUCTURE_CAP * scale / FLOOR_FACTOR))
    return max(floor, min(kernel_error, most))


def threshold(floor: float, scale: float, *, tier: str) -> float:
    """The largest absolute error that passes."""
    bound, cap = FLOOR_FACTOR * floor, STRUCTURE_CAP * scale
    if tier != "structure":
        return bound
    bound = max(bound, STRUCTURE_LEAST * scale)
    return min(bound, cap) if cap > floor else bound
