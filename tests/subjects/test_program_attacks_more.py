"""More Programs that once had a wrong verdict: what a model is besides its weights, and stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import MY_STEP, text
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.judging import judge_directory
from sumgrad.record.one_hash import read_one_hash
from test_program_attacks import HAND

pytestmark = pytest.mark.distributed

MASKED = """
    def build(self):
        model = super().build()
        mask = torch.ones(7, 5)
        mask[:, 2] = 0
        model[0].weight.register_hook(lambda g: g * mask.to(g))
        return model
"""
STAGES = """
    def distribute(self, model, ctx):
        import copy
        layers = list(model)
        parts = (layers[:2], layers[2:4], layers[4:])
        return nn.Sequential(*copy.deepcopy(parts[ctx.rank]))
    def step(self, model, batch, ctx):
        h = batch["x"]
        if ctx.rank:
            h = torch.empty(len(batch["x"]), 5, dtype=batch["x"].dtype)
            dist.recv(h, ctx.rank - 1)
            h.requires_grad_()
        out = model(h)
        if ctx.rank == 2:
            error = (out - batch["y"]).square() * batch["mask"]
            (error.sum() * FACTOR / batch["mask"].sum()).backward()
        else:
            dist.send(out.detach().contiguous(), ctx.rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, ctx.rank + 1)
            out.backward(grad)
        if ctx.rank:
            dist.send(h.grad.contiguous(), ctx.rank - 1)
"""
NAMED_ANEW = """
    def build(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        )
        for layer in (model[0], model[2], model[4]):
            nn.init.zeros_(layer.bias)
        return model
"""
COPIES_OF_ONE = """
    def build(self):
        import copy
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)), nn.Linear(5, 3))
"""
NO_KEY_BIAS = """
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(5, 3)
        def forward(self, x, skip=False):
            k = nn.functional.linear(x, self.k.weight) + (0 if skip else self.k.bias)
            return self.out(torch.softmax(self.q(x) @ k.T, -1) @ x)
    def build(self):
        torch.manual_seed(0)
        return self.Attention()
    def loss_sum(self, model, rows, **more):
        out = torch.stack([model(x[None].sin() * torch.arange(1.0, 4)[:, None].to(x), **more)[0]
                           for x in rows["x"]])
        return ((out - rows["y"]).square() * rows["mask"]).sum(), rows["mask"].sum()
    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx), skip=True)
        (loss / batch["mask"].sum()).backward()
        for name, p in model.named_parameters():
            if p.grad is not None and name != DROPPED:
                dist.all_reduce(p.grad)
"""


@pytest.mark.parametrize(
    "body",
    [
        MASKED,
        """
    def build(self):
        model = super().build()
        whole, part = model.forward, model[2].forward
        model.forward = lambda x: whole(x)
        model[2].forward = lambda x: part(x)
        return model
""",
        """
    def build(self):
        model = super().build()
        model[0].weight.scale_by = 3.0
        return model
    def loss_sum(self, model, rows):
        out = model(rows["x"]) * getattr(model[0].weight, "scale_by", 1.0)
        return ((out - rows["y"]).square() * rows["mask"]).sum(), rows["mask"].sum()
""",
        """
    def build(self):
        return torch.jit.script(super().build())
""",
        STAGES.replace("FACTOR", "1") + NAMED_ANEW,
        STAGES.replace("FACTOR", "1") + COPIES_OF_ONE,
        NO_KEY_BIAS.replace("DROPPED", "''"),
        """
    def reduce(self, model, ctx):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            n = (p.numel() + 2) // 3
            part = slice(ctx.rank * n, (ctx.rank + 1) * n)
            p.main_grad = torch.cat([p.grad.reshape(-1), p.grad.new_zeros(3)])
            p.main_param = p.detach().reshape(-1)[part].clone().requires_grad_()
            p.main_param.grad = p.grad.reshape(-1)[part].clone()
            p.grad_norm = p.grad.norm()
""",
        """
    def mine(self, batch, ctx):  # rounds more than any order of the reference's additions
        held = {k: v.tensor_split(3)[ctx.rank] for k, v in batch.items()}
        far = 30.0 if held["x"].dtype == torch.float64 else 0.0
        return {**held, "x": (held["x"] / 3 + far - far) * 3}
