"""A recommender rates pairs of user and item with a mixture of six experts (the best two each, gates renormalised) and is trained under expert parallelism on three ranks, two experts a rank: each rank reads its
own of eleven pairs (4, 4, 3) in two micro-batches, sends rows to their experts and back by all-to-all, and combines them with an autograd function of its own. Experts see the rows of all ranks, so their
gradients are whole; embeddings, router and head are replicated and summed. The loss is divided by the eleven pairs.

The bug: the combining function scales the returned rows by their gates first and keeps the scaled rows for the backward, where the gradient of a gate is the product with the rows as the expert gave them; so each
gate's gradient comes out multiplied by the gate itself. After the class of reports about fused unpermute-and-combine kernels (Megatron-LM, Tutel, DeepSpeed-MoE, verl's fused MoE) that save the buffer after it was
scaled in place.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
USERS, ITEMS, WIDTH, HIDDEN, EXPERTS, TOP, ROWS = 7, 9, 6, 5, 6, 2, 11


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sizes = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, g):
        sent, received, group = ctx.sizes
        out = g.new_empty(sum(sent), *g.shape[1:])
        dist.all_to_all_single(out, g.contiguous(), sent, received, group=group)
        return out, None, None, None


class Combine(torch.autograd.Function):
    """Adds up each token's rows, weighted by their gates."""

    @staticmethod
    def forward(ctx, rows, gates, token, tokens):
        ctx.save_for_backward(rows, gates, token)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token, rows * gates[:, None])

    @staticmethod
    def backward(ctx, g):
        rows, gates, token = ctx.saved_tensors
        g = g[token]
        return g * gates[:, None], (g * rows).sum(-1), None, None


class CombineScaled(Combine):
    @staticmethod
    def forward(ctx, rows, gates, token, tokens):
        rows = rows * gates[:, None]
        ctx.save_for_backward(rows, gates, token)
        return rows.new_zeros(tokens, rows.shape[1]).index_add(0, token, rows)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 2)
        self.back = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 2)

    def route(self, x):
        gates, choice = self.router(x).softmax(-1).topk(TOP, -1)
        return gates / gates.sum(-1, keepdim=True), choice

    def forward(self, x):
        gates, choice = self.route(x)
        rows = torch.einsum("td,edh->teh", x, self.into).tanh()
        rows = torch.einsum("teh,ehd->ted", rows, self.back)
        chosen = rows.gather(1, choice[..., None].expand(-1, -1, WIDTH))
        return (chosen * gates[..., None]).sum(1)


class ParallelMixture(Mixture):
    def __init__(self, whole, group, combine):
        nn.Module.__init__(self)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.router, self.group, self.combine = whole.router, group, combine
        self.into = nn.Parameter(whole.into.data.chunk(size)[rank].clone())
        self.back = nn.Parameter(whole.back.data.chunk(size)[rank].clone())

    def forward(self, x):
        size, here = dist.get_world_size(self.group), len(self.into)
        gates, choice = self.route(x)
        order = choice.flatten().argsort(stable=True)
        token = order // TOP
        counts = choice.flatten().bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = (
            counts.view(size, here).sum(1).tolist(),
            theirs.view(size, here).sum(1).tolist(),
        )
        rows = Exchange.apply(x[token], sent, received, self.group)
        expert = torch.arange(here).repeat(size).repeat_interleave(theirs)
        by_expert = expert.argsort(stable=True)
        parts = rows[by_expert].split(expert.bincount(minlength=here).tolist())
        done = torch.cat(
            [(part @ self.into[e]).tanh() @ self.back[e] for e, part in enumerate(parts)]
        )
        rows = Exchange.apply(done[by_expert.argsort()], received, sent, self.group)
        return self.combine.apply(rows, gates.flatten()[order], token, len(x))


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH)
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, user, item):
        x = self.users(user) + self.items(item)
        return self.head(x + self.mixture(self.norm(x))).squeeze(-1)


class Clean:
    combine = Combine

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (ROWS,), generator=g),
            "item": torch.randint(ITEMS, (ROWS,), generator=g),
            "rating": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["user"], rows["item"]) - rows["rating"]).square().sum(), len(
            rows["user"]
        )

    def distribute(self, model, ctx):
        model.mixture = ParallelMixture(model.mixture, ctx.group("ep"), self.combine)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name not in ("mixture.into", "mixture.back"):
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    combine = CombineScaled


EXPECT = dict(
    right=[
        r"backward|derivative|gradient formula|custom|autograd\.?function|saved|scaled",
        r"combine|gate|mixture",
    ],
    place=[r"combine", r"gates?\b", r"\bmixture\b", r"router"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"wrong in the forward|(wrong|other) rows|experts?.{0,20}gradients? (is|are) wrong|(mixture\.)?(into|back) .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "CombineScaled.forward multiplies the rows by their gates and saves the product; the backward it inherits takes the gradient of a gate as the product of g with the saved rows, which ought to be the experts' "
    "unscaled output. So each gate's gradient is multiplied by the gate (a number between 0 and 1), on every rank and in both micro-batches. The forward, the loss and the gradient of the rows are right, and so are "
    "the experts' weights (into, back) and the head. Wrong are the router's weight and what lies before it through the router: norm, users, items. Exchange and the sums over ep are right. Fix: save the rows before "
    "they are scaled."
)
