"""Failing gradients whose error has another explanation than a mistake: UNKNOWN, with the reason.

A doubt is a function from a stored run and its comparison to that comparison; it may turn a FAIL
into an UNKNOWN that says what would have to be otherwise, never anything into a PASS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.base.outcome import some_of
from sumgrad.diagnose.diagnose import diagnose
from sumgrad.diagnose.of_script import which_rows
from sumgrad.judge.checks.drawn import other_draws
from sumgrad.judge.checks.script import other_order, other_rows
from sumgrad.judge.checks.script_starts import not_known_to_start_alike
from sumgrad.judge.checks.updates import update_error
from sumgrad.judge.comparison import TensorDiff
from sumgrad.judge.finding import Compared
from sumgrad.record.directory import Record

SHARED = 0.05  # of a common error: by how much that of one tensor may be another
FEW, TURNED = 4, 1e-3  # elements of a direction; how far from it is another one
NARROW_ROUNDINGS = 16  # of the scale: what casts to fewer digits may leave

Doubt = Callable[[Record, list[TensorDiff], Record | None], list[TensorDiff]]


def with_doubts(record: Record, diffs: list[TensorDiff], clean: Record | None) -> list[TensorDiff]:
    """The comparison as all doubts leave it. clean: a run of the same that passed."""
    for doubt in DOUBTS:
        diffs = doubt(record, diffs, clean)
    return diffs


def _other_function(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """A script's failing gradients of steps that drew other numbers, or read other rows, than the
    single run's. A cause that is proved all the same stays a FAIL."""
    why = {(tier, step): text for tier, step, text in reversed(list(_not_the_same(record)))}
    failed = [d for d in diffs if d.status == "fail" and (d.tier, d.step) in why and d.comparable]
    drawn = {
        (tier, draws.step) for tier in record.spec.tiers for draws in other_draws(record, tier)
    }
    failed = [
        d for d in failed if not ((d.tier, d.step) in drawn and _is_unlike_on_replicas(record, d))
    ]
    if not failed:
        return diffs
    compared = Compared(record=record, diffs=diffs, again=(), mismatches=())
    if any(c.standing == "proved" for c in diagnose(compared, clean=clean).causes):
        return diffs
    return _unknown(diffs, {id(d): why[d.tier, d.step] for d in failed})


def _is_unlike_on_replicas(record: Record, d: TensorDiff) -> bool:
    """Whether another rank that holds all of it, too, has another gradient when its optimizer
    steps: whatever they drew, they part for good."""
    at, own = (d.tier, d.step), record.ranks[d.rank]
    mine = own.grads.get(at, {}).get(d.name)
    if mine is None or own.index_of(d.tier, d.name) is not None:
        return False
    others = (held for rank, held in record.ranks.items() if rank != d.rank)
    theirs = [held.grads.get(at, {}).get(d.name) for held in others
              if held.index_of(d.tier, d.name) is None]  # fmt: skip
    return any(
        other is not None
        and other.shape == mine.shape
        and float((other.double() - mine.double()).abs().max()) > 2 * d.threshold
        for other in theirs
    )


def _not_the_same(record: Record) -> Iterator[tuple[str, int, str]]:
    """Tier, step and why its gradients cannot be held against the single run's, as the first such
    step has it."""
    unlike = not_known_to_start_alike(record)
    for tier in record.spec.tiers:
        yield from ((tier, step, unlike) for step in range(record.spec.steps) if unlike)
        draws = list(other_draws(record, tier))
        yield from ((tier, drawn.step, draws[0].text) for drawn in draws)
        batches = [rows for rows in other_rows(record, tier) if rows.another_batch]
        yield from ((tier, rows.step, which_rows(batches[0])) for rows in batches)


