"""How ranks' own gradients were put together, recovered from records made by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from records_in_memory import compared, program_record
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.diagnose import diagnose
from sumgrad.diagnose.explainers.of_factors import by_rank
from sumgrad.diagnose.explainers.of_factors.by_rank import multiplied_between
from sumgrad.diagnose.explainers.of_others.replaced import _where
from sumgrad.diagnose.own_gradients import _filled, add_up_evenly, mixed, near
from sumgrad.record.ranks import OWN, OWN_AT, SAMPLES, sample_of
from sumgrad.record.spec import Script

AT = ("structure", 0)
RANKS, PASSES = 3, 2
SIZES = {"w": (40, 50), "b": (60,)}
RIGHT = torch.tensor([[0.25, 0.25], [0.125, 0.125], [0.125, 0.125]]).double()
EVEN = torch.full((RANKS, PASSES), 1 / 6).double()


def sampled(tensor):
    return tensor.reshape(-1)[sample_of(tensor.numel())]


def record_of(tables, wanted=RIGHT, *, own_wrong=0.0, keep=True):
    """Rank i ends with `tables[i]` of the ranks' own gradients, in w and in b. own_wrong: of
    something else in what rank 1's own backward gives."""
    one = program_record(tiers={"structure": "float64"}, ranks=RANKS)
    drawn = torch.Generator().manual_seed(5)
    own = {n: torch.randn(RANKS, PASSES, *s, generator=drawn).double() for n, s in SIZES.items()}
    extra = {n: torch.randn(s, generator=drawn).double() for n, s in SIZES.items()}
    (reference,) = one.references["structure"]

    def mixed(table, name):
        return torch.einsum("rp,rp...->...", table, own[name])

    grads = {n: mixed(wanted, n) for n in SIZES}
    reference = replace(
        reference, grads=grads, scale=dict.fromkeys(SIZES, 4.0), same_dtype={}, partials={},
        by_term={"loss": grads}, resolution={"loss": dict.fromkeys(SIZES, 1e-20)},
        kinds={"loss": "coupled"}, counts={"loss": 1},
    )  # fmt: skip
    ranks = {}
    for rank, held in one.ranks.items():
        got = {n: mixed(tables[rank], n) + own_wrong * extra[n] for n in SIZES}
        mine = {n: torch.stack([sampled(p) for p in own[n][rank]]) for n in SIZES}
        if rank == 1 and own_wrong:
            mine = {n: g + own_wrong * sampled(extra[n]) / tables[0][1, 0] / 2
                    for n, g in mine.items()}  # fmt: skip
        at = {n: sample_of(g.numel()) for n, g in grads.items()}
        more = {(OWN, 0): mine, (OWN_AT, 0): at} if keep else {}
        ranks[rank] = replace(held, grads={AT: got, **more})
    script = Script(command="c", rows=({},), losses=((1.0,),))
    facts = replace(one.spec.facts, params=SIZES, terms=("loss",), num_rows=1)
    spec = replace(one.spec, script=script, facts=facts)
    return replace(one, spec=spec, ranks=ranks, references={"structure": [reference]})


def cause_of(*tables, **more):
    return diagnose(compared(record_of(tables, **more))).causes[0]


def only(rank, times=1.0):
    table = torch.zeros(RANKS, PASSES).double()
    table[rank] = times
    return table


def without(rank):
    table = RIGHT.clone()
    table[rank] = 0
    return table


def last_only(rank):
    """Backwards before the last stay on their rank; the last is averaged."""
    table = torch.zeros(RANKS, PASSES).double()
    table[:, -1], table[rank, 0] = RIGHT[:, -1], 0.5
    return table


def first_only(rank):
    """Of others the first backward, of its own both: the last came too late."""
    table = RIGHT.clone()
    table[:, -1] = 0
    table[rank, -1] = RIGHT[rank, -1]
    return table