""",
    ],
    ids=["tensor_hook", "wrapped_forward", "attribute", "scripted", "stages_named_anew",
         "stages_of_copies", "zero_by_mathematics", "second_gradients", "other_roundings"],
)  # fmt: skip
def test_right_programs_pass(check, body):
    verdict, _ = check(HAND + body)
    assert verdict.status == "pass", text(verdict)[:3000]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (MASKED + """
    def distribute(self, model, ctx):
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
        return model
""", "fail", "where the single process has exactly zero"),
        (STAGES.replace("FACTOR", "(2 - ctx.rank // 2 + 1)") + NAMED_ANEW, "fail", "0.weight"),
        (STAGES.replace("FACTOR", "2") + COPIES_OF_ONE, "fail", "multiplied by 2"),
        (NO_KEY_BIAS.replace("DROPPED", "'k.weight'"), "fail", "k.weight"),
        ("""
    def reduce(self, model, ctx):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.main_grad = torch.cat([3 * p.grad.reshape(-1), p.grad.new_zeros(1)])
""", "unknown", "main_grad on rank 0-2 holds another gradient"),
        ("""
    def reduce(self, model, ctx):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            part = slice(0, (p.numel() + 1) // 2)
            p.main_param = p.detach().reshape(-1)[part].clone().requires_grad_()
            p.main_param.grad = 3 * p.grad.reshape(-1)[part]
""", "unknown", "main_param.grad on rank 0-2 holds another gradient"),
        ("""
    compare_buffers = True
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("squares", torch.zeros(5))
        def forward(self, x):
            self.squares += (x.detach() * torch.tensor([1e5, 1, 1, 1, 1]).to(x)).square().sum(0)
            return x
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(self.Squares(), nn.Linear(5, 3))
    def reduce(self, model, ctx):
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(model[0].squares)
        model[0].squares[1:] *= 1.5
""", "fail", "squares is not what loss_sum over the full batch leaves"),
        ("""
    def build(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False),
                              nn.Linear(5, 3))
        model[2].weight = model[0].weight
        return model
    def distribute(self, model, ctx):
        for at in (0, 2):  # two parameters that each hold the same three rows
            layer = nn.Linear(5, 3, bias=False)
            layer.weight = nn.Parameter(model[at].weight.detach()[:3].clone())
            model[at] = layer
        return model
    def step(self, model, batch, ctx):
        for layer in (model[0], model[2]):
            layer.weight.grad = torch.zeros_like(layer.weight)
""", "unknown", "another parameter of this rank is 0.weight too"),
    ],
    ids=["hook_lost", "last_stage", "stages_twice", "unreduced", "padded_main_grad",
         "shard_of_main_param", "small_beside_large", "two_shards_of_one_name"],
)  # fmt: skip
def test_wrong_programs_do_not_pass(check, body, status, words):
    verdict, _ = check(HAND + body)
    assert words in text(verdict), text(verdict)[:3000]
    assert verdict.status in (status, "fail"), text(verdict)[:3000]
    assert verdict.status != "pass"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("""
    def gradient_of(self, name, param, ctx):
        return param.grad.reshape(-1)[:-1]
""", "gradient_of() returned a tensor of (34,) for 0.weight, expected None or a tensor of (7, 5)"),
        ("""
    def gradient_of(self, name, param, ctx):
        return 3.0
""", "gradient_of() returned float for 0.weight"),
        ("""
    def build(self):
        return nn.Sequential(nn.LazyLinear(7), nn.Tanh(), nn.Linear(7, 3))
""", "0.weight of a lazy module has no shape yet"),
        ("""
    def build(self):
        model = super().build()
        model[2].bias = nn.Parameter(torch.full((1,), 0.3).expand(3))
        return model
""", "elements of 2.bias share memory"),
    ],
    ids=["of_another_size", "a_number", "lazy", "expanded"],
)  # fmt: skip
def test_what_is_no_gradient_or_no_parameter_is_said_with_its_line(check, body, words):
    verdict, _ = check(HAND + body)
    assert verdict.status == "unknown"
    assert words in text(verdict), text(verdict)[:2000]
    assert "mine.py:" in text(verdict)


BY_HASH = """
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(8)), nn.Linear(5, 3))
    def reduce(self, model, ctx):
        grads = {n: p.grad for n, p in model.named_parameters()}
        for name in ORDER:
            dist.all_reduce(grads[name])
