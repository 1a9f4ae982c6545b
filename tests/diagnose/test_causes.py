"""Causes of real bugs, from the failed run alone: one of each kind that looking at modules names.

`scripts/right_causes.py` runs all of tests/bugs; docs/data/causes_*.json is what came out.
"""

from __future__ import annotations

import json

import pytest
import right_causes
from conftest import ROOT, shipped
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "kind", "standing"),
    [
        ("a_21", "backward", "likely"),
        ("a_23", "other_parameters", "likely"),
        ("a_26", "late_gradient", "proved"),
        ("a_27", "too_few_ranks", "proved"),
        ("a_33", "rows_read", "proved"),
        ("a_39", "loss_weights", "likely"),
        ("b_02", "forward", "likely"),
        ("b_09", "recomputed", "likely"),
        ("b_23", "counted_again", "proved"),
        ("b_26", "block_factor", "likely"),
        ("b_33", "backward", "likely"),
        ("b_42", "term_by_rows", "proved"),
        ("c_06", "own_value", "proved"),
        ("c_15", "skipped_collective", "proved"),
        ("c_17", "backward", "likely"),
        ("c_21", "rank_scale", "proved"),
        ("d_06", "late_gradient", "proved"),
        ("e_06", "foreign_backward", "proved"),
        ("e_18", "factor", "likely"),
        ("e_19", "term_factor", "likely"),
        ("f_16", "loss_at_tokens", "likely"),
        ("g_07", "backward", "likely"),
        ("h_03", "other_parameters", "likely"),
        ("i_02", "lost_rows", "proved"),
        ("j_02", "micro_batches", "proved"),
        ("j_17", "forward", "likely"),
        ("k_02", "untied", "likely"),
        ("k_08", "backward", "likely"),
        ("o_11", "recomputed", "likely"),
        ("o_15", "skipped_collective", "proved"),
    ],
)
def test_a_bug_has_the_cause_that_it_is(name, kind, standing, sumgrad_launcher):
    """What is likely is proved where an edit made it right in the time that there was."""
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    row = right_causes.run(path, "Buggy", sumgrad_launcher, tiers=("structure",))
    assert (row["status"], row["kind"]) == ("fail", kind), row["said"]
    assert row["standing"] in (standing, "proved"), row["said"]
    assert row["place"], row["said"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "k_05",
            "the forward is right up to blocks.0.qkv (Linear); what goes into blocks.0.out "
            "(Linear) is wrong already on rank 1-2",
        ),
        ("l_05", "look at what changes it, or gathers it again, before the backward"),
        (
            "l_14",
            "look at what runs between encoder (Sequential) and decoder.0 (Linear): the gradient "
            "of what goes into decoder.0 is right, and at what else uses it, up to the loss",
        ),
        (
            "l_16",
            "some of what goes into near (Linear) is nothing that goes into it in the single "
            "process on rank 0-2",
        ),
        ("k_14", "and by 1/46 on rank 1, 3, whose gradients are right"),
        ("k_12", "the backward of GroupedLinear gives for weight is not the derivative of its for"),
        ("m_03", "rows 6-17 are not in the gradient of"),
        (
            "d_07",
            'value_term_by_local_tokens.py:92 `return value / mask.sum() / ctx.axes["dp"]`, in it '
            "`value / mask.sum()` divides by 12 (on rank 0), 10 (on rank 1-2); were it 32/3 in all",
        ),
        ("az_07", "in it `scale.detach()` gives on rank 0-2, and in the single process a gradient"),
        ("ax_02", "rank 0 takes rows 0-1 in calls 0-1, rows 2 in calls 0, 2; rank 1 takes rows 6"),
        ("ax_03", "makes head.bias, head.weight, scale and 4 more, which are right: look at what"),
        ("ax_06", "its second argument is blocks.middle.weight, by its numbers; in the single pro"),
        ("ax_09", "in the single process: layers.4 is called in place of layers.6, or is"),
        ("u_10", "`return torch.tensor(target.numel())`, 69 (were it 47, the gradient were right)"),
        ("l_07", "`return weight / weight.max()`, 0.305384 times the single process's (on rank 0)"),
        ("m_06", "on rank 1 1/2 times at positions 0-1, 4-5 of 6 in rows 0-6"),
        ("c_05", "micro-batch 0-1 over rank 0-1 and over rank 2-3; micro-batch 2 over rank 0-3"),
        ("c_13", "of lstm's 3 outputs the first alone could be compared"),
        ("f_04", "hands on what one rank has, where the sum of what all of them have is right"),
        ("f_20", "with weights of their own: 2/5, 3/10, 3/10 of rank 0, 1, 2"),
        ("g_12", "of each such vector of what goes in elements 4-11 of 16 are not what stands"),
        ("l_19", "policy is counted 17/27 = count of policy/count of kl times; the other terms"),
        ("af_08", "on rank 0, 2 it is computed again in the backward, and is right then: look at"),
        ("af_10", "of attention.inv_freq, on rank 1-2, all its elements are zeros"),
        ("c_17", "a reentrant checkpoint has no graph of its first pass, so what is taken"),
        (
            "t_02",
            "has reduction='batchmean' on rank 0-2, and in the single process reduction='sum'",
        ),
        ("q_10", "initial is counted 1/3 = 1/dp times; the other terms are right"),
        ("ab_01", "row 3 in call 0 has at places 0-1 those of row 3, at 2-3 those of row 12"),
        (
            "ab_05",
            "in it `LongConvolution.apply(u, self.filter(u.dtype), self.turn)` in blocks.1 is",
        ),
        ("ab_10", "the backward of rank 0, 3 gives layers.0.adapters.0.down.weight one, that of"),
        ("ad_02", "takes 1 of rank 0; at the end of the step it is not seen to be a sum of that"),
        ("ad_07", "in 1 of 2 backwards and is not handed back"),
        (
            "ad_10",
            "moe.experts.1.up.weight on rank 0 lacks exactly what reached its copy on rank 0",
        ),
        ("ad_09", "the backward is right down to mixer.leave (Linear); the gradient that reaches"),
        ("ac_08", "on rank 1 features 4-7, 18-23 stand beside columns 10-19 of 30"),
        ("ac_10", "experts.1.up, experts.1.down on rank 0, 2"),
        ("e_09", "td_target_keeps_graph.py:32 `last = reward[:, t] + DISCOUNT * mixed * goes_on"),
        ("j_07", "in it `self.entropy.apply(logits, tp)` is right on rank 0-3, and that of its"),
        (
            "z_03",
            "in it `total**2` takes what is right only as a sum over ranks, and what it gives",
        ),
        (
            "z_08",
            "z_08_expert_exchange.py:61 `y = y.index_add(0, at, expert(x[at]) * gates[at, None])`",
        ),
        ("z_05", "call 1 gets those of call 0-1, call 2 gets those of call 0-2, call 3 gets"),
        ("h_10", "is another, with other numbers for the keys of a query on rank"),
        ("m_09", "came back as something else on rank 0: it goes through the hooks for saved"),
        ("m_12", "summed over the 4 backwards that reach it"),
        ("p_02", "on rank 0 it is the gradient of vectors that rank 1 holds; on rank 1"),
        ("r_04", "other vectors of its own: call 0 gets that of call 4, call 1 gets that of"),
        ("r_08", "what goes into blocks.0.over then is another already, its numbers in other"),
        ("r_10", "the backward of FusedLoss gives for weight is not the derivative of its forward"),
        ("s_05", "in the single process autograd passes there "),
        ("x_01", "without one: for one, vectors 12-13 of 14 on rank 0 in call 1"),
        ("x_02", "the same gradient came 2 times to the output of chunks.2"),
        ("w_07", "dp, pp gives the same number; unequal sizes separate them"),
        (
            "x_05",
            "summed over all ranks and calls, is wrong: the backward of BiasedAttention (backw",
        ),
        ("ah_01", "is computed again in the backward in place of blocks.0.now, blocks.1.now, on"),
        ("ah_05", "there the single process has no gradient"),
        (
            "ah_05",
            "`memory = start.scatter(1, slot, sent)` is right where no place is written twice",
        ),
        ("ah_08", "is wrong already on rank 1, 3"),
        (
            "aj_09",
            "gives for logits is not the derivative of its forward, by finite differences on al",
        ),
        ("aj_09", "ranks (0, 1, 2, 3)"),  # zeros of targets that others hold accuse nobody
        (
            "ah_04",
            "had made of it in place, on rank 0-1\nblocks.0, blocks.1 have in_place = True on rank",
        ),
        ("ak_09", "ak_09_residual_added_into_the_kept_input.py:62 `x = x.add_(y) if self.in_pl"),
        ("ai_10", "96 `back[:, halo] = inbox.grad` reads was there still when the next backward"),
        ("ai_07", "next_observation_after_the_automatic_reset.py:39 `after = rows["),
        ("al_03", "`labels` of the batch: row 0 of call 0 is row 0 of it; row 1 of call 0 is row"),
        ("al_04", "of the parameters features.weight alone is wrong: look at the backward of Bag"),
        ("al_05", "in is 2.44949 (the square root of 6) times one that is there in the single"),
        (
            "al_06",
            "al_06_places_scaled_back_by_the_other_side.py:82 `read = Sample.apply(values, places, "
            "self.swapped)` is right on rank 1-2, and that of its second tensor argument",
        ),
        (
            "al_01",
            "gets in place of what is given at (0, 0, 9) of the result on rank 1 what is given at "
            "(0, 0, 0) of the result on rank 1, where number (0, 0, 5) of rank 0 went",
        ),
        ("e_07", "at (0, 0) of the result on rank 3, where number (0, 0) of rank 2 went"),
        ("al_07", "is 1 times its first result's, 0 times its second result's share of the der"),
        (
            "an_07",
            "`return torch.cat(every)` gives on rank 1 vectors 0-1 of what image gives on ra",
        ),
        (
            "aj_06",
            "aj_06_hook_weights_what_it_finds_by_the_latest_count.py:42 `buffer = bucket.buf",
        ),
        ("bd_03", "(4 x 5 x 6)\nthis line, which the single process does not run, gives"),
        ("bd_03", "in it `torch.einsum("),
        ("az_02", "wrong already on rank 0-1\nmixer has causal = False in call 3 on rank 0 (and"),
        (
            "cf_02",
            "mask` changes the numbers of first.weight, blocks.0.weight, blocks.1.weight out",
        ),
        (
            "cf_03",
            "the backward of FusedSnakeKernel gives for alpha is not the derivative of its f",
        ),
        ("bg_01", "call 0 has 6 numbers, of which the first 1 alone are a bag of the single"),
        (
            "bg_02",
            "mixture has adds = False on rank 0-3, and True in the single process\nthe forward",
        ),
        ("bl_04", "with what the allreduce(SUM) of 12 float64 over ranks 0-1, at bl_04_gate"),
        ("bm_09", "mix.0.weight and 3 more is not reduced over dp: its ranks keep their own"),
        ("bo_02", "all put the same numbers into the allreduce(SUM) of 12 float64 over ranks"),
        ("al_08", "both_branches_hang_a_hook_on_it.py:33 is whole already: it is counted 3 times"),
        ("al_09", "layers.10.linear.weight and 5 more is summed already: it is counted 3 times"),
        ("ap_04", "`context = (scores + mask).softmax(-1) @ self.value(y)` is finite still; in t"),
        ("ap_06", "the ranks call Entry in another order: what rank 0 hands it in call 0 rank 1 h"),
        ("aq_07", "users.weight on rank 2 lacks what rank 1 gave in rows 10, 13; items.weight on"),
        ("bh_06", "were the second argument of `mul` along its dimension 0 at 0 17/20 times what"),
        ("ax_05", "`a @ t`: were its `matmul` with its two arguments the other way round, what "),
        ("bj_05", "were the first argument of `sub` 6 less in 6 of 32 elements, what goes into l"),
        ("bj_06", "scatter(1, chosen, self.weigh(sco...` gives, is 2/5 times what it is there"),
        ("bj_09", "it goes wrong in cell (Cell at"),
        ("bk_07", "are the same bits on all 2 ranks; so are those of ranks 2-3"),
        ("x_07", "whether by the same is not known: rows 4-7, 11-13 count on no"),
        ("y_06", "was multiplied by 2/3 after micro-batch 0, 1/3 after micro-batch 1"),
        ("y_08", "`sub` of shapes (3, 1) and (3) pairs every number of one with every number"),
        (
            "s_06",
            "goes to no place, and gets what is given at (0, 1) of the result on rank 0, where",
        ),
        ("bn_01", "multiplies words.weight twice by 0.0168645 on rank 0, and enter.weight, leave"),
        ("br_10", "(1 / self.p)` (Reciprocal) is counted 3 times as often as it should be; what"),
        ("p_02", "gives for k, v is not the derivative of its forward, by finite differences on "),
        ("bs_03", "was found on no rank (rows 5, 9, 16 of table.weight): look at what is handed"),
        ("o_04", "ranks (0, 1, 2, 3)"),  # both groups of the axis, not the first alone
        (
            "o_03",
            "it is the gradient of tokens that have none in the single process: class 12 at "
            "position 5 of row 5 on rank 2, where that has no gradient: look at how targets are",
        ),
        ("cj_06", "layers.10 is called in place of layers.2, or is handed what belongs to that"),
        ("cj_08", "takes in the single process, and no rank calls smooth_l1_loss on it"),
        ("cj_09", '`heat = torch.trapezoid(flow, rows["time"])` gives from what ranks have, too'),
    ],
)
def test_a_module_is_told_from_what_goes_into_it(name, words, sumgrad_launcher):
    """Without anything that is tried, which most of the time would go into."""
    assert_told(name, words, sumgrad_launcher, search_s=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ax_08", "where a sum belongs in between it is missing (cross is called at tests/bugs/ax"),
        ("ax_10", "is that of the second argument of tests/bugs/ax_10_divergence_counted_from_the"),
        ("g_03", "the factors go with two lines together: tests/bugs/g_03_dynamic_batches_weig"),
        ("a_42", "one, made at tests/bugs/a_42_moe_combine"),
        ("e_08", "nowhere: tests/bugs/e_08_two_tower_logq_order.py:45 `logits = 4 * users @"),
        (
            "ad_01",
            "at tests/bugs/ad_01_offload_takes_the_transpose_for_its_base.py:20 came back as ",
        ),
        ("x_06", "was not seen there: tests/bugs/x_06_minus_one_names_the_last_expert.py:64"),
        ("z_02", "rank 0-2, and that of its first tensor argument (backward at tests/bugs/z_02"),
        ("z_10", "what has a backward of its own there is ParallelFocal (backward at tests/bugs/"),
        ("x_03", "or in the backward of Summa (backward at tests/bugs/x_03_"),
        ("ai_08", "autograd knows nothing of what tests/bugs/ai_08_table_rows_cut_to_length"),
        (
            "aj_05",
            "takes as its first argument, when the backward runs it again, not what it took in "
            "the forward but what tests/bugs/aj_05_checkpointed_block_adds_into_its_own_input.py"
            ":30 `x += self.places` had made of it in place",
        ),
        (
            "h_06",
            "Halo (backward at tests/bugs/h_06_halo_gradient_overwrites_the_edge.py:40) "
            "does not take gradients back the way that its forward takes numbers",
        ),
        (
            "an_05",
            "wrong on rank 0-1: the backward of HalfSpectrum (backward at tests/bugs/an_05_interior"
            "_bins_come_back_twice.py:55) is not the derivative of its forward",
        ),
        (
            "an_04",
            "what hooks of the step compute while the backward runs: tests/bugs/an_04_scales",
        ),
        (
            "au_09",
            "loops.to(own.dtype))`\nwhat it takes on rank 0 is made at tests/bugs/au_09_every",
        ),
        ("bf_09", "its numbers on rank 2 come from rank 1 at tests/bugs/bf_09_handed_on_before_it"),
        ("cf_10", "_score.py:57 `return (pulled * signs.draw(x)).sum(1)`, where that has tests/bu"),
        ("cg_10", "self.couplings[:, :, lo:hi].permute(2, 3, 0, 1))`, every gradient of every"),
        (
            "a_38",
            'sum_before(ids.shape[1], "cp") + ids.shape[1], device=ids.device)`, where sum_be',
        ),
        ("bg_03", "floor)[..., None]`: the second argument of `maximum`, made at tests/bugs/bg_03"),
        ("al_10", "what enters the model was made at tests/bugs/al_10_rows_left_in_the_fixed_buf"),
        ("aq_10", "what the model is handed as edges, made at tests/bugs/aq_10_way_back_of_the_as"),
        ("ao_08", "were its `softmax` over dimension 2, what goes into tests/bugs/ao_08_gates_co"),
        ("br_03", "whose numbers rank 0 made at tests/bugs/br_03_interface_seen_from_one_side.py:"),
        (
            "bp_04",
            "`return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)`: were its "
            "second argument 1/2 times what it is, every gradient of every rank would be right",
        ),
        (
            "bp_08",
            "`return (a * b).sum((1, 2))`: were what it gives summed over the ranks of time, and "
            "its gradient, too, every gradient of every rank would be right",
        ),
        (
            "bu_01",
            "in it `slope[:, lo:hi]`: were its first argument summed over the ranks of domain, and "
            "its gradient, too, every gradient of every rank would be right",
        ),
        ("bu_06", "were its second argument, which all ranks add, a part of it on each, so that a"),
    ],
)
def test_what_is_told_where_it_is_run_again_otherwise(name, words, sumgrad_launcher):
    """The words that a change, or an edit, brings, or leaves behind the cause."""
    assert_told(name, words, sumgrad_launcher)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cj_01", "self.padding_idx, None, 2.0, not self.dense_grad)`, every gradient of every"),
        ("cj_04", "were it `self.pending = []; self.group = group`, every gradient of every rank"),
        ("cj_06", "were it `return list(model.layers)`, every gradient of every rank would be ri"),
        ("ck_04", "were it `return list(reversed(saved))`, every gradient of every rank would be"),
        ("ck_09", "were it `return before, world / before`, every gradient of every rank would b"),
        (
            "cn_04",
            "`return SEED + dist.get_rank(self.group)`: were it `return SEED`, they would be",
        ),
        ("cn_08", "descending=True).argsort(-1)`, every gradient of every rank would be right"),
        ("cn_09", "were it `ctx.states.append(state.detach().clone())`, every gradient of every r"),
        ("co_04", "were it `return ([a + b for a, b in zip(total, grads)] if total else grads)`"),
        ("co_05", "own_u.copy_(F.normalize(layer.weight @ v, dim=0)) return own_u.clone(), v`, e"),
        (
            "co_06",
            "were it `return torch.cat([part * scale for scale in scales for part in parts],",
        ),
        ("co_10", "were they over the ranks of dp, every gradient of every rank would be right"),
    ],
)
def test_an_edit_that_makes_it_right_is_told(name, words, sumgrad_launcher):
    """Of what distributes, too; in the time that it takes on a machine that does much else."""
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    more = {"tiers": ("structure",), "search_s": 40.0}
    row = right_causes.run(path, "Buggy", sumgrad_launcher, **more)
    assert words in row["said"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("topology", "fault", "kind", "words"),
    [
        ("hsdp", "skip:all_gather@shard#1", "gathered_weights",
         "up (Linear) computes with other weights than the model's: up.weight (and up.bias) on "),
        ("hsdp", "scale_one:all_gather@shard#0", "gathered_weights",
         "embed.weight, on rank 0-1, 4, elements 60-84 of 85 are 1.001 times what they should"),
        ("hsdp", "missing_wait:all_gather@shard#4", "gathered_weights",
         "in the backward up.weight (and up.bias) on rank 0-5 is not the model's"),
        ("hsdp", "low_precision:all_gather@shard#2", "low_precision", "runs in bfloat16"),
        ("hsdp", "low_precision:reduce_scatter@shard#2", "low_precision", "runs in bfloat16"),
        ("hsdp", "skip:reduce_scatter@shard#0", "skipped_collective", "rank 0 holds rows 0-2, 7-8"),
        ("hsdp", "copy:allreduce@replicate#0", "unused_result", "is right and is not used"),
        ("hsdp", "missing_wait:allreduce@replicate#1", "missing_wait", "is read too early: a part"),
        # Its count is a sum of weights, and no whole number.
        ("sequence_parallel", "avg:allreduce@dp#0", "avg",
         "averages a count that every gradient is divided by"),
        ("tensor_parallel", "skip:allreduce@tp#0", "skipped_collective",
         "the sum over tp of what 0.down (Linear) gives is missing"),
        ("tensor_parallel", "copy:allreduce@tp#0", "unused_result",
         "is not used on rank 0: the output of 0.down has what it has itself in its place"),
    ],
)  # fmt: skip
def test_a_planted_fault_alone_is_named(topology, fault, kind, words, tmp_path, sumgrad_launcher):
    asked = CheckOptions(topology=shipped(topology), fault=fault, out=tmp_path / "run", steps=2)
    verdict, _ = run_check(asked, launcher=sumgrad_launcher)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == kind, right_causes.said_by(verdict)
    assert words in right_causes.said_by(verdict)


