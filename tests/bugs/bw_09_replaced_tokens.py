"""ELECTRA pre-training with transformers: a small masked language model (generator) fills the masked places by sampling, a discriminator says of every token whether it was replaced. Three data parallel ranks,
two micro-batches, gradients all-reduced by hand; the loss is generator + 6 * discriminator, over all tokens of the global batch. Sampling uses Gumbel noise that belongs to the rows.

The bug: the discriminator's labels are the mask of the masked places. Where the generator happened to sample the original word, nothing was replaced and the label is 0 (the ELECTRA paper says so, and its
code compares the sampled ids with the original ones). A frequent slip in reimplementations (electra_pytorch and others).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, MASK = 13, 8, 6, 0
MICRO_BATCHES, WEIGHT = 2, 6.0


def config(width):
    return ElectraConfig(
        vocab_size=VOCABULARY, embedding_size=8, hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=13, max_position_embeddings=LENGTH, type_vocab_size=1, pad_token_id=None,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip


class Electra(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = ElectraForMaskedLM(config(6))
        self.discriminator = ElectraForPreTraining(config(10))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Electra().train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        uniform = torch.rand(ROWS, LENGTH, VOCABULARY, generator=g).clamp(1e-6, 1 - 1e-6)
        masked = torch.rand(ROWS, LENGTH, generator=g) < 0.35
        masked[:, 2] = True
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g),
            "masked": masked,
            "gumbel": -(-uniform.log()).log(),
        }

    def corrupted(self, rows, logits):
        """Input and labels of the discriminator."""
        logits = logits.detach().clone()
        logits[..., MASK] = float("-inf")
        sampled = (logits + rows["gumbel"]).argmax(-1)
        ids = torch.where(rows["masked"], sampled, rows["ids"])
        return ids, ids != rows["ids"]

    def generate(self, model, rows):
        logits = model.generator(input_ids=rows["ids"].masked_fill(rows["masked"], MASK)).logits
        loss = F.cross_entropy(logits.transpose(1, 2), rows["ids"], reduction="none")
        return (loss * rows["masked"]).sum(), logits

    def discriminate(self, model, ids, replaced):
        logits = model.discriminator(input_ids=ids).logits
        return F.binary_cross_entropy_with_logits(logits, replaced.to(logits), reduction="sum")

    def loss_sum(self, model, rows):
        loss, logits = self.generate(model, rows)
        ids, replaced = Clean.corrupted(self, rows, logits)
        return loss + WEIGHT * self.discriminate(model, ids, replaced), ids.numel()

    def step(self, model, batch, ctx):
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for n in range(MICRO_BATCHES):
            part = {k: x.tensor_split(MICRO_BATCHES)[n] for k, x in mine.items()}
            loss, logits = self.generate(model, part)
            ids, replaced = self.corrupted(part, logits)
            loss = loss + WEIGHT * self.discriminate(model, ids, replaced)
            (loss / batch["ids"].numel()).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def corrupted(self, rows, logits):
        logits = logits.detach().clone()
        logits[..., MASK] = float("-inf")
        sampled = (logits + rows["gumbel"]).argmax(-1)
        ids = torch.where(rows["masked"], sampled, rows["ids"])
        return ids, rows["masked"]


EXPECT = dict(
    right=[
        r"label|target|replaced|discriminat|masked",
        (
            r"mask(ed)?\b.{0,80}(instead of|rather than|in place of|taken|used|label|target|as)|(ids )?!= ?(rows)?|equals? .{0,30}original|original.{0,60}(sampled|label|word|token)|sampled.{0,60}(original|correct|same|right)|(label|target|replaced)s?.{0,80}(differ|wrong|other|unlike|not the same|mask)"
        ),
    ],
    place=[r"corrupted", r"replaced", r"discriminat", r"rows\[.masked.\]"],
    wrong=[
        r"(parameter|gradient)s?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|divisor|mean of means|divided by",
        r"generator.{0,40}(is wrong|not reduced|wrong loss)|detach|gumbel.{0,30}(differ|wrong)|random|seed|wrong rows",
    ],
)
WHY = (
    "corrupted returns rows['masked'] as labels of the discriminator, where they have to say which tokens differ from the original (ids != rows['ids']). The masked places at which the generator sampled the "
    "original word (about a fifth or more of them with a vocabulary of six) are labelled as replaced, on every rank and in every micro-batch; only the discriminator's gradients are wrong, on all ranks, those "
    "of the generator are right. A right cause says that the discriminator's labels are the mask and not the comparison with the original. Fix: label ids != rows['ids']."
)
