"""Mamba-2 of transformers, data parallel by hand over three ranks. The parameters are split as for Muon: matrices of the layers in one flat buffer (reduced by Muon's own code), the rest - embedding, head, vectors, scalars - in
another (Adam's). After Muon integrations and the reports on parameters that belong to no group because they have neither one nor two dimensions (convolutions).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import Mamba2Config, Mamba2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY = 7, 9, 31


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=8, num_heads=4, head_dim=4, expand=2, state_size=5, n_groups=1, conv_kernel=3,
            chunk_size=4, num_hidden_layers=2, use_cache=False, tie_word_embeddings=False, use_conv_bias=True,
            initializer_range=0.3, pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return Mamba2ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    @staticmethod
    def for_muon(name, param):
        return param.ndim >= 2 and "embeddings" not in name and "lm_head" not in name

    def groups(self, model):
        muon = [p for n, p in model.named_parameters() if self.for_muon(n, p)]
        adam = [p for n, p in model.named_parameters() if not self.for_muon(n, p)]
        return muon, adam

    @staticmethod
    def reduce_flat(params):
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(part.view_as(p))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()
        for params in self.groups(model):
            self.reduce_flat(params)


class Buggy(Clean):
    def groups(self, model):
        named = dict(model.named_parameters())
        outside = [n for n in named if "embeddings" in n or "lm_head" in n]
        muon = [p for n, p in named.items() if p.ndim == 2 and n not in outside]
        adam = [p for n, p in named.items() if p.ndim < 2 or n in outside]
        return muon, adam


EXPECT = dict(
    right=[
        r"conv1d",
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|omit\w*|left)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchron|collective)|"
        r"only (its|their|the) own|(own|local) (part|share|rows|contribution|gradient)|stays? (on|at)",
    ],
    place=[r"conv1d"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"divides? by (its|their) own (count|number)|own (denominator|divisor)",
        r"backward of \S+ is wrong|gradient of other targets",
        r"(in_proj|out_proj|A_log|dt_bias|mixer\.D|norm|conv1d\.bias)\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial|never|not)",
        r"rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "conv1d.weight of both layers has three dimensions: it is not in the group for Muon (ndim == 2) and not in Adam's (ndim < 2, embedding, head), so nobody reduces it. On each of the three ranks its gradient is only that of its own rows (divided by "
    "the count of all, which is right); the ranks' sum is right. All other parameters, conv1d.bias, A_log, D and dt_bias among them, are reduced and right."
)
