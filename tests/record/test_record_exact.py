"""What a stored run must hold: evidence that is not there is never taken for a right step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from records_in_memory import planned_record, program_record
from sumgrad.base.errors import UserError
from sumgrad.launch.check import copy_reference
from sumgrad.record.directory import load_record, read_ranks, write_problems
from sumgrad.record.endings import rank_file
from sumgrad.record.ranks import SAID, RankFiles
from sumgrad.record.reference import (
    _each_alone,
    read_parts,
    read_reference,
    read_tensors,
    write_reference,
    write_tensors,
)
from sumgrad.record.spec import read_spec, write_spec


def stored(record, directory: Path, *, lacks: str = ""):
    """The directory of a Program's run, as its ranks write it; `lacks` is left out of all steps."""
    (directory / "ranks").mkdir(parents=True)
    write_spec(directory, record.spec)
    for rank, held in record.ranks.items():
        files = RankFiles(directory, rank)
        for (tier, step), grads in held.grads.items():
            files.keep(f"{tier}/{step}", grads)
        steps = [{k: v for k, v in info.items() if k != lacks} for info in held.info.values()]
        result = {
            "steps": steps, "operations": 0, "params": {n: {} for n in held.params},
            "unknown": [], "built": held.built, "batch": held.batch, "grads": files.finish(),
        }  # fmt: skip
        end = {
            "rank": rank,
            "status": "ok",
            "result": {k: v for k, v in result.items() if k != lacks},
        }
        rank_file(directory, rank, ".json").write_text(json.dumps(end))
        rank_file(directory, rank, ".ledger.jsonl").touch()
    for tier, references in record.references.items():
        for reference in references:
            write_reference(directory, tier, reference)
    return directory


def test_a_run_is_read_as_it_was_written(tmp_path):
    record = program_record(steps=2)
    back = load_record(stored(record, tmp_path / "run"))
    assert replace(back.spec, topology=record.spec.topology) == record.spec
    assert list(back.ranks) == list(record.ranks)
    for rank, held in back.ranks.items():
        assert set(held.grads) == set(record.ranks[rank].grads)
        assert held.ledger_whole
    for tier, references in record.references.items():
        for was, now in zip(references, back.references[tier], strict=True):
            assert set(now.partials) == set(was.partials)
            for name in (
                "step",
                "floor",
                "kinds",
                "intervals",
                "row_counts",
                "reached",
                "problems",
            ):
                assert getattr(now, name) == getattr(was, name)
            assert all(torch.equal(now.grads[n], g) for n, g in was.grads.items())


@pytest.mark.parametrize("lacks", [*SAID, "unknown", "built", "batch", "params"])
def test_a_rank_that_leaves_evidence_out_is_damaged(tmp_path, lacks):
    record = program_record()
    ranks, _, damage = read_ranks(stored(record, tmp_path / "run", lacks=lacks), record.spec)
    assert not ranks
    assert [line.partition(":")[0] for line in damage] == ["rank 0", "rank 1", "rank 2"]


def test_a_reference_without_what_is_wrong_with_it_is_none(tmp_path):
    directory = stored(program_record(), tmp_path / "run")
    (directory / "reference_structure_0.json").unlink()
    back = load_record(directory)
    assert "structure" not in back.references
    assert "tier structure: no reference was stored" in back.damage


def test_a_spec_says_which_tiers_were_left_out(tmp_path):
    directory = stored(program_record(), tmp_path / "run")
    data = json.loads((directory / "run.json").read_text())
    assert data["kind"] == "program"
    for bad in (None, [], "x"):
        (directory / "run.json").write_text(json.dumps({**data, "skipped": bad}))
        with pytest.raises(UserError, match="skipped"):
            read_spec(directory)
    del data["skipped"]
    (directory / "run.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match="skipped"):
        read_spec(directory)


def test_a_spec_has_one_kind_of_subject(tmp_path):
    program, planned = program_record().spec, planned_record().spec
    for spec in (replace(program, declaration=planned.declaration), replace(program, facts=None)):
        write_spec(tmp_path, spec)
        with pytest.raises(UserError, match="either a declaration or facts"):
            read_spec(tmp_path)
    write_spec(tmp_path, planned)
    assert replace(read_spec(tmp_path), topology=planned.topology) == planned


def test_a_reference_that_is_used_again_takes_its_problems_along(tmp_path):
    record = program_record()
    old, new = stored(record, tmp_path / "old"), tmp_path / "new"
    new.mkdir()
    write_problems(old, ["the reference of tier structure: killed"])
    copy_reference(old, new, record.spec)
    write_spec(new, record.spec)
    assert "the reference of tier structure: killed" in load_record(new).damage
    with pytest.raises(UserError, match="another seed"):
        copy_reference(old, new, replace(record.spec, seed=3))


def test_a_reference_of_another_loss_is_not_used_again(tmp_path):
    record = program_record()
    old = stored(record, tmp_path / "old")
    other = replace(record.spec, facts=replace(record.spec.facts, sample="other"))
    with pytest.raises(UserError, match="of another loss_sum: of the same rows and weights"):
        copy_reference(old, tmp_path, other)
    more = replace(other, facts=replace(other.facts, num_rows=99))
    with pytest.raises(UserError, match="another facts"):
        copy_reference(old, tmp_path, more)


def test_a_reference_of_a_workload_comes_back_with_its_partials_or_without(tmp_path):
    references = planned_record().references["structure"]
    names, terms = list(references[0].grads), list(references[0].by_term)
    write_reference(tmp_path, "structure", replace(references[0], partials={}))
    write_reference(tmp_path, "structure", references[1])
    for reference in references:
        back = read_reference(tmp_path, "structure", reference.step, names=names, terms=terms)
        assert back.step == reference.step
        for term, grads in reference.by_term.items():
            assert all(torch.equal(back.by_term[term][n], g) for n, g in grads.items())
    assert read_parts(tmp_path, "structure", 0) is None
    parts = read_parts(tmp_path, "structure", 1)
    assert parts is not None
    assert set(parts.partials) == set(references[1].partials)


def test_tensors_that_share_a_memory_are_written_each_alone(tmp_path):
    whole = torch.arange(6.0)
    held = {"a": whole, "b": whole.view(2, 3), "c": whole[2:4]}
    held |= {"none": torch.empty(0), "nor": torch.empty(0)}
    write_tensors(tmp_path / "t.safetensors", held)
    read = dict(read_tensors(tmp_path / "t.safetensors"))
    beside = _each_alone({"a": whole[:3], "b": whole[3:], "c": whole[2:4]})
    copied = [n for n, t in beside.items() if t.untyped_storage().nbytes() < 24]
    assert copied == ["c"]  # no copy of what lies side by side
    assert {n: t.tolist() for n, t in read.items()} == {n: t.tolist() for n, t in held.items()}
