"""What a verdict says is what the run showed: no cause from what never met the gradient."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.distributed

STRUCTURE = {"tiers": ("structure",)}
OPEN = "            p.grad += p.grad.sin()\n"  # no factor on anything
STEP = """
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        BEFORE
        for p in model.parameters():
"""
LOGS = [
    "dist.all_reduce(torch.ones(()), op=dist.ReduceOp.AVG)",  # a scalar for a log
    "dist.all_reduce(torch.full((), 7.0))",  # equal on all ranks
    "dist.all_reduce(torch.ones(24, dtype=torch.int32))",  # a map of used parameters
    "dist.all_reduce(torch.ones(35, dtype=torch.bfloat16))",  # low precision of something else
    "dist.all_reduce(torch.zeros(35) if ctx.rank == 1 else torch.ones(35))",  # empty-handed
    "dist.all_reduce(batch['x'].clone())",  # a sum of the forward, whole on every rank
]


@pytest.mark.parametrize("log", LOGS)
def test_what_never_carried_the_gradient_is_not_accused(check, log):
    verdict, _ = check(STEP.replace("BEFORE", log) + OPEN, **STRUCTURE)
    assert verdict.status == "fail"
    (told,) = verdict.diagnoses
    if told.kind != "open":  # what does it was found by leaving lines out, as far as time allowed
        assert told.kind == "code", told
        assert "`p.grad += p.grad.sin()`: were it left out" in told.cause
    else:
        assert told.cause.startswith("open: ")
    assert "all-reduce" not in told.cause
    assert "factors on rows or terms explain" not in json.dumps(verdict.data)


def test_a_scalar_for_a_log_is_no_count(check):
    """A factor of 1/3 on everything, and an all-reduce of equal scalars beside it."""
    log = "dist.all_reduce(torch.full((), 7.0))"
    third = "            p.grad /= 3\n"
    verdict, _ = check(STEP.replace("BEFORE", log) + third, **STRUCTURE)
    assert [d.kind for d in verdict.diagnoses] == ["factor"], verdict.diagnoses
    assert "another group" not in json.dumps(verdict.data)
    counted = "\n".join(
        [
            "    def step(self, model, batch, ctx):",
            "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}",
            "        count = batch['mask'].sum()",
            "        dist.all_reduce(count)  # already whole",
            "        (self.loss_sum(model, mine)[0] / count).backward()",
        ]
    )
    verdict, _ = check(counted, **STRUCTURE)
    assert [d.kind for d in verdict.diagnoses] == ["double_reduction"], verdict.diagnoses
    assert "every gradient is divided by it" in verdict.diagnoses[0].cause


@pytest.mark.parametrize("limit", [0.1, 0.025])
def test_clipping_is_called_clipping(check, limit):
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})"
    verdict, _ = check(STEP.replace("BEFORE", clip) + "            pass\n", **STRUCTURE)
    assert [d.kind for d in verdict.diagnoses] == ["clipped"], verdict.diagnoses
    assert f"the global norm is {limit:g}" in verdict.diagnoses[0].cause


def test_a_compiled_model_is_known_however_it_was_compiled():
    """Such a region is not looked into, so what was not seen in it is no evidence."""
    import torch
    from sumgrad.subjects.program.lift import is_compiled

    plain, wrapped, in_place = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3))
    wrapped[0] = torch.compile(wrapped[0], backend="eager")
    in_place[0].compile(backend="eager")
    assert [is_compiled(model) for model in (plain, wrapped, in_place)] == [False, True, True]


SMALL = """
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        with torch.no_grad():
            for p in model.parameters():
                p.grad += 1e-7 * p.sin()
"""
CAST = """
    def step(self, model, batch, ctx):
        super().step(model, {**batch, 'x': batch['x'].float().to(batch['x'].dtype)}, ctx)
"""


def test_a_small_wrong_term_is_wrong_and_a_cast_is_not_seen_through(check):
    verdict, _ = check(SMALL, **STRUCTURE)
    assert verdict.status == "fail", verdict.reasons
    assert "float32" not in json.dumps(verdict.data["tensors"])
    cast = (CAST + "    def batch(self):\n"
                       "        return {k: v / 3 for k, v in super().batch().items()}\n"
                       "    def loss_sum(self, model, rows):\n"
                       "        rows = {**rows, 'mask': (rows['mask'] > 0).to(rows['x'].dtype)}\n"
                       "        return super().loss_sum(model, rows)\n"
                       "    def step(self, model, batch, ctx):\n"
                       "        x = batch['x'] / 3\n"
                       "        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}\n"
                       "        mine['x'] = (mine['x'] / 3).float().to(x.dtype) * 3\n"
                       "        count = (mine['mask'] > 0).sum()\n"
                       "        dist.all_reduce(count)\n"
                       "        (self.loss_sum(model, mine)[0] / count).backward()\n")  # fmt: skip
    verdict, _ = check(cast, **STRUCTURE)
    assert verdict.status == "pass", (verdict.findings, verdict.diagnoses)
    assert any("float32 at mine.py:" in entry["place"] for entry in verdict.data["lifted"])
    verdict, _ = check(cast, lift=False, **STRUCTURE)
    assert verdict.status == "unknown", (verdict.findings, verdict.diagnoses)
    assert "the step makes float32 at mine.py:" in json.dumps(verdict.data["tensors"])


def test_a_coarse_dtype_that_passes_says_what_it_would_have_seen(check):
    """Of the whole gradient: term by term is what the structure tier sees."""
    verdict, _ = check(dtype="bfloat16")
    tensors = [t for t in verdict.data["tensors"] if t["tier"] == "precision"]
    assert all(t["smallest_scale_error_caught"] < 1 for t in tensors if t["status"] == "pass")
    assert any(t["status"] == "pass" for t in tensors)
