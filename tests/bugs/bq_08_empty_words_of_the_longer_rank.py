"""Late-interaction retrieval (ColBERT) with in-batch negatives on three data-parallel ranks with accelerate: each rank encodes its two queries and two documents (cut to its own longest), documents and their padding masks are padded across processes and gathered (with
gradient); the score of query and document is the sum over query words of the best similarity among the document's words. Cross-entropy of each query over all six documents. Gradients are summed over the ranks.

The bug: the padding mask is true where there is NO word, and is padded across processes with the default pad_index 0, so that the words that were added to the shorter ranks' documents (zero vectors) count as words and win the maximum over negative similarities.
After accelerate's pad_across_processes and reports of late-interaction trainers (PyLate, ColBERT) on padding in gathered documents.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, QUERY, DOCUMENT, VOCABULARY, WIDTH = 6, 3, 7, 29, 6
LENGTHS = (2, 3, 7, 5, 1, 2)


class ColBert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.Linear(8, 8)
        self.linear = nn.Linear(8, WIDTH, bias=False)
        self.kind = nn.Embedding(2, 8)

    def encode(self, ids, kind):
        h = self.words(ids) + self.kind.weight[kind]
        return F.normalize(self.linear(h + torch.tanh(self.mix(h))), dim=-1)


def max_sim(queries, documents, padding):
    similar = torch.einsum("qiw,djw->qdij", queries, documents)
    return similar.masked_fill(padding[None, :, None], -9.0).amax(-1).sum(-1)


class GatherDocuments(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, group):
        fctx.group, fctx.rank = group, dist.get_rank(group)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        fctx.rows = len(own)
        return torch.cat(parts)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[fctx.rank * fctx.rows : (fctx.rank + 1) * fctx.rows], None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ColBert()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.tensor(LENGTHS)[:, None]
        return {
            "query": torch.randint(VOCABULARY, (ROWS, QUERY), generator=g),
            "document": torch.randint(VOCABULARY, (ROWS, DOCUMENT), generator=g),
            "padding": torch.arange(DOCUMENT) >= lengths,
        }

    def loss_sum(self, model, rows):
        full = self.batch()
        queries = model.encode(full["query"][rows], 0)
        documents = model.encode(full["document"], 1)
        scores = max_sim(queries, documents, full["padding"])
        return F.cross_entropy(scores, rows, reduction="sum"), len(rows)

    def pad_mask(self, accelerator, padding):
        return accelerator.pad_across_processes(padding.long(), dim=1, pad_index=1)

    def all_documents(self, model, accelerator, mine, group):
        padding = mine["padding"]
        longest = int((~padding).sum(1).max())
        documents = model.encode(mine["document"][:, :longest], 1)
        documents = accelerator.pad_across_processes(documents, dim=1)
        padding = self.pad_mask(accelerator, padding[:, :longest])
        documents = GatherDocuments.apply(documents, group)
        return documents, accelerator.gather(padding).bool()

    def step(self, model, batch, ctx):
        accelerator = Accelerator(cpu=True)
        group = ctx.group("dp")
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        queries = model.encode(mine["query"], 0)
        documents, padding = self.all_documents(model, accelerator, mine, group)
        target = torch.arange(len(queries)) + ctx.rank * len(queries)
        scores = max_sim(queries, documents, padding)
        (F.cross_entropy(scores, target, reduction="sum") / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def pad_mask(self, accelerator, padding):
        return accelerator.pad_across_processes(padding.long(), dim=1)


EXPECT = dict(
    right=[
        r"pad|mask|added (words|columns|positions)|zero (vectors|words|rows|columns)|empty",
        r"mask|pad_index|padding|max|similar|attend|counted|document|gather|across|words?|zero|false|not masked",
    ],
    place=[
        r"pad_mask|pad_across_processes|pad_index",
        r"padding",
        r"max_sim|masked_fill|amax",
        r"all_documents|gather",
    ],
    wrong=[
        r"all.?reduce.{0,40}(missing|twice|wrong)|not reduced|reduced twice",
        r"GatherDocuments.{0,60}(backward|gradient).{0,20}(wrong|missing)|without gradient|no_grad|detach",
        r"divisor|own count|mean of means|wrong target|label offset|order of the ranks",
        r"truncat(ed|ion) of (the )?documents|documents? (is|are) cut too short",
    ],
)
WHY = (
    "The documents of the ranks are 3, 7 and 2 words long; pad_across_processes adds zero vectors to those of ranks 0 and 2, and the inverted mask (1 = no word) is padded with 0, i.e. 'word'. On all three ranks the maximum over a document's words takes the added word's similarity 0 where the real ones are negative, so "
    "scores of documents of ranks 0 and 2 and the gradients of all ranks are wrong; padding within a rank is masked rightly. A right cause says that the mask of the positions added across processes is wrong (padding counts as words). Fix: pad_index=1."
)
