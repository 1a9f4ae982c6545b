"""What is cast to fewer digits inside a Lift is float64 all the same, forward and backward."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import numpy
import pytest
import torch
from conftest import text
from sumgrad.subjects.program.lift import Lift
from sumgrad.subjects.script.roundings import OtherRoundings
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

NARROW = (torch.float32, torch.float16, torch.bfloat16)
THIRD = torch.tensor([1 / 3, 2 / 3, 1e-3], dtype=torch.float64)
LIKE = torch.ones(3, dtype=torch.float32)


class Casting(torch.autograd.Function):
    """A user's own function that casts in both directions."""

    @staticmethod
    def forward(ctx, x):
        return (x.float() / 3).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return (grad.bfloat16() / 3).to(grad.dtype)


CASTS = {
    "float": lambda x: x.float() / 3,
    "half": lambda x: x.half() / 3,
    "bfloat16": lambda x: x.bfloat16() / 3,
    "to a dtype": lambda x: x.to(torch.float32) / 3,
    "to a dtype by name": lambda x: x.to(dtype=torch.float16) / 3,
    "to what another has": lambda x: x.to(LIKE) / 3,
    "type": lambda x: x.type(torch.float32) / 3,
    "type as": lambda x: x.type_as(LIKE) / 3,
    "type by its old name": lambda x: x.type("torch.FloatTensor") / 3,
    "softmax": lambda x: F.softmax(x, 0, dtype=torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32) / 3,
    "cumsum": lambda x: x.cumsum(0, dtype=torch.float32),
    "a factory": lambda x: x * torch.full((3,), 1 / 3, dtype=torch.float32),
    "a factory of a tensor": lambda x: x * x.new_full((3,), 1 / 3, dtype=torch.float32),
    "a number": lambda x: x * torch.tensor(1 / 3, dtype=torch.float32),
    "a table": lambda x: x * torch.arange(3, dtype=torch.float32).div(7).sin(),
    "integers made floats": lambda x: x * torch.arange(3).float().div(7),
    "in place": lambda x: torch.zeros(3, dtype=torch.float32).add_(x).div(3),
    "an own function": Casting.apply,
    "a constant made before": lambda x: x * (LIKE / 3),
}


def run(function):
    x = THIRD.clone().requires_grad_()
    out = function(x)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_leaves_float64(name, monkeypatch):
    with Lift() as lift:
        out, grad = run(CASTS[name])
    monkeypatch.setitem(globals(), "LIKE", LIKE.double())
    for method in ("float", "half", "bfloat16"):
        monkeypatch.setattr(torch.Tensor, method, torch.Tensor.double)
    for dtype in ("float32", "float16", "bfloat16"):
        monkeypatch.setattr(torch, dtype, torch.float64)
    monkeypatch.setattr(torch.Tensor, "type", lambda x, *_: x)
    wanted, wanted_grad = run(CASTS[name])
    assert out.dtype == grad.dtype == torch.float64
    assert torch.equal(out, wanted)
    assert torch.equal(grad, wanted_grad)
    assert not lift.narrow


@pytest.mark.parametrize("name", [n for n in CASTS if n != "a constant made before"])
def test_each_lift_is_counted_at_its_line(name):
    with Lift() as lift:
        run(CASTS[name])
    assert sum(lift.lifted.values()) >= 1
    assert all(" at test_lift.py:" in place for place in lift.lifted)


@pytest.mark.parametrize(("make", "drawn"), [
    (lambda: torch.randn(3), True),
    (lambda: torch.zeros(3).uniform_(), True),
    (lambda: torch.randperm(3), True),
    (lambda: nn.functional.dropout(torch.ones(3)), True),
    (lambda: torch.ones(3) + 1, False),
])  # fmt: skip
def test_what_is_drawn_is_seen(make, drawn):
    with Lift() as lift:
        make()
    assert lift.drawn is drawn
    assert [place.partition(":")[0] for place in lift.draws] == ["test_lift.py"] * drawn


def test_nothing_is_changed_where_it_only_looks():
    with Lift(change=False) as lift:
        out, _ = run(CASTS["float"])
    assert out.dtype == torch.float32
    assert not lift.lifted
    assert any(place.startswith("float32 at test_lift.py:") for place in lift.narrow)


def test_a_coarser_tier_is_looked_at_for_what_is_coarser_still():
    x = torch.ones(3, dtype=torch.float32)
    with Lift(torch.float32, change=False) as lift:
        _ = x / 3
    assert not lift.narrow
    with Lift(torch.float32, change=False) as lift:
        _ = x.bfloat16()
    assert [place.split()[0] for place in lift.narrow] == ["bfloat16"]


