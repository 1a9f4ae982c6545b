"""What no gradient comparison covers: never a silent PASS, and no alarm where all is well."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.distributed

STEP = "    def step(self, model, batch, ctx):\n        super().step(model, batch, ctx)\n"
EVERY = "        for p in model.parameters():\n"

CRITERION = """
    def __init__(self):
        torch.manual_seed(5)
        self.criterion = nn.Linear(3, 3)
    def loss_sum(self, model, rows):
        self.criterion.to(rows['x'].dtype)
        error = (self.criterion(model(rows['x'])) - rows['y']).square() * rows['mask']
        return error.sum(), rows['mask'].sum()
"""
UNREGISTERED = """
    def build(self):
        model = super().build()
        model.scale = [torch.ones((), requires_grad=True)]
        return model
    def loss_sum(self, model, rows):
        scale = getattr(model, 'module', model).scale[0].to(rows['x'].dtype)
        loss, n = super().loss_sum(model, rows)
        return loss * scale, n
"""
RESHAPED = """
    def distribute(self, model, ctx):
        return model
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        count = mine['mask'].sum()
        dist.all_reduce(count)
        up, _, down = model
        down.bias.data = down.bias.data.reshape(1, -1)
        out = torch.tanh(up(mine['x'])) @ down.weight.t() + down.bias
        (((out - mine['y']).square() * mine['mask']).sum() / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
"""
TWO_DTYPES = """
    def build(self):
        model = super().build()
        model[2].bfloat16()
        return model
    def loss_sum(self, model, rows):
        up, act, down = getattr(model, 'module', model)
        out = down(act(up(rows['x'])).to(down.weight.dtype)).to(rows['y'].dtype)
        return ((out - rows['y']).square() * rows['mask']).sum(), rows['mask'].sum()
    def distribute(self, model, ctx):
        return model
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        first = model[0].weight.dtype
        for p in model.parameters():
            if p.dtype == first:  # all of them, in one dtype
                dist.all_reduce(p.grad)
"""
UNFROZEN = """
    def build(self):
        model = super().build()
        model[2].bias.requires_grad_(False)
        return model
    def step(self, model, batch, ctx):
        if ctx.step:
            model.module[2].bias.requires_grad_(True)
        super().step(model, batch, ctx)
"""


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (STEP + EVERY + "            p.main_grad = 2 * p.grad", "unknown",
         "main_grad on rank 0-2 holds another gradient than its .grad"),
        (STEP + EVERY + "            p.main_grad = p.grad.float()", "pass", ""),
        (STEP + EVERY + "            p.main_grad, p.grad = p.grad, None", "unknown",
         "the step left no .grad, but a gradient in main_grad"),
        (STEP + EVERY + "            p._hp_grad = p.grad + (ctx.rank == 1)", "unknown",
         "_hp_grad on rank 1 holds another gradient"),
        (STEP + EVERY + "            p.main_param = p.detach().clone()\n"
         "            p.main_param.grad = 2 * p.grad", "unknown",
         "main_param.grad on rank 0-2 holds another gradient than its .grad"),
        (STEP + EVERY + "            p.main_param = p.detach().double()\n"
         "            p.main_param.grad = p.grad.double()", "pass", ""),
        (TWO_DTYPES, "unknown", "build() gives parameters of bfloat16 and float32"),
        (CRITERION, "unknown", "self.criterion.weight is trained by the loss and is none of"),
        (UNREGISTERED, "unknown", "a tensor of shape () is trained by the loss"),
        (RESHAPED, "unknown", "2.bias on rank 0-2 has shape (1, 3) after the step"),
        (UNFROZEN, "unknown", "module.2.bias is trained after the step on rank 0-2"),
    ],
    ids=["main_grad", "main_grad_same", "main_grad_alone", "hp_grad_of_one_rank",
         "main_param", "main_param_same", "two_dtypes", "criterion",
         "unregistered", "reshaped_in_the_step", "unfrozen_later"],
)  # fmt: skip
def test_what_is_trained_elsewhere_is_never_outside_in_silence(check, body, status, words):
    verdict, _ = check(body)
    assert verdict.status == status, json.dumps(verdict.data)[:3000]
    assert words in json.dumps(verdict.data), (verdict.reasons, verdict.findings)


MAIN_GRAD = (
    STEP
    + EVERY
    + """            p.main_grad, p.grad = p.grad.flatten(), None
    def gradient_of(self, name, param, ctx):
        return FOUND
"""
)


@pytest.mark.parametrize(
    ("found", "status"),
    [("param.main_grad", "pass"), ("2 * param.main_grad", "fail"), ("param.grad", "fail")],
)
def test_a_program_says_where_its_gradients_are(check, found, status):
    """A flat buffer's part, in place of `.grad`; what it gives is what is judged."""
    verdict, _ = check(MAIN_GRAD.replace("FOUND", found))
    assert verdict.status == status, json.dumps(verdict.data)[:2000]


def test_a_group_of_several_axes(check):
    body = (
        "    def distribute(self, model, ctx):\n        return model\n"
        "    def step(self, model, batch, ctx):\n"
        "        both = ctx.group('dp', 'cp')\n"
        "        assert both is ctx.group('cp', 'dp')\n"
        "        assert dist.get_process_group_ranks(both) == ["
        "[0, 2, 4, 6], [1, 3, 5, 7]][ctx.coords['tp']]\n"
        "        me, of = dist.get_rank(both), dist.get_world_size(both)\n"
        "        mine = {k: v.tensor_split(of)[me] for k, v in batch.items()}\n"
        "        (self.loss_sum(model, mine)[0] / batch['mask'].sum()).backward()\n"
        "        for p in model.parameters():\n            dist.all_reduce(p.grad, group=both)\n"
    )
    verdict, _ = check(body, axes="dp: 2, cp: 2, tp: 2")
    assert verdict.status == "pass", json.dumps(verdict.data)[:3000]


BUFFER = """
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('mean', torch.zeros(5))
        def forward(self, x):
            if torch.is_grad_enabled():
                self.mean.copy_(x.detach().FORMULA)
            return x
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(self.Seen(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
"""


def test_buffers_that_differ_are_said(check):
    """Between replicas; from the reference; and not where every process leaves the same."""
    verdict, _ = check(BUFFER.replace("FORMULA", "mean(0)"))
    assert verdict.status == "pass"
    assert "0.mean is not the same on all ranks" in verdict.warnings[0], verdict.warnings
    verdict, _ = check(BUFFER.replace("FORMULA", "new_full((5,), float(dist.is_initialized()))"))
    assert verdict.status == "pass"
    assert "0.mean is not what loss_sum over the full batch leaves" in verdict.warnings[0]
    verdict, _ = check(BUFFER.replace("FORMULA", "new_full((5,), 3.0)"))
    assert (verdict.status, verdict.warnings) == ("pass", ())


PENALTY = """
    def loss_sum(self, model, rows):
        loss, n = super().loss_sum(model, rows)
        x = rows['x'].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss + slope.square().sum(), n
    def distribute(self, model, ctx):
        return model
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        count = mine['mask'].sum()
        dist.all_reduce(count)
        loss, _ = self.loss_sum(model, mine)
        params = list(model.parameters())
        torch.autograd.grad(loss / count, params, retain_graph=True)  # looked at, thrown away
        torch.autograd.grad(loss / count, params, retain_graph=True)
        (loss / count).backward()
        for p in params:
            dist.all_reduce(p.grad)
"""


def test_a_gradient_that_is_only_looked_at_is_no_gradient_of_the_step(check):
    """Hooks fire inside autograd.grad too; the points of a penalty are leaves of each run."""
    verdict, _ = check(PENALTY, law="enforce")
    assert verdict.status == "pass", (verdict.reasons, verdict.findings, verdict.diagnoses)


DEFERRED = """
    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, later):
            ctx.save_for_backward(x, w)
            ctx.later = later
            return x @ w.t()
        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            ctx.later.append((w, grad, x))
            return grad @ w, None, None
    def distribute(self, model, ctx):
        return model
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        count = mine['mask'].sum()
        dist.all_reduce(count)
        later, (up, _, down) = [], model
        hidden = torch.tanh(self.Deferred.apply(mine['x'], up.weight, later) + up.bias)
        out = self.Deferred.apply(hidden, down.weight, later) + down.bias
        (((out - mine['y']).square() * mine['mask']).sum() / count).backward()
        for p, layer in ((up.weight, later[1]), (down.weight, later[0])):
            p.grad = layer[1].t() @ layer[2]
        for p in model.parameters():
            dist.all_reduce(p.grad)
"""


def test_weight_gradients_that_come_later(check):
    """Autograd hands None to the weight's node; the step makes the gradient itself."""
    verdict, _ = check(DEFERRED)
    assert verdict.status == "pass", (verdict.reasons, verdict.findings, verdict.diagnoses)


JOIN = """
    def step(self, model, batch, ctx):
        from torch.distributed.algorithms.join import Join
        mine = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        count = mine['mask'].sum()
        dist.all_reduce(count)
        with Join([model], divide_by_initial_world_size=WHAT):
            loss, _ = self.loss_sum(model, mine)
            (loss / count).backward()
"""
LOGGED = """
        import torch.distributed._functional_collectives as functional
        self.logged = functional.all_reduce(batch['x'].sum().detach(), 'sum', ctx.group())
"""
LEFT = """
        self.logged = dist.all_reduce(batch['x'].sum().detach(), async_op=True)
"""


LATER = """
        import threading
        grads = [p.grad for p in model.parameters()]
        threading.Timer(0.05, lambda: [g.mul_(WHAT) for g in grads]).start()
"""
POOL = """
        from concurrent.futures import ThreadPoolExecutor
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(sum, [1, 2]).result()
"""


@pytest.mark.parametrize(
    ("body", "passes"),
    [(STEP + LATER.replace("WHAT", "0.5"), False), (STEP + LATER.replace("WHAT", "1"), True),
     (STEP + POOL, True)],
    ids=["halves_them", "leaves_them", "a_pool"],
)  # fmt: skip
def test_what_a_thread_that_is_left_does_to_gradients_is_seen(check, body, passes):
    verdict, _ = check(body, tiers=("structure",))
    assert (verdict.status == "pass") is passes, (verdict.reasons, verdict.findings)
    told = [text for text in verdict.reasons if "a thread that the step leaves running" in text]
    assert bool(told) is not passes


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (JOIN.replace("WHAT", "True"), "pass"),
        (JOIN.replace("WHAT", "False"), "pass"),
        (STEP + LOGGED, "pass"),
        (STEP + LEFT, "fail"),
    ],
    ids=["join", "join_by_those_that_are_left", "functional_never_read", "left_by_the_step"],
)
def test_who_need_not_wait(check, body, status):
    """Join's notices and functional collectives wait for themselves; a step's own work does not."""
    verdict, _ = check(body, tiers=("structure",))
    assert verdict.status == status, (verdict.reasons, verdict.findings)
    assert any("nobody waits" in text for text in verdict.findings) == (status == "fail")
