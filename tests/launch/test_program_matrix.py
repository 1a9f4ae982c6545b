"""The sensitivity run: every fault of every shipped Program, one operation of each kind and axis.

`sumgrad faults` without --quick runs them all; docs/data/kill_matrix.json has the result.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import PROGRAMS, ROOT, shipped
from sumgrad.base.errors import UserError
from sumgrad.faults.collective import KINDS, parse_collective_fault
from sumgrad.faults.matrix import Cell, Matrix
from sumgrad.faults.operators import OPERATORS, RESEMBLES, operators_of, to_markdown
from sumgrad.faults.plan import plan_faults
from sumgrad.faults.step import step_faults, variants
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.matrix import run as matrix_run
from sumgrad.launch.matrix.run import cell_of, run_faults, run_matrix
from sumgrad.record.directory import load_record
from sumgrad.report.matrix import matrix_grid

NAMED: list[Cell] = []


def planted() -> set[str]:
    return {*plan_faults(), *KINDS, *step_faults(), *variants()}


def test_every_planted_fault_stands_in_the_catalogue():
    listed = {name for operator in OPERATORS for name in operator.planted}
    assert listed - planted() == set()
    assert planted() - listed - {"scale_one", "times_ci_then_avg"} == set()
    assert len({operator.id for operator in OPERATORS}) == len(OPERATORS) == 47
    assert all(bool(operator.planted) != bool(operator.why_not) for operator in OPERATORS)
    assert set(RESEMBLES.values()) <= {operator.id for operator in OPERATORS}


def test_the_documented_table_is_the_catalogue():
    assert to_markdown() in (ROOT / "docs" / "faults.md").read_text()


def test_faults_name_the_operator_of_the_catalogue():
    for name, fault in {**step_faults(), **variants()}.items():
        assert fault.operator in operators_of(name), name
    for name, kind in KINDS.items():
        assert kind.operator is None or kind.operator in operators_of(f"{name}:allreduce@dp")


@pytest.mark.parametrize(
    "text", ["avg", "avg:", "avg:allreduce", "bad:allreduce@dp", "avg:recv@pp"]
)
def test_a_malformed_collective_fault_says_what_is_expected(text):
    with pytest.raises(UserError, match="--fault"):
        parse_collective_fault(text)


def test_a_matrix_fails_where_a_fault_survives():
    killed = Cell(topology="t", workload="w", fault="avg:allreduce@dp#0", result="killed")
    clean = Cell(topology="t", workload="w", fault=None, result="clean")
    for result in ("missed", "alarm", "crashed", "hung"):
        bad = Cell(topology="t", workload="w", fault="f", result=result)
        assert not Matrix(cells=(clean, killed, bad)).ok
        assert Matrix(cells=(clean, killed, bad)).bad() == [bad]
    assert Matrix(cells=(clean, killed)).ok
    assert not Matrix(cells=()).ok


@pytest.mark.distributed
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_visible_fault_is_killed(name, sumgrad_launcher):
    matrix = run_matrix(
        [shipped(name)], faults=None, quick=True, seed=0, timeout_s=240,
        launcher=sumgrad_launcher, progress=lambda _: None,
    )  # fmt: skip
    bad = [cell for cell in matrix.bad() if cell.result != "misnamed"]
    assert not bad, bad
    assert matrix.counts["killed"] > 15
    NAMED.extend(matrix.cells)


@pytest.mark.distributed
def test_causes_are_named():
    """Over all Programs that ran in this process, as the matrix counts it."""
    matrix = Matrix(cells=tuple(NAMED))
    if len({cell.topology for cell in NAMED}) < len(PROGRAMS):
        pytest.skip("runs after the whole sensitivity run")
    assert matrix.share_named is not None
    assert matrix.share_named >= 0.95, [c for c in matrix.bad()]
    assert {c.fault.partition(":")[0] for c in NAMED if c.fault and c.result == "killed"} >= (
        set(KINDS) | set(variants()) | set(step_faults())
    )


@pytest.mark.distributed
def test_a_fault_on_a_group_of_one_is_invisible_and_passes(tmp_path, sumgrad_launcher):
    path = tmp_path / "one.yaml"
    path.write_text(shipped("tensor_parallel").read_text().replace("dp: 2", "dp: 1"))
    matrix = run_matrix(
        [path], faults=["divide_by_world", "avg:allreduce@tp", "unsynchronised_init"],
        seed=0, timeout_s=240, launcher=sumgrad_launcher, progress=lambda _: None,
    )  # fmt: skip
    assert matrix.ok, matrix.bad()
    assert not any(c.fault and "@dp" in c.fault for c in matrix.cells)


class Struck:
    """A launcher whose warm ranks are struck behind their last write, as the kernel would."""

    def __init__(self, launcher, **ended) -> None:
        self.launcher, self.ended = launcher, ended

    def run(self, job, **said):
        outcomes = self.launcher.run(job, **said)
        assert [o.detail for o in outcomes if not o.ok] == []
        return [*outcomes[:-1], replace(outcomes[-1], **self.ended)]


@pytest.mark.distributed
def test_a_warm_rank_that_dies_after_its_last_write_is_no_fault_that_was_caught(
    tmp_path, sumgrad_launcher
):
    options = CheckOptions(
        topology=shipped("data_parallel"), steps=2, tiers=("structure",), out=tmp_path / "clean"
    )
    _, stored = run_check(options, launcher=sumgrad_launcher)
    clean = load_record(stored)
    faults = ["avg:allreduce@dp#1", "skip:allreduce@dp#1"]
    for i, (ended, result) in enumerate(
        [
            ({"status": "killed", "exit_code": -9}, "crashed"),  # somebody, or the kernel
            ({"status": "killed", "exit_code": -11}, "died"),  # what the collective did to it
        ]
    ):
        struck = Struck(sumgrad_launcher, **ended)
        place = tmp_path / str(i)
        ran = run_faults(clean, faults, place, launcher=struck, progress=lambda _: None)
        assert [r.fault for r in ran] == faults
        cells = [cell_of("data_parallel", clean, r) for r in ran]
        assert [cell.result for cell in cells] == ["killed", result]


@pytest.mark.distributed
def test_a_count_that_is_not_reduced_is_named_by_a_look_at_the_modules(sumgrad_launcher):
    asked = dict(faults=["copy:allreduce@dp#0"], seed=0, timeout_s=120.0,
                 launcher=sumgrad_launcher, progress=lambda _: None)  # fmt: skip
    matrix = run_matrix([shipped("data_parallel")], look=True, **asked)
    assert [(c.result, c.named_alone) for c in matrix.cells if c.fault] == [("killed", True)]


@pytest.mark.distributed
def test_many_faults_are_run_in_portions(sumgrad_launcher, monkeypatch):
    """What a process has seen adds up in it, as groups and buffers do."""
    monkeypatch.setattr(matrix_run, "MOST_AT_ONCE", 2)
    asked = ["skip:allreduce@dp#0", "copy:allreduce@dp#0", "divide_by_world"]
    said: list[str] = []
    matrix = run_matrix(
        [shipped("data_parallel")], faults=asked, seed=0, timeout_s=120,
        launcher=sumgrad_launcher, progress=said.append,
    )  # fmt: skip
    assert [cell.fault for cell in matrix.cells] == [None, *asked]
    assert {cell.result for cell in matrix.cells[1:]} == {"killed"}
    started = [line for line in said if line.endswith(" first")]
    assert [line.split(", ")[0] for line in started] == [
        "data_parallel: 2 faults", "data_parallel: 1 faults",
    ]  # fmt: skip


SLOW = """
import time

