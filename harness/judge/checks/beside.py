"""What no comparison of gradients covers: trained elsewhere, buffers, what a reader should know."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.directory import Record
from torch import Tensor

READS_ROWS = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard")  # axes, how they begin
SAME_BUFFER = 1e-9  # of an element: a float64 buffer that is off by more is another one
CANCELLED = 1e-12  # of a buffer's largest element: roundings of what cancels out in a small one


def nothing_trained_elsewhere(compared: Compared) -> Iterator[Finding]:
    """What is trained and was not compared."""
    for text in dict.fromkeys(_unseen(compared.record)):
        yield Finding(level="unknown", text=text)


def whole_gradients(compared: Compared) -> Iterator[Finding]:
    """Gradients that a step left as partial sums, and were reduced for the comparison."""
    partial = _ranks_by_name(compared.record, "partial")
    if partial:
        name, ranks = next(iter(partial.items()))
        more = f" and {len(partial) - 1} more" if len(partial) > 1 else ""
        yield Finding(
            level="warning",
            text=f"the gradient of {name}{more} on rank {spans(ranks)} is still a Partial "
            f"DTensor; it was reduced for the comparison",
        )


def nothing_to_see_of(compared: Compared) -> Iterator[Finding]:
    """Parameters of a user's own that pass because their gradient is zero at all weights that were
    tried: the loss may go through them, and on these rows no factor on it shows."""
    record = compared.record
    if not record.spec.opaque:
        return
    every = [r for held in record.references.values() for r in held]
    names = [n for n in (every[0].scale if every else ()) if not any(r.scale[n] for r in every)]
    passed = {d.name for d in compared.diffs if d.status == "pass"}
    told = [name for name in names if name in passed]
    if not told or len(told) == len(every[0].scale):
        return
    frozen = {*_ranks_by_name(record, "still_frozen")}
    trained, still = [n for n in told if n not in frozen], [n for n in told if n in frozen]
    if trained:
        yield Finding(
            level="warning",
            text=f"the gradient of {some_of(trained)} is zero on these rows at all weights that "
            f"were tried: whether it is reduced, or counted how often, was not seen",
        )
    if still:
        yield Finding(
            level="warning",
            text=f"{some_of(still)} is frozen in all steps that were looked at, and an optimizer "
            f"has it: if it is trained later, whether it is reduced then was not seen (a wrapper "
            f"that was made while it was frozen does not reduce it)",
        )


def hashes_of_their_own(compared: Compared) -> Iterator[Finding]:
    """Lines of a Program that go by Python's hash of strings, as the order of a set does."""
    facts = compared.record.spec.facts
    if facts is not None and facts.hashed:
        yield Finding(
            level="warning",
            text=f"{some_of(list(facts.hashed))} takes a set in its order, or a hash: those of "
            f"strings are others in each process, and so they were here",
        )


def gradients_read_elsewhere(compared: Compared) -> Iterator[Finding]:
    """Gradients of a script that are no parameter's `.grad`, and were compared all the same."""
    names: dict[str, dict[str, None]] = {}
    for _, info in _infos(compared.record):
        for name, attribute in info.get("read_from", {}).items():
            names.setdefault(attribute, {})[name] = None
    for attribute, own in names.items():
        yield Finding(
            level="warning",
            text=f"{some_of(list(own))} has no .grad when the optimizer steps: compared is what "
            f"is in its {attribute}",
        )


def the_same_buffers(compared: Compared) -> Iterator[Finding]:
    """Buffers that a step leaves unlike on different ranks, or unlike those of one process.

    A warning: batch statistics of micro-batches and a router's local counts are unlike by design.
    Where the Program wants them compared like gradients they fail, or were not seen.
    """
    record = compared.record
    for text in (*_buffers(record, wanted=False), *_too_large(record)):
        yield Finding(level="warning", text=text)
    for text in _buffers(record, wanted=True):
        yield Finding(level="fail", text=text)
    for text in _buffers_unseen(record):
        yield Finding(level="unknown", text=text)


def rows_for_every_rank(compared: Compared) -> Iterator[Finding]:
    """A user's step with fewer rows than ranks that share them: some may have read none."""
    spec = compared.record.spec
    if spec.facts is None or spec.script is not None:
        return
    for pool in spec.topology.pools:
        sharing = math.prod(size for axis, size in pool.axes if axis.startswith(READS_ROWS))
        if sharing > spec.facts.num_rows > 0:
            yield Finding(
                level="warning",
                text=f"{spec.facts.num_rows} row{'s'[: spec.facts.num_rows > 1]} for {sharing} "
                f"ranks of pool {pool.name} that share them: what a rank without rows would do "
                f"wrong with some was not tried",
            )