def test_what_no_operation_made_is_seen_where_it_is_taken():
    """Memory of numpy's: nothing lifts it."""
    held, x = torch.from_numpy(numpy.ones(3, dtype=numpy.float32)), torch.zeros(3).double()
    with Lift() as lift:
        x.copy_(held)
    assert [place.split(" at ")[0] for place in lift.narrow] == ["float32"]
    with Lift() as lift:
        x.copy_(torch.from_numpy(numpy.ones(3)))
    assert not lift.narrow


def test_numbers_are_drawn_as_they_were_asked_for():
    """A mask of a seeded float32 draw is the same mask in float64."""

    def drawn():
        g = torch.Generator().manual_seed(3)
        like = torch.zeros(5, dtype=torch.float32)
        return [
            torch.rand(5, generator=g, dtype=torch.float32),
            torch.randn(5, generator=g, dtype=torch.float32),
            torch.rand_like(like),
            torch.bernoulli(torch.full((5,), 0.5, dtype=torch.float32), generator=g),
        ]

    torch.manual_seed(1)
    plain = drawn()
    torch.manual_seed(1)
    with Lift():
        lifted = drawn()
    assert [t.dtype for t in lifted] == [torch.float64] * 4
    for one, other in zip(plain[:2], lifted[:2], strict=True):
        assert torch.equal(one.double(), other)


def test_numbers_of_no_dtype_are_drawn_as_without_float64():
    def drawn(like):
        g = torch.Generator().manual_seed(3)
        return [
            torch.rand(5, generator=g),
            torch.rand_like(like, generator=g),
            torch.empty_like(like).uniform_(generator=g),
            torch.empty_like(like).normal_(generator=g),
            F.dropout(torch.ones_like(like), 0.4),
            torch.randint(9, (5,), generator=g),
            torch.randn(5, generator=g, dtype=torch.float64),
        ]

    torch.set_default_dtype(torch.float32)
    torch.manual_seed(1)
    plain = drawn(torch.zeros(5))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    with Lift():
        lifted = drawn(torch.zeros(5))
    assert lifted[5].dtype == torch.int64
    for one, other in zip(plain, lifted, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-7, atol=0)


def test_integers_and_bits_are_left_alone():
    with Lift() as lift:
        assert torch.arange(3).dtype == torch.int64
        assert (THIRD > 0).dtype == torch.bool
        assert THIRD.view(torch.int64).dtype == torch.int64
        assert torch.ones(2, dtype=torch.int32).view(torch.float32).dtype == torch.float32
    assert not lift.lifted


def test_a_buffer_made_before_keeps_its_dtype_and_is_named():
    buffer = torch.zeros(3, dtype=torch.float32)
    with Lift() as lift:
        buffer[1:].copy_(THIRD[1:])
    assert buffer[1] == THIRD[1].float()
    assert [place.split()[0] for place in lift.narrow] == ["float32"]


def test_a_parameter_that_is_narrow_keeps_a_gradient_of_its_dtype():
    held = torch.ones(3, dtype=torch.float32, requires_grad=True)
    with Lift():
        (held.to(torch.float64) * THIRD).sum().backward()
        (held * THIRD).sum().backward()
    assert torch.equal(held.grad, 2 * THIRD.float())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_it_computed(reentrant):
    def block(x):
        return F.softmax(x.type_as(LIKE) / 3, 0, dtype=torch.float32).to(LIKE)

    with Lift():
        out, grad = run(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        wanted, wanted_grad = run(block)
    assert torch.equal(out, wanted)
    assert torch.equal(grad, wanted_grad)


def test_a_compiled_region_is_lifted_too():
    class Model(nn.Module):
        def forward(self, x):
            return F.softmax(x.float() / 3, 0, dtype=torch.float32).to(x.dtype)

    torch._dynamo.reset()
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    with Lift():
        out, grad = run(torch.compile(Model(), backend="aot_eager"))
        wanted, wanted_grad = run(Model())
    assert frames["ok"] == before + 1  # compiled, not run as it is written
    assert float((out - wanted).abs().max()) < 1e-15
    assert float((grad - wanted_grad).abs().max()) < 1e-15


def test_groups_of_products_have_a_float64_kernel():
    """torch's has none: forward and both gradients are those of one product a group."""
    g = torch.Generator().manual_seed(0)
    a = torch.randn(7, 4, generator=g, requires_grad=True)
    b = torch.randn(3, 4, 5, generator=g, requires_grad=True)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    wanted = torch.cat([a[:2] @ b[0], a[2:2] @ b[1], a[2:] @ b[2]])
    weight = torch.randn(7, 5, generator=g)
    grads = torch.autograd.grad((wanted * weight).sum(), [a, b])
    with Lift():
        out = torch._grouped_mm(a, b, offs=ends)
        got = torch.autograd.grad((out * weight).sum(), [a, b])
    assert torch.allclose(out, wanted, rtol=0, atol=1e-14)
    for one, other in zip(got, grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-14)


STUBBORN = """
    def {name}(self, model, {rest}):
        low = torch.ones(2).to(torch.bfloat16)
        assert low.dtype == torch.bfloat16, "stubborn"
        return super().{name}(model, {rest})
"""


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "rest"), [("step", "batch, ctx"), ("loss_sum", "rows")])
def test_what_raises_only_where_casts_are_lifted_is_run_as_it_is(check, name, rest):
    verdict, directory = check(STUBBORN.format(name=name, rest=rest))
    assert verdict.status != "pass"
    assert "this raises only where its casts are lifted" in text(verdict)
    assert (directory / "no_lift" / "verdict.json").exists()


