"""A retention layer (RetNet) in context parallel: 14 tokens over four ranks (4, 4, 3 and 3). Each rank computes the retention within its shard and a state, the sum over its tokens of k v^T, decayed to the shard's end; the states of all ranks are
gathered, and a rank decays those before it to its own first token. Two heads with decays of their own, two micro-batches, gradients summed over the ranks.

The bug: how far the end of an earlier shard is away is counted in shards of the receiver's own length, as if all had the same. After sequence parallel linear attention (LASP, flash-linear-attention's context parallel), which was
written for equal chunks.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 4}}}}
ROWS, TOKENS, INPUT, HEADS, DIM, MICRO = 6, 14, 5, 2, 4, 2


class Retention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(INPUT, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, INPUT)
        self.register_buffer("decay", torch.tensor([0.8, 0.93]))

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)

    def within(self, q, k, v):
        n = torch.arange(q.shape[2])
        apart = (n[:, None] - n).clamp(min=0)
        weight = self.decay[:, None, None] ** apart * (n[:, None] >= n)
        return (q @ k.transpose(-1, -2) * weight) @ v

    def project(self, y):
        return self.out(torch.tanh(y).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.project(self.within(*self.heads(x)))


class GatherStates(torch.autograd.Function):
    """The states of all ranks; each rank uses them for other tokens, so the gradients are summed."""

    @staticmethod
    def forward(fctx, state, group):
        fctx.group = group
        every = [torch.empty_like(state) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, state.contiguous(), group=group)
        return torch.stack(every)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad[dist.get_rank(fctx.group)], None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Retention()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, INPUT, generator=g),
            "target": torch.randn(ROWS, TOKENS, INPUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["target"]).square().sum(), len(rows["x"])

    def state_before(self, states, decay, lengths, rank):
        """What the shards before this one have left behind, at the place of its first token."""
        total = states[rank] * 0  # keeps the gather in the graph of the first rank, too
        for source in range(rank):
            between = sum(lengths[source + 1 : rank])
            total = total + decay[:, None, None] ** between * states[source]
        return total

    def retain(self, model, x, lengths, rank, group):
        q, k, v = model.heads(x)
        n = torch.arange(x.shape[1])
        to_end = model.decay[:, None] ** (len(n) - 1 - n)
        state = (k * to_end[..., None]).transpose(-1, -2) @ v
        states = GatherStates.apply(state, group)
        before = self.state_before(states, model.decay, lengths, rank)
        from_start = model.decay[:, None] ** (n + 1)
        return model.project(model.within(q, k, v) + (q * from_start[..., None]) @ before)

    def step(self, model, batch, ctx):
        rank = ctx.coords["cp"]
        shards = torch.arange(TOKENS).tensor_split(ctx.axes["cp"])
        lengths = [len(s) for s in shards]
        for n in range(MICRO):
            x, target = (batch[k].tensor_split(MICRO)[n][:, shards[rank]] for k in ("x", "target"))
            y = self.retain(model, x, lengths, rank, ctx.group("cp"))
            ((y - target).square().sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def state_before(self, states, decay, lengths, rank):
        total = states[rank] * 0  # keeps the gather in the graph of the first rank, too
        for source in range(rank):
            between = (rank - 1 - source) * lengths[rank]
            total = total + decay[:, None, None] ** between * states[source]
        return total


EXPECT = dict(
    right=[
        r"decay|distance|exponent|between|power|length",
        r"own (shard.{0,3} )?length|lengths?\[rank\]|uneven|unequal|same length|equal (length|chunk|shard)|receiver|different length|unlike|length of the (own|receiv)|wrong (distance|exponent|power|decay|length)|(rank|ranks) (2|3)|forward",
    ],
    place=[r"state_before", r"\bbetween\b", r"\bdecay\b", r"states?\b"],
    wrong=[
        r"GatherStates.{0,60}(backward|adjoint).{0,40}(wrong|missing|twice)|detached|without (a )?grad",
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"(contains|includes) (the|its) own (chunk|state)|states?.{0,20}wrong order",
    ],
)
WHY = (
    "The shards have 4, 4, 3 and 3 tokens. The state of an earlier shard has to be decayed over all tokens that lie between that shard's end and the own first token; Buggy takes the number of shards in between times the length of the own "
    "shard. On rank 2 the state of shard 0 is decayed over 3 tokens instead of 4, on rank 3 that of shard 0 over 6 instead of 7; ranks 0 and 1 compute the right thing, but get wrong gradients back into their keys and values. It is so in "
    "both micro-batches. A right cause says that the decay (distance) across shards of unequal length is wrong in state_before. Fix: the sum of the lengths in between."
)