def said_by_the_reference(compared: Compared) -> Iterator[Finding]:
    """What a reader should know of the reference, each once."""
    seen = set()
    for tier, references in compared.record.references.items():
        for reference in references:
            for warning in reference.warnings:
                if warning not in seen:
                    seen.add(warning)
                    yield Finding(level="warning", text=f"{tier}: {warning}")


def _unseen(record: Record) -> Iterator[str]:
    facts = record.spec.facts
    if facts is not None and len(facts.dtypes) > 1:
        yield (
            f"build() gives parameters of {' and '.join(facts.dtypes)}, and every tier computes in "
            f"one dtype: what the step does by dtype (a bucket or a branch for each) was not seen; "
            f"let build() give one, or compare the script as it is (sumgrad diff)"
        )
    for tier, references in record.references.items():
        for reference in references[:1]:
            yield from (f"{tier}: {text}" for text in reference.outside)
    for name, (attribute, ranks) in _elsewhere(record).items():
        yield (
            f"{name}.{attribute} on rank {spans(ranks)} holds another gradient than its .grad, "
            f"which is what was compared; which of them the optimizer takes is not known"
        )
    without = _ranks_by_name(record, "changed_without")
    if without:
        ranks = [rank for held in without.values() for rank in held]
        yield (
            f"{some_of(list(without))} has no .grad before the optimizer's step on rank "
            f"{spans(ranks)}, and the step changes it all the same: if its gradient is kept "
            f"elsewhere, it was not compared"
        )
    for name, (shape, ranks) in _reshaped(record).items():
        yield (
            f"{name} on rank {spans(ranks)} has shape {shape} after the step and had another one "
            f"when the model was distributed, so which elements it holds is not known; shard it in "
            f"distribute()"
        )
    later = _ranks_by_name(record, "changed_later")
    if later:
        ranks = [rank for held in later.values() for rank in held]
        yield (
            f"{some_of(list(later))} on rank {spans(ranks)} is another soon after step() has "
            f"returned: a thread that the step leaves running changes it"
        )
    alive = _ranks_by_name(record, "alive")
    if alive:
        ranks = [rank for held in alive.values() for rank in held]
        yield (
            f"{some_of(list(alive))} is trained after the step on rank {spans(ranks)} and was not "
            f"when the model was distributed, so its gradient was not compared"
        )


def _elsewhere(record: Record) -> dict[str, tuple[str, list[int]]]:
    return _by_name(record, "elsewhere")


def _reshaped(record: Record) -> dict[str, tuple[Any, list[int]]]:
    return {n: (tuple(s), ranks) for n, (s, ranks) in _by_name(record, "reshaped").items()}


def _ranks_by_name(record: Record, key: str) -> dict[str, list[int]]:
    """Parameter -> the ranks that list it, once for each step."""
    out: dict[str, list[int]] = {}
    for rank, info in _infos(record):
        for name in info.get(key, ()):
            out.setdefault(name, []).append(rank)
    return out


def _by_name(record: Record, key: str) -> dict[str, tuple[Any, list[int]]]:
    """Parameter -> what the first rank noted of it, and the ranks that did; at most three."""
    out: dict[str, tuple[Any, list[int]]] = {}
    for rank, info in _infos(record):
        for name, noted in info.get(key, {}).items():
            out.setdefault(name, (noted, []))[1].append(rank)
    return dict(list(out.items())[:3])


def _infos(record: Record) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank, held in record.ranks.items():
        for info in held.info.values():
            yield rank, info


def _wants(record: Record, buffer: str) -> bool:
    """Whether the Program has a buffer compared like a gradient."""
    return record.spec.facts is not None and record.spec.facts.compares(buffer)


