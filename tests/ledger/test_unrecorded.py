"""What no ledger shows is UNKNOWN, never a quiet PASS; what a compiler calls is in the ledger."""

from __future__ import annotations

import pytest
from conftest import text
from sumgrad.record.endings import read_ledger

pytestmark = pytest.mark.distributed

REDUCES = """
    def distribute(self, model, ctx):
        self.group = dist.{new_group}(backend="gloo")
        return model
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        for p in model.parameters():
            dist.all_reduce(p.grad{group})
"""


@pytest.mark.parametrize(
    ("new_group", "group", "status"),
    [
        ("new_group", ", group=self.group", "pass"),  # made to record, whatever it asks for
        ("new_group.__wrapped__", ", group=self.group", "unknown"),
        ("new_group.__wrapped__", "", "pass"),  # it exists, but carries nothing
    ],
    ids=["recorded", "used", "unused"],
)
def test_groups_of_another_backend(check, new_group, group, status):
    verdict, _ = check(REDUCES.format(new_group=new_group, group=group))
    assert verdict.status == status, text(verdict)[:2000]
    seen = [r for r in verdict.reasons if "over a group of backend gloo, which no ledger" in r]
    assert len(seen) == (3 if status == "unknown" else 0)


@pytest.mark.parametrize("raises", ["False", "True"])
def test_a_method_that_a_later_torch_brings(check, raises):
    """It exists: nothing to say. It is called: UNKNOWN, even where it raises and is caught."""
    body = f"""
    def build(self):
        from sumgrad.ledger import delegation
        from sumgrad.ledger import process_group
        def put_single(self, tensor):
            if {raises}:
                raise RuntimeError("not on this backend")
        dist.ProcessGroup.put_single = put_single  # before ours is made of it, as torch would
        assert delegation.unrecorded_operations() >= {{"put_single"}}
        process_group.RecordingProcessGroup.put_single = process_group._unrecorded("put_single")
        return super().build()
    def step(self, model, batch, ctx):
        try:
            dist.group.WORLD.put_single(torch.ones(2))
        except RuntimeError:
            pass
        super().step(model, batch, ctx)
"""
    verdict, _ = check(body)
    assert verdict.status == "unknown", text(verdict)[:2000]
    assert [t.status for t in verdict.tiers] == ["pass", "pass"]
    (reason,) = verdict.reasons
    assert reason.startswith("rank 0-2 calls put_single at mine.py:")


COMPILED = """
    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model)
        {hook}
        return torch.compile(ddp, backend="eager")
    def step(self, model, batch, ctx):
        import torch.distributed._functional_collectives as functional
        @torch.compile(backend="eager")
        def count_of(mask):
            return functional.all_reduce(mask.sum(), "sum", dist.group.WORLD)
        mine = {{k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}}
        loss, _ = self.loss_sum(model, mine)
        (loss / count_of(mine["mask"])).backward()
"""


def sites(directory) -> list[str]:
    """Where the first tier's first step reduces, in the words of its source."""
    source = (directory.parents[1] / "mine.py").read_text().splitlines()
    events = read_ledger(directory / "ranks" / "rank_00000.ledger.jsonl")
    at = [e["site"] for e in events if e.get("label") == "structure/0/step" and "reduce" in e]
    assert all(site.startswith("mine.py:") for site in at), at
    return [source[int(site.partition(":")[2]) - 1].strip() for site in at]


def test_ddp_under_torch_compile(check):
    body = COMPILED.format(hook="ddp.register_comm_hook(None, self.sum_hook)")
    verdict, directory = check(body, timeout_s=180)
    assert verdict.status == "pass", text(verdict)[:2000]
    assert [t.status for t in verdict.tiers] == ["pass", "pass"]
    compiled, hook = sites(directory)
    assert "count_of(mine" in compiled or compiled.startswith("@torch.compile")
    assert hook.startswith("work = dist.all_reduce(bucket")


def test_an_average_under_torch_compile_fails(check):
    verdict, _ = check(COMPILED.format(hook="pass"), tiers=("structure",), steps=1, timeout_s=180)
    assert verdict.status == "fail", text(verdict)[:2000]
    assert verdict.diagnoses[0].factor.startswith("1/3")


WHOLE = """
    def distribute(self, model, ctx):
        return model
    def step(self, model, batch, ctx):
        @torch.compile(backend="eager")
        def step(mine):
            count = mine["mask"].sum()
            dist.all_reduce(count)
            (self.loss_sum(model, mine)[0] / count).backward()
            works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()
        step({k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()})
"""


def test_a_fault_below_a_compiled_step_is_seen(check):
    """The whole step, with its reductions and their works; one of them averages."""
    verdict, directory = check(
        WHOLE, fault="avg:allreduce@dp#2", tiers=("structure",), steps=1, timeout_s=180
    )
    assert verdict.status == "fail", text(verdict)[:2000]
    assert {t["name"] for t in verdict.data["tensors"] if t["status"] == "fail"} == {"0.bias"}
    assert len(sites(directory)) == 5
