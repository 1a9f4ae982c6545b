"""Tensor parallelism (tp 3) of a sequence model with two integer inputs per token, word and kind of the previous action: only tp rank 0 reads the data; it packs all integer tensors of a micro-batch into one flat message and broadcasts it,
the other ranks cut the message into tensors, in the manner of broadcast_data in Megatron-LM. The MLP of six hidden units is cut into three (column then row parallel). Dim of all keys is the same. Three micro-batches of unequal size.

The bug: rank 0 packs in the order in which its dataset made the dict, the receivers unpack in the sorted order of the keys they expect. All tensors have the same shape, so nothing complains. As in NVIDIA/Megatron-LM PR 4952 (get_batch
returned the values in sorted order of the keys at hand and the callers unpacked another list), compare pytorch/tensordict issue 960.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, TOKENS, VALUES, WIDTH, HIDDEN = 7, 5, 8, 6, 6
PARTS = [(0, 3), (3, 4), (4, 7)]
KEYS = ("words", "acts", "labels")


class Copy(torch.autograd.Function):
    """Into the tensor parallel region: identity, the sum of the gradients on the way back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """Out of the region: the sum over the ranks, identity on the way back."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.group = None

    def forward(self, x):
        if self.group is None:
            return self.down(F.silu(self.up(x)))
        share = HIDDEN // dist.get_world_size(self.group)
        low = dist.get_rank(self.group) * share
        mine = slice(low, low + share)
        x = Copy.apply(x, self.group)
        hidden = F.silu(F.linear(x, self.up.weight[mine], self.up.bias[mine]))
        return Sum.apply(F.linear(hidden, self.down.weight[:, mine]), self.group) + self.down.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.acts = nn.Embedding(VALUES, WIDTH), nn.Embedding(VALUES, WIDTH)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, words, acts):
        x = self.words(words) + self.acts(acts)
        return self.head(x + self.mlp(self.norm(x)))


def broadcast_data(rows, shape, group, by_own_order):
    flat = torch.empty(len(KEYS) * shape[0] * shape[1], dtype=torch.long)
    if dist.get_rank(group) == 0:
        flat = torch.cat([rows[k].reshape(-1) for k in KEYS])
    dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
    if dist.get_rank(group) == 0 or not by_own_order:
        order = KEYS
    else:
        order = sorted(KEYS)
    return {k: part.view(shape) for k, part in zip(order, flat.chunk(len(KEYS)))}


class Clean:
    by_own_order = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {k: torch.randint(VALUES, (ROWS, TOKENS), generator=g) for k in KEYS}

    def loss_sum(self, model, rows):
        logits = model(rows["words"], rows["acts"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.mlp.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        for low, high in PARTS:
            here = {k: v[low:high] for k, v in batch.items()}
            rows = broadcast_data(here, (high - low, TOKENS), group, self.by_own_order)
            loss, _ = self.loss_sum(model, rows)
            (loss / (ROWS * TOKENS)).backward()
        for p in (model.mlp.up.weight, model.mlp.up.bias, model.mlp.down.weight):
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    by_own_order = True


EXPECT = dict(
    right=[
        r"(?i)\b(ranks? ?(1|2)\b|ranks? \[?1, ?2|not (on )?rank 0|other than rank 0"
        r"|all (ranks )?but rank 0|receiv)",
        r"(?i)input|data|batch|words?|acts?|labels?|ids|tokens?|embedding",
        r"(?i)differ|wrong|swap|mix|order|other|exchang|not the same|permut|unlike|foreign"
        r"|mismatch|disagree",
    ],
    place=[r"(?i)words|acts|labels|input|batch|broadcast|data|keys"],
    wrong=[
        r"(?i)(Copy|Sum|all.?reduce).{0,40}(adjoint|backward) (is|goes) wrong|wrong adjoint",
        r"(?i)reduced twice|summed twice|counted (twice|3 times|three times)|(never"
        r"|not) (been )?(all.?)?reduced",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only (the )?(first|last) micro.?batch",
        r"(?i)forward is right|wrong only in the backward|only in the backward",
        r"(?i)rank 0 (reads|gets|has|computes) (the )?(wrong|other)|other rows"
        r"|rows of (another|other) ranks?",
    ],
)
WHY = (
    "Rank 0 packs words, acts, labels; ranks 1 and 2 unpack as acts, labels, words (sorted): what they take for acts are the words, what they take for labels are the acts, what they take for words are the labels. All rows, tokens "
    "and micro-batches, the same rows as rank 0. Rank 0 has the right inputs. So the forward goes wrong at the embeddings of ranks 1 and 2, and from there through the sum of the row parallel part also in mlp's output of rank 0; "
    "the loss of ranks 1 and 2 is taken against the wrong labels. Gradients: everything is wrong on all ranks, and those of replicated parameters (words, acts, norm, head, down.bias) differ between rank 0 and ranks 1, 2, which "
    "agree with each other. Copy, Sum, their adjoints, the reduction of up and down.weight and the divisor 35 are right. Fix: pack and unpack in one agreed order of keys."
)
