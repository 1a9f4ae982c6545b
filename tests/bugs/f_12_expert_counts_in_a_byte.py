"""Switch-like mixture of experts, one expert per rank, balance loss with counts over all ranks. Counts travel as bytes. After
FAULTS C10/C18 (balance loss from wrong counts) and the usual uint8 one-hot masks: a sum over ranks above 255 wraps.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB, COEFFICIENT = 13, 53, 5, 3, 17, 0.3


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.args = received, sent
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        received, sent = ctx.args
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([1.0, 0.0, -0.3]))
        self.experts = nn.ModuleDict(
            {
                str(e): nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
                for e in range(EXPERTS)
            }
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, parallel=False):
        x = self.embed(ids).flatten(0, 1)
        chances = self.router(x).softmax(-1)
        chance, expert = chances.max(-1)
        order, counts = expert.argsort(stable=True), expert.bincount(minlength=EXPERTS)
        here = x[order]
        if parallel:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            received, sent = received.tolist(), counts.tolist()
            (mlp,) = self.experts.values()
            here = AllToAll.apply(mlp(AllToAll.apply(here, received, sent)), sent, received)
        else:
            pieces = zip(self.experts.values(), here.split(counts.tolist()), strict=True)
            here = torch.cat([mlp(piece) for mlp, piece in pieces])
        routed = torch.zeros_like(x).index_copy(0, order, here)
        return self.head(x + chance[:, None] * routed), chances, F.one_hot(expert, EXPERTS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"task": self.task_sum, "balance": (self.statistics, self.balance)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    @staticmethod
    def task(logits, labels):
        return F.cross_entropy(logits, labels.flatten(), reduction="sum")

    def task_sum(self, model, rows):
        return self.task(model(rows["ids"])[0], rows["labels"]), rows["labels"].numel()

    def statistics(self, model, rows):
        _, chances, chosen = model(rows["ids"])
        return torch.cat([chances.sum(0), chosen.to(chances.dtype).sum(0)])

    def balance(self, total, count):
        chances, chosen = total.split(EXPERTS)
        return COEFFICIENT * EXPERTS * (chances * chosen).sum() / chosen.sum().square()

    def loss_sum(self, model, rows):
        task, count = self.task_sum(model, rows)
        return task + count * self.balance(self.statistics(model, rows), count), count

    def distribute(self, model, ctx):
        for e in range(EXPERTS):
            if e != ctx.rank:
                del model.experts[str(e)]
        return model

    def tokens_per_expert(self, chosen):
        counts = chosen.sum(0)
        dist.all_reduce(counts)
        return counts

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits, chances, chosen = model(mine["ids"], parallel=True)
        total = batch["labels"].numel()
        share = self.tokens_per_expert(chosen).to(chances.dtype) / total
        balance = COEFFICIENT * EXPERTS * (share * chances.sum(0) / total).sum()
        (self.task(logits, mine["labels"]) / total + balance).backward()
        for name, param in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def tokens_per_expert(self, chosen):
        counts = chosen.to(torch.uint8).sum(0, dtype=torch.uint8)
        dist.all_reduce(counts)
        return counts


EXPECT = dict(
    right=[
        r"balance|auxiliar|aux|router",
        r"count|overflow|wrap|uint8|byte|weight|coefficient|scale|factor|share|statistic|too (small|low)|term|direction|fraction|load",
    ],
    place=[r"balance", r"router", r"term", r"count", r"(all|every|each) ranks?"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"task\S* (term )?(is|has) (wrong|scaled|missing)",
        r"experts\.\d\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"balance\S* (term |loss )?(is|was) (missing|dropped|absent|detached)",
        r"tokens? (is|are|was|were) (dropped|lost)",
    ],
)
WHY = (
    "The tokens per expert are summed over the ranks in uint8: of 689 tokens at least one expert has more than 255, and its count wraps modulo 256. The balance term has wrong "
    "weights per expert; router and embedding (what the balance term reaches) are wrong, on all ranks equally; experts and head are exact."
)
