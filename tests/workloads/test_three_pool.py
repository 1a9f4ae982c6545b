"""The flagship workload: text, draws, term sizes, additivity, and the mathematics of its parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import RUNNABLE, plan_of, shipped
from sumgrad.record.spec import RunSpec
from sumgrad.subjects.planned.job import PlannedStep
from sumgrad.subjects.planned.reference import _Single
from sumgrad.subjects.planned.workload import load_workload
from sumgrad.topology.pools import load_topology
from sumgrad.workloads.three_pool import documents, draws
from sumgrad.workloads.three_pool import model as three_pool_model
from sumgrad.workloads.three_pool.model import allowed_keys, lower, upper
from sumgrad.workloads.three_pool.workload import Options, ThreePool


def spec_of(name: str, seed: int = 0) -> tuple[RunSpec, ThreePool]:
    topology = load_topology(shipped(name))
    workload = load_workload(topology.workload, topology, seed=seed)
    spec = RunSpec(
        topology=topology,
        declaration=workload.declaration,
        workload=topology.workload,
        seed=seed,
        steps=1,
        tiers={"structure": "float64"},
        fault=None,
        law="enforce",
        kernels="torch",
        timeout_s=1,
        reproduce="",
        versions={},
    )
    return spec, workload


def single(name: str, seed: int = 0) -> _Single:
    spec, _ = spec_of(name, seed)
    return _Single(PlannedStep(spec)._job("structure"), torch.float64)


# ---- data --------------------------------------------------------------------------------------


def test_the_text_is_real_and_unequal():
    text = documents.read_text()
    assert len(text) > 4000
    assert text.startswith(b"Alice was beginning")
    ids = documents.tokens(29, 16, vocabulary=256, seed=0)
    lengths = documents.row_lengths(29, 16)
    for row, length in zip(ids, lengths, strict=True):
        assert bytes(row[:length].astype(np.uint8).tolist()) in text
        assert not row[length:].any()


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_rank_has_another_number_of_valid_positions(name):
    plan = plan_of(name)
    lengths = plan.declaration.row_lengths
    assert sum(n < max(lengths) for n in lengths) * 3 >= len(lengths) or "published" in name
    if name in ("three_pool_published", "three_pool_empty"):
        return  # four rows for many ranks
    for pool, cuts in plan.offsets.items():
        counts = [sum(lengths[a:b]) for a, b in pairwise(cuts)]
        assert len(set(counts)) == len(counts), (pool, counts)


@pytest.mark.parametrize("name", ["three_pool_ragged", "three_pool_primes"])
def test_no_pool_size_divides_the_rows(name):
    plan = plan_of(name)
    for pool in plan.topology.pools:
        assert plan.declaration.num_rows % pool.size


def test_published_lengths():
    assert plan_of("three_pool_published").declaration.row_lengths == (3, 3, 2, 3)


def test_draws_do_not_depend_on_the_sharding():
    everything = draws.uniform(3, "u", np.arange(10), (4, 5))
    for rows in ([7], [9, 0, 4], list(range(5, 10))):
        assert (draws.uniform(3, "u", np.asarray(rows), (4, 5)) == everything[rows]).all()
    assert (draws.uniform(4, "u", np.arange(10), (4, 5)) != everything).any()
    assert (draws.uniform(3, "v", np.arange(10), (4, 5)) != everything).any()


def test_draws_are_the_same_number_in_every_dtype():
    values = torch.from_numpy(draws.uniform(0, "u", np.arange(50), (40,)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(values.to(dtype).double(), values)
    assert 0 < float(values.min()) < float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 0.02


def test_normal_draws_are_normal():
    values = draws.normal(0, "w", (20000,))
    assert abs(values.mean()) < 0.03
    assert abs(values.std() - 1) < 0.03


@pytest.mark.parametrize(
    "options", [{"rows": 0}, {"rows": True}, {"colour": 1}, {"width": 3}, {"lengths": [1]}]
)
def test_bad_options_name_their_place(options):
    with pytest.raises(ValueError, match="options"):
        ThreePool(options, seed=0, where=lambda loc: ".".join(map(str, loc)))


def test_presets_can_be_changed():
    assert Options.model_validate({"preset": "published", "width": 16}).width == 16


# ---- formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["three_pool", "three_pool_published", "three_pool_empty"])
def test_every_term_is_at_least_one_percent_of_what_it_reaches(name, seed):
    reference = single(name, seed)
    run = reference.run(0, [reference.everything])
    for param, total in run.total().items():
        for term, grads in run.by_term.items():
            share = float(grads[param].abs().max() / total.abs().max())
            assert share == 0 or share >= 0.01, (term, param, share)


@pytest.mark.parametrize(("name", "steps"), [("three_pool", 1), ("three_pool_published", 3)])
def test_partials_add_up_to_the_reference(name, steps):
    whole, parts = single(name), single(name)
    for step in range(steps):
        reference = whole.run(step, [whole.everything])
        rows = list(parts.everything.split(1))
        partials = parts.run(step, rows, keep=True, local_rows=[(0, 2), (2, 4)]).partials
        for term, grads in reference.by_term.items():
            for param, wanted in grads.items():
                held = [
                    value[param].sum(0)
                    for (t, producer), value in partials.items()
                    if t == term and "@" not in producer and param in value
                ]
                got = torch.stack(held).sum(0) if held else torch.zeros_like(wanted)
                torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)


def test_the_global_statistic_is_not_the_local_one():
    reference = single("three_pool")
    rows = list(reference.everything.split(1))
    partials = reference.run(0, rows, keep=True, local_rows=[(0, 10), (10, 29)]).partials
    right = partials["imp", "ci"]["ci.in.bias"].sum(0)
    for wrong in ("ci@local", "ci@mean"):
        other = partials["imp", wrong]["ci.in.bias"].sum(0)
        assert float((other - right).abs().max()) > 1e-3 * float(right.abs().max())


def test_counts_come_from_the_data():
    reference = single("three_pool")
    lengths = plan_of("three_pool").declaration.row_lengths
    run = reference.run(0, [reference.everything])
    valid = sum(lengths)
    assert run.counts == {"stoch": 8 * valid, "faith": run.counts["faith"], "imp": valid,
                          "ppgd": valid}  # fmt: skip
    frozen = [w for name, w in reference.formulas.frozen.items() if name.startswith("W.")]
    assert run.counts["faith"] == sum(w.numel() for w in frozen)


def test_lower_leaks_below_zero_and_is_linear_in_the_gradient():
    z = torch.tensor([-2.0, -0.1, 0.3, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    assert lower(z).tolist() == [0, 0, 0.3, 1, 1]
    for sign in (1.0, -1.0):
        (grad,) = torch.autograd.grad(lower(z), z, grad_outputs=torch.full_like(z, sign))
        assert (sign * grad).tolist() == [0.01, 0.01, 1, 1, 0]


def test_upper_continues_above_one():
    z = torch.tensor([-2.0, 0.3, 1.5], dtype=torch.float64, requires_grad=True)
    assert upper(z).tolist() == pytest.approx([0, 0.3, 1.005])
    (grad,) = torch.autograd.grad(upper(z).sum(), z)
    assert grad.tolist() == pytest.approx([0, 1, 0.01])


def test_attention_is_causal_and_padding_is_masked():
    allowed = allowed_keys(torch.tensor([[True, True, False]]))[0, 0]
    assert allowed.tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_the_gradient_is_the_derivative(monkeypatch):
    """Central differences in float64 of the whole loss, in one drawn direction per tensor.

    The leak of `lower` is a chosen slope; here it is 0, the derivative of the clamp.
    """
    monkeypatch.setattr(three_pool_model, "LEAK", 0.0)
    reference = single("three_pool_published")
    formulas, rows = reference.formulas, reference.everything
    params = reference.job.workload.params(0)
    state = formulas.initial_state("ppgd", rows)  # fixed sources: the ascent is not trained

    def loss(values):
        produced = formulas.produce(values, rows)
        common = {"params": values, "quantity": produced.quantity, "rows": rows, "step": 0}
        counts = {t: formulas.count(t, rows) for t in ("stoch", "faith", "imp", "ppgd")}
        units = formulas.sizes.sites
        total = sum(
            formulas.coefficient(t)
            * formulas.loss_sum(t, units=units, state=state, **common)
            / counts[t]
            for t in ("stoch", "faith", "ppgd")
        )
        sums = formulas.statistics("imp", produced, rows)
        return total + formulas.coefficient("imp") * formulas.value("imp", sums, counts["imp"])

    leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()))
    for (name, value), grad in zip(params.items(), grads, strict=True):
        direction = torch.from_numpy(draws.normal(5, name, tuple(value.shape)))
        h = 1e-6
        up, down = (loss({**params, name: value + s * h * direction}) for s in (1, -1))
        numeric = float(up - down) / (2 * h)
        analytic = float((grad * direction).sum())
        assert numeric == pytest.approx(analytic, rel=2e-5, abs=1e-8), name