from sumgrad.workloads.programs.data_parallel import DataParallel


class Slow(DataParallel):
    def step(self, model, batch, ctx):
        time.sleep(2.0)
        super().step(model, batch, ctx)
"""


@pytest.mark.distributed
def test_each_fault_has_the_time_of_a_run_of_its_own(sumgrad_launcher, tmp_path):
    """Two seconds, eight times: together more than the time of one run."""
    (tmp_path / "slow.py").write_text(SLOW)
    asked = [
        f"{kind}:allreduce@dp#{i}" for kind in ("avg", "skip", "double", "copy") for i in (0, 1)
    ]
    matrix = run_matrix(
        [shipped("data_parallel")], workload=f"{tmp_path / 'slow.py'}:Slow", faults=asked, seed=0,
        timeout_s=12, launcher=sumgrad_launcher, progress=lambda _: None,
    )  # fmt: skip
    assert {cell.result for cell in matrix.cells if cell.fault} == {"killed"}


HASHED = """
import torch
import torch.distributed as dist


class Step:
    def build(self):
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2)

    def batch(self):
        return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(1))}

    def loss_sum(self, model, rows):
        return model(rows["x"]).square().sum(), len(rows["x"])

    def step(self, model, batch, ctx):
        here = [None] * ctx.world_size
        dist.all_gather_object(here, [hash("a name"), *set("abcdef")])
        assert here[0] != here[1], "ranks share their hashes"
        mine = slice(2 * ctx.rank, 2 * ctx.rank + 2)
        (model(batch["x"][mine]).square().sum() / 4).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
