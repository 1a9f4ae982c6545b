"""Modules that one rank trains and another only evaluates: after a validation on one rank alone."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import some_of, spans
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.directory import Record


def modules_in_one_mode(compared: Compared) -> Iterator[Finding]:
    """A script's modules are in training on all ranks, or on none. (Dropout is switched off, so
    that where it is all that differs the gradients do not show it.)"""
    for tier in compared.record.spec.tiers:
        for text in unlike_modes(compared.record, tier):
            yield Finding(level="warning", text=text)
            return


def unlike_modes(record: Record, tier: str) -> Iterator[str]:
    """Of each step and model of which ranks have the same modules: which of them evaluate what
    others train."""
    infos = [held.info for held in record.ranks.values()]
    for step in sorted({at for info in infos for name, at in info if name == tier}):
        by_model: dict[tuple[str, int], dict[int, frozenset[str]]] = {}
        for rank, held in record.ranks.items():
            told = held.info.get((tier, step), {}).get("modes", {})
            for model, (number, evaluated) in told.items():
                by_model.setdefault((model, number), {})[rank] = frozenset(evaluated)
        for (model, _), evaluated in by_model.items():
            every = evaluated.values()
            apart = frozenset.union(*every) - frozenset.intersection(*every)
            if not apart:
                continue
            ranks = [rank for rank, names in evaluated.items() if names & apart]
            where = "itself" if "" in apart else some_of(sorted(apart))
            yield (
                f"{model} is called in training on some ranks and in evaluation on rank "
                f"{spans(ranks)} at step {step} ({where}): a model.eval() without a model.train() "
                f"behind it? Dropout, which is switched off here, is another on each then"
            )