@pytest.mark.parametrize(("tables", "kind", "words"), [
    ([EVEN] * 3, "weights_of_ranks",
     "weighed alike (1/6), where the single run's weighs them by 1/4 of rank 0, 1/8 of rank 1-2"),
    ([only(r) for r in range(3)], "not_reduced",
     "rank 0-2 each keep what their own backward gave; the"),
    ([only(r, 0.5) for r in range(3)], "not_reduced", "own backward gave (times 1/2); the"),
    ([without(2)] * 3, "not_reduced", "gradients of rank 2 are not in it, on rank 0-2"),
    ([last_only(r) for r in range(3)], "not_reduced", "only the last of 2 backwards is reduced"),
    ([first_only(r) for r in range(3)], "late_gradient", "is added after the reduction"),
    ([without(2), without(2), only(2, 0.125)], "too_few_ranks",
     "rank 0-1 holds what rank 0-1 gave; rank 2 holds what rank 2 gave"),
    ([RIGHT + only(0, 0.25)] * 3, "weights_of_ranks",
     "weighed by 1/2 of rank 0, 1/8 of rank 1-2, where the single run's weighs them by 1/4 of"),
])  # fmt: skip
def test_the_weights_are_recovered_and_named(tables, kind, words):
    cause = cause_of(*tables)
    assert (cause.kind, cause.standing) == (kind, "proved"), cause
    assert words in cause.cause


@pytest.mark.parametrize(("table", "ddp", "told"), [(only, 3, 1), (only, 0, 0), (first_only, 3, 0)])
def test_what_makes_ddp_reduce_is_said_where_it_did_not(table, ddp, told):
    record = record_of([table(r) for r in range(3)])
    ranks = {rank: replace(held, ddp=ddp) for rank, held in record.ranks.items()}
    cause = diagnose(compared(replace(record, ranks=ranks))).causes[0]
    assert sum("outside of no_sync()" in text for text in cause.because) == told


@pytest.mark.parametrize(("made", "issued", "table", "told"), [
    (True, False, only, 1), (True, True, only, 0), (False, False, only, 0),
    (True, False, first_only, 0),
])  # fmt: skip
def test_a_scripts_ddp_that_issues_nothing_is_named(made, issued, table, told):
    """What it wraps is called, and not itself."""
    record = record_of([table(r) for r in range(3)])
    ddps = {"op": "allreduce", "site": "train.py:50", "by": "nn/parallel/distributed.py",
            "group": [0, 1, 2], "dtype": "float64", "numel": 60, "n": 7}  # fmt: skip
    started = {rank: [ddps] if made else [] for rank in record.ranks}
    ranks = {rank: replace(held, events={AT: [ddps] if issued else []})
             for rank, held in record.ranks.items()}  # fmt: skip
    case = SimpleNamespace(record=replace(record, ranks=ranks, started=started), tier=AT[0],
                           step=AT[1])  # fmt: skip
    kind = "not_reduced" if table is only else "late_gradient"
    said = by_rank._idle_ddp(case, kind)
    assert len(said) == told
    assert not said or "made at train.py:50, issues nothing in that step" in said[0]


@pytest.mark.parametrize(("own", "weights", "told"), [
    ((2.0, 4.0, 5.0), (1 / 2, 1 / 4, 1 / 5), True),  # each of norm 1 afterwards
    ((2.0, 4.0, 5.0), (1 / 2, 1 / 4, 1 / 4), False),
    ((3.0, 3.0, 3.0), (1 / 3, 1 / 3, 1 / 3), False),  # as any factor gives
])  # fmt: skip
def test_ranks_that_each_clip_by_their_own_norm_before_the_sum(own, weights, told):
    """In a script whose single run clips, too, so that what is compared was before its clip."""
    gave = torch.tensor([3 / 5, 4 / 5]).double()
    given = {r: ({"w": (gave * norm)[None]}, {"w": torch.arange(2)}) for r, norm in enumerate(own)}
    mix = SimpleNamespace(sources=((0,), (1,), (2,)), got=torch.tensor(weights).double()[:, None])
    cells = [SimpleNamespace(name="w", rank=r, measured=gave) for r in range(3)]
    case = SimpleNamespace(cells=cells, record=SimpleNamespace(ranks=dict.fromkeys(range(3))))
    said = by_rank._of_one_norm(case, mix, given)
    assert len(said) == told
    assert not told or "has the norm 1 in what comes of it" in said[0]
    assert not told or "(to 3, if they are averaged then)" in said[0]
    sampled = {r: (held, {"w": torch.arange(1)}) for r, (held, _) in given.items()}
    assert by_rank._of_one_norm(case, mix, sampled) == []