def _in_another_order(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """A script's gradients of steps at which other optimizers step than in the single run."""
    found = list(other_order(record))
    at = {(tier, step) for tier, step, _ in found}
    failed = [d for d in diffs if d.status == "fail" and (d.tier, d.step) in at]
    return _unknown(diffs, {id(d): found[0][2] for d in failed}) if failed else diffs


def _like_float32(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """Failing float64 tensors whose errors may be float32 roundings, and no cause: UNKNOWN.

    A user's step or model that computes in float32 whatever it is given is not wrong, but what a
    float64 run would have shown was not seen either. Never a PASS; and a FAIL where the step was
    looked at and nothing of it computes in less than float64.
    """
    if not record.spec.opaque:
        return diffs
    looked = [info["narrow"] for h in record.ranks.values() for info in h.info.values()
              if "narrow" in info]  # fmt: skip
    places = list(dict.fromkeys(place for seen in looked for place in seen))
    if looked and not places:
        return diffs
    failed = [d for d in diffs if d.status == "fail" and record.spec.tiers[d.tier] == "float64"]
    if not failed or any(not d.comparable for d in failed):
        return diffs
    for d in failed:
        scale = record.references[d.tier][d.step].scale[d.name]
        if d.max_abs > NARROW_ROUNDINGS * torch.finfo(torch.float32).eps * scale:
            return diffs
    compared = Compared(record=record, diffs=diffs, again=(), mismatches=())
    causes = diagnose(compared, clean=clean).causes
    if any(cause.kind not in ("open", "low_precision") for cause in causes):
        return diffs
    seen = f"the step makes {some_of(places)}" if places else "what it computes in was not seen"
    why = (
        f"its error is no larger than float32 roundings, and {seen}: a wrong term of that size "
        f"would look the same"
    )
    return _unknown(diffs, {id(d): why for d in failed})


def _reduced_in_the_step(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """A script's failing gradients where the weights after the step are right: UNKNOWN.

    Gradients are read before an optimizer's step, and some optimizers reduce inside it. Only where
    every failing gradient is no multiple of the right one (Adam hides a factor), and the step moves
    the weight at all.
    """
    failed = [d for d in diffs if d.status == "fail"]
    if record.spec.script is None or not failed or any(not d.comparable for d in failed):
        return diffs
    if not any(d.step for d in failed) or any(not _is_right_after(record, d) for d in failed):
        return diffs
    why = (
        "it is not the single run's before the optimizer's step, and its weight is after it: the "
        "step reduces it itself, which is not looked into"
    )
    return _unknown(diffs, {id(d): why for d in failed})


def _is_right_after(record: Record, d: TensorDiff) -> bool:
    """Whether a gradient that is no multiple of the right one moves its weight as the right one."""
    references = record.references[d.tier]
    reference, held = references[d.step], record.ranks[d.rank]
    found = update_error(record, d.tier, reference, d.rank, d.name)
    got = held.grads[d.tier, d.step].get(d.name)
    if found is None or got is None or not found[0] <= found[1]:
        return False
    before = [r.after[d.name] for r in references[: d.step] if d.name in r.after]
    if before and not float((reference.after[d.name] - before[-1]).abs().max()) > found[1]:
        return False  # other optimizers may have stepped since it moved
    index, whole = held.index_of(d.tier, d.name), reference.grads[d.name]
    wanted = (whole if index is None else whole.reshape(-1)[index]).reshape(-1)
    mine, square = got.double().reshape(-1), float(wanted.square().sum())
    if wanted.numel() < FEW or not square:
        return True  # of a few numbers a multiple is nothing that tells
    rest = mine - float(mine @ wanted) / square * wanted
    return float(rest.norm()) > TURNED * float(mine.norm())


def _perhaps_another(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """A script's failing gradients of parameters that may be others of the single run's: UNKNOWN.

    Stages and experts may number their own from nought. Where that run has another parameter that
    began with the same values, and nothing but its name tells which a rank has, that is not known;
    and what the first step made of the wrong one is in every later step.
    """
    if not any(d.status == "fail" for d in diffs):
        return diffs
    unsure = _unsure(record)
    first = next(iter(unsure.items()), None)
    why = {}
    for d in diffs:
        own = unsure.get((d.rank, d.name))
        if d.status != "fail" or first is None or not (d.step or own):
            continue
        name, others = (d.name, own) if own else (first[0][1], first[1])
        why[id(d)] = (
            f"the single run has {some_of(others)}, too, which began with the same values as "
            f"{name}: which of them a rank has by that name is not known (stages, or experts, that "
            f"number their own?)"
        )
    return _unknown(diffs, why) if why else diffs


def _unsure(record: Record) -> dict[tuple[int, str], list[str]]:
    """Of ranks' parameters those that may be another, and which: any that began as others did where
    others of the rank are not what their names say, and no sibling tells it; or, where the rank has
    a part of the model, if all of its layer began as others did."""
    names, script = record.spec.params, record.spec.script
    twins = {n: own for own in (script.twins if script else ()) for n in own}
    told = {layer for n in names if n not in twins for layer in _layers(n)}
    return {
        (rank, n): [other for other in twins[n] if other != n]
        for rank, held in record.ranks.items()
        for n in held.params
        if n in twins and (n in held.by_name or (
            len(held.params) < len(names) and _layers(n) and _layers(n)[-1] not in told))
    }  # fmt: skip


def _layers(name: str) -> list[str]:
    """`experts.3` of `experts.3.up.weight`; of what is numbered within a layer both, the inner
    last."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _like_fewer_digits(
    record: Record, diffs: list[TensorDiff], clean: Record | None
) -> list[TensorDiff]:
    """Failing tensors of the precision tier that a cast of the step's own explains: UNKNOWN.

    Only where the whole structure tier passed, with those casts lifted, and the step was seen to
    compute or communicate in fewer digits than the tier has: a choice of the user's, whose cost the
    tier cannot judge. Its error may be no larger than roundings of that dtype.
    """
    spec = record.spec
    algebra = [d for d in diffs if spec.tiers[d.tier] == "float64"]
    if not (spec.opaque and spec.lift and algebra) or any(d.status != "pass" for d in algebra):
        return diffs
    out = []
    for d in diffs:
        shared = _shared_factor([o for o in diffs if (o.tier, o.step) == (d.tier, d.step)])
        why = _fewer_digits(record, d, shared) if d.status == "fail" and d.comparable else None
        out.append(d if why is None else replace(d, status="unknown", reason=why))
    return out


def _shared_factor(diffs: Sequence[TensorDiff]) -> float | None:
    """The one factor that all failing tensors of a step have, if it is more of their errors than
    anything else: roundings of single elements have none."""
    wrong = [d for d in diffs if d.status == "fail" and d.comparable and d.ratio is not None]
    off = [d.ratio - 1 for d in wrong if d.ratio is not None]
    if not off or not all(off) or max(off) - min(off) > SHARED * abs(sum(off) / len(off)):
        return None
    if any(d.l2_rel > (1 + SHARED) * abs(own) for d, own in zip(wrong, off, strict=True)):
        return None
    return 1 + sum(off) / len(off)


def _fewer_digits(record: Record, diff: TensorDiff, shared: float | None) -> str | None:
    """What of its step was seen in fewer digits, if that may explain a difference.

    shared: the factor that all gradients of its step have.
    """
    at = (diff.tier, record.spec.steps - 1)  # the step that is looked at
    seen = dict.fromkeys(
        place for held in record.ranks.values() for place in held.info.get(at, {}).get("narrow", ())
    )
    dtypes = {place.split(" ")[0] for place in seen if " at " in place}
    if not dtypes:
        return None
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps)
    eps = torch.finfo(getattr(torch, coarsest)).eps
    scale = record.references[diff.tier][diff.step].scale[diff.name]
    if diff.max_abs > NARROW_ROUNDINGS * eps * scale:
        return None
    if shared is not None:
        return (
            f"every gradient is multiplied by {shared:.6g}, and the step makes "
            f"{some_of(list(seen))}: a count or a coefficient held in it has this error; lifted to "
            f"float64 it is right"
        )
    return (
        f"the step makes {some_of(list(seen))}, fewer digits than {record.spec.tiers[diff.tier]}, "
        f"and its error is no larger than their roundings; lifted to float64 it is right; "
        f"--dtype {coarsest} holds it to the noise of {coarsest}"
    )


def _unknown(diffs: list[TensorDiff], why: dict[int, str]) -> list[TensorDiff]:
    """why: by id of a diff."""
    return [replace(d, status="unknown", reason=why[id(d)]) if id(d) in why else d for d in diffs]


DOUBTS: tuple[Doubt, ...] = (
    _in_another_order,
    _perhaps_another,
    _like_float32,
    _like_fewer_digits,
    _reduced_in_the_step,
    _other_function,
)
