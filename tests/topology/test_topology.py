"""Topologies from YAML: what is accepted, and every refusal with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import PROGRAMS
from hypothesis import given, settings
from hypothesis import strategies as st
from sumgrad.base.errors import UserError
from sumgrad.topology.pools import (
    json_schema,
    load_topology,
    parse_topology,
    topology_from_json,
    topology_to_json,
)
from sumgrad.topology.shipped import shipped_topologies, topologies_directory
from sumgrad.topology.yaml_source import YamlSource

HEAD = "name: t\nworkload: three_pool\n"

# name, CI ranks, block ranks, ppgd ranks, world size: the table of the shipped topologies
SHIPPED = [
    ("three_pool", 4, [2, 2], 2, 10),
    ("three_pool_coarse", 2, [4, 4], 4, 14),
    ("three_pool_ragged", 3, [2, 5], 4, 14),
    ("three_pool_primes", 5, [3, 7], 11, 26),
    ("three_pool_square", 2, [2, 2], 2, 8),
    ("three_pool_ones", 1, [1, 1], 1, 4),
    ("three_pool_empty", 3, [2, 2], 5, 12),
    ("three_pool_wide", 24, [8, 8, 4], 12, 56),
    ("three_pool_published", 4, [2, 2], 2, 10),
    ("three_pool_planet", 65563, [1021] * 8, 16381, 90112),
]


@pytest.mark.parametrize(("name", "ci", "blocks", "ppgd", "world"), SHIPPED)
def test_shipped_topologies(name, ci, blocks, ppgd, world):
    topology = load_topology(topologies_directory() / f"{name}.yaml")
    assert topology.name == name
    assert topology.world_size == world
    assert topology.pool("ci").size == ci
    assert [pool.size for pool in topology.with_role("block")] == blocks
    assert topology.pool("ppgd").size == ppgd
    assert topology.why


def test_every_shipped_file_is_in_the_table():
    planned = {path.stem for path in shipped_topologies()} - set(PROGRAMS)
    assert planned == {row[0] for row in SHIPPED}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_an_odd_axis_and_a_reason(name):
    topology = load_topology(topologies_directory() / f"{name}.yaml")
    assert topology.name == name
    assert topology.why
    assert any(size % 2 for pool in topology.pools for _, size in pool.axes)


def test_published_schema_is_the_models():
    assert (topologies_directory() / "schema.json").read_text() == json_schema()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    return path


BAD = {
    "unknown key": (HEAD + "pools:\n  ci: {axes: {dp: 1}, colour: red}\n", ":4: pools.ci.colour"),
    "a key that is nearly one": (
        HEAD + "pools:\n  ci: {axis: {dp: 1}}\n",
        ":4: pools.ci.axis: unknown key; did you mean axes?",
    ),
    "nearly pools": (HEAD + "pool: {}\n", ":3: pool: unknown key; did you mean pools?"),
    "a flag": (
        HEAD + "steps: 3\npools:\n  ci: {axes: {dp: 1}}\n",
        ":3: steps: unknown key; it is a flag, --steps",
    ),
    "another key": (
        HEAD + "pools:\n  ci: {axes: {dp: 1}, steps: 1}\n",
        ":4: pools.ci.steps: unknown key; known are axes, ",
    ),
    "a brace that is open": ("pools: {train: {axes: {dp: 3}}\n", "t.yaml:1: not valid YAML"),
    "duplicate key": (HEAD + "name: u\npools:\n  ci: {axes: {dp: 1}}\n", ":3: name: duplicate"),
    "true": (HEAD + "pools:\n  ci: {axes: {dp: true}}\n", ":4: pools.ci.axes.dp: got True"),
    "float": (HEAD + "pools:\n  ci: {axes: {dp: 2.0}}\n", ":4: pools.ci.axes.dp: got 2.0"),
    "text": (HEAD + "pools:\n  ci: {axes: {dp: two}}\n", ":4: pools.ci.axes.dp: got 'two'"),
    "zero": (HEAD + "pools:\n  ci: {axes: {dp: 0}}\n", "got 0, expected an integer >= 1"),
    "negative": (HEAD + "pools:\n  ci: {axes: {dp: -3}}\n", "got -3, expected an integer >= 1"),
    "huge": (HEAD + "pools:\n  ci: {axes: {dp: 99999999}}\n", ":4: pools.ci.axes.dp: got 99999999"),
    "huge product": (HEAD + "pools:\n  ci: {axes: {a: 9999, b: 9999}}\n", "ranks, at most"),
    "no axes": (HEAD + "pools:\n  ci: {axes: {}}\n", ":4: pools.ci.axes: got {}"),
    "no pools": (HEAD, "pools: missing"),
    "overlap": (
        HEAD + "pools:\n  a: {axes: {dp: 2}}\n  b: {axes: {dp: 2}, ranks: [1, 2]}\n",
        ":5: pools.b.ranks: rank 1 is already in pool a",
    ),
    "gap": (HEAD + "pools:\n  a: {axes: {dp: 1}, ranks: [1]}\n", "no pool holds rank 0"),
    "too few ranks": (HEAD + "pools:\n  a: {axes: {dp: 3}, ranks: [0]}\n", "got 1 ranks, expected"),
    "bad name": (HEAD + "pools:\n  'a b': {axes: {dp: 3}}\n", ":4: pools.a b: got 'a b'"),
    "alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\n", ":1: anchors and aliases are not allowed"),
    "deep": ("[" * 5000, ":1: nested deeper"),
    "a list": ("- 1\n", "expected a mapping"),
    "number as key": ("1: 2\n", ":1: : got key '1', not a name"),
    "two documents": ("a: 1\n---\na: 2\n", "got 2 YAML documents"),
    "empty": ("", "got 0 YAML documents"),
    "not YAML": ("a: [1\nb", "not valid YAML"),
    "tag": ("a: !!python/object/apply:os.system [ls]\n", ":1: tags are not allowed"),
    "rows do not fit the ranks": (
        HEAD + "pools:\n  ci: {axes: {dp: 2}, rows_per_rank: [1]}\n",
        ":4: pools.ci.rows_per_rank: got 1 numbers, expected 2",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals_name_file_and_line(case, tmp_path):
    text, expected = BAD[case]
    with pytest.raises(UserError) as caught:
        load_topology(write(tmp_path, text))
    assert expected in str(caught.value)
    assert str(tmp_path / "t.yaml") in str(caught.value)


def test_all_problems_at_once(tmp_path):
    text = "name: 3\nworkload: x\ncolour: 1\npools:\n  a: {axes: {dp: 0}}\n"
    with pytest.raises(UserError) as caught:
        load_topology(write(tmp_path, text))
    assert len(caught.value.problems) == 3


def test_large_missing_and_unreadable_files(tmp_path):
    large = write(tmp_path, "#" * 10_000_000)
    with pytest.raises(UserError, match="larger than"):
        load_topology(large)
    with pytest.raises(UserError, match="no such file"):
        load_topology(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="is a directory"):
        load_topology(tmp_path)
    large.write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_topology(large)


def test_scattered_ranks_and_meshes(tmp_path):
    text = HEAD + "pools:\n  a: {axes: {x: 2, y: 3}, ranks: [5, 4, 3, 2, 1, 0]}\n"
    pool = load_topology(write(tmp_path, text)).pool("a")
    assert pool.coords(5) == (0, 0)
    assert pool.coords(0) == (1, 2)
    assert pool.symbol == "a.x*a.y"


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,6}", fullmatch=True), st.integers(1, 40), min_size=1, max_size=5
    )
)
def test_json_round_trip(sizes):
    data = {
        "name": "t",
        "workload": "w",
        "pools": {name: {"axes": {"dp": size}} for name, size in sizes.items()},
    }
    topology = parse_topology(YamlSource(path=Path("t"), data=data, lines={}))
    assert topology.world_size == sum(sizes.values())
    back = topology_from_json(topology_to_json(topology), path=Path("t"))
    assert [tuple(p.ranks) for p in back.pools] == [tuple(p.ranks) for p in topology.pools]
