"""A user's own Program: right ones pass, and each way to be wrong has its own plain verdict."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PROGRAMS, shipped, text
from sumgrad.base.verdict import EXIT_CODES
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.judging import judge_directory
from sumgrad.topology.pools import load_topology

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_shipped_program_passes(name, sumgrad_launcher, tmp_path):
    options = CheckOptions(topology=shipped(name), steps=3, out=tmp_path, timeout_s=240)
    verdict, directory = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "pass", (verdict.reasons, verdict.findings, verdict.diagnoses)
    assert not verdict.warnings, verdict.warnings
    assert all(t["smallest_scale_error_caught"] < 1e-3 for t in verdict.data["tensors"]
               if t["tier"] == "structure" and t["max_abs"])  # fmt: skip
    assert judge_directory(directory).data == verdict.data


def test_a_ddp_program_passes_and_is_judged_again(check):
    verdict, directory = check(steps=2)
    assert (verdict.status, verdict.exit_code) == ("pass", 0)
    assert judge_directory(directory).status == "pass"
    assert {t["name"] for t in verdict.data["tensors"]} == {
        "0.weight", "0.bias", "2.weight", "2.bias"
    }  # fmt: skip


def test_loss_sum_may_take_indices(check):
    verdict, _ = check(
        "    def loss_sum(self, model, rows):\n"
        "        cut = {k: v[rows] for k, v in self.batch().items()}\n"
        "        return MyStep.loss_sum(self, model, cut)\n"
        "    def step(self, model, batch, ctx):\n"
        "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}\n"
        "        count = mine['mask'].sum()\n        dist.all_reduce(count)\n"
        "        (MyStep.loss_sum(self, model, mine)[0] / count).backward()\n"
    )
    assert verdict.status == "pass", text(verdict)[:2000]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("    def build(self):\n        return nn.Linear(5, 3)", "unknown",
         "build() gives other weights"),
        ("    def batch(self):\n        return {**super().batch(), 'x': torch.randn(11, 5)}",
         "unknown", "batch() gives another batch"),
        ("    def build(self):\n        return 3", "unknown", "expected an nn.Module"),
        ("    def batch(self):\n        return {'x': torch.ones(3), 'y': torch.ones(4)}",
         "unknown", "as many in each"),
        ("    def loss_sum(self, model, rows):\n        return 3.0", "unknown",
         "expected (sum, count)"),
        ("    def loss_sum(self, model, rows):\n        raise ValueError('no')",
         "unknown", "loss_sum() raised ValueError: no at"),
        ("    def loss_sum(self, model, rows):\n"
         "        loss, n = super().loss_sum(model, rows)\n"
         "        return loss * torch.rand(()), n", "unknown", "draws unseeded random numbers"),
        ("    def step(self, model, batch, ctx):\n"
         "        if ctx.rank == 1:\n            raise ValueError('boom')\n"
         "        super().step(model, batch, ctx)", "unknown", "ValueError: boom"),
        ("    def step(self, model, batch, ctx):\n        super().step(model, batch, ctx)\n"
         "        model.module[0].bias.grad = None", "fail", "the step left no gradient"),
        ("    def step(self, model, batch, ctx):\n        super().step(model, batch, ctx)\n"
         "        with torch.no_grad():\n            model.module[0].bias.add_(1)",
         "unknown", "changes the weights of 0.bias"),
        ("    def step(self, model, batch, ctx):\n"
         "        batch['x'] = batch['x'] * (1 + torch.rand(()) / 10)\n"
         "        super().step(model, batch, ctx)", "fail",
         "gives another gradient when it is run again: "),
        ("    def distribute(self, model, ctx):\n        return None", "unknown",
         "expected the nn.Module"),
        ("    def distribute(self, model, ctx):\n"
         "        return nn.Sequential(nn.Linear(5, 2).to(ctx.dtype), nn.Tanh(), model[2])\n"
         "    def step(self, model, batch, ctx):\n        model[0].weight.sum().backward()",
         "fail", "its gradient was not compared"),
        ("    def step(self, model, batch, ctx):\n"
         "        dist.all_reduce(torch.ones(2 + ctx.rank % 2))\n"
         "        super().step(model, batch, ctx)", "fail", "ranks disagree"),
    ],
    ids=["build_unseeded", "batch_unseeded", "no_module", "ragged_batch", "no_tuple",
         "loss_raises", "loss_random", "step_raises", "forgets", "changes_weights", "step_random",
         "distribute_none", "other_shape", "disagree"],
)  # fmt: skip
def test_bad_programs_have_their_own_verdict(check, body, status, words):
    verdict, directory = check(body)
    assert verdict.status == status, text(verdict)[:2000]
    assert words in text(verdict), (verdict.reasons, verdict.findings)
    assert (directory / "verdict.json").exists()
    assert judge_directory(directory).status == status


@pytest.mark.parametrize(
    "body",
    [
        "    def build(self):\n        time.sleep(600)",
        "    def loss_sum(self, model, rows):\n        time.sleep(600)",
        "    def step(self, model, batch, ctx):\n        time.sleep(600)",
    ],
    ids=["build", "loss_sum", "step"],
)
def test_a_program_that_hangs_ends_at_the_deadline(check, body):
    started = time.monotonic()
    verdict, _ = check(body, timeout_s=4)
    assert verdict.status == "unknown"
    assert time.monotonic() - started < 60
    assert "timed out" in text(verdict)


def test_a_rank_that_leaves_the_others_waiting_is_named_at_once(check):
    started = time.monotonic()
    verdict, _ = check(
        "    def step(self, model, batch, ctx):\n"
        "        if ctx.rank != 1:\n            super().step(model, batch, ctx)",
        timeout_s=240,
        tiers=("structure",),
    )
    assert verdict.status != "pass"
    assert time.monotonic() - started < 30  # the deadline is at 60
    assert any("rank 1" in finding for finding in verdict.findings), verdict.findings


def test_step_and_loss_sum_that_disagree_even_on_one_rank(check):
    verdict, _ = check(
        "    def step(self, model, batch, ctx):\n"
        "        super().step(model, {**batch, 'y': 2 * batch['y']}, ctx)"
    )
    assert verdict.status == "fail"
    assert "disagree even on one rank" in text(verdict)


def test_an_average_is_named_and_a_mean_of_means_too(check):
    average = (
        "    def distribute(self, model, ctx):\n        return DistributedDataParallel(model)\n"
    )
    verdict, _ = check(average)
    assert verdict.diagnoses[0].kind == "avg"
    assert verdict.data["coefficients"][0]["fraction"] == "1/3"
    verdict, _ = check(
        average + "    def step(self, model, batch, ctx):\n"
        "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}\n"
        "        loss, n = self.loss_sum(model, mine)\n        (loss / n).backward()\n"
    )
    assert verdict.diagnoses[0].kind == "mean_of_means", verdict.diagnoses


RIGHT_BUT_AVERAGED = (
    "    def distribute(self, model, ctx):\n        return DistributedDataParallel(model)\n"
    "    def step(self, model, batch, ctx):\n"
    "        super().step(model, batch, ctx) if False else None\n"
    "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}\n"
    "        count = mine['mask'].sum()\n        dist.all_reduce(count)\n"
    "        loss, _ = self.loss_sum(model, mine)\n"
    "        (loss * 3 / count).backward()\n"
)


def test_two_factors_that_cancel_warn_and_fail_only_where_the_law_is_enforced(check):
    verdict, directory = check(RIGHT_BUT_AVERAGED)
    assert verdict.status == "pass"
    assert any("an average" in warning for warning in verdict.warnings), verdict.warnings
    assert judge_directory(directory, law="enforce").status == "fail"


def test_a_model_that_cannot_be_float64_is_unknown_in_structure_only(check):
    verdict, _ = check(
        "    def loss_sum(self, model, rows):\n"
        "        if rows['x'].dtype == torch.float64:\n            raise TypeError('32 only')\n"
        "        return super().loss_sum(model, rows)"
    )
    tiers = {tier.name: tier.status for tier in verdict.tiers}
    assert tiers == {"structure": "unknown", "precision": "pass"}
    assert "32 only" in text(verdict)


def test_float64_that_is_none_is_unknown_unless_it_is_lifted(check):
    body = (
        "    def loss_sum(self, model, rows):\n"
        "        error = (model(rows['x']).float() - rows['y'].float()) * rows['mask'].float()\n"
        "        return error.square().sum(), rows['mask'].sum()"
    )
    assert check(body)[0].status == "pass"
    assert check(body, lift=False)[0].status == "unknown"


def test_terms_and_their_coefficients(check):
    body = (
        "    def __init__(self):\n"
        "        self.terms = {'fit': self.fit, 'decay': self.decay}\n"
        "    def fit(self, model, rows):\n        return MyStep.loss_sum(self, model, rows)\n"
        "    def decay(self, model, rows):\n"
        "        return 0.1 * sum(p.square().sum() for p in model.parameters()), 1\n"
        "    def loss_sum(self, model, rows):\n"
        "        loss, n = self.fit(model, rows)\n"
        "        return loss + n * self.decay(model, rows)[0], n\n"
        "    def distribute(self, model, ctx):\n        return model\n"
        "    def step(self, model, batch, ctx):\n"
        "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}\n"
        "        count = mine['mask'].sum()\n        dist.all_reduce(count)\n"
        "        loss = self.fit(model, mine)[0] / count\n"
        "        if WHO:\n            loss = loss + self.decay(model, mine)[0]\n"
        "        loss.backward()\n"
        "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n"
    )
    verdict, _ = check(body.replace("WHO", "ctx.rank == 0"))
    assert verdict.status == "pass", text(verdict)[:3000]
    verdict, _ = check(body.replace("WHO", "True"))
    assert verdict.status == "fail"
    found = {c["term"]: c["fraction"] for c in verdict.data["coefficients"]}
    assert found == {"fit": "1", "decay": "3"}, found


CUT_BY_HAND = """
    def build(self):
        model = super().build()
        BUILT
        return model
    def distribute(self, model, ctx):
        mine = CUT
        up, down = nn.Linear(5, len(mine)), nn.Linear(len(mine), 3, bias=False)
        up.weight.data = model[0].weight.data[mine]
        up.bias.data = BIAS
        down.weight.data = model[2].weight.data[:, mine]
        local = nn.ModuleDict({"0": up, "2": down})
        local["2"].bias = model[2].bias
        return local
    def step(self, model, batch, ctx):
        up, down = model["0"], model["2"]
        part = nn.functional.linear(torch.tanh(up(batch["x"])), down.weight)
        whole = part.detach().clone()
        dist.all_reduce(whole)
        out = part + (whole - part).detach() + down.bias
        error = (out - batch["y"]).square() * batch["mask"]
        (error.sum() / batch["mask"].sum()).backward()