@pytest.mark.distributed
def test_what_raises_anyway_is_not_blamed_on_the_lift(check):
    verdict, _ = check("    def step(self, model, batch, ctx):\n        raise ValueError('always')")
    assert verdict.status != "pass"
    assert "this raises only where" not in text(verdict)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_gradient_scaler_computes_in_float64(overflow):
    """Its kernels take float32 scales only."""
    with Lift():
        weight = torch.tensor([3.0, -5.0], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=1)
        scaler.scale((weight * weight).sum() / 7).backward()
        if overflow:
            weight.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        gradient = weight.grad.clone()
        scaler.step(optimizer)
        scaler.update()
    if overflow:
        assert weight.tolist() == [3.0, -5.0]
        assert scaler.get_scale() == 1.5
    else:
        wanted = 2 * torch.tensor([3.0, -5.0], dtype=torch.float64) / 7
        assert (gradient - wanted).abs().max() < 1e-15
        assert scaler.get_scale() == 6.0


VALUES = torch.arange(1, 9, dtype=torch.float32)


def saved() -> io.BytesIO:
    out = io.BytesIO()
    torch.save({"whole": VALUES, "part": VALUES[2:5]}, out)
    out.seek(0)
    return out


@pytest.mark.parametrize("rounded", [False, True])
def test_what_is_made_anew_over_bytes_has_the_numbers_of_these_bytes(tmp_path, rounded):
    """Read in another dtype they would be other numbers, and end too soon."""
    path, file = tmp_path / "values.bin", saved()
    VALUES.numpy().tofile(path)
    pickled = pickle.dumps(VALUES[1:])
    data = DataLoader(TensorDataset(VALUES.view(4, 2)), batch_size=2, num_workers=1)
    with contextlib.ExitStack() as stack:
        stack.enter_context(Lift())
        if rounded:
            stack.enter_context(OtherRoundings(1))
        loaded = torch.load(file)
        found = {
            "load": loaded["whole"],
            "load a part": loaded["part"],
            "pickle": pickle.loads(pickled),
            "deepcopy": copy.deepcopy(VALUES),
            "from_file": torch.from_file(str(path), size=8, dtype=torch.float32),
            "frombuffer": torch.frombuffer(bytearray(VALUES.numpy()), dtype=torch.float32),
            "collate": default_collate([VALUES[:4], VALUES[4:]]).flatten(),
            "worker": torch.cat([batch for (batch,) in data]).flatten(),
        }
        doubled = loaded["whole"] * 2
    parts = {"load a part": VALUES[2:5], "pickle": VALUES[1:]}
    for name, value in found.items():
        assert torch.equal(value.float(), parts.get(name, VALUES)), (name, value)
    assert doubled.dtype == torch.float64  # what is computed from them is lifted


def test_where_a_block_under_autocast_is_first_met():
    """It leaves float64 as it is, so that no cast shows."""
    x = torch.ones(2, 2, dtype=torch.float64)
    with Lift() as lift:
        y = x @ x
        with torch.autocast("cpu", torch.bfloat16):
            y = y @ x
            y = y.exp()
    assert y.dtype == torch.float64
    (place,) = lift.autocast
    assert place.startswith("bfloat16 at ")
    assert "test_lift.py:" in place
    assert lift.autocast[place] == 1
    assert not lift.lifted
    with Lift() as lift:
        x.exp()
    assert not lift.autocast
