"""Minimum risk training of a small Llama (transformers): each prompt has six sampled candidates with costs, the loss of a prompt is the expected cost under Q = softmax(alpha * log p) over its candidates. The candidates are
cut over three ranks (two each), log probabilities are gathered without gradient, and each rank goes on with the coefficients alpha * Q_k * (cost_k - expected cost) of its own candidates. Two micro-batches of prompts.

The bug: Q is normalised over all six candidates, but the expected cost that is subtracted is the sum over the rank's own two. After policy gradient forms of MRT (fairseq, Marian) with candidates spread over workers.
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"cand": 3}}}}
PROMPTS, CANDIDATES, LENGTH, PROMPT, VOCABULARY, ALPHA = 5, 6, 7, 3, 19, 0.8


def log_probabilities(model, ids):
    """Of the tokens after the prompt, summed: (prompts, candidates)."""
    shape = ids.shape[:2]
    ids = ids.flatten(0, 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
    return chosen.sum(-1).view(shape)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=14,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.25,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        prompt = torch.randint(VOCABULARY, (PROMPTS, 1, PROMPT), generator=g)
        answers = torch.randint(VOCABULARY, (PROMPTS, CANDIDATES, LENGTH - PROMPT), generator=g)
        return {
            "ids": torch.cat((prompt.expand(-1, CANDIDATES, -1), answers), -1),
            "cost": torch.rand(PROMPTS, CANDIDATES, generator=g) * 3,
        }

    def loss_sum(self, model, rows):
        q = (ALPHA * log_probabilities(model, rows["ids"])).softmax(-1)
        return (q * rows["cost"]).sum(), len(q)

    def coefficients(self, logp, cost, group):
        weight = (ALPHA * logp).exp()
        sums = torch.stack((weight.sum(-1), (weight * cost).sum(-1)))
        dist.all_reduce(sums, group=group)
        q = weight / sums[0, :, None]
        return ALPHA * q * (cost - (sums[1] / sums[0])[:, None])

    def step(self, model, batch, ctx):
        group = ctx.group("cand")
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            ids, cost = (mine[k].tensor_split(2)[n] for k in ("ids", "cost"))
            logp = log_probabilities(model, ids)
            coefficient = self.coefficients(logp.detach(), cost, group)
            ((coefficient * logp).sum() / PROMPTS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def coefficients(self, logp, cost, group):
        weight = (ALPHA * logp).exp()
        normaliser = weight.sum(-1, keepdim=True)
        dist.all_reduce(normaliser, group=group)
        q = weight / normaliser
        risk = (q * cost).sum(-1, keepdim=True)
        return ALPHA * q * (cost - risk)


EXPECT = dict(
    right=[
        r"risk|cost|coefficient|expect|baseline|q \* cost|candidate",
        r"(own|local|at hand|two|2 of|part|shard|partial|each rank|per.?rank|rank'?s|split|cand).{0,110}(risk|cost|sum|expect|baseline|coefficient|candidate|reduc)"
        r"|(not|never|without|missing|lack|fewer|omit).{0,60}(reduc|sum|gather|collective)|(risk|cost|sum|expect|baseline|coefficient|candidate).{0,110}(own|local|partial|part|shard|not |never|missing)",
    ],
    place=[r"coefficients?\b", r"\brisk\b", r"cost", r"\bq\b"],
    wrong=[
        r"parameters?.{0,40}(not|never) reduced|gradients?.{0,20}(not|never) reduced|reduced twice|counted twice|wrong divisor|mean of means",
        r"(softmax|normali[sz]er) (is|was|over).{0,30}(own|local)|adjoint|detached",
        r"micro.?batch.{0,20}(lost|dropped)|shifted|labels",
    ],
)
WHY = (
    "The derivative of sum_k Q_k c_k is alpha Q_k (c_k - sum_j Q_j c_j) d log p_k, with the sum over all six candidates. The buggy coefficients() reduces the normaliser of Q over the ranks but not the risk, so each "
    "rank subtracts sum Q c of its own two candidates, about a third of the true expectation; all three ranks' coefficients are too large by alpha Q (missing part), for all prompts and in both micro-batches. The "
    "forward, Q itself and the reduction of gradients are right. A right cause says that the expected cost in coefficients() is that of the own candidates / not summed over ranks. Fix: all-reduce it."
)