"""
STRETCH = "[[0, 1], [2, 3], [4, 5, 6]][ctx.rank]"
ZERO = "model[0].bias.data.zero_()"
OWN = "model[0].bias.data[mine]"


@pytest.mark.parametrize(
    ("cut", "built", "bias", "status", "words"),
    [
        (STRETCH, "pass", OWN, "pass", ""),
        (STRETCH, ZERO, OWN, "pass", ""),  # the values do not tell, numbers do
        ("list(range(ctx.rank, 7, 3))", "pass", OWN, "pass", ""),  # in no one piece
        ("[[1, 0], [6, 3], [4, 2, 5]][ctx.rank]", ZERO, OWN, "pass", ""),
        # Made anew and not cut: nobody can say whose zeros these are.
        (STRETCH, ZERO, "torch.zeros(len(mine))", "unknown", "occur 2 times"),
        # Another rank's zeros: the first step has right weights, and is wrong all the same.
        (STRETCH, ZERO, "model[0].bias.data[[[2, 3], [0, 1], mine][ctx.rank]]", "fail", "0.bias"),
        (STRETCH, "pass", "model[0].bias.data[mine] * 1.5", "fail", "occur nowhere"),
    ],
)  # fmt: skip
def test_shards_cut_by_hand_are_found_and_never_guessed(check, cut, built, bias, status, words):
    body = CUT_BY_HAND.replace("BUILT", built).replace("CUT", cut).replace("BIAS", bias)
    verdict, _ = check(body)
    assert verdict.status == status, text(verdict)[:3000]
    assert words in text(verdict)


def test_rows_and_a_program_without_an_options_parameter(tmp_path, sumgrad_launcher):
    path = tmp_path / "dp.yaml"
    path.write_text(shipped("data_parallel").read_text() + "rows: 5\n")
    options = CheckOptions(topology=path, out=tmp_path / "run", timeout_s=240)
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    assert (verdict.status, verdict.data["num_rows"]) == ("pass", 5)
    assert load_topology(path).rows == 5


def test_shrinking_finds_two_ranks(sumgrad_launcher, tmp_path):
    from sumgrad.launch.matrix.shrink import shrink

    options = CheckOptions(
        topology=shipped("ddp"), fault="ddp_average", out=tmp_path / "run", timeout_s=240
    )
    verdict, directory = run_check(options, launcher=sumgrad_launcher)
    small = replace(options, tiers=("structure",))
    shrunk = shrink(small, verdict, directory, launcher=sumgrad_launcher, progress=lambda _: None)
    assert shrunk is not None
    assert shrunk.num_ranks == 2
    assert shrunk.rows is not None
    assert shrunk.rows < 13
    again = replace(small, topology=shrunk.path, out=tmp_path / "again")
    assert run_check(again, launcher=sumgrad_launcher)[0].diagnoses[0].kind == "avg"


def test_a_program_under_torchrun_has_the_same_verdict(tmp_path):
    import subprocess
    import sys

    from conftest import ROOT

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "3", str(ROOT / "harness" / "run.py"), "--topology", str(shipped("data_parallel")),
               "--out", str(tmp_path / "run"), "--json", str(tmp_path / "v.json"),
               "--timeout", "60"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == EXIT_CODES["pass"], done.stdout + done.stderr
    assert json.loads(Path(tmp_path / "v.json").read_text())["status"] == "pass"


def test_libraries_find_what_torchrun_would_have_set(check):
    """accelerate takes itself for one process where the environment does not say otherwise."""
    verdict, _ = check(
        "    def distribute(self, model, ctx):\n"
        "        import os\n"
        "        for name in ('RANK', 'LOCAL_RANK'):\n"
        "            assert os.environ[name] == str(ctx.rank)\n"
        "        for name in ('WORLD_SIZE', 'LOCAL_WORLD_SIZE'):\n"
        "            assert os.environ[name] == str(ctx.world_size)\n"
        "        import torch.distributed as dist\n"
        "        place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "        store = dist.TCPStore(*place, ctx.world_size, ctx.rank == 0)\n"
        "        store.add('here', 1)\n"
        "        return super().distribute(model, ctx)\n"
    )
    assert verdict.status == "pass", text(verdict)[:2000]


def test_what_other_runs_showed_is_kept_with_the_run(check):
    verdict, directory = check(
        "    def step(self, model, batch, ctx):\n"
        "        super().step(model, batch, ctx)\n"
        "        for p in model.parameters():\n"
        "            p.grad.mul_(2)\n"
    )
    assert any("even on one rank" in w for w in verdict.warnings)
    assert judge_directory(directory).data == verdict.data
    (directory / "second_looks.json").write_text('["something else"]')
    assert not any("something else" in w for w in judge_directory(directory).warnings)