@pytest.mark.distributed
def test_a_count_in_few_digits_is_unknown_and_is_said_to_be_one(sumgrad_launcher):
    """The same error in every gradient is no rounding of single elements."""
    (path,) = right_causes.BUGS.glob("e_17_*.py")
    row = right_causes.run(path, "Buggy", sumgrad_launcher)
    assert row["status"] == "unknown"
    assert "every gradient is multiplied by 0.996154" in row["said"]
    assert "bfloat16 at e_17_token_count_in_bfloat16.py:63" in row["said"]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["a_24", "a_40", "b_33", "a_06"])
def test_nothing_looks_wrong_in_a_right_twin(name, sumgrad_launcher):
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    row = right_causes.looked_at(path, sumgrad_launcher)
    assert (row["status"], row["wrong"]) == ("pass", []), row["said"]


@pytest.mark.distributed
def test_a_right_twin_that_is_cut_otherwise_in_each_tier(sumgrad_launcher):
    """FSDP1 pads its flat parameters by bytes: a rank holds other elements in float32."""
    (path,) = right_causes.BUGS.glob("a_32_*.py")
    row = right_causes.run(path, "Clean", sumgrad_launcher)
    assert (row["status"], row["kind"]) == ("pass", None), row["said"]


# Steps on these need `.[examples]`.
LIBRARIES = ("transformers", "tokenizers", "accelerate", "peft")


