"""The bitwise tier on real ranks: 0 on every topology, and FAIL for every ingredient left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import shipped
from sumgrad.base.errors import UserError
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.checks.bitwise import compared_bits, expected_names
from sumgrad.judge.knowledge import known_plan
from sumgrad.launch.ask import CheckOptions, make_spec
from sumgrad.launch.check import run_check
from sumgrad.plan.schedule import compare_ledger, schedule
from sumgrad.record.bits import BITS
from sumgrad.record.directory import load_record

pytestmark = pytest.mark.distributed
PLANTED = Path(__file__).with_name("bitwise_workloads.py")
SMALL = (
    "options: {rows: 7, length: 5, vocabulary: 16, width: 8, mlp: 12, components: 3, layers: 1, "
    "ci_width: 8, lengths: [5, 3, 4, 5, 2, 5, 1]}"
)
SHAPES = {"square": (2, (2, 2), 2), "ragged": (3, (2, 5), 4), "one row": (7, (3, 6), 5),
          "idle": (4, (1,), 9)}  # fmt: skip


@pytest.fixture(scope="module")
def bitwise(sumgrad_launcher, tmp_path_factory):
    """(verdict, directory) of the small workload on some pools."""
    known = {}

    def run(shape, workload="three_pool", **more):
        key = (shape, workload, *sorted(more.items()))
        if key not in known:
            place = tmp_path_factory.mktemp("bitwise")
            ci, blocks, ppgd = SHAPES[shape]
            pools = [f"  ci: {{axes: {{dp: {ci}}}}}", f"  ppgd: {{axes: {{dp: {ppgd}}}}}"]
            pools += [f"  b{i}: {{role: block, axes: {{dp: {n}}}}}" for i, n in enumerate(blocks)]
            lines = [f"name: {shape.replace(' ', '_')}", f"workload: {workload}", SMALL, "pools:"]
            (place / "t.yaml").write_text("\n".join([*lines, *pools]) + "\n")
            flags = {"tiers": ("bitwise",), "steps": 2, **more}
            options = CheckOptions(
                topology=place / "t.yaml", out=place / "run", timeout_s=120, **flags
            )
            known[key] = run_check(options, launcher=sumgrad_launcher)
        return known[key]

    return run


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, "float32") for shape in SHAPES), ("ragged", "float64"),
])  # fmt: skip
def test_every_cut_of_rows_and_units_has_the_bits_of_one_process(bitwise, shape, dtype):
    verdict, directory = bitwise(shape, dtype=dtype)
    assert verdict.exit_code == 0, verdict.data
    tier = verdict.data["tiers"][BITS]
    assert (tier["differing"], tier["max_ulp"], tier["first"]) == (0, 0, None)
    record = load_record(directory)
    plan = known_plan(record)
    ranks = range(plan.topology.world_size)
    assert tier["tensors"] == 2 * sum(len(expected_names(plan, rank)) for rank in ranks)
    for rank in ranks:
        held = record.ranks[rank]
        assert set(held.grads[BITS, 1]) == set(expected_names(plan, rank))
        events = held.events[BITS, 1]
        assert events
        assert not compare_ledger(plan, rank, dtype, "x", events, alone_too=True, by_trees=True)
        assert compare_ledger(plan, rank, dtype, "x", events[:-1], alone_too=True, by_trees=True)


def test_one_process_in_float64_has_the_references_gradients(bitwise):
    """The tier's own arithmetic is held against the reference's, which shares none of it."""
    verdict, directory = bitwise("ragged", dtype="float64", tiers=("structure", "bitwise"))
    assert verdict.exit_code == 0, verdict.data
    record = load_record(directory)
    for reference, single in zip(record.references["structure"], record.bits, strict=True):
        for name, wanted in reference.grads.items():
            far = (single.tensors[f"gradient/{name}"] - wanted).abs().max()
            assert float(far) <= 1e-13 * reference.scale[name], name
        norm = float(single.tensors["norm/all"])
        assert norm == pytest.approx(reference.norm, rel=1e-13)
        assert float(single.tensors["clip/all"]) == pytest.approx(min(1.0, 0.25 / norm), rel=1e-5)


def test_other_topologies_give_the_same_gradients(bitwise):
    """What each run's own process says of itself is the same process's word; so is this."""
    held = [load_record(bitwise(shape)[1]).bits[1].tensors for shape in SHAPES]
    for other in held[1:]:
        assert all(torch.equal(held[0][name], other[name]) for name in held[0])


@pytest.mark.parametrize(("planted", "first"), [
    ("PlainSum", "statistic"), ("DroppedNode", "statistic"), ("Rounded", "statistic"),
    ("NoSiblings", "statistic"), ("LocalAndRest", "statistic"), ("Batched", "quantity"),
    ("ByEdge", "root"),
])  # fmt: skip
def test_each_ingredient_is_needed(bitwise, planted, first):
    failed = []
    for shape in ("ragged", "one row"):
        verdict, _ = bitwise(shape, f"{PLANTED}:{planted}", law="report", steps=1)
        if verdict.exit_code == 1:
            failed.append(verdict)
            break
    assert failed, planted
    names = {v.data["tiers"][BITS]["first"]["name"] for v in failed}
    assert {name.split("/")[0] for name in names} == {first}
    assert failed[0].diagnoses[0].kind == "first_other_bits"


def test_an_operator_that_is_not_the_same_each_time_is_no_ranks_fault(bitwise):
    verdict, _ = bitwise("square", f"{PLANTED}:Restless")
    (reason, *_) = verdict.data["tiers"][BITS]["reasons"]
    assert "from the last to the first has other bits in statistic/imp" in reason
    assert (verdict.data["tiers"][BITS]["status"], verdict.exit_code) == ("unknown", 3)


@pytest.mark.parametrize(("change", "ulp"), [
    (lambda x: torch.nextafter(x, x.new_tensor(9.0)), 1),
    (lambda x: x * float("nan"), None),
    (lambda x: -x * 0.0, 0),
])  # fmt: skip
def test_one_element_of_one_rank_is_enough(bitwise, change, ulp):
    record = load_record(bitwise("ragged")[1])
    rank = record.spec.topology.world_size - 1
    held = record.ranks[rank].grads[BITS, 1]
    name = next(n for n in held if n.startswith("root/"))
    held[name] = held[name].clone()
    if ulp == 0:  # a zero of the other sign
        zeros = torch.zeros_like(held[name])
        for grads in [r.grads[BITS, 1] for r in record.ranks.values()] + [record.bits[1].tensors]:
            if name in grads:
                grads[name] = zeros.clone()
    held[name][3] = change(held[name][3])
    verdict = judge(record)
    assert verdict.exit_code == 1
    first = verdict.data["tiers"][BITS]["first"]
    assert (first["name"], first["rank"], first["step"]) == (name, rank, 1)
    assert (first["differing"], first["index"]) == (1, [3])
    assert first["max_ulp"] == ulp  # zeros of either sign are one place, and two bits


def test_what_a_rank_did_not_write_is_not_passed(bitwise):
    record = load_record(bitwise("ragged")[1])
    del record.ranks[2].grads[BITS, 1]
    assert judge(record).exit_code == 3
    record = load_record(bitwise("ragged")[1])
    name = next(iter(record.ranks[2].grads[BITS, 0]))
    del record.ranks[2].grads[BITS, 0][name]
    assert judge(record).exit_code == 1
    assert compared_bits(record).first.name == name


def test_what_an_exchange_sends_is_what_the_plan_knows(bitwise):
    """(m + t) / 2 of a ring SUM, m nodes and t trees: two collectives, no header."""
    record = load_record(bitwise("ragged")[1])
    plan = known_plan(record)
    for rank in record.ranks:
        planned = [o for o in schedule(plan, rank, "float32", by_trees=True)
                   if o.edge.startswith("reduce:")]  # fmt: skip
        assert [o.op for o in planned] == ["all_to_all", "all_gather"] * (len(planned) // 2)


@pytest.mark.parametrize(("flags", "words"), [
    ({"dtype": "bfloat16"}, "sums are float32 or float64"),
    ({"kernels": "fixed", "tiers": ("structure",)}, "--kernels fixed is the bitwise tier's"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(tmp_path, flags, words):
    options = {"tiers": ("bitwise",), **flags}
    with pytest.raises(UserError, match=words):
        make_spec(
            CheckOptions(topology=shipped("three_pool_square"), **options), prefix=["sumgrad"]
        )


def test_a_program_has_no_trees_that_are_known():
    with pytest.raises(UserError, match="nothing tells by which trees a Program"):
        make_spec(CheckOptions(topology=shipped("ddp"), tiers=("bitwise",)), prefix=["sumgrad"])