def _buffers(record: Record, *, wanted: bool) -> Iterator[str]:
    """The first step that leaves buffers unlike, of those that are to be compared or the others."""
    for tier in record.spec.tiers:
        for step in range(record.spec.steps):
            held = {r: h.buffers.get((tier, step), {}) for r, h in record.ranks.items()}
            changed = {
                name
                for h in record.ranks.values()
                for name in h.info.get((tier, step), {}).get("changed_buffers", ())
                if not wanted and not _wants(record, name)
            }
            if wanted:  # also those that nobody changes
                changed = {n for own in held.values() for n in own if _wants(record, n)}
            odd = {n: ranks for n, ranks in _differing(held).items() if n in changed}
            if odd:
                name, (first, other) = next(iter(odd.items()))
                yield (
                    f"buffers: after step {step}, {tier}, {some_of(list(odd))} is not the same on "
                    f"all ranks ({name}: rank {first} and rank {other}); a buffer "
                    f"is not reduced like a gradient"
                )
                return
            off = [
                name
                for name in _off(record, tier, step, held, changed)
                if _wants(record, name) == wanted
            ]
            if off:
                yield (
                    f"buffers: after step {step}, {tier}, {some_of(off)} is not what "
                    f"{_left_by(record)}"
                )
                return


def _left_by(record: Record) -> str:
    if record.spec.script is not None:
        return "the single run leaves"
    return "loss_sum over the full batch leaves in a single process"


def _buffers_unseen(record: Record) -> Iterator[str]:
    """Buffers that were to be compared, and that no rank or no reference shows whole."""
    if record.spec.facts is None or not record.spec.facts.buffers:
        return
    exact = [tier for tier, dtype in record.spec.tiers.items() if dtype == "float64"]
    references = [r for tier in exact for r in record.references.get(tier, ())]
    named = {n for r in references for n in r.buffers if _wants(record, n)}
    held = {n for h in record.ranks.values() for own in h.buffers.values() for n in own}
    if not references or not named:
        yield (
            "buffers were not compared with a single process: that needs a structure tier and a "
            "loss of one term"
        )
    for name in sorted(n for n in held if _wants(record, n)):
        places = [own for h in record.ranks.values() for own in h.buffers.values()]
        shapes = {own[name].shape for own in places if name in own}
        whole = {r.buffers[name].shape for r in references if name in r.buffers}
        if named and shapes != whole:
            yield f"buffer {name} was not compared: ranks hold a part of it, or another shape"
    for name in sorted(named - held):
        yield f"buffer {name} was not compared: no rank holds it"


def _too_large(record: Record) -> Iterator[str]:
    """Buffers that a step changes, and of which no rank kept what it left."""
    places = [(at, h) for h in record.ranks.values() for at in h.info]
    changed = {
        name
        for at, h in places
        for name in h.info[at].get("changed_buffers", ())
        if name not in h.buffers.get(at, {})
    }
    if changed and record.spec.script is None:
        yield (
            f"buffers: {some_of(sorted(changed))} is changed by the step, and too large to be "
            f"looked at; where compare_buffers names it, it is"
        )


def _differing(held: Mapping[int, Mapping[str, Tensor]]) -> dict[str, tuple[int, int]]:
    """Buffer -> two ranks that both have it, of one shape, and disagree on it."""
    out: dict[str, tuple[int, int]] = {}
    first: dict[str, int] = {}
    for rank, buffers in held.items():
        for name, value in buffers.items():
            other = first.setdefault(name, rank)
            theirs = held[other][name]
            if theirs.shape == value.shape and not _close(value, theirs):
                out.setdefault(name, (other, rank))
    return out


def _off(
    record: Record,
    tier: str,
    step: int,
    held: Mapping[int, Mapping[str, Tensor]],
    changed: set[str],
) -> list[str]:
    """Buffers that ranks or the reference change, and that they leave unlike each other."""
    if record.spec.tiers[tier] != "float64" or len(record.references.get(tier, ())) <= step:
        return []
    reference = record.references[tier][step]
    return [
        name
        for name, value in reference.buffers.items()
        if (value.is_floating_point() or _wants(record, name))
        and name in changed | set(reference.changed_buffers)
        and any(
            name in mine and mine[name].shape == value.shape and not _close(mine[name], value)
            for mine in held.values()
        )
    ]


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers differ by roundings only."""
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return True
    if not a.is_floating_point() or not b.is_floating_point():
        return False
    finite = b.double()[b.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    # Each element by itself: beside a large one a wrong small one is lost.
    eps = 64 * torch.finfo(a.dtype).eps
    bound = max(SAME_BUFFER, eps) * b.double().abs() + max(CANCELLED, eps) * largest
    return bool(((a.double() - b.double()).abs() <= bound)[~same].all())
