"""transformers' OLMo 2 (tiny), preference learning with the IPO loss: 7 pairs over dp (3; 3, 2 and
2), micro-batches of two pairs. IPO compares log ratios per token; the reference's log
probabilities come precomputed with the batch, as sums over the answer's tokens.

Bug: the step averages the policy's log probabilities over the tokens, but subtracts the
reference's sums as they lie in the batch. After the reports on TRL's IPO loss, which had to be
changed from sums to means, and on precomputed reference columns.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid
from transformers import Olmo2Config, Olmo2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, T, PAIRS, BETA, ANCHOR = 12, 9, 7, 0.4, 0.2


def answer_log_probs(model, ids, answer):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    words = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (words * answer[:, 1:]).sum(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        config = Olmo2Config(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=9,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
        )
        return Olmo2ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        batch = {}
        for side in ("chosen", "rejected"):
            prompt = torch.randint(2, 5, (PAIRS, 1), generator=g)
            length = torch.randint(1, 5, (PAIRS, 1), generator=g)
            at = torch.arange(T)
            batch[side] = torch.randint(1, WORDS, (PAIRS, T), generator=g)
            batch[side] = batch[side].masked_fill(at >= prompt + length, 0)
            batch[side + "_answer"] = ((at >= prompt) & (at < prompt + length)).long()
            words = 2.0 + 0.6 * torch.randn(PAIRS, 1, generator=g)
            batch[side + "_reference"] = -(words * length).squeeze(-1)
        return batch

    def log_ratio(self, model, rows, side):
        answer = rows[side + "_answer"]
        log_probs = answer_log_probs(model, rows[side], answer)
        return (log_probs - rows[side + "_reference"]) / answer[:, 1:].sum(-1)

    def loss_sum(self, model, rows):
        chosen = Clean.log_ratio(self, model, rows, "chosen")
        rejected = Clean.log_ratio(self, model, rows, "rejected")
        loss = (chosen - rejected - 1 / (2 * BETA)).square() - ANCHOR * logsigmoid(chosen)
        return loss.sum(), chosen.shape[0]

    def pair_losses(self, model, rows):
        chosen, rejected = (self.log_ratio(model, rows, side) for side in ("chosen", "rejected"))
        return (chosen - rejected - 1 / (2 * BETA)) ** 2 - ANCHOR * logsigmoid(chosen)

    def step(self, model, batch, ctx):
        own = torch.arange(PAIRS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            losses = self.pair_losses(model, {k: v[part] for k, v in batch.items()})
            (losses.sum() / PAIRS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def log_ratio(self, model, rows, side):
        answer = rows[side + "_answer"]
        log_probs = answer_log_probs(model, rows[side], answer)
        return log_probs / answer[:, 1:].sum(-1) - rows[side + "_reference"]


EXPECT = dict(
    right=[
        r"reference",
        r"mean|averag|length|tokens?|per.?token|divid|normali[sz]|sum(s|med)?\b|scale",
        r"not (divided|averaged|normali[sz]ed|scaled)|un(divided|normali[sz]ed|scaled)|only|"
        r"sums?\b|without|mismatch|instead|before|outside|as (it|they)|lacks|missing",
    ],
    place=[r"log_ratio", r"_reference", r"answer\[:, 1:\]\.sum", r"pair_losses"],
    wrong=[
        r"(not|never|missing|twice).{0,25}(all.?)?reduc",
        r"uneven.{0,40}(pairs|rows)",
        r"beta.{0,30}(wrong|missing|twice)",
        r"shift.{0,30}(wrong|miss|off)",
        r"mean of (the )?means",
        r"policy('s log.?prob\w*)? (is|are) (summed|not (averaged|divided))",
        r"padding.{0,40}(counted|attended|included)",
    ],
)
WHY = """IPO takes (log pi - log ref) / number of answer tokens. Buggy.log_ratio divides only the
policy's log probability by the number of tokens and subtracts the reference's sum undivided, so
the log ratios are far too large and the residual of the square is wrong; so is every gradient.
Masks, shift, rows and reduction are right. A right cause says that the reference's log
probabilities are not divided by the answer's length. Fix: divide the difference."""