def test_a_shard_is_put_together_from_the_whole_that_each_rank_made():
    """As FSDP does: a rank keeps a part, and every rank's own backward gave all of it."""
    record = record_of([EVEN] * 3)
    for rank, held in record.ranks.items():
        for name in SIZES:
            whole = held.grads[AT][name].reshape(-1)
            held.index[name] = torch.arange(len(whole)).tensor_split(RANKS)[rank].flip(0)
            held.grads[AT][name] = whole[held.index[name]]
    cause = diagnose(compared(record)).causes[0]
    assert cause.kind == "weights_of_ranks"
    assert "by 1/4 of rank 0, 1/8 of rank 1-2" in cause.cause


def record_with_a_bias(table, *, off=0.0, wanted=RIGHT):
    """A second bias of four numbers, too few to tell weights, that ranks 1 and 2 gave the same."""
    record = record_of([table] * 3, wanted)
    (reference,) = record.references["structure"]
    own = torch.randn(RANKS, PASSES, 4, generator=torch.Generator().manual_seed(9)).double()
    own[2] = own[1]
    right = torch.einsum("rp,rp...->...", wanted, own)
    grads = {**reference.grads, "c": right}
    reference = replace(
        reference, grads=grads, scale=dict.fromkeys(grads, 4.0), by_term={"loss": grads},
        floor=dict(reference.floor) | {"c": reference.floor["b"]},
        resolution={"loss": dict.fromkeys(grads, 1e-20)},
    )  # fmt: skip
    for rank, held in record.ranks.items():
        held.grads[AT]["c"] = torch.einsum("rp,rp...->...", table, own) + off
        held.grads[OWN, 0]["c"], held.grads[OWN_AT, 0]["c"] = own[rank], torch.arange(4)
    facts = replace(record.spec.facts, params={**SIZES, "c": (4,)})
    spec = replace(record.spec, facts=facts)
    ranks = {r: replace(held, params=(*held.params, "c")) for r, held in record.ranks.items()}
    return replace(record, spec=spec, ranks=ranks, references={"structure": [reference]})


def test_a_small_parameter_is_told_by_the_weights_of_others():
    cause = diagnose(compared(record_with_a_bias(EVEN))).causes[0]
    assert (cause.kind, cause.standing, cause.however) == ("weights_of_ranks", "proved", ())
    cause = diagnose(compared(record_with_a_bias(EVEN, off=0.1))).causes[0]
    assert (cause.kind, cause.standing) == ("weights_of_ranks", "likely")
    assert cause.however[0].startswith("c is wrong too, and whether by the same is not known")


def test_weights_of_one_rank_are_not_said_of_others():
    cause = cause_of(RIGHT + only(0, 0.25), RIGHT + only(0, 0.25), RIGHT + only(1, 0.5))
    assert cause.cause.startswith("every gradient: on rank 0-1, the ranks' own gradients are")


def test_one_factor_on_everything_is_left_to_those_who_say_it_shorter():
    cause = cause_of(*[3 * RIGHT] * 3)
    assert cause.kind not in ("weights_of_ranks", "not_reduced")
    assert "multiplied by 3" in cause.cause


def test_a_wrong_gradient_of_one_rank_is_said_to_be_so_before_its_reduction():
    cause = cause_of(*[RIGHT] * 3, own_wrong=1e-3)
    assert cause.kind == "open"
    assert any("itself gives is wrong already" in text for text in cause.because), cause


def test_nothing_is_said_where_own_gradients_were_not_kept():
    cause = cause_of(*[EVEN] * 3, keep=False)
    assert cause.kind == "open"
    assert len(cause.because) == 1


def test_equal_own_gradients_prove_no_weights():
    """Ranks with the same rows: which of them was counted cannot be told."""
    record = record_of([EVEN] * 3)
    for held in record.ranks.values():
        held.grads[OWN, 0] = record.ranks[0].grads[OWN, 0]
    assert diagnose(compared(record)).causes[0].kind == "open"


