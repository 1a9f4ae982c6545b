"""A sparse retriever (SPLADE on transformers' BertForMaskedLM): queries and two documents a row,
margin distillation plus the FLOPS regulariser, DDP over 2 ranks with unequal rows.

FLOPS is the sum over the vocabulary of the squared mean activation, a mean over the whole batch,
for queries and for documents apart.

The bug: representations of queries and documents come from one forward pass, and the regulariser
is taken once, over their joint mean, and counted twice. After the FLOPS losses of naver/splade
and sentence-transformers' SpladeLoss, which have a term of its own for each side; merging the
encodings into one call is a common speed-up.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCAB, TIME, WEIGHT = 19, 6, 0.3


class Splade(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCAB,
            hidden_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=13,
            max_position_embeddings=9,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        self.bert = BertForMaskedLM(config)

    def forward(self, tokens):
        mask = (tokens != 0).long()
        logits = self.bert(input_ids=tokens, attention_mask=mask).logits
        return (torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)).amax(1)


def tokens_of(g, rows, longest):
    length = torch.randint(2, longest + 1, (rows, 1), generator=g)
    return torch.randint(1, VOCAB, (rows, TIME), generator=g) * (torch.arange(TIME) < length)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "margin": self.margin_sum,
            "flops_queries": (lambda model, rows: model(rows["query"]).sum(0), self.flops),
            "flops_documents": (lambda model, rows: self.documents(model, rows).sum(0), self.flops),
        }

    def build(self):
        torch.manual_seed(self.seed + 51)
        return Splade()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 52)
        return {
            "query": tokens_of(g, 7, 3),
            "good": tokens_of(g, 7, TIME),
            "bad": tokens_of(g, 7, TIME),
            "margin": torch.rand(7, generator=g) * 2,
        }

    def documents(self, model, rows):
        return (model(rows["good"]) + model(rows["bad"])) / 2

    def flops(self, total, number):
        return WEIGHT * (total / number).square().sum()

    def margin(self, query, good, bad, target):
        return F.mse_loss((query * good).sum(1) - (query * bad).sum(1), target, reduction="sum")

    def margin_sum(self, model, rows):
        loss = self.margin(
            model(rows["query"]), model(rows["good"]), model(rows["bad"]), rows["margin"]
        )
        return loss, len(rows["margin"])

    def loss_sum(self, model, rows):
        loss, number = self.margin_sum(model, rows)
        queries = self.flops(model(rows["query"]).sum(0), number)
        documents = self.flops(self.documents(model, rows).sum(0), number)
        return loss + number * (queries + documents), number

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def over_ranks(self, own, group):
        """The sum over ranks, whose gradient is that of the own part."""
        everything = own.detach().clone()
        dist.all_reduce(everything, group=group)
        return own + (everything - own.detach())

    def regulariser(self, query, good, bad, number, group):
        queries = self.over_ranks(query.sum(0), group)
        documents = self.over_ranks((good + bad).sum(0) / 2, group)
        return self.flops(queries, number) + self.flops(documents, number)

    def step(self, model, batch, ctx):
        number, group = len(batch["margin"]), ctx.group("dp")
        lo, hi = [(0, 4), (4, 7)][ctx.rank]
        rows = {k: v[lo:hi] for k, v in batch.items()}
        query, good, bad = model(torch.cat([rows["query"], rows["good"], rows["bad"]])).chunk(3)
        loss = self.margin(query, good, bad, rows["margin"]) / number
        loss = loss + self.regulariser(query, good, bad, number, group)
        (loss * ctx.world_size).backward()


class Buggy(Clean):
    def regulariser(self, query, good, bad, number, group):
        total = self.over_ranks(torch.cat([query, good, bad]).sum(0), group)
        return 2 * self.flops(total, 3 * number)


EXPECT = dict(
    right=[
        r"flops|regulari[sz]|sparsity|penalty",
        r"quer(y|ies)",
        r"document|passage|good|bad",
        (
            r"joint|together|one mean|single mean|pooled|concat|combined|mixed|same mean|both|"
            r"merged|cross|apart|separate|jointly|shared"
        ),
    ],
    place=[r"regulari[sz]er", r"flops", r"torch\.cat|concat", r"over_ranks"],
    wrong=[
        (
            r"(local|own|per-?rank) (mean|activations|rows)|mean (is )?(taken )?(over|"
            r"of) (the )?(own|local)"
        ),
        r"divided by (the )?world|times world|world_size (twice|missing)",
        r"all.?reduce (is )?(without|no) grad|detach",
        r"padding (tokens )?(is|are)",
        r"unequal rows|mean of means",
    ],
)

WHY = """FLOPS squares a mean, so the penalty of the joint mean of queries and documents is not the
sum of the two penalties: cross products of queries' and documents' activations enter, and
queries, being a third of the rows, weigh less. The gradient of every BERT parameter has a
wrong regulariser part; the margin term and the sums over ranks are right. A right cause
says that the FLOPS term takes one mean over queries and documents together and not one of
each. The fix: a mean of its own for queries and for documents, each penalised."""
