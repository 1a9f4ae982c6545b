"""Dense retrieval with GradCache: representations without a graph, the loss on the gathered representations, and a second pass over
chunks with the stored gradients, each tower under DDP with `no_sync` for all chunks but the last. Modelled on luyug/GradCache's
reports on `no_sync_except_last` and sentence-transformers' cached ranking loss: the passage tower has twice the rows, hence more
chunks than the query tower, and the loop asks for the last chunk of the queries.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"retriever": {"axes": {"dp": 2}}}}
ROWS, QUERY, PASSAGE, WIDTH, CHUNK, SCALE = 10, 6, 9, 5, 2, 4.0


class Tower(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.hidden, self.norm, self.out = (
            nn.Linear(inputs, 11),
            nn.LayerNorm(11),
            nn.Linear(11, WIDTH, bias=False),
        )

    def forward(self, x):
        return F.normalize(self.out(F.gelu(self.norm(self.hidden(x)))), dim=-1)


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.passage = Tower(QUERY), Tower(PASSAGE)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Retriever()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "query": torch.randn(ROWS, QUERY, generator=g),
            "passages": torch.randn(ROWS, 2, PASSAGE, generator=g),
        }

    @staticmethod
    def ranking(queries, passages, first):
        """The positive of query i is passage 2 i, its hard negative passage 2 i + 1; all others are negatives too."""
        target = 2 * (first + torch.arange(len(queries)))
        return F.cross_entropy(SCALE * queries @ passages.T, target, reduction="sum")

    def loss_sum(self, model, rows):
        passages = model.passage(rows["passages"].flatten(0, 1))
        return self.ranking(model.query(rows["query"]), passages, 0), len(rows["query"])

    def distribute(self, model, ctx):
        self.towers = {name: DDP(getattr(model, name)) for name in ("query", "passage")}
        return model

    def is_last(self, i, chunks, query_chunks):
        return i == len(chunks) - 1

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        inputs = {
            "query": mine["query"].split(CHUNK),
            "passage": mine["passages"].flatten(0, 1).split(CHUNK),
        }
        with torch.no_grad():
            stored = {
                name: torch.cat([getattr(model, name)(x) for x in chunks])
                for name, chunks in inputs.items()
            }
        parts = [torch.empty_like(stored["passage"]) for _ in range(ctx.world_size)]
        dist.all_gather(parts, stored["passage"])
        queries, passages = stored["query"].requires_grad_(), torch.cat(parts).requires_grad_()
        # DDP averages
        loss = self.ranking(queries, passages, ctx.rank * len(queries)) * ctx.world_size / ROWS
        d_queries, d_passages = torch.autograd.grad(loss, [queries, passages])
        dist.all_reduce(d_passages)
        gradients = {
            "query": d_queries,
            "passage": d_passages.tensor_split(ctx.world_size)[ctx.rank],
        }
        for name, chunks in inputs.items():
            tower = self.towers[name]
            for i, (x, grad) in enumerate(zip(chunks, gradients[name].split(CHUNK))):
                with nullcontext() if self.is_last(i, chunks, inputs["query"]) else tower.no_sync():
                    (tower(x) * grad).sum().backward()


class Buggy(Clean):
    def is_last(self, i, chunks, query_chunks):
        return i == len(query_chunks) - 1


EXPECT = dict(
    right=[
        r"passage",
        r"chunk|sync|accumulat|window|after the (reduc|all.?reduc)|before the last|early|too soon|(not|never|n't|un|without|lacks?|"
        r"only)[ -]?.{0,40}"
        r"(reduc|summed|averag|synchroni|shared)|differ\w* (between|across|on|from)|ranks? (disagree|hold different)",
    ],
    place=[r"passage", r"(all|every|each|both) ranks?|ranks? \W?[01]", r"chunk"],
    wrong=[
        r"query\.\S+ (is|are|has|have) (a )?wrong",
        r"forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad|lost its graph",
    ],
)
WHY = (
    "Each rank has 3 query chunks but 5 passage chunks, and the passage tower synchronises at its third chunk: chunks 4 and 5 (the last "
    "4 of a rank's 10 passages) are added after the reduction, so passage.* differs between the ranks and holds of these only the own "
    "rank's, twice as large. The first three chunks and the query tower are right."
)