def test_a_table_that_misses_by_more_than_the_threshold_is_none():
    record = record_of([EVEN] * 3)
    for held in record.ranks.values():
        held.grads[AT]["w"].view(-1)[0] += 1e-12  # the first element is always in the sample
    cause = diagnose(compared(record)).causes[0]
    assert (cause.kind, cause.standing) == ("weights_of_ranks", "likely")
    assert cause.cause.startswith("b: ")
    assert cause.however == ("w is wrong too, and whether by the same is not known",)
    for held in record.ranks.values():
        held.grads[AT]["b"].view(-1)[0] += 1e-12
    # Another record: what one was found to have is not looked for again.
    assert diagnose(compared(replace(record))).causes[0].kind == "open"


def test_ranks_that_give_the_same_are_one_source():
    """As tensor parallelism's do for a bias: which of the two was taken cannot be told."""
    record = record_of([EVEN] * 3)
    for name in SIZES:
        own = [record.ranks[r].grads[OWN, 0][name] for r in range(3)]
        own[2].copy_(own[1])
        (reference,) = record.references["structure"]
        reference.grads[name].view(-1)[sample_of(reference.grads[name].numel())] = 0.25 * own[
            0
        ].sum(0) + 0.5 * own[1].sum(0)
        for held in record.ranks.values():
            held.grads[AT][name].view(-1)[sample_of(held.grads[AT][name].numel())] = 0.5 * own[
                0
            ].sum(0) + 0.5 * own[1].sum(0)
    cause = diagnose(compared(record)).causes[0]
    assert "weighed alike (1/2), where the single run's weighs them by 1/4 of rank 0, 1/2 of" in (
        cause.cause
    )


def test_a_backward_that_is_no_part_of_the_right_gradient():
    wanted = RIGHT.clone()
    wanted[:, 1] = 0
    cause = cause_of(*[RIGHT] * 3, wanted=wanted)
    assert (cause.kind, cause.standing) == ("left_in", "proved")
    assert cause.cause.startswith(
        "every gradient: what backward 2 of the 2 that each rank runs gave is left in it, and is"
    )
    assert cause_of(*[RIGHT + only(0, 0.25)] * 3, wanted=wanted).kind == "weights_of_ranks"


@pytest.mark.parametrize(("repeats", "num"), [(False, 1), (True, 0)])
def test_a_backward_of_rows_that_are_read_once_more_is_not_left_in(monkeypatch, repeats, num):
    wanted, asked = RIGHT.clone(), []
    wanted[:, 1] = 0
    record = record_of([RIGHT] * 3, wanted)
    case = Case(record=record, tier=AT[0], step=0, diffs=compared(record).diffs)

    def are_of_rows(case, found):
        asked.extend(found)
        return repeats

    monkeypatch.setattr(by_rank, "are_of_rows", are_of_rows)
    assert len(list(by_rank.a_backward_is_left_in(case, frozenset()))) == num
    columns, gave = asked[0]
    second = columns.own.reshape(RANKS, PASSES, -1)[:, 1].sum(0)
    assert torch.equal(gave, second)


def test_a_backward_that_is_no_part_of_some_parameters_alone_is_anothers():
    record = record_of([RIGHT] * 3)
    (reference,) = record.references["structure"]
    wanted = {n: g.clone() for n, g in reference.grads.items()}
    name = next(iter(SIZES))
    for rank, held in record.ranks.items():
        own = held.grads[OWN, 0][name]
        at = sample_of(wanted[name].numel())
        reference.grads[name].view(-1)[at] -= RIGHT[rank, 1] * own[1]
    cause = diagnose(compared(record)).causes[0]
    assert (cause.kind, cause.standing) == ("foreign_backward", "proved")
    assert "backward 2 of the 2 that reach it on each rank is in it" in cause.cause


def changed(record, name, change):
    """What every rank ends with of a parameter, changed."""
    for held in record.ranks.values():
        change(held.grads[AT][name])
    return diagnose(compared(record)).causes[0]


def right_record():
    return record_of([RIGHT] * 3)


def test_elements_of_another_gradient_are_found_by_their_values():
    record = right_record()
    (reference,) = record.references["structure"]
    other = reference.grads["w"].reshape(-1)[300:360]
    cause = changed(record, "b", lambda g: g.copy_(other))
    assert (cause.kind, cause.ranks) == ("held_elsewhere", (0, 1, 2))
    assert "b holds elements of the gradient of w" in cause.cause
    assert "of 60 wrong elements of b on rank 0 60 are, within the threshold," in cause.because[0]


