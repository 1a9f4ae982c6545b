"""Which elements of a parameter a rank holds, in short where they follow one another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sumgrad.record.ranks import INDEX, INDEX_IN, RankFiles, _at_length

SPEC = SimpleNamespace(facts=SimpleNamespace(params={"w": (5, 4), "s": ()}))
ROWS = torch.arange(20).reshape(5, 4)


def written(tmp_path, index, *, kind=INDEX, stretches=True):
    (tmp_path / "ranks").mkdir()
    files = RankFiles(tmp_path, 0)
    key = f"{kind}/precision/w" if kind == INDEX_IN else f"{kind}/w"
    files.others[key] = index
    files.finish(stretches=stretches)
    ((name, held),) = load_file(next((tmp_path / "ranks").glob("*.safetensors"))).items()
    return name, held


@pytest.mark.parametrize("kind", [INDEX, INDEX_IN])
@pytest.mark.parametrize("index", [ROWS[2:4], ROWS[4:], ROWS.reshape(-1)[3:11], ROWS])
def test_a_stretch_is_read_as_it_was(index, kind, tmp_path):
    name, held = written(tmp_path, index, kind=kind)
    assert name.startswith(f"stretch_{kind}/")
    assert held.numel() <= 3
    assert torch.equal(_at_length("w", held, SPEC), index)


@pytest.mark.parametrize("index", [ROWS[:, 1:3], ROWS[::2], ROWS[:0], torch.tensor(0)])
def test_what_is_no_stretch_is_written_whole(index, tmp_path):
    name, held = written(tmp_path, index)
    assert name == f"{INDEX}/w"
    assert torch.equal(held, index)


def test_where_nobody_says_of_how_many_it_is_written_whole(tmp_path):
    assert written(tmp_path, ROWS[2:4], stretches=False)[0] == f"{INDEX}/w"


@pytest.mark.parametrize(
    ("name", "stretch"),
    [("w", [12, 3, 4]), ("w", [-1, 2, 4]), ("w", [0, 0, 4]), ("w", [0, 1 << 40]), ("x", [0, 2])],
)
def test_elements_that_a_parameter_does_not_have_are_damage(name, stretch):
    with pytest.raises(ValueError, match="has no"):
        _at_length(name, torch.tensor(stretch), SPEC)


def test_without_facts_there_is_no_stretch():
    with pytest.raises(ValueError, match="has no"):
        _at_length("w", torch.tensor([0, 2]), SimpleNamespace(facts=None))
