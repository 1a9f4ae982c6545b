"""A Program's reference: linear models of small integers, whose gradients are known by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.errors import Broken
from sumgrad.record.reference import with_parts
from sumgrad.subjects.program.probe import probe
from sumgrad.subjects.program.protocol import Weights, hash_model, loss_of
from sumgrad.subjects.program.reference import compute, noise
from sumgrad.subjects.program.reference import parts as program_parts
from sumgrad.subjects.program.reference.compute import compute_program_reference
from sumgrad.subjects.program.reference.noise import (
    at_least_typical,
    low_precision,
    zero_by_mathematics,
)
from sumgrad.subjects.program.reference.parts import compute_parts
from sumgrad.subjects.program.reference.single import Single
from sumgrad.subjects.program.reference.terms import Term, same_up_to
from torch import nn

X = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.0, 4.0], [2.0, 2.0], [-3.0, 1.0]])
NUM = len(X)


class Linear:
    """loss = sum over rows of x w, count = rows; subclasses change what they are about."""

    def build(self):
        model = nn.Linear(2, 1, bias=False)
        model.register_buffer("seen", torch.zeros(()))
        nn.init.constant_(model.weight, 2.0)
        return model

    def batch(self):
        return {"x": X.clone()}

    def loss_sum(self, model, rows):
        return model(rows["x"]).sum(), len(rows["x"])

    def step(self, model, batch, ctx):
        raise NotImplementedError


def reference(program, dtype=torch.float64, steps=1, num_chunks=3, facts=None):
    """Of every step, with its parts."""
    if facts is None:
        facts = probe(program, dtype=dtype)
        assert facts.problems == ()
    out = []
    for step in range(steps):
        found = compute_program_reference(
            program, facts, {"tier": dtype}, step=step, num_chunks=num_chunks, num_steps=steps
        )["tier"]
        out.append(with_parts(found, compute_parts(program, facts, {"tier": dtype}, found)))
    return out


def weight(grads) -> list[float]:
    return grads["weight"].reshape(-1).tolist()


def near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-15)


def test_the_gradient_is_that_of_the_sum_over_the_count():
    first, second = reference(Linear(), steps=2)
    assert weight(first.grads) == pytest.approx([3 / 5, 8 / 5], rel=1e-14)
    assert weight(first.by_term["loss"]) == weight(first.grads)
    assert first.scale["weight"] == pytest.approx(10 / 5, rel=1e-14)
    assert first.kinds == {"loss": "rows"}
    assert first.counts == {"loss": 5}
    assert first.intervals == ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5))
    partials = first.partials["loss", "all"]["weight"]
    assert partials.shape == (5, 1, 2)
    near(partials[:, 0], X.double() / 5)
    assert first.row_counts == {"loss": (1.0,) * 5}
    assert first.reached == second.reached == ("weight",)
    assert (first.problems, first.warnings) == ((), ())
    assert first.norm == pytest.approx((0.36 + 2.56) ** 0.5, rel=1e-14)
    assert [r.step for r in (first, second)] == [0, 1]
    assert first.weights != second.weights
    assert 0 < first.floor["weight"] < 1e-14
    assert first.resolution["loss"]["weight"] < 1e-15


class Steep(Linear):
    """A slope that a rounding of the weights changes a million times as much."""

    def loss_sum(self, model, rows):
        y = model(rows["x"])
        return (y * torch.sin(1e6 * y.detach())).sum(), len(rows["x"])


def test_more_runs_never_find_less_noise():
    facts = probe(Squares(), dtype=torch.float32)
    floors = [
        compute_program_reference(
            Squares(), facts, {"tier": torch.float32}, step=1, num_chunks=3, jitters=jitters
        )["tier"]
        for jitters in (1, 9, 40)
    ]
    one, nine, forty = (r.floor["weight"] for r in floors)
    assert one <= nine <= forty < 8 * nine
    assert forty <= floors[2].floor_by_term["loss"]["weight"] * (1 + 1e-9)
    assert {r.norm for r in floors} == {floors[0].norm}


def test_float64_is_measured_itself_where_more_runs_are_asked_for():
    """Not only by what float32 shows: what cancels in a row is another number in each."""
    facts, tiers = probe(Steep(), dtype=torch.float32), {"structure": torch.float64}
    tiers["precision"] = torch.float32
    one, nine = (
        compute_program_reference(Steep(), facts, tiers, step=0, num_chunks=3, jitters=jitters)[
            "structure"
        ]
        for jitters in (1, 9)
    )
    noise = float(torch.finfo(torch.float64).eps)
    assert one.floor["weight"] < 100 * noise * one.scale["weight"]
    assert nine.floor["weight"] > 1e4 * noise * nine.scale["weight"]


def test_a_method_with_nearly_a_name_of_ours_is_a_warning():
    class Misspelled(Linear):
        def distributed(self, model, ctx):
            return model

    facts = probe(Misspelled(), dtype=torch.float64)
    found = compute_program_reference(
        Misspelled(), facts, {"tier": torch.float64}, step=0, num_chunks=3
    )["tier"]
    assert [w for w in found.warnings if "did you mean distribute?" in w]


def test_only_float64_takes_its_noise_from_a_dtype_of_fewer_digits(monkeypatch):
    own, measured = noise.jittered, []

    def counted(working, exact):
        measured.append(working.dtype)
        return own(working, exact)

    monkeypatch.setattr(noise, "jittered", counted)
    facts = probe(Squares(), dtype=torch.float32)
    tiers = {"low": torch.bfloat16, "precision": torch.float32, "structure": torch.float64}
    compute_program_reference(Squares(), facts, tiers, step=0, num_chunks=3)
    assert measured == [torch.bfloat16, torch.float32]


def test_the_noise_of_the_ranks_device_raises_the_floor_within_its_cap(monkeypatch):
    """Played: a device whose runs are off by a given part."""
    facts, dtype = probe(Squares(), dtype=torch.float32), torch.float32
    asked = []

    def floor(ranks_on):
        found = compute_program_reference(
            Squares(), facts, {"tier": dtype}, step=1, num_chunks=3, ranks_on=ranks_on
        )["tier"]
        return found.floor["weight"], found.scale["weight"]

    own = noise.working_run

    def off_by(part):
        def run(working, *args, **named):
            found = own(working, *args, **named)
            if working.device.type == "cpu" and working in asked:
                total = {n: g * (1 + part) for n, g in found.total.items()}
                return replace(found, total=total)
            return found

        return run

    class There(Single):
        def __init__(self, *args, device="cpu", **named):
            super().__init__(*args, **named)
            if device != "cpu":
                asked.append(self)

    monkeypatch.setattr(compute, "Single", There)
    monkeypatch.setattr(compute, "take_device", lambda kind: kind)
    quiet, scale = floor("cpu")
    assert asked == []
    assert floor("cuda")[0] == quiet  # the same arithmetic
    assert len(asked) == 1
    least = max(quiet, 2.0**-23 * scale)
    for part, largest in ((1e-5, 4 * least), (0.5, 4 * least)):
        monkeypatch.setattr(noise, "working_run", off_by(part))
        assert quiet < floor("cuda")[0] <= largest * (1 + 1e-9)


class Squares(Linear):
    """A gradient that depends on the weights, so that they and their rounding count."""

    def loss_sum(self, model, rows):
        return model(rows["x"]).square().sum() / 3, len(rows["x"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_every_step_are_rounded_and_the_reference_is_not(dtype):
    found = reference(Squares(), dtype, steps=2)
    base = {"weight": torch.full((1, 2), 2.0).double()}
    for r in found:
        w = Weights(base, r.step, dtype, torch.float64)["weight"]
        wanted = 2 / 3 / 5 * (X.double() @ w.T).T @ X.double()
        near(r.grads["weight"], wanted)
        assert r.same_dtype["weight"].dtype == dtype
        error = (r.same_dtype["weight"].double() - wanted).abs().max()
        assert 0 < error <= r.floor["weight"]


def test_the_floor_knows_weights_that_are_off_by_one_rounding():
    """(3 w - 6)^2 / w near w = 2: no order of rows shows what one rounding of w does."""

    class Steep(Linear):
        def loss_sum(self, model, rows):
            y = rows["x"][:, :1] * 0 + (model.weight[0, 0] - 1.9375) * 64
            return y.square().sum(), len(rows["x"])

    (r,) = reference(Steep(), torch.float32)
    one_rounding = 2 * 64 * 64 * 2 * 2.0**-23  # of a gradient of 2 * 64 * 64 / 16
    assert r.grads["weight"][0, 0].item() == 512
    assert r.scale["weight"] == 512
    # Four floors at most, and the floor without it is one rounding of the scale.
    assert r.floor["weight"] == pytest.approx(4 * 512 * 2.0**-23)
    assert one_rounding > 4 * 512 * 2.0**-23


@pytest.mark.parametrize(("rows", "parts", "said"), [(4, 2, 1), (4, 3, 1), (5, 2, 0), (6, 4, 1)])
def test_counts_that_cannot_tell_a_mean_of_means_are_said(rows, parts, said):
    class Even(Linear):
        def batch(self):
            return {"x": torch.arange(2.0 * rows).reshape(rows, 2)}

    (r,) = reference(Even(), num_chunks=parts)
    assert ["has the same count" in warning for warning in r.warnings] == [True] * said


def test_rows_that_are_all_alike_tell_nothing():
    class Alike(Linear):
        def batch(self):
            return {"x": X[:1].expand(4, 2).clone()}

    (r,) = reference(Alike())
    assert any(text.startswith("all rows of batch() are alike") for text in r.problems)


def test_terms_of_every_kind():
    class Terms(Linear):
        def terms(self):
            return {
                "rows": lambda m, r: (m(r["x"]).sum(), 2 * len(r["x"])),
                "once": lambda m, r: (m.weight.square().sum(), 1),
                "coupled": lambda m, r: (m(r["x"]).sum().square(), len(r["x"])),
                "statistic": (
                    lambda m, r: m(r["x"]).sum()[None],
                    lambda s, count: s.square().sum() / count,
                ),
            }

    (r,) = reference(Terms())
    assert r.kinds == {
        "rows": "rows", "once": "once", "coupled": "coupled", "statistic": "rows"
    }  # fmt: skip
    total = X.double().sum(0)
    by = {t: weight(g) for t, g in r.by_term.items()}
    assert by["rows"] == pytest.approx((total / 10).tolist(), rel=1e-14)
    assert by["once"] == [4, 4]
    s = 2 * total.sum()
    assert by["coupled"] == pytest.approx((2 * s * total / 5).tolist(), rel=1e-14)
    assert by["statistic"] == pytest.approx((2 * s / 5 * total).tolist(), rel=1e-14)
    assert weight(r.grads) == pytest.approx([sum(v[i] for v in by.values()) for i in (0, 1)])
    assert set(r.partials) == {("rows", "all"), ("once", "all"), ("statistic", "all")}
    assert r.partials["once", "all"]["weight"].tolist() == [[[4.0, 4.0]]]
    stat = r.partials["statistic", "all"]["weight"]
    near(stat[:, 0], 2 * s / 5 * X.double())
    # The scale of what has no partials is its size and a hundredth of the largest element.
    own = max(map(abs, by["coupled"]))
    wanted = 1.01 * own + 10 / 10 + 10 * 2 * float(s) / 5 + 4.04
    assert r.scale["weight"] == pytest.approx(wanted, rel=1e-6)
    (warning, other) = r.warnings
    assert warning.startswith("coupled is non-additive")
    assert other.startswith("`terms` add up to another gradient than loss_sum")


class ByLength(torch.autograd.Function):
    """A value that adds up, and a gradient that depends on how many rows there are."""

    @staticmethod
    def forward(ctx, y):
        ctx.rows = len(y)
        return y.sum()

    @staticmethod
    def backward(ctx, grad):
        return (grad / ctx.rows).expand(ctx.rows, 1)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 9])
def test_rows_that_only_their_gradient_couples_are_not_summed(num_chunks):
    class Coupled(Linear):
        def loss_sum(self, model, rows):
            return ByLength.apply(model(rows["x"])), len(rows["x"])

    (r,) = reference(Coupled(), num_chunks=num_chunks)
    assert r.kinds == {"loss": "coupled"}
    assert weight(r.grads) == pytest.approx([3 / 25, 8 / 25], rel=1e-14)


def test_terms_that_add_up_to_loss_sum_are_not_warned_of():
    class Both(Linear):
        def terms(self):
            return {"a": lambda m, r: (m(r["x"][:, :]).sum() / 4, len(r["x"])),
                    "b": lambda m, r: (m(r["x"]).sum() * 0.75, len(r["x"]))}  # fmt: skip

    (r,) = reference(Both())
    assert r.warnings == ()


@pytest.mark.parametrize(
    ("size", "problem"),
    [(0.0, None), (4e-10, None), (4e-9, "less than float64"), (4e-5, "less than float64"),
     (1e-3, "unseeded"), (0.5, "unseeded")],
)  # fmt: skip
def test_runs_that_differ_are_unsound_and_named_by_how_much(size, problem):
    """The second run over the same rows is off by this part of the scale."""

    class Drifts(Linear):
        calls = 0

        def loss_sum(self, model, rows):
            self.calls += 1
            more = 2 * size * (self.calls % 2)  # the scale is 2
            loss = (rows["x"] * model.weight).sum()
            return loss + more * model.weight[0, 1] * len(rows["x"]), len(rows["x"])

    program = Drifts()
    facts = probe(Linear(), dtype=torch.float64)
    program.calls = 0
    r = compute_program_reference(program, facts, {"tier": torch.float64}, step=0, num_chunks=3)[
        "tier"
    ]
    if problem is None:
        assert not [p for p in r.problems if "unseeded" in p or "two single" in p]
    else:
        assert problem in r.problems[0], r.problems


def test_what_makes_a_reference_unsound():
    class Moves(Linear):
        def loss_sum(self, model, rows):
            with torch.no_grad():
                model.weight.add_(1e-3)
            return super().loss_sum(model, rows)

    class Infinite(Linear):
        def loss_sum(self, model, rows):
            return model(rows["x"]).sum() / 0.0, len(rows["x"])

    facts = probe(Linear(), dtype=torch.float64)
    not_finite = "loss: the single-process gradient is not finite"
    for program, words in ((Moves(), "loss_sum() changes the weights"), (Infinite(), not_finite)):
        (r,) = reference(program, facts=facts)
        assert words in r.problems

    class Nothing(Linear):
        def loss_sum(self, model, rows):
            return model(rows["x"]).sum(), 0

    with pytest.raises(Broken, match="loss: the count of the full batch is 0, expected more"):
        reference(Nothing(), facts=facts)


def test_buffers_and_random_numbers_are_reset_before_each_run():
    class Remembers(Linear):
        def loss_sum(self, model, rows):
            model.seen += 1
            return model(rows["x"]).sum() * model.seen, len(rows["x"])

    (r,) = reference(Remembers())
    assert r.problems == ()
    assert weight(r.grads) == pytest.approx([3 / 5, 8 / 5], rel=1e-14)

    class Draws(Linear):
        def loss_sum(self, model, rows):
            return model(rows["x"]).sum() * (1 + torch.rand(())), len(rows["x"])

    facts = probe(Linear(), dtype=torch.float64)
    (r,) = reference(Draws(), facts=facts)
    assert any("draws unseeded random numbers" in p for p in r.problems)


def test_a_parameter_is_reached_where_some_step_uses_it():
    class Two(Linear):
        def build(self):
            model = super().build()
            model.gate = nn.Parameter(torch.zeros(()))
            model.idle = nn.Parameter(torch.ones(()))
            return model

        def terms(self):
            return {"a": lambda m, r: (m(r["x"]).sum() + 0 * m.idle, len(r["x"])),
                    "b": lambda m, r: (m.gate.square() * len(r["x"]), len(r["x"]))}  # fmt: skip

    (r,) = reference(Two())
    assert r.reached == ("weight", "gate")  # the gate's gradient is zero at these weights only
    assert r.grads["gate"].item() == 0
    assert r.scale["gate"] == 0


def test_one_weight_is_moved_by_one_rounding_up_or_down():
    facts = probe(Linear(), dtype=torch.float32)
    single = Single(Linear(), facts, torch.float32, rounded_to=torch.float32)
    hashed = single.set_step(0)
    seen = set()
    for seed in range(1, 8):
        assert single.set_step(0, jitter=seed) == hashed
        seen |= set(single.model.weight.reshape(-1).tolist())
    eps = 2.0**-23
    assert seen == {2 * (1 - eps), 2 * (1 + eps)}
    single.set_step(0)
    assert single.model.weight.tolist() == [[2.0, 2.0]]
    assert single.same == pytest.approx(1e4 * eps)
    exact = Single(Linear(), facts, torch.float64, rounded_to=torch.float32)
    assert exact.same == 1e-9
    assert exact.built == hash_model(Linear().build())
    rows = torch.arange(NUM)
    grads, count = exact.gradient("loss", rows[:2], rows, seed=0.5)
    assert (weight(grads), count) == ([2, 0.5], 2)


def test_partials_are_merged_to_fit_into_memory(monkeypatch):
    monkeypatch.setattr(program_parts, "MAX_PARTIALS", 5)  # elements; a gradient has two
    (r,) = reference(Linear())
    assert r.intervals == ((0, 2), (2, 5))
    assert r.row_counts == {"loss": (2.0, 3.0)}
    parts = r.partials["loss", "all"]["weight"]
    assert parts[0, 0].tolist() == pytest.approx([4 / 5, 1 / 5])
    monkeypatch.setattr(program_parts, "MAX_PARTIALS", 1)
    assert reference(Linear())[0].intervals == ((0, 5),)


def test_a_loss_that_needs_several_rows_has_no_partials():
    class Several(Linear):
        def loss_sum(self, model, rows):
            if len(rows["x"]) < 2:
                raise ValueError("needs two rows")
            return model(rows["x"]).sum(), len(rows["x"])

    facts = probe(Linear(), dtype=torch.float64)
    (r,) = reference(Several(), facts=facts)
    assert r.kinds == {"loss": "coupled"}
    assert r.partials == {}
    assert r.row_counts == {}
    assert weight(r.grads) == pytest.approx([3 / 5, 8 / 5], rel=1e-14)


@pytest.mark.parametrize(
    ("floor", "scale", "loud"),
    [(3e-12, 2.0, True), (1.9e-12, 2.0, False), (3e-12, 10.0, False), (0.9e-12, 1e-3, False),
     (1.1e-12, 1e-3, True), (1e-9, 0.0, True)],
)  # fmt: skip
def test_a_cast_inside_leaves_its_mark_on_the_floor(floor, scale, loud):
    found = low_precision({"e": 0.0, "w": floor}, {"e": 0.0, "w": scale})
    assert bool(found) == loud
    if loud:
        assert found[0].startswith(
            "loss_sum() gives the gradient of w in fewer digits than float64 has"
        )


def test_the_same_is_within_a_part_of_the_scale():
    one = {"w": torch.tensor([1.0, 2.0]).double(), "e": torch.empty(0)}
    scale = {"w": 4.0, "e": 0.0}
    for by, same in ((3.9e-9, True), (4.1e-9, False)):
        for sign in (1, -1):
            moved = {"w": one["w"] + sign * torch.tensor([0.0, by]).double(), "e": one["e"]}
            assert same_up_to(moved, one, scale, 1e-9) == same
    assert same_up_to({"w": one["w"] + 4.0}, one, scale, 1.0)  # the bound itself is the same
    zero = {"w": torch.zeros(2).double(), "e": one["e"]}
    assert same_up_to(zero, zero, {"w": 0.0, "e": 0.0}, 1e-9)


def test_sparse_gradients_and_objects_with_slots_are_taken():
    class Table(Linear):
        __slots__ = ()

        def build(self):
            model = nn.Module()
            model.table = nn.Embedding(3, 2, sparse=True)
            nn.init.constant_(model.table.weight, 1.0)
            return model

        def batch(self):
            return {"x": torch.tensor([0, 2, 2])}

        def loss_sum(self, model, rows):
            return model.table(rows["x"]).sum(), len(rows["x"])

    (r,) = reference(Table())
    assert r.grads["table.weight"].tolist() == [
        pytest.approx([1 / 3] * 2), [0, 0], pytest.approx([2 / 3] * 2)
    ]  # fmt: skip
    assert SimpleNamespace(**r.kinds).loss == "rows"


class Outside(Linear):
    """Trains two tensors beside its model, and one that is another each time."""

    def __init__(self):
        self.first, self.last = torch.ones((), requires_grad=True), nn.Linear(1, 1, bias=False)

    def loss_sum(self, model, rows):
        own = torch.ones((), dtype=rows["x"].dtype).requires_grad_()
        scale = own * self.first.to(rows["x"].dtype)
        self.last.to(rows["x"].dtype)
        return self.last(model(rows["x"]) * scale).sum(), len(rows["x"])


def test_every_tensor_that_is_trained_outside_the_model_is_named():
    (found,) = reference(Outside())
    assert [text.partition(" is trained")[0] for text in sorted(found.outside)] == [
        "self.first", "self.last.weight"
    ]  # fmt: skip
    (found,) = reference(Linear())
    assert found.outside == ()


class Before(Linear):
    """Trains what its rows are scaled by: the leaf that a walk of the graph meets last."""

    def __init__(self):
        self.scale = torch.ones((), requires_grad=True)

    def loss_sum(self, model, rows):
        return model(rows["x"] * self.scale.to(rows["x"].dtype)).sum(), len(rows["x"])


class Late(Linear):
    """A parameter that loss_sum thaws."""

    def build(self):
        model = super().build()
        model.late = nn.Parameter(torch.ones(()), requires_grad=False)
        return model

    def loss_sum(self, model, rows):
        model.late.requires_grad_()
        return (model(rows["x"]) * model.late).sum(), len(rows["x"])


def test_a_parameter_that_is_trained_late_is_named():
    (found,) = reference(Late())
    assert found.outside == ("late requires a gradient only after loss_sum has run",)


def test_a_tensor_that_is_trained_before_the_model_is_named():
    (found,) = reference(Before())
    assert len(found.outside) == 1
    assert found.outside[0].startswith("self.scale is trained by the loss")


def test_no_tensor_is_quieter_than_half_of_them_and_a_zero_has_the_noise_of_the_largest():
    scale = {"a": 1.0, "b": 2.0, "c": 4.0, "zero": 0.5, "unused": 0.0}
    floor = {"a": 0.0, "b": 0.25, "c": 1.0, "zero": 0.0, "unused": 0.0}
    found = at_least_typical(floor, scale, {"zero"})  # noise as parts of the scale: 0, 0, 1/8, 1/4
    assert found == {"a": 0.125, "b": 0.25, "c": 1.0, "zero": 0.5, "unused": 0.0}
    assert at_least_typical({"w": 0.0}, {"w": 0.0}, set()) == {"w": 0.0}
    # However many are zero by mathematics, they say nothing of the others.
    zeros = {"x": 1e-16, "y": 1e-16, "z": 1e-16}
    quiet = at_least_typical({"w": 1e-15, **zeros}, {"w": 1.0, **zeros}, {*zeros})
    assert quiet == {"w": 1e-15, **dict.fromkeys(zeros, 1e-15)}
    one = {"a": 1.0, "b": 1.0}
    assert at_least_typical({"a": 0.0, "b": 1.0}, one, set()) == one
    assert at_least_typical({"a": 1.0, "b": 0.0}, one, set()) == one


@pytest.mark.parametrize(("size", "zero"), [(0.0, True), (9e-14, True), (1.1e-13, False)])
def test_what_two_runs_differ_by_a_thousandth_of_is_zero_by_mathematics(size, zero):
    grad, none = torch.tensor([size, 0.0]).double(), torch.empty(0).double()
    term = Term(
        grads={"w": grad, "e": none}, again={"w": grad + 1e-16, "e": none}, count=1.0, scale={},
        kind="coupled",
    )  # fmt: skip
    loud = replace(term, grads={"w": grad + 1.0, "e": none}, again={"w": grad + 1.0, "e": none})
    assert zero_by_mathematics({"one": term}, torch.float64) == ({"w"} if zero else set())
    assert zero_by_mathematics({"one": term, "other": loud}, torch.float64) == set()


@pytest.mark.parametrize("learned", [True, False])
def test_a_count_that_depends_on_parameters_is_refused(learned):
    """As a constant it would give a gradient that no trainer has."""
    model = nn.Linear(2, 1)

    def term(model, rows):
        weights = rows @ model.weight.t()
        return (weights * rows).sum(), (weights if learned else weights.detach()).abs().sum()

    if learned:
        with pytest.raises(Broken, match=r"loss_sum\(\): the count depends on parameters"):
            loss_of(term, "loss", model, torch.ones(3, 2))
    else:
        assert loss_of(term, "loss", model, torch.ones(3, 2))[1] > 0