def test_a_gradient_that_is_shifted_or_permuted_holds_its_own_elements():
    cause = changed(right_record(), "b", lambda g: g[:-5].copy_(g[5:].clone()))
    assert "b holds in each place what belongs +5 elements on" in cause.cause
    cause = changed(right_record(), "w", lambda g: g.copy_(g.flip(0)))
    assert "w holds its own elements in other places" in cause.cause
    few = changed(right_record(), "b", lambda g: g[:5].copy_(g[5:10].clone()))
    assert few.kind != "held_elsewhere"  # five numbers are too few
    near = changed(right_record(), "w", lambda g: g.copy_(g.flip(0) + 1e-9))
    assert near.kind != "held_elsewhere"


def test_a_sum_that_was_overwritten_by_one_of_its_parts():
    weights = torch.full((RANKS, PASSES), 0.5).double()
    record = record_of([weights] * 3, weights)
    own = [record.ranks[r].grads[OWN, 0]["b"].sum(0) * 0.5 for r in range(3)]
    cause = changed(record, "b", lambda g: g[:20].copy_(own[2][:20]))
    assert (cause.kind, cause.standing) == ("overwritten", "proved")
    assert "b on rank 0: 20 elements that several" in cause.because[0]
    assert "that of the highest of these ranks alone" in cause.because[0]
    record = record_of([weights] * 3, weights)
    cause = changed(record, "b", lambda g: g[:20].copy_(own[2][:20] + 1e-9))
    assert cause.kind == "open"
    assert any("what the ranks' own backwards gave b is right" in t for t in cause.because)
    assert any("it was changed after that" in t for t in cause.because)


@pytest.mark.parametrize("off", [0.0, 0.1])
def test_beside_a_sum_that_was_overwritten_a_few_numbers_may_be_wrong_too(off):
    record = record_with_a_bias(EVEN, off=off, wanted=EVEN)
    own = torch.einsum("p,p...->...", EVEN[2], record.ranks[2].grads[OWN, 0]["b"])
    cause = changed(record, "b", lambda g: g[:20].copy_(own[:20]))
    assert (cause.kind, cause.standing) == ("overwritten", "likely" if off else "proved")


@pytest.mark.parametrize("each", [True, False])
def test_a_part_that_every_rank_keeps_is_not_reduced(each):
    """All of one column, on every rank what it gave itself, or on all what one gave."""
    weights = torch.full((RANKS, PASSES), 0.5).double()
    record = record_of([weights] * 3, weights)
    spec = replace(record.spec, facts=replace(record.spec.facts, params={**SIZES, "b": (20, 3)}))
    own = [record.ranks[r].grads[OWN, 0]["b"].sum(0) * 0.5 for r in range(3)]
    for r, held in record.ranks.items():
        kept = own[r if each else 1].reshape(20, 3)
        held.grads[AT]["b"] = held.grads[AT]["b"].reshape(20, 3)
        held.grads[AT]["b"][:, 1] = kept[:, 1]
    (reference,) = record.references["structure"]
    grads = {**reference.grads, "b": reference.grads["b"].reshape(20, 3)}
    other = replace(reference, grads=grads, by_term={"loss": grads})
    record = replace(record, spec=spec, references={"structure": [other]})
    cause = diagnose(compared(record)).causes[0]
    assert (cause.kind, cause.standing) == ("not_reduced" if each else "overwritten", "proved")
    start = "b on rank 0: 20 elements, those at 1 of dimension 1, that several ranks' gradients"
    assert cause.because[0].startswith(start)
    if each:
        assert cause.cause == (
            "in a part of b rank 0-2 each hold what their own backward gave, and nothing of the "
            "others: it is not reduced there, or the sum is not put back"
        )


def test_a_sample_is_evenly_apart_and_everything_of_a_small_tensor():
    assert sample_of(5).tolist() == [0, 1, 2, 3, 4]
    assert sample_of(4 * SAMPLES).tolist() == list(range(0, 4 * SAMPLES, 4))
    assert sample_of(0).numel() == 0