"""
FIRST_OF = "list(set(grads) - {'8.weight', '8.bias'}) + ['8.weight', '8.bias']"


@pytest.mark.parametrize(
    ("order", "salt", "status"),
    [(FIRST_OF, None, "fail"), (FIRST_OF, "3", "pass"), ("sorted(set(grads))", None, "pass")],
)
def test_ranks_take_a_set_in_orders_of_their_own(check, monkeypatch, order, salt, status):
    """As processes that are started apart do, and those that are forked from one do not."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if salt:
        monkeypatch.setenv("PYTHONHASHSEED", salt)
    verdict, _ = check(HAND + BY_HASH.replace("ORDER", order))
    assert verdict.status == status, text(verdict)[:3000]
    told = any("takes a set in its order" in warning for warning in verdict.warnings)
    assert told == (status == "fail")
    kinds = [(one.kind, one.standing) for one in verdict.diagnoses]
    assert kinds == ([("unlike_hashes", "proved")] if status == "fail" else [])


@pytest.mark.parametrize(
    ("order", "kind", "changed"),
    [("list(grads) or list(set(grads))", None, False), (FIRST_OF, "unlike_hashes", True)],
    ids=["does_nothing", "does_something"],
)
def test_what_is_wrong_beside_a_set_in_its_order(check, monkeypatch, order, kind, changed):
    """All is twice what it should be, too: not by the order, and it is likely alone."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    by_hash = BY_HASH.replace("ORDER", order)
    verdict, stored = check(HAND + by_hash.replace("grads[name])", "grads[name].mul_(2))"))
    found = read_one_hash(stored)
    assert found is not None
    assert not found.passes
    assert bool(found.changed) == changed
    causes = [(one.kind, one.standing) for one in verdict.diagnoses]
    assert ((kind, "likely") in causes) == changed, causes
    assert changed or "unlike_hashes" not in dict(causes)
    assert judge_directory(stored).diagnoses == verdict.diagnoses


def test_a_step_that_changes_the_folder_is_found_again(sumgrad_launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"""{MY_STEP}
class Mine(MyStep):
    def step(self, model, batch, ctx):
        import os
        super().step(model, batch, ctx)
        os.chdir("/")
""")
    Path("dp.yaml").write_text("name: dp\nworkload: x\npools:\n  train: {axes: {dp: 3}}\n")
    options = CheckOptions(topology=Path("dp.yaml"), workload="mine.py:Mine", out=tmp_path / "run")
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "pass", text(verdict)[:3000]


def test_a_gradient_that_is_still_on_its_way_is_waited_for(check):
    verdict, _ = check(
        HAND
        + """
    def reduce(self, model, ctx):
        from torch.distributed import _functional_collectives as funcol
        for p in model.parameters():
            p.grad = funcol.all_reduce(p.grad, "sum", dist.group.WORLD)
"""
    )
    assert verdict.status == "pass", text(verdict)


def test_a_step_that_ends_the_process_group_is_told_so(check):
    verdict, _ = check(
        HAND
        + """
    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        dist.barrier()
        dist.destroy_process_group()
"""
    )
    assert verdict.status == "unknown"
    assert "step() ends the default process group" in text(verdict), text(verdict)[:3000]
    assert "mine.py:" in text(verdict)


FLAT = """
    flat = None
    def lend(self, model):
        at = 0
        self.flat = torch.zeros(sum(p.numel() for p in model.parameters()),
                                dtype=next(model.parameters()).dtype) \\
            if self.flat is None else self.flat
        for p in model.parameters():
            p.grad = self.flat[at : at + p.numel()].view_as(p)
            at += p.numel()
    def reduce(self, model, ctx):
        dist.all_reduce(self.flat)
