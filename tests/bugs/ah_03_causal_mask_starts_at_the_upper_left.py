"""Context parallelism over three ranks with uneven parts of twelve positions (5, 4, 3): queries stay, keys and values of all ranks are gathered (with a backward that sums), two layers of causal attention by
scaled_dot_product_attention. Two micro-batches. The loss is a sum over the own positions divided by all positions of the batch, parameter gradients are summed over the ranks.

The bug: the ranks call scaled_dot_product_attention(q, k, v, is_causal=True) with fewer queries than keys. PyTorch's causal mask starts at the upper left corner: local query i sees keys 0 .. i whatever its place in the sequence. As in
pytorch issues #103082 and #108108 (alignment of the causal mask when L != S; causal_lower_right in torch.nn.attention.bias) and ml-explore/mlx #2835.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS = 5, 12, 9, 8, 2, 2
EDGES = (0, 5, 9, 12)
PARTS = [(0, 3), (3, 5)]


class GatherPositions(torch.autograd.Function):
    """The whole sequence from uneven parts; backward: the sum over the ranks, own part."""

    @staticmethod
    def forward(ctx, x, low, high, group):
        ctx.low, ctx.high, ctx.group = low, high, group
        whole = x.new_zeros(*x.shape[:2], TOKENS, x.shape[3])
        whole[:, :, low:high] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, :, ctx.low : ctx.high].contiguous(), None, None, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x, part):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if part is None:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            low, high, group, by_place = part
            k, v = (GatherPositions.apply(t, low, high, group) for t in (k, v))
            if by_place:
                seen = torch.arange(TOKENS)[None] <= torch.arange(low, high)[:, None]
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            else:
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.part = None

    def forward(self, ids):
        low = 0 if self.part is None else self.part[0]
        x = self.embed(ids) + self.places[low : low + ids.shape[1]]
        for layer in self.layers:
            x = layer(x, self.part)
        return self.head(x)


class Clean:
    by_place = True

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
        logits = model(rows["ids"]).flatten(0, 1)
        labels = rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def distribute(self, model, ctx):
        group = ctx.group("cp")
        rank = dist.get_rank(group)
        model.part = (EDGES[rank], EDGES[rank + 1], group, self.by_place)
        return model

    def step(self, model, batch, ctx):
        mine = slice(*model.part[:2])
        for low, high in PARTS:
            logits = model(batch["ids"][low:high, mine]).flatten(0, 1)
            labels = batch["labels"][low:high, mine].flatten()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            (loss / (ROWS * TOKENS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    by_place = False


EXPECT = dict(
    right=[
        r"(?i)attention|mask|causal|layers\.[01]",
        r"(?i)forward|mask|causal|sees?|attends?|upper|top.?left|align|offset|output",
        r"(?i)rank(s)? .{0,12}[12]|not (on )?rank 0|(every|all) .{0,12}(but|"
        r"except) (the )?(rank 0|first)|"
        r"mask|causal|offset|align",
    ],
    place=[r"(?i)attention|layers\.[01](\.out)?|causal|mask"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|only the backward",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)rank 0 alone|only (on )?rank 0|all three ranks .{0,20}wrong",
        r"(?i)(gather|GatherPositions).{0,30}(adjoint|backward) .{0,12}wrong",
        r"(?i)(positions?|places) .{0,25}(is|are) (wrong|those of)|labels? .{0,20}(is|"
        r"are) (wrong|of)",
    ],
)
WHY = (
    "Rank 0 (positions 0-4) is right: its queries are at the upper left. Rank 1 (positions 5-8): its queries see keys 0, 0-1, 0-2, 0-3 instead of 0-5, 0-6, 0-7, 0-8. Rank 2 (positions 9-11): keys 0, 0-1, 0-2 instead of 0-9, 0-10, "
    "0-11. So the attention's output (input of layers.0.out) and everything behind it is wrong in the forward on ranks 1 and 2, in layer 0 and again in layer 1 (there rank 0 stays right: it sees keys of its own only). All "
    "micro-batches and rows; after the sum all parameters' gradients are wrong, alike on all ranks, by the parts of ranks 1 and 2. The gather and its backward, the places, labels, divisor 60 and the reduction are right. Fix: a "
    "mask made from global positions (or, on the last rank only, causal_lower_right)."
)
