"""A feed-forward block with sequence parallelism over three ranks (tp 3, sequence first): the tokens of a micro-batch are dealt out, the column-parallel linear gathers them in its forward and keeps only the own tokens, transposed, for the
weight gradient, and gathers them again in its backward. The row-parallel linear ends in a reduce-scatter. Two micro-batches.

The bug: the saved input is transposed, (features, own tokens), and has to be gathered along its last dimension; the buffer of shape (features, all tokens) is handed to all_gather_into_tensor, which joins along the first. As in
NVIDIA/TransformerEngine issue 530 (Linear: error in computation for wgrad if sequence_parallel=True, gather_along_last_dim).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, INNER = 5, 6, 7, 6, 9
PARTS = [slice(0, 3), slice(3, 5)]


class SequenceLinear(torch.autograd.Function):
    """Column-parallel linear on dealt-out tokens: x (own tokens, features), all tokens out."""

    @staticmethod
    def forward(ctx, x, weight, group, joined):
        size = dist.get_world_size(group)
        every = x.new_empty(size * len(x), x.shape[1])
        dist.all_gather_into_tensor(every, x.contiguous(), group=group)
        ctx.save_for_backward(x.t().contiguous(), weight)
        ctx.group, ctx.joined = group, joined
        return every @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        turned, weight = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        features, own = turned.shape
        if ctx.joined:
            every = turned.new_empty(size * features, own)
            dist.all_gather_into_tensor(every, turned, group=ctx.group)
            every = every.view(size, features, own).transpose(0, 1).reshape(features, -1)
        else:
            every = turned.new_empty(features, size * own)
            dist.all_gather_into_tensor(every.view(size * features, own), turned, group=ctx.group)
        to_input = grad @ weight
        dist.all_reduce(to_input, group=ctx.group)
        mine = to_input[rank * own : (rank + 1) * own].contiguous()
        return mine, (every @ grad).t(), None, None


class SumAndDeal(torch.autograd.Function):
    """Sum of the partial results, own tokens only; backward: all tokens' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.group, self.joined = None, True

    def forward(self, ids):
        x = self.embed(ids)
        y = self.norm(x)
        if self.group is None:
            y = self.down(F.silu(self.up(y)))
        else:
            share = INNER // dist.get_world_size(self.group)
            own = slice(dist.get_rank(self.group) * share, (dist.get_rank(self.group) + 1) * share)
            y = SequenceLinear.apply(y.flatten(0, 1), self.up.weight[own], self.group, self.joined)
            y = SumAndDeal.apply(F.silu(y) @ self.down.weight[:, own].t(), self.group)
            y = (y + self.down.bias).view_as(x)
        return self.head(x + y)


class Clean:
    joined = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["ids"].t())
        loss = F.cross_entropy(scores.flatten(0, 1), rows["labels"].t().flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        model.group, model.joined = ctx.group("tp"), self.joined
        return model

    def step(self, model, batch, ctx):
        size = TOKENS // ctx.world_size
        mine = slice(ctx.rank * size, (ctx.rank + 1) * size)
        for part in PARTS:
            scores = model(batch["ids"][part, mine].t())
            labels = batch["labels"][part, mine].t()
            loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / (ROWS * TOKENS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    joined = False


EXPECT = dict(
    right=[
        r"(?i)\bup\b|SequenceLinear|column",
        r"(?i)backward|weight gradient|own gradient|wgrad|weight.s gradient|gather",
        r"(?i)weight|wgrad|\bup\b only|saved|gather|parameter gradient",
    ],
    place=[r"(?i)\bup\b|SequenceLinear"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(down|head|norm|embed)(\.(weight|bias))? (is|are|has|have) (a )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)|only (on )?rank \d",
        r"(?i)input gradient .{0,15}wrong|hands? back a wrong gradient to its input",
    ],
)
WHY = (
    "The forward is right everywhere. In the backward of SequenceLinear (module `up`) the saved own input, transposed to (6 features, own tokens), is gathered again on every rank; the result is joined along dimension 0, feature rows "
    "of rank 0, then of rank 1, then of rank 2, and read as (6, all tokens). So the matrix that multiplies the output gradient holds values of other tokens and other features, and the gradient of up.weight is wrong in direction, on "
    "all three ranks, for all rows of the weight and in both micro-batches; all else is right, the gradient that goes on to the input (it is grad @ weight, summed over tp), norm, embed, down, head, the sum of the parameter gradients "
    "over tp and the divisor 30. After the sum all ranks hold the same wrong up.weight gradient. Fix: gather into (ranks, features, own), swap the first two dimensions, then flatten the last two."
)