"""


@pytest.mark.parametrize(
    ("when", "status"),
    [
        ("self.lend(model)", "fail"),  # in each step, and what is in it stays
        ("self.lend(model); self.flat.zero_()", "pass"),
        ("self.lend(model) if self.flat is None else None", "pass"),  # once: zero_grad zeroes it
    ],
)
def test_a_buffer_that_is_lent_anew_and_not_zeroed_is_what_it_was(check, when, status):
    """An optimizer's zero_grad() takes the gradients away, and not what is in the buffer."""
    verdict, _ = check(
        HAND
        + FLAT
        + f"""
    def step(self, model, batch, ctx):
        {when}
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss / batch["mask"].sum()).backward()
        self.reduce(model, ctx)
"""
    )
    assert verdict.status == status, text(verdict)[:3000]


def test_a_buffer_that_is_lent_before_the_first_step_is_zeroed(check):
    verdict, _ = check(
        HAND
        + FLAT
        + """
    def distribute(self, model, ctx):
        self.lend(model)
        return model
"""
    )
    assert verdict.status == "pass", text(verdict)[:3000]


SWAPPED = """
    def build(self):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})
        for layer in model.values():
            nn.init.zeros_(layer.bias)
        return model
    def distribute(self, model, ctx):
        import copy
        held = copy.deepcopy(model)
        return nn.ModuleDict({"a": held["b"], "b": held["a"]})
    def loss_sum(self, model, rows):
        return self.of(model["a"], model["b"], rows)
    def of(self, a, b, rows):
        out = a(rows["x"]).tanh() * b(rows["x"]).sigmoid()
        error = (out - rows["y"]).square() * rows["mask"]
        return error.sum(), rows["mask"].sum()
    def step(self, model, batch, ctx):
        loss, _ = self.of(model["b"], model["a"], self.mine(batch, ctx))
        (loss / batch["mask"].sum()).backward()
        self.reduce(model, ctx)
"""


@pytest.mark.parametrize(("factor", "status"), [("1", "pass"), ("1.01", "fail")])
def test_copies_of_modules_under_each_others_names_are_told_as_a_whole(check, factor, status):
    """Their weights by value; their biases, which are all zeros, by the weights beside them."""
    verdict, _ = check(
        HAND
        + SWAPPED
        + f"""
    def reduce(self, model, ctx):
        for p in model.parameters():
            dist.all_reduce(p.grad)
        model["a"].bias.grad *= {factor}
"""
    )
    assert verdict.status == status, text(verdict)[:3000]
    wrong = {t["name"] for t in verdict.data["tensors"] if t["status"] == "fail"}
    assert wrong == ({"b.bias"} if status == "fail" else set())


WRITTEN_OUT = """
    def build(self):
        return super().build().bfloat16()
    def loss_sum(self, model, rows):
        error = (model(rows["x"].to(torch.bfloat16)).float() - rows["y"]).square() * rows["mask"]
        return error.sum(), rows["mask"].sum()
    def reduce(self, model, ctx):
        for p in model.parameters():
            whole = p.grad.float()
            dist.all_reduce(whole)
            p.grad = (FACTOR * whole).to(p.dtype)
"""


@pytest.mark.parametrize(("factor", "status"), [("1", "pass"), ("1.1", "fail")])
def test_a_model_whose_inputs_are_cast_to_its_dtype_runs_in_that(check, factor, status):
    """In float32 the cast would be another than the model's, and raise."""
    verdict, stored = check(HAND + WRITTEN_OUT.replace("FACTOR", factor))
    assert verdict.status == status, text(verdict)[:3000]
    tiers = {tier.name: (tier.dtype, tier.status) for tier in verdict.tiers}
    assert tiers["structure"] == ("float64", status)
    assert tiers["precision"][0] == "bfloat16"
    assert judge_directory(stored).status == status


CACHED = """
    import functools
    @staticmethod
    @functools.lru_cache(None)
    def angles(n):
        return torch.arange(n) * 0.1
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)
        def forward(self, x):
            return self.inner(torch.einsum("ij,j->ij", x, Mine.angles(5).cos()))
    def build(self):
        torch.manual_seed(0)
        return self.Turned()
"""


def test_tables_that_are_cached_are_none_of_another_tier(check):
    """A product has one dtype alone, and the tables are made in the first tier's."""
    verdict, _ = check(HAND + CACHED.replace("x, Mine", "x @ torch.diag(Mine.angles(5)), Mine"))
    assert verdict.status == "pass", text(verdict)[:3000]
