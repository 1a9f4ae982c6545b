"""What a Program may say beside its four methods: clipping, scale, rows by step, buffers."""

from __future__ import annotations

import pytest
from conftest import text
from sumgrad.record.directory import load_record

pytestmark = pytest.mark.distributed

CLIPS = """
    after, max_norm = "clip", {limit}
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        {then}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)"


@pytest.mark.parametrize("limit", [0.01, 1e4])
def test_declared_clipping_passes(check, limit):
    verdict, _ = check(CLIPS.format(limit=limit, then=CLIP))
    assert verdict.status == "pass", text(verdict)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("pass", "does not clip"),
        (CLIP.replace("self.max_norm", "self.max_norm / 2"), "clips by a norm of"),
        (
            "from itertools import chain\n        torch.nn.utils.clip_grad_norm_("
            "chain(model.parameters(), model.parameters()), self.max_norm)",
            "clips by a norm of",
        ),
        (CLIP.replace("max_norm)", "max_norm * (1 + 1e-9))"), None),
    ],
)
def test_another_norm_than_the_declared_one_fails(check, then, says):
    verdict, _ = check(CLIPS.format(limit=0.01, then=then))
    assert verdict.status == "fail"
    assert says is None or says in verdict.diagnoses[0].cause, text(verdict)


def test_clipping_by_the_norm_of_one_rank_fails(check):
    local = "[p.grad.mul_(0.01 / (1 + ctx.rank)) for p in model.parameters()]"
    assert check(CLIPS.format(limit=0.01, then=local))[0].status == "fail"


SCALES = """
    after, scale = "scale", 1024.0
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        for p in model.parameters():
            p.grad.mul_({by})
"""


def test_a_declared_scale_passes_and_another_one_fails(check):
    assert check(SCALES.format(by="1024"))[0].status == "pass"
    verdict, _ = check(SCALES.format(by="512"))
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].factor == "1/2"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("after = 'clip'", "needs `max_norm`"),
        ("after, max_norm = 'clip', 0", "needs `max_norm`"),
        ("after, max_norm, clip_eps = 'clip', 1, -1", "clip_eps: got -1"),
        ("after = 'norm'", "expected 'clip' or 'scale'"),
        ("after, scale = 'scale', float('nan')", "needs `scale`"),
        ("compare_buffers = 'running_mean'", "expected True or a list"),
        ("compare_buffers = ['*.running_mean']", "names no buffer"),
        ("num_microbatches = 0", "num_microbatches: got 0"),
        ("def terms(self, model, rows): return 1", "the name is taken for the loss's terms"),
    ],
)
def test_what_is_said_wrongly_is_unknown_and_named(check, said, words):
    verdict, _ = check(f"    {said}")
    assert verdict.status == "unknown"
    assert words in text(verdict)


STEPWISE = """
    def batch(self, step{default}):
        g = torch.Generator().manual_seed(7 + {seed})
        x, y = torch.randn(11, 5, generator=g), torch.randn(11, 3, generator=g)
        return {{"x": x, "y": y, "mask": torch.ones(11, 3)}}
    def step(self, model, batch, ctx):
        assert torch.equal(self.batch()["x"], batch["x"]) and batch["x"].dtype == ctx.dtype
        {then}
"""


@pytest.mark.parametrize("default", ["", "=0"])
def test_rows_of_each_step(check, default):
    own = STEPWISE.format(default=default, seed="step", then="super().step(model, batch, ctx)")
    verdict, _ = check(own, steps=3)
    assert verdict.status == "pass", text(verdict)


def test_a_step_on_the_rows_of_the_first_fails_at_the_second(check):
    stale = (
        "self.first = getattr(self, 'first', None) or batch\n"
        "        super().step(model, self.first, ctx)"
    )
    verdict, _ = check(STEPWISE.format(default="", seed="step", then=stale))
    assert verdict.status == "fail"
    failed = {(t["tier"], t["step"]) for t in verdict.data["tensors"] if t["status"] == "fail"}
    assert failed == {("structure", 1), ("precision", 1)}


def test_rows_of_a_step_that_are_drawn_unseeded_are_unknown(check):
    drawn = STEPWISE.format(
        default="", seed="int(torch.rand(()) * 1e6) * (step > 0)",
        then="super().step(model, batch, ctx)",
    )  # fmt: skip
    verdict, _ = check(drawn)
    assert verdict.status != "pass"
    assert "batch(1) gives another batch on rank" in text(verdict)


def test_another_number_of_rows_at_a_later_step_is_unknown(check):
    body = """
    def batch(self, step):
        return {k: v[: 11 - step] for k, v in super().batch().items()}
