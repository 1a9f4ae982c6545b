"""transformers' EsmForMaskedLM (protein language model, token_dropout, rotary positions); the
lookup of the amino acids is cut over tp (2) by vocabulary: each rank looks up its own words, the
vectors are summed over tp and handed to the model as inputs_embeds. All else is computed on both
ranks. Micro-batches of two of five proteins.

Bug: ESM treats the rows of <mask> as dropped: it sets their vectors to zero and scales the others
by (1 - 0.12) / (1 - share of masks in the sequence); it does so only if it gets input_ids. The
hand-made lookup leaves this out. After reports that ESM-2 gives other outputs for inputs_embeds
than for the same input_ids.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import EsmConfig, EsmForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, LENGTH, WORDS, PAD, MASK = 5, 9, 15, 1, 14


class SumPartials(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        config = EsmConfig(
            vocab_size=WORDS,
            mask_token_id=MASK,
            pad_token_id=PAD,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=14,
            max_position_embeddings=32,
            position_embedding_type="rotary",
            token_dropout=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        return EsmForMaskedLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 210)
        words = torch.randint(4, MASK, (ROWS, LENGTH), generator=g)
        lengths = torch.tensor([9, 6, 8, 5, 7])
        seen = torch.arange(LENGTH) < lengths[:, None]
        chosen = (torch.rand(ROWS, LENGTH, generator=g) < 0.3) & seen
        chosen[:, 2] = True
        labels = words.masked_fill(~chosen, -100)
        words = words.masked_fill(chosen, MASK).masked_fill(~seen, PAD)
        return {"words": words, "seen": seen.long(), "labels": labels}

    def summed(self, logits, labels):
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["words"], attention_mask=rows["seen"]).logits
        return self.summed(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        self.words = [round(i * WORDS / tp) for i in range(tp + 1)][r : r + 2]
        return model

    def lookup(self, model, words, group):
        lo, hi = self.words
        table = model.get_input_embeddings().weight[lo:hi]
        own = (words >= lo) & (words < hi) & (words != PAD)
        found = F.embedding((words - lo).clamp(0, hi - lo - 1), table)
        return SumPartials.apply(found * own[..., None].to(found.dtype), group)

    def embed(self, model, words, seen, group):
        vectors = self.lookup(model, words, group)
        hidden = words == MASK
        vectors = vectors.masked_fill(hidden[..., None], 0.0)
        share = hidden.sum(-1).float() / seen.sum(-1)
        return vectors * (1 - 0.15 * 0.8) / (1 - share)[:, None, None] * seen[..., None]

    def step(self, model, batch, ctx):
        total = (batch["labels"] != -100).sum()
        for rows in torch.arange(ROWS).split(2):
            words, seen = batch["words"][rows], batch["seen"][rows]
            vectors = self.embed(model, words, seen, ctx.group("tp"))
            logits = model(inputs_embeds=vectors, attention_mask=seen).logits
            (self.summed(logits, batch["labels"][rows]) / total).backward()
        table = model.get_input_embeddings().weight
        dist.all_reduce(table.grad, group=ctx.group("tp"))


class Buggy(Clean):
    def embed(self, model, words, seen, group):
        return self.lookup(model, words, group) * seen[..., None]


EXPECT = dict(
    right=[
        r"token.?dropout|mask(ed)? (token|word|row|vector|position|residue)s?|<mask>|mask.?ratio|"
        r"MASK|scal|0\.88|0\.12|factor",
        r"embed|lookup|inputs_embeds|vectors",
        r"token.?dropout|zero|scal|rescal|0\.88|ratio|left out|missing|not applied|without|omit|"
        r"skip|factor",
    ],
    place=[r"\bembed\b", r"\blookup\b", r"inputs_embeds", r"word_embeddings", r"EsmEmbeddings"],
    wrong=[
        r"position.{0,30}(wrong|shift|differ)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"padding.{0,40}(attended|counted|not masked)",
        r"vocab\w*.{0,40}(shard|cut|slice|range).{0,20}(wrong|off|overlap)",
        r"(count|normali[sz]|divisor).{0,30}(local|own|micro)",
    ],
)
WHY = """With token_dropout ESM sets the vectors of <mask> to zero and multiplies every sequence by
0.88 / (1 - its share of masks), but only inside EsmEmbeddings.forward when input_ids are given. The
ranks hand in inputs_embeds from their vocabulary-parallel lookup; Buggy.embed neither zeroes nor
scales, so the first layer sees other vectors and all gradients differ (the row of <mask> even gets
one). Fix: zero and scale in embed as the Clean class does."""
