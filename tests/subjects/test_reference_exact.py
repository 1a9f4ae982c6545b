"""The reference of a workload of small integers, whose every gradient is known by hand.

main    sum over rows of (x w)^2, by two producers on a unit each; divided by its count
reg     3 sum(w^2) / 2, from the weights alone
stat    2 |S|^2 / count with S = sum over rows of x v: not linear in its global sums
state   sum over rows of h v, where h grows by step + 1 with every step
read    sum over rows of the quantity g = x w
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.tensors import hash_weights
from sumgrad.subjects.noise_floor import floor_runs
from sumgrad.subjects.planned import reference as planned
from sumgrad.subjects.planned.reference import Job, compute_partials, compute_reference
from sumgrad.subjects.planned.workload import Produced
from sumgrad.topology.declaration import Declaration, Param, Quantity, Role, Term

X = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
NUM = len(X)
COUNTS = {"main": 10, "reg": 2, "stat": 4, "state": 5, "read": 8}
FACTORS = {"main": 0.5, "reg": 3.0, "stat": 2.0, "state": 1.0, "read": 4.0}
PRODUCERS = {
    "main": [("a", ("one",)), ("b", ("two",))], "reg": [("a", ("one",))], "stat": [("a", ("v",))],
    "state": [("a", ("v",))], "read": [("a", ("one",))],
}  # fmt: skip


class Small:
    """The workload of this file's head. off: what its kernels add to every loss's slope."""

    def __init__(self, terms: tuple[str, ...] = tuple(COUNTS), off: float = 0.0) -> None:
        shapes = {"one": (), "two": (), "v": (), "idle": (2,)}
        kinds = {"reg": "replicated", "stat": "statistic"}
        self.off = off
        self.declaration = Declaration(
            workload="small",
            row_lengths=(1,) * NUM,
            params=tuple(Param(name=n, unit=n, shape=s) for n, s in shapes.items()),
            roles=(Role(name="dp", units=tuple(shapes), home=True),),
            quantity=Quantity(name="g", role="dp", shapes={"one": ()}),
            terms=tuple(
                Term(name=t, role="dp", kind=kinds.get(t, "rows"), reads_quantity=t == "read",
                     statistic_numel=2 if t == "stat" else 0)
                for t in terms
            ),
        )  # fmt: skip

    def params(self, step):
        values = {"one": 3.0, "two": 1.0 + step, "v": 2.0, "idle": [1.0, 1.0]}
        return {n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()}

    def formulas(self, dtype, device, rounded_to=None, kernels="torch"):
        return Formulas(dtype, self.off if kernels == "triton" else 0.0)


class Formulas:
    def __init__(self, dtype, off):
        self.x, self.off = X.to(dtype), off

    def produce(self, params, rows):
        return Produced(quantity={"one": self.x[rows] * params["one"]}, inner=params)

    def count(self, term, rows):
        return COUNTS[term] * len(rows) // NUM

    def coefficient(self, term):
        return FACTORS[term]

    def loss_sum(self, term, *, params, quantity, rows, units, step, state):
        if term == "reg":
            return sum(params[u].square() for u in units)
        if term == "state":
            return (state["h"] * params["v"]).sum()
        if term == "read":
            return quantity["one"].sum()
        assert not quantity
        return sum((self.x[rows] * params[u]).square().sum() * (1 + self.off) for u in units)

    def statistics(self, term, produced, rows):
        own = self.x[rows].sum() * produced.inner["v"]
        return torch.stack([own, 2 * own])

    def value(self, term, sums, count):
        return sums.square().sum() / count

    def initial_state(self, term, rows):
        return {"h": torch.zeros(len(rows), dtype=self.x.dtype)} if term == "state" else {}

    def advance(self, term, *, params, quantity, rows, step, state):
        return {name: held + self.x[rows] * (step + 1) for name, held in state.items()}


def job(workload=None, dtype=torch.float64, steps=2, kernels="torch") -> Job:
    return Job(
        workload=workload or Small(), producers=PRODUCERS, dtype=dtype, device="cpu", steps=steps,
        num_chunks=4, kernels=kernels,
    )  # fmt: skip


def wanted(step: int) -> dict[str, dict[str, float]]:
    """d/dw by hand: sum x = 15, sum x^2 = 55."""
    one, two, v, grown = 3.0, 1.0 + step, 2.0, 1 if step == 0 else 3
    return {
        "main": {"one": 0.5 / 10 * 2 * 55 * one, "two": 0.5 / 10 * 2 * 55 * two},
        "reg": {"one": 3 / 2 * 2 * one},
        "stat": {"v": 2 / 4 * 2 * 5 * 15 * v * 15},
        "state": {"v": 1 / 5 * grown * 15},
        "read": {"one": 4 / 8 * 15},
    }


def test_every_gradient_of_every_term_at_every_step():
    references = compute_reference(job())
    assert [r.step for r in references] == [0, 1]
    for r in references:
        for term, grads in wanted(r.step).items():
            for name, value in r.by_term[term].items():
                assert value.tolist() == pytest.approx(
                    grads.get(name, [0, 0] if name == "idle" else 0), rel=1e-14
                ), (term, name)
        total = {
            n: sum(g.get(n, 0.0) for g in wanted(r.step).values()) for n in ("one", "two", "v")
        }
        for name, value in total.items():
            assert r.grads[name].item() == pytest.approx(value, rel=1e-14)
            assert r.scale[name] == pytest.approx(value, rel=1e-14)  # all of one sign
            assert r.same_dtype[name].item() == pytest.approx(value, rel=1e-14)
            assert r.floor[name] <= 1e-13
        assert r.grads["idle"].tolist() == [0, 0]
        assert r.scale["idle"] == 0
        assert r.norm == pytest.approx(sum(v**2 for v in total.values()) ** 0.5, rel=1e-14)
        assert r.counts == COUNTS
        assert r.weights == hash_weights(Small().params(r.step))
        assert set(r.resolution) == set(r.floor_by_term) == set(COUNTS)
        assert max(max(held.values()) for held in r.resolution.values()) <= 1e-13
    assert references[0].weights != references[1].weights


def test_the_scale_is_the_sum_of_absolute_partials():
    """Rows of both signs: x (w - 2.9) changes its sign nowhere, x - 3 does."""

    class Signs(Formulas):
        def loss_sum(self, term, *, params, rows, **_):
            return ((self.x[rows] - 3) * params["one"]).sum()

    workload = Small(("read",))
    workload.formulas = lambda dtype, device, **_: Signs(dtype, 0.0)
    (r,) = compute_reference(job(workload, steps=1))
    assert r.grads["one"].item() == 0
    assert r.scale["one"] == 4 / 8 * (2 + 1 + 0 + 1 + 2)


def test_the_floor_is_the_error_of_eight_orders_in_the_working_dtype():
    class Thirds(Formulas):
        def loss_sum(self, term, *, params, rows, **_):
            return (params["one"] / 3 * self.x[rows]).square().sum() / 7

    workload = Small(("main",))
    workload.formulas = lambda dtype, device, **_: Thirds(dtype, 0.0)
    (r,) = compute_reference(job(workload, dtype=torch.float32, steps=1))
    exact = r.grads["one"].item()
    errors = []
    for chunks in floor_runs(NUM, 4, "cpu").values():
        weight = torch.tensor(3.0, requires_grad=True)
        grad = torch.zeros(())
        for rows in chunks:
            for _ in PRODUCERS["main"]:
                loss = (weight / 3 * X[rows].float()).square().sum() / 7
                (slope,) = torch.autograd.grad(loss, weight, torch.tensor(0.5 / 10))
                grad += slope
        errors.append(abs(grad.item() - exact))
    assert r.floor["one"] == max(errors) == r.floor_by_term["main"]["one"] > 0
    assert r.norm_floor == pytest.approx(max(errors), rel=1e-6)
    assert r.same_dtype["one"].dtype == torch.float32
    assert abs(r.same_dtype["one"].item() - exact) == errors[0]  # all rows at once
    assert errors[0] != errors[1]
    assert r.grads["one"].dtype == torch.float64


def test_weights_are_rounded_to_the_working_dtype_before_anything_is_computed():
    class Odd(Small):
        def params(self, step):
            return {**super().params(step), "one": torch.tensor(3.001, dtype=torch.float64)}

    (r,) = compute_reference(job(Odd(("main",)), dtype=torch.bfloat16, steps=1))
    assert r.grads["one"].item() == pytest.approx(0.5 / 10 * 2 * 55 * 3.0, rel=1e-14)
    rounded = {n: p.bfloat16() for n, p in Odd().params(0).items()}
    assert r.weights == hash_weights(rounded)


@pytest.mark.parametrize(("off", "raised"), [(0.0, False), (1e-6, True), (0.5, True)])
def test_other_kernels_raise_the_floor_within_its_cap(off, raised):
    small = Small(("main",), off=off)
    (plain,) = compute_reference(job(small, dtype=torch.float32, steps=1))
    (r,) = compute_reference(job(small, dtype=torch.float32, steps=1, kernels="triton"))
    least = max(plain.floor["one"], 2.0**-23 * float(r.scale["one"]))
    if raised:
        assert plain.floor["one"] < r.floor["one"] <= 4.0001 * least
        assert plain.norm_floor < r.norm_floor
    else:
        assert r.floor == plain.floor
    if off == 0.5:
        assert r.floor["one"] == pytest.approx(4 * least)
    assert torch.equal(r.grads["one"], plain.grads["one"])


def test_the_roundings_of_the_ranks_device_raise_the_floor_once(monkeypatch):
    """Several runs there, by their largest error; the bound is on all of them together."""
    monkeypatch.setattr(planned, "take_device", lambda kind: torch.device("cpu"))
    small = Small(("main",), off=0.5)
    (plain,) = compute_reference(job(small, dtype=torch.float32, steps=1))
    there = replace(job(small, dtype=torch.float32, steps=1, kernels="triton"), ranks_on="cuda")
    said = []
    (r,) = compute_reference(there, progress=said.append)
    least = max(plain.floor["one"], 2.0**-23 * float(r.scale["one"]))
    assert r.floor["one"] == pytest.approx(4 * least)
    assert [text for text in said if "on cuda" in text] == [
        f"noise floor (triton kernels on cuda, {cut}), step 0"
        for cut in ("at once", "reversed", "permuted")
    ]
    on_torch = replace(there, kernels="torch")
    (same,) = compute_reference(on_torch)
    assert same.floor == plain.floor  # the same arithmetic, played: nothing to add


def test_partials_of_rows_producers_and_wrong_sums():
    found = compute_partials(job(), steps=[1], local_rows=[(0, 2), (2, 2), (2, 5)])
    assert set(found) == {1}
    by = {key: {n: v.tolist() for n, v in g.items()} for key, g in found[1].items()}
    assert by["main", "a"]["one"] == pytest.approx([0.3 * x * x for x in X.tolist()])
    assert by["main", "b"]["two"] == pytest.approx([0.2 * x * x for x in X.tolist()])
    assert set(by["main", "a"]) == {"one"}
    assert by["reg", "a"] == {"one": [9.0]}
    assert by["state", "a"]["v"] == pytest.approx([0.2 * 3 * x for x in X.tolist()])
    assert by["read", "a"]["one"] == pytest.approx([0.5 * x for x in X.tolist()])
    # d/dv = <slope at some sums, (x, 2 x)>, slope = 2 * 2 S / 4, S = (s v, 2 s v)
    assert by["stat", "a"]["v"] == pytest.approx([5 * 15 * 2 * x for x in X.tolist()])
    local = [3, 3, 12, 12, 12]
    assert by["stat", "a@local"]["v"] == pytest.approx(
        [5 * s * 2 * x for s, x in zip(local, X.tolist(), strict=True)]
    )
    assert by["stat", "a@mean"]["v"] == pytest.approx([5 * 15 / 3 * 2 * x for x in X.tolist()])
    both = compute_partials(job(), steps=[0, 1], local_rows=[])
    assert set(both) == {0, 1}
    assert ("stat", "a@mean") not in both[1]
    assert both[0]["state", "a"]["v"].sum().item() == pytest.approx(3)
    total = sum(g["v"].sum(0) for key, g in both[1].items() if "v" in g)
    assert total.item() == pytest.approx(wanted(1)["stat"]["v"] + wanted(1)["state"]["v"])


@pytest.mark.parametrize("what", ["quantity", "loss", "statistics"])
def test_what_formulas_give_is_checked(what):
    class Bad(Formulas):
        def produce(self, params, rows):
            found = super().produce(params, rows)
            return found if what != "quantity" else SimpleNamespace(quantity={}, inner=params)

        def loss_sum(self, *args, **kwargs):
            loss = super().loss_sum(*args, **kwargs)
            return loss if what != "loss" else loss[None]

        def statistics(self, *args):
            sums = super().statistics(*args)
            return sums if what != "statistics" else sums[:1]

    workload = Small(("stat", "main"))
    workload.formulas = lambda dtype, device, **_: Bad(dtype, 0.0)
    with pytest.raises(ValueError, match=r"shape"):
        compute_reference(job(workload, steps=1))