def clipped(*often):
    """Rank i's first backwards count so often, the last one once."""
    return torch.stack([RIGHT[i] * torch.tensor([n, 1.0]) for i, n in enumerate(often)])


@pytest.mark.parametrize(
    ("often", "words"),
    [
        ((0.5, 1.0, 0.2), "; as if what a rank had added up was multiplied by 1/2 after backward 0 "
         "on rank 0; by 1/5 after backward 0 on rank 2: look for a clip"),
        ((1.0, 1.0, 1.0 / 3), "was multiplied by 1/3 after backward 0 on rank 2: look for a clip"),
    ],
)  # fmt: skip
def test_what_was_done_to_a_sum_between_its_backwards_is_said(often, words):
    assert words in cause_of(*[clipped(*often)] * 3).cause


def test_of_ranks_that_count_alike_in_all_backwards_nothing_was_done_in_between():
    table = RIGHT * torch.tensor([[2.0], [1.0], [1.0]])
    assert "as if" not in cause_of(*[table] * 3).cause
    late = RIGHT * torch.tensor([1.0, 2.0])
    assert "as if" not in cause_of(*[late] * 3).cause


def test_multiplications_after_each_part():
    assert multiplied_between([0.25, 0.5, 1.0], "micro-batch") == (
        "1/2 after micro-batch 0, 1/2 after micro-batch 1"
    )
    assert multiplied_between([1.0, 2.0], "step") == "1/2 after step 0, 2 after step 1"


@pytest.mark.parametrize(("norms", "clips"), [((3.0, 3.0, 3.0), True), ((3.0, 3.0, 3.1), False)])
def test_sums_that_have_one_norm_after_they_were_multiplied_were_clipped(monkeypatch, norms, clips):
    monkeypatch.setitem(SIZES, "w", (20, 30))  # all of it is kept
    drawn = torch.Generator().manual_seed(5)
    own = [torch.randn(RANKS, PASSES, *s, generator=drawn).double() for s in SIZES.values()]
    table = RIGHT.clone()
    for rank, norm in enumerate(norms):
        first = torch.cat([g[rank, 0].reshape(-1) for g in own])
        table[rank, 0] *= norm / float(first.norm())
    cause = cause_of(table, table, table)
    assert cause.kind == "weights_of_ranks"
    said = [text for text in cause.because if "clipping to 3 does" in text]
    assert bool(said) == clips


def strange(record):
    """What ranks hold is none of any sum."""
    drawn = torch.Generator().manual_seed(9)
    ranks = {
        r: replace(held, grads={
            **held.grads, AT: {n: torch.randn(g.shape, generator=drawn).double()
                               for n, g in held.grads[AT].items()}})
        for r, held in record.ranks.items()
    }  # fmt: skip
    return replace(record, ranks=ranks)


def case_of(record):
    return Case(record=record, tier="structure", step=0, diffs=compared(record).diffs)


@pytest.mark.parametrize(
    ("wanted", "even"),
    [
        (EVEN, True),
        (EVEN * 6, True),
        (RIGHT, False),
        (torch.where(EVEN > 0, torch.tensor([[1.0, 2.0]] * 3).double(), 0.0), False),
    ],
)
def test_own_gradients_that_add_up_evenly(wanted, even):
    case = case_of(strange(record_of([RIGHT] * RANKS, wanted=wanted)))
    assert add_up_evenly(case) == even
    assert not add_up_evenly(case_of(strange(record_of([RIGHT] * RANKS, wanted, keep=False))))


def test_they_are_not_even_where_parameters_differ_in_the_factor():
    record = strange(record_of([RIGHT] * RANKS, wanted=EVEN))
    (reference,) = record.references["structure"]
    grads = {n: g * (2 if n == "b" else 1) for n, g in reference.grads.items()}
    other = replace(reference, grads=grads, by_term={"loss": grads})
    assert not add_up_evenly(case_of(replace(record, references={"structure": [other]})))