"""
    verdict, _ = check(body)
    assert verdict.status == "unknown"
    assert "batch(1) has 10 rows, batch(0) has 11" in text(verdict)


COUNTS = """
    {said}
    def build(self):
        model = super().build()
        model.register_buffer("seen", torch.zeros(3, dtype={dtype}))
        return model
    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
        ddp.register_comm_hook(None, self.sum_hook)
        return ddp
    def loss_sum(self, model, rows):
        inner = getattr(model, "module", model)
        inner.seen += rows["mask"].sum(0).to(inner.seen.dtype)
        return super().loss_sum(model, rows)
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        {then}
"""
REDUCED = "dist.all_reduce(model.module.seen)"


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.int64"])
@pytest.mark.parametrize(
    ("said", "then", "status"),
    [
        ("pass", "pass", "pass"),
        ("compare_buffers = True", "pass", "fail"),
        ("compare_buffers = ['s*']", REDUCED, "pass"),
        ("compare_buffers = ['seen']", f"{REDUCED}; model.module.seen.mul_(2)", "fail"),
    ],
)
def test_buffers_are_compared_where_it_is_asked_for(check, said, then, status, dtype):
    verdict, _ = check(COUNTS.format(said=said, then=then, dtype=dtype))
    assert verdict.status == status, text(verdict)
    unlike = "seen is not the same on all ranks" in text(verdict)
    assert unlike == (REDUCED not in then)


def test_a_buffer_that_no_rank_holds_was_not_compared(check):
    body = COUNTS.format(said="compare_buffers = ['seen']", then=REDUCED, dtype="torch.float32")
    gone = body.replace(
        "        ddp = Dist", "        del model.seen; model.seen = 0\n        ddp = Dist"
    )
    gone = gone.replace(f"        {REDUCED}", "        pass").replace(".to(inner.seen.dtype)", "")
    verdict, _ = check(gone)
    assert verdict.status == "unknown", text(verdict)
    assert "buffer seen was not compared: no rank holds it" in text(verdict)


def test_the_declared_number_of_microbatches_names_a_factor(check):
    body = """
    num_microbatches = 5
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        for p in model.parameters():
            p.grad.div_(5)
"""
    verdict, _ = check(body)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].symbol == "1/num_microbatches"


def scaled(then: str, by: float = 7.0, more: str = "") -> str:
    """A step that multiplies every gradient, and then clips."""
    return CLIPS.format(
        limit=0.01, then=f"[p.grad.mul_({by}) for p in model.parameters()]\n        {then}"
    ) + (f"    {more}\n" if more else "")


def test_a_factor_before_the_clip_is_seen_by_its_eps(check):
    verdict, _ = check(scaled(CLIP))
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].factor == "7", text(verdict)
    assert "before the step clips it" in verdict.diagnoses[0].cause


def test_a_clip_without_eps_hides_a_factor_and_that_is_said(check):
    own = (
        "total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])\n"
        "        [p.grad.mul_((self.max_norm / total).clamp(max=1)) for p in model.parameters()]"
    )
    for by in (1.0, 7.0):
        verdict, _ = check(scaled(own, by, "clip_eps = 0"))
        assert verdict.status == "unknown", text(verdict)
        assert "gone behind a clip" in text(verdict)


def test_a_clip_that_never_acts_says_nothing_of_its_norm(check):
    verdict, _ = check(CLIPS.format(limit=1e6, then=CLIP))
    assert verdict.status == "pass"
    assert any("no step clips" in warning for warning in verdict.warnings)


def test_an_average_too_small_to_be_clipped_is_called_an_average(check):
    body = """
    after, max_norm = "clip", {limit}
    def distribute(self, model, ctx):
        return DistributedDataParallel(model)
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        {then}
"""
    _, directory = check("    pass")
    norm = load_record(directory).references["structure"][0].norm
    verdict, _ = check(body.format(limit=0.6 * norm, then=CLIP), steps=1)
    assert verdict.status == "fail"
    assert "average" in verdict.diagnoses[0].cause, text(verdict)


def test_a_zero_gradient_is_clipped_by_no_eps(check):
    body = (
        CLIPS.format(limit=0.01, then="pass")
        + """
    clip_eps = 0
    def loss_sum(self, model, rows):
        loss, count = super().loss_sum(model, rows)
        return loss * 0, count
