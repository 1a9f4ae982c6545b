"""Functions of torch's that a rank calls with other options than the single process does.

Another reduction of a loss is no fault by itself: who divides afterwards may do so. Beside a loss
that is wrong it says what to look at first. Of other functions those options alone are compared
that say how: a switch, a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.record.computed import Computation, Computed

LOSSES = {
    "cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "cosine_embedding_loss",
    "margin_ranking_loss", "hinge_embedding_loss", "soft_margin_loss", "triplet_margin_loss",
}  # fmt: skip

SAYS_HOW = re.compile(r"True|False|'[a-z_]+'")
# Options that change no number, or that are meant to be others where shapes are.
NO_NUMBERS = {"inplace", "sparse", "keepdim", "copy", "non_blocking", "training", "requires_grad",
              "memory_format", "is_causal", "reduction"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOption:
    """A rank's call of a loss has `now`, as reduction='mean', where the single process has `was`
    with the same numbers."""

    mine: Computation
    now: str
    was: str


def other_options(mine: Computed, whole: Computed) -> Iterator[OtherOption]:
    """In the order of the rank; where some call of the single process has the same, there is none.

    Calls belong together where all numbers of a rank's first tensor are found in the other's.
    """
    there = Numbers(whole.values)
    for c in mine.computations:
        if c.function not in LOSSES or not c.takes or not isinstance(c.takes[0], int):
            continue
        held = there.holding(mine.values[c.takes[0]])
        own = _options(c)
        alike = [(w.takes[0], _options(w)) for w in whole.computations if w.function == c.function
                 and w.takes and isinstance(w.takes[0], int) and w.takes[0] in held]  # fmt: skip
        if not own or not alike or own in [options for _, options in alike]:
            continue
        number, theirs = alike[0]
        shapes = mine.values[c.takes[0]].shape, whole.values[number].shape
        for key in own.keys() & theirs.keys():
            sizes = _is_a_size(own[key], shapes[0]) and _is_a_size(theirs[key], shapes[1])
            if own[key] != theirs[key] and not sizes:
                yield OtherOption(mine=c, now=own[key], was=theirs[key])


def unlike_options(mine: Computed, whole: Computed) -> Iterator[OtherOption]:
    """In the order of the rank, of functions that are no losses: an option that all calls of the
    same function have in the single process, and that has another value there."""
    there: dict[tuple[str, str], set[str]] = {}
    for c in whole.computations:
        for key, word in _options(c).items():
            there.setdefault((c.function, key), set()).add(word)
    for c in mine.computations if there else ():
        for key, word in _options(c).items() if c.function not in LOSSES else ():
            its = there.get((c.function, key), set())
            if len(its) == 1 and word not in its and key not in NO_NUMBERS:
                (was,) = its
                if all(SAYS_HOW.fullmatch(one.partition("=")[2]) for one in (word, was)):
                    yield OtherOption(mine=c, now=word, was=was)


def _options(c: Computation) -> Mapping[str, str]:
    """By name, those that are no tensors."""
    words = [t for t in c.takes if isinstance(t, str) and "=" in t]
    return {word.partition("=")[0]: word for word in words}


def _is_a_size(option: str, shape: torch.Size) -> bool:
    """Whether it is a size of its input, as an index one beyond the last: that is meant to differ
    where the sizes do."""
    return option.partition("=")[2] in map(str, shape)