@pytest.mark.parametrize("empty", [False, True])
def test_a_backward_that_gave_nothing_counts_as_the_others_of_its_rank(empty):
    record = record_of([RIGHT] * RANKS, wanted=EVEN)
    if empty:
        nothing = {n: own * torch.tensor([0.0, 1.0])[:, None]
                   for n, own in record.ranks[1].grads[OWN, 0].items()}  # fmt: skip
        ranks = {**record.ranks}
        ranks[1] = replace(ranks[1], grads={**ranks[1].grads, (OWN, 0): nothing})
        record = replace(record, ranks=ranks)
        own = {n: [ranks[r].grads[OWN, 0][n] for r in range(RANKS)] for n in SIZES}
        (reference,) = record.references["structure"]
        # All of `b` is sampled: it alone is the sum of what is there now.
        b = sum(o.sum(0) for o in own["b"]).reshape(SIZES["b"]) / 6
        grads = {**reference.grads, "b": b}
        other = replace(reference, grads=grads, by_term={"loss": grads})
        record = replace(record, references={"structure": [other]})
    case = case_of(strange(record))
    found = [m for m in mixed(case) if m.names == ("b",) or not empty]
    assert found
    assert all(m.got is None and m.only for m in found)
    assert all(near(m.wanted, torch.full_like(m.wanted, 1 / 6)) for m in found)


@pytest.mark.parametrize("wrong", [True, False])
def test_ranks_that_keep_their_own_are_told_beside_a_backward_that_gave_nothing(wrong):
    """As of rows without a target: any weight is its, and none is another's."""
    record = record_of([only(r, 0.25) if wrong else RIGHT for r in range(RANKS)])
    nothing = {n: own * torch.tensor([1.0, 0.0])[:, None]
               for n, own in record.ranks[2].grads[OWN, 0].items()}  # fmt: skip
    own = {r: dict(held.grads[OWN, 0]) for r, held in record.ranks.items()} | {2: nothing}
    for r, held in record.ranks.items():
        table = only(r, 0.25) if wrong else RIGHT
        held.grads[OWN, 0] = own[r]
        for name in SIZES:
            place = sample_of(held.grads[AT][name].numel())
            got = sum(table[i, p] * own[i][name][p] for i in range(RANKS) for p in range(PASSES))
            held.grads[AT][name].view(-1)[place] = got
    (reference,) = record.references["structure"]
    for name in SIZES:
        wanted = sum(RIGHT[i, p] * own[i][name][p] for i in range(RANKS) for p in range(PASSES))
        reference.grads[name].view(-1)[sample_of(reference.grads[name].numel())] = wanted
    causes = diagnose(compared(record)).causes
    assert [c.kind for c in causes] == (["not_reduced"] if wrong else [])
    if wrong:
        assert "rank 0-2 each keep what their own backward gave (times 1/4)" in causes[0].cause


def test_an_empty_backward_beside_others_that_count_unlike_has_no_weight_of_theirs():
    empty = torch.tensor([[False, False, True], [False, True, False]])
    table = torch.tensor([[1.0, 2, 0], [0.5, 0, 0.5]]).double()
    filled = _filled(table.reshape(-1), empty)
    assert filled.tolist() == [1, 2, 0, 0.5, 0.5, 0.5]


def test_elements_are_told_by_a_dimension_where_they_are_all_of_it():
    cell = SimpleNamespace(index=None, measured=torch.zeros(4, 3))
    assert _where(cell, torch.tensor([1, 4, 7, 10])) == ", those at 1 of dimension 1,"
    assert _where(cell, torch.tensor([1, 4, 7, 10, 2])) == ""
    assert _where(cell, torch.tensor([3, 4, 5])) == ", those at 1 of dimension 0,"


def test_weights_that_are_of_some_parameters_alone_are_said_to_be_of_those():
    """As where each parameter's owner counts its own gradient once more."""
    one, other = record_of([RIGHT + only(0, 0.25)] * 3), record_of([RIGHT + only(1, 0.25)] * 3)
    for rank, held in one.ranks.items():
        held.grads[AT]["b"] = other.ranks[rank].grads[AT]["b"]
    cause = diagnose(compared(one)).causes[0]
    (of, elsewhere) = ("w", "b") if "in w on" in cause.cause else ("b", "w")
    assert cause.cause.startswith(f"every gradient: in {of} on rank 0-2, the ranks' own gradients")
    assert any(line.startswith(f"rank 0-2, {elsewhere}: ") for line in cause.because)