"""
    )
    assert "ZeroDivisionError" not in text(check(body)[0])


def test_the_rows_of_another_step_are_not_those_of_this_one(check):
    other = "super().step(model, {k: v.to(batch[k]) for k, v in self.batch(0).items()}, ctx)"
    verdict, _ = check(STEPWISE.format(default="", seed="step", then=other))
    assert verdict.status == "fail"
    failed = {t["step"] for t in verdict.data["tensors"] if t["status"] == "fail"}
    assert failed == {1}


@pytest.mark.parametrize("taken", ["n=11, step=0", "*, step", "step=0, *, n=11"])
def test_step_is_found_wherever_batch_takes_it(check, taken):
    body = STEPWISE.format(
        default="", seed="step",
        then="again = self.batch(step=ctx.step)\n"
        "        assert all(torch.equal(again[k], batch[k]) for k in batch)\n"
        "        super().step(model, batch, ctx)",
    ).replace("def batch(self, step)", f"def batch(self, {taken})")  # fmt: skip
    verdict, _ = check(body)
    assert verdict.status == "pass", text(verdict)


UNLIKE = COUNTS.replace(
    "        ddp = Dist", "        model.seen.add_({start})\n        ddp = Dist"
)


@pytest.mark.parametrize("said", ["True", "(n for n in ['seen'])", "['seen']"])
def test_a_buffer_that_nobody_changes_is_compared_too(check, said):
    body = UNLIKE.replace("inner.seen += rows", "unused = rows").format(
        said=f"compare_buffers = {said}", then="pass", dtype="torch.float32", start="1 + ctx.rank"
    )
    verdict, _ = check(body)
    assert verdict.status == "fail"
    assert "seen is not the same on all ranks" in text(verdict)


def test_a_last_row_that_changes_no_buffer_stands_for_no_others(check):
    body = (
        COUNTS.format(said="compare_buffers = True", then=REDUCED, dtype="torch.float32")
        + """
    def batch(self):
        batch = super().batch()
        batch["mask"][-1] = 0
        return batch
"""
    )
    verdict, _ = check(body)
    assert verdict.status == "pass", text(verdict)


def test_nan_in_the_same_places_is_the_same(check):
    body = COUNTS.format(said="compare_buffers = True", then=REDUCED, dtype="torch.float32")
    body = body.replace("torch.zeros(3,", "torch.full((3,), float('nan'),")
    verdict, _ = check(body)
    assert verdict.status == "pass", text(verdict)


@pytest.mark.parametrize(
    "said",
    ["after = lambda self: 1", "compare_buffers = None", "num_microbatches = lambda self: 2",
     "import numpy; num_microbatches = numpy.int64(2)"],
)  # fmt: skip
def test_what_only_has_the_same_name_is_left_alone(check, said):
    verdict, _ = check(f"    {said}")
    assert verdict.status == "pass", text(verdict)


def test_first_rows_of_the_rows_of_each_step(check):
    body = STEPWISE.format(
        default="", seed="step",
        then="again = self.batch(ctx.step)\n"
        "        assert len(again['x']) == 7 and torch.equal(again['x'], batch['x'])\n"
        "        super().step(model, batch, ctx)",
    )  # fmt: skip
    verdict, directory = check(body, axes="dp: 3}}\nrows: 7\n#")
    assert verdict.status == "pass", text(verdict)
    first, second = load_record(directory).references["structure"]
    assert first.batch != second.batch


MEAN = """
    def loss_sum(self, model, rows):
        self.calls = getattr(self, "calls", 0) + 1
        total, count = super().loss_sum(model, rows)
        return {}, {}
"""


@pytest.mark.parametrize(
    ("given", "count", "mean"),
    [("total / count", "count", True), ("total / count", "1", False), ("total", "count", False),
     ("0 * total", "count", False),
     ("total / 2**self.calls", "count", False)],  # half as much each time it is called
)  # fmt: skip
def test_a_mean_in_place_of_a_sum_is_said_to_be_one(check, given, count, mean):
    verdict, _ = check(MEAN.format(given, count))
    said = "loss_sum() returns a mean, not the SUM over the rows" in text(verdict)
    assert said == mean
    if mean:
        assert verdict.status == "unknown"
        assert ".py:" in text(verdict)