def assert_told(name, words, launcher, **more):
    (path,) = right_causes.BUGS.glob(f"{name}_*.py")
    row = right_causes.run(path, "Buggy", launcher, tiers=("structure",), **more)
    for line in words.split("\n"):
        assert line in row["said"]


def test_every_bug_says_what_a_right_cause_is_and_is_in_one_half():
    halves = right_causes.halves()
    assert {half: len(paths) for half, paths in halves.items()} == {
        "learn": 42, "sealed": 42, "second": 42, "third": 40, "fourth": 40, "fifth": 40,
        "sixth": 40, "seventh": 20, "eighth": 32, "ninth": 28, "tenth": 20,
        "eleventh": 20,
        "twelfth": 20,
        "thirteenth": 20,
        "fourteenth": 20,
        "fifteenth": 20,
        "sixteenth": 20,
        "seventeenth": 20,
        "eighteenth": 20,
        "nineteenth": 20,
        "twentieth": 20,
        "twenty-first": 20,
        "twenty-second": 20,
        "twenty-third": 20,
        "twenty-fourth": 20,
        "twenty-fifth": 20,
        "twenty-sixth": 20,
        "twenty-seventh": 20,
        "twenty-eighth": 20,
        "twenty-ninth": 20,
        "thirtieth": 20,
        "thirty-first": 20,
        "thirty-second": 19,
        "thirty-third": 20,
        "thirty-fourth": 20,
        "thirty-fifth": 20,
        "thirty-sixth": 20,
        "thirty-seventh": 20,
        "thirty-eighth": 20,
        "thirty-ninth": 20,
        "fortieth": 20,
        "forty-first": 20, "forty-second": 20, "forty-third": 20, "forty-fourth": 20,
        "forty-fifth": 20, "forty-sixth": 20, "forty-seventh": 20,
        "forty-eighth": 20, "forty-ninth": 20, "fiftieth": 20,
    }  # fmt: skip
    for paths in halves.values():
        for path in paths:
            try:
                module = right_causes.load(path)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in LIBRARIES:
                    raise
                continue
            assert set(module.EXPECT) == {"right", "place", "wrong"}, path
            assert all(module.EXPECT.values()), path
            assert issubclass(module.Buggy, module.Clean), path


@pytest.mark.parametrize(
    ("said", "marks"),
    [
        ("norm is not reduced", (True, True, [])),
        ("NORM is not\nreduced", (True, True, [])),
        ("norm is reduced twice", (False, True, ["twice"])),
        ("", (False, False, [])),
    ],
)
def test_marks_of_a_cause(said, marks):
    expected = {"right": ["not.reduced"], "place": ["norm"], "wrong": ["twice"]}
    assert tuple(right_causes.marked(said, expected).values()) == marks


def test_the_tables_are_of_the_split_that_was_drawn():
    for half, paths in right_causes.halves().items():
        table = json.loads((ROOT / "docs" / "data" / f"causes_{half}.json").read_text())
        assert table["drawn"] == right_causes.DRAWN
        assert {row["name"] for row in table["rows"]} == {path.stem for path in paths}
        assert table["right"] == sum(row["right"] for row in table["rows"])
