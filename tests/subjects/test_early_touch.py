"""What a step reads or writes before it waits for it: right or wrong by chance, and never PASS."""

from __future__ import annotations

import pytest
from conftest import text
from test_program_attacks import HAND

pytestmark = pytest.mark.distributed

STEP = """
    def step(self, model, batch, ctx):
        count = batch["mask"].sum()
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss * FACTOR / count).backward()
        grads = [p.grad for p in model.parameters()]
        n, r = ctx.world_size, ctx.rank
"""
ISSUED = """
        works = [dist.all_reduce(g, async_op=True) for g in grads]
"""


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (ISSUED + """
        for g in grads:
            g.mul_(1 / 8)
        for work in works:
            work.wait()
""", "is written before this is waited for"),
        (ISSUED + """
        for g in grads:
            g.data.mul_(1 / 8)
        for work in works:
            work.wait()
""", "is written before this is waited for"),
        (ISSUED + """
        import time
        time.sleep(1.0)  # it is there by then, also where others use the machine
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g / 8
        for work in works:
            work.wait()
""", "what one of these gives is read before it is waited for"),
        ("""
        import time
        flat = torch.cat([g.reshape(-1) for g in grads]) / 8
        there = torch.zeros(n, len(flat), dtype=flat.dtype)
        works = [dist.isend(flat, to) for to in range(n) if to != r]
        works += [dist.irecv(there[of], of) for of in range(n) if of != r]
        there[r] = flat
        time.sleep(0.2)
        flat.zero_()
        for work in works:
            work.wait()
        for g, new in zip(grads, there.sum(0).split([g.numel() for g in grads]), strict=True):
            g.copy_(new.view_as(g))
""", "a tensor of send"),
    ],
    ids=["written", "written_as_data", "read", "a_send_buffer_used_again"],
)  # fmt: skip
def test_who_touches_it_before_the_wait_fails(check, body, cause):
    verdict, _ = check(HAND + STEP.replace("FACTOR", "8") + body)
    assert verdict.status == "fail", text(verdict)[:3000]
    assert [one.kind for one in verdict.diagnoses] == ["missing_wait"]
    assert cause in verdict.diagnoses[0].cause, verdict.diagnoses[0]
    assert "mine.py:" in verdict.diagnoses[0].cause


@pytest.mark.parametrize(
    "body",
    [
        ISSUED + """
        while not all(work.is_completed() for work in works):
            pass
""",
        """
        futures = [dist.all_reduce(g, async_op=True).get_future() for g in grads]
        for g, future in zip(grads, futures, strict=True):
            value = future.wait()
            assert value[0] is g or value[0].data_ptr() == g.data_ptr()
""",
        """
        def half(future):
            return [future.value()[0] / 2]
        works = [dist.all_reduce(g, async_op=True) for g in grads]
        halves = [work.get_future().then(half) for work in works]
        for p, done in zip(model.parameters(), halves, strict=True):
            p.grad = done.wait()[0] * 2
""",
        """
        flat = torch.cat([g.reshape(-1) for g in grads])
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % n)])
        size = len(flat) // n
        mine = flat[r * size : (r + 1) * size]
        dist.reduce_scatter_tensor(mine, flat.clone(), async_op=True).wait()
        work = dist.all_gather_into_tensor(flat, mine, async_op=True)
        work.wait()
        parts = flat[: sum(g.numel() for g in grads)].split([g.numel() for g in grads])
        for g, new in zip(grads, parts, strict=True):
            g.copy_(new.view_as(g))
""",
        """
        from torch.distributed import _functional_collectives as funcol
        for p in model.parameters():
            p.grad = funcol.wait_tensor(funcol.all_reduce(p.grad, "sum", dist.group.WORLD))
""",
        """
        theirs = [[torch.empty_like(g) for _ in range(n)] for g in grads]
        works = [dist.all_gather(t, g, async_op=True) for t, g in zip(theirs, grads, strict=True)]
        for g, of, work in zip(grads, theirs, works, strict=True):
            work.wait()
            g.copy_(torch.stack(of).sum(0))
""",
        """
        flat = torch.cat([g.reshape(-1) for g in grads])
        whole, there = flat.clone(), torch.empty_like(flat)
        for k in range(1, n):
            asked = [dist.P2POp(dist.isend, flat, (r + k) % n),
                     dist.P2POp(dist.irecv, there, (r - k) % n)]
            for work in dist.batch_isend_irecv(asked):
                work.wait()
            whole += there
        for g, new in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
            g.copy_(new.view_as(g))
""",
        """
        if hasattr(self, "under_way"):
            self.under_way.wait()
        self.metric = loss.detach().clone()
        self.under_way = dist.all_reduce(self.metric, async_op=True)
        for g in grads:
            dist.all_reduce(g)
""",
    ],
    ids=["polled", "futures", "then", "in_place_parts", "functional", "lists", "ring", "metric"],
)  # fmt: skip
def test_who_waits_first_passes(check, body):
    verdict, _ = check(HAND + STEP.replace("FACTOR", "1") + body)
    assert verdict.status == "pass", text(verdict)[:3000]
    assert not verdict.warnings