"""


@pytest.mark.distributed
def test_ranks_do_not_share_their_hashes_where_a_step_goes_by_them(
    tmp_path, sumgrad_launcher, monkeypatch
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "by_hash.py").write_text(HASHED)
    topology = tmp_path / "by_hash.yaml"
    topology.write_text(
        f"name: by_hash\nworkload: {tmp_path}/by_hash.py:Step\n"
        "pools: {train: {axes: {dp: 2}}}\n"
    )
    matrix = run_matrix(
        [topology], faults=["double:allreduce@dp"], quick=True, seed=0, timeout_s=120,
        launcher=sumgrad_launcher, progress=lambda _: None,
    )  # fmt: skip
    assert matrix.cells[0].result == "clean", matrix
    assert {cell.result for cell in matrix.cells[1:]} == {"killed"}, matrix


STEP = """
import torch
import torch.distributed as dist
from torch import nn


class Step:
    def build(self):
        torch.manual_seed(0)
        return nn.Linear(4, 2)

    def batch(self):
        torch.manual_seed(1)
        return {"x": torch.randn(301, 4)}

    def loss_sum(self, model, rows):
        return model(rows["x"]).square().sum(), len(rows["x"])

    def step(self, model, batch, ctx):
        mine = batch["x"].tensor_split(ctx.world_size)[ctx.rank]
        model(mine).square().sum().backward()
        count = torch.tensor(float(len(mine)))
        dist.all_reduce(count)
        for p in model.parameters():
            REDUCED
            p.grad /= COUNT


class BySums(Step):
    pass
"""
BY_A_SUM = "dist.all_reduce(p.grad)"
BY_OBJECTS = (
    "held = [None] * ctx.world_size; dist.all_gather_object(held, p.grad.tolist()); "
    "p.grad = torch.tensor(held, dtype=p.grad.dtype).sum(0)"
)
OVERFLOWS = "(torch.full((), 301.0, dtype=torch.float16) * 300 / 300).to(p.grad.dtype)"


@pytest.mark.distributed
@pytest.mark.parametrize(("reduced", "count", "result", "said"), [
    (BY_A_SUM, "count", "clean", None),
    (BY_A_SUM, OVERFLOWS, "alarm", "every gradient"),  # right in float64 alone
    (BY_OBJECTS, "count", "unattacked", "none of its collectives carries a parameter's gradient"),
])  # fmt: skip
def test_what_is_said_of_the_clean_step(reduced, count, result, said, tmp_path, sumgrad_launcher):
    (tmp_path / "t.yaml").write_text("pools: {train: {axes: {dp: 3}}}\n")
    code = STEP.replace("REDUCED", reduced).replace("COUNT", count)
    (tmp_path / "steps.py").write_text(code)
    matrix = run_matrix(
        [tmp_path / "t.yaml"], faults=["avg:allreduce@dp"], quick=True, seed=0, timeout_s=60,
        launcher=sumgrad_launcher, progress=lambda _: None,
        workload=f"{tmp_path / 'steps.py'}:Step",
    )  # fmt: skip
    first = matrix.cells[0]
    assert first.result == result
    assert (first.cause or "").startswith(said or "")
    assert bool(first.cause) == bool(said)
    worst = matrix_grid(matrix).first
    assert any("none was attacked" in text for text in worst) == (reduced == BY_OBJECTS)
