"""A mixture of six experts on three ranks, tokens sent by all-to-all with unequal counts. After the reports on placements of experts
(Megatron-LM's and DeepSpeed-MoE's expert maps, vLLM's round-robin placement; FAULTS C16): the experts are dealt out to the ranks in
turn, while the tokens of experts 2 r and 2 r + 1 go to rank r.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, EXPERTS, TOP = 10, 5, 16, 6, 6, 2


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


def run_all(experts, tokens, counts):
    """tokens: sorted by expert"""
    return torch.cat([expert(part) for expert, part in zip(experts, tokens.split(counts.tolist()))])


def run_over_ranks(experts, tokens, counts):
    ranks, held = dist.get_world_size(), len(experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    send, receive = (c.view(ranks, held).sum(1).tolist() for c in (counts, arriving))
    got = AllToAll.apply(tokens, send, receive)  # by source rank, then by expert
    order = torch.arange(held).repeat(ranks).repeat_interleave(arriving).argsort(stable=True)
    out = run_all(experts, got[order], arriving.view(ranks, held).sum(0))
    return AllToAll.apply(out[order.argsort()], receive, send)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 9),
            nn.Linear(WIDTH, 9),
            nn.Linear(9, WIDTH),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def forward(self, x, run):
        weights, chosen = (2 * self.router(x)).softmax(-1).topk(TOP, -1)
        weights, chosen = (weights / weights.sum(-1, keepdim=True)).flatten(), chosen.flatten()
        order = chosen.argsort(stable=True)
        out = run(list(self.experts.values()), x[order // TOP], chosen.bincount(minlength=EXPERTS))
        return torch.zeros_like(x).index_add(0, order // TOP, out * weights[order, None])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.moe, self.head = Mixture(), nn.Linear(WIDTH, WORDS)

    def forward(self, words, run=run_all):
        x = self.words(words) + self.places.weight
        x = x + torch.tanh(self.before(torch.cat([x, F.pad(x, (0, 0, 1, 0))[:, :-1]], -1)))
        x = x + self.moe(self.norm(x).flatten(0, 1), run).view_as(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        labels = words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
        return {"words": words[:, :-1].contiguous(), "labels": labels}

    def loss_sum(self, model, rows, *how):
        logits = model(rows["words"], *how).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), (
            rows["labels"] != -100
        ).sum()

    def held(self, rank, ranks):
        count = EXPERTS // ranks
        return range(rank * count, (rank + 1) * count)

    def distribute(self, model, ctx):
        for i in set(range(EXPERTS)) - set(self.held(ctx.rank, ctx.world_size)):
            del model.moe.experts[str(i)]
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, run_over_ranks)
        (loss / (batch["labels"] != -100).sum()).backward()
        for name, param in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def held(self, rank, ranks):
        return range(rank, EXPERTS, ranks)


EXPECT = dict(
    right=[
        r"expert|moe",
        r"forward|output|activation|other expert|wrong expert|another expert|placement|held|holds|order|permut|input of|wrong (tokens|"
        r"rows)|tokens (of|meant|routed)",
    ],
    place=[r"moe", r"experts?", r"(all|every|each|three) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(words|before|norm|moe\.router)\S* (is|was) wrong|first wrong .{0,20}(words|before|norm|router)",
        r"mean of (the )?(rank |ranks' )?means",
        r"divided by the (size|number)",
    ],
)
WHY = (
    "Rank r holds experts r and r + 3 but gets the tokens routed to experts 2r and 2r + 1, so only experts 0 and 5 run on their own "
    "tokens, the others on tokens of another expert. The forward is wrong from "
    "the mixture's output on, on all ranks (router, norm and all before are right in the forward), and with it the gradients of all "
    "parameters."
)
