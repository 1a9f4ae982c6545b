"""A protein model with two tasks on 2 tensor ranks times 2 data ranks: masked residues (all rows) and contacts (rows with a known structure). Two column-parallel projections, one per task, are gathered from the tensor ranks in one collective
by a hand-written autograd Function with two outputs, which sets materialize_grads to False so as not to allocate zeros. The contact head runs only in micro-batches in which a row has a structure. Two micro-batches per data rank.

The bug: the Function's backward returns at once if one of the two gradients is None ("unused, nothing to do") and so throws away the other one, too. In every micro-batch without a structure the residue task does not reach anything below its
head. After THUDM/slime PR #2158 ("Remove ctx.set_materialize_grads(False) which may cause issues"), pytorch/pytorch #58511 and DTensor's None gradients in pytorch/pytorch PR #173865.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
LENGTH, RESIDUES, WIDTH, HIDDEN, TOKEN, PAIR, SHARE = 6, 11, 8, 12, 6, 4, 0.5
PARTS = [[(0, 2), (2, 4)], [(4, 6), (6, 7)]]
STRUCTURE = [True, False, False, False, False, True, False]
CUT = {
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
    "token.weight": 0,
    "token.bias": 0,
    "pair.weight": 0,
    "pair.bias": 0,
}


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatherTwo(torch.autograd.Function):
    """Gathers the columns of two tensors in one collective. What follows is the same on all tensor ranks: backward cuts."""

    @staticmethod
    def forward(ctx, a, b, group, give_up):
        ctx.set_materialize_grads(False)
        ctx.widths, ctx.rank, ctx.give_up = (
            (a.shape[-1], b.shape[-1]),
            dist.get_rank(group),
            give_up,
        )
        both = torch.cat([a, b], -1).contiguous()
        parts = [torch.empty_like(both) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, both, group=group)
        halves = [p.split(ctx.widths, -1) for p in parts]
        return torch.cat([h[0] for h in halves], -1), torch.cat([h[1] for h in halves], -1)

    @staticmethod
    def backward(ctx, *grads):
        if ctx.give_up and any(g is None for g in grads):
            return None, None, None, None
        own = [
            None if g is None else g[..., ctx.rank * w : (ctx.rank + 1) * w]
            for g, w in zip(grads, ctx.widths)
        ]
        return *own, None, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


def linear(layer, x):
    return F.linear(x, local(layer.weight), local(layer.bias))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(RESIDUES, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.token, self.pair = nn.Linear(WIDTH, TOKEN), nn.Linear(WIDTH, PAIR)
        self.residue_head = nn.Linear(TOKEN, RESIDUES)
        self.contact = nn.Parameter(0.5 * torch.randn(PAIR, PAIR))

    def features(self, ids, group=None, give_up=False):
        x = self.embed(ids)
        x = x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)
        h = self.norm(x)
        h = F.gelu(linear(self.up, h if group is None else Copy.apply(h, group)))
        h = F.linear(h, local(self.down.weight))
        x = x + (h if group is None else Reduce.apply(h, group)) + self.down.bias
        x = x if group is None else Copy.apply(x, group)
        token, pair = torch.tanh(linear(self.token, x)), torch.tanh(linear(self.pair, x))
        return (token, pair) if group is None else GatherTwo.apply(token, pair, group, give_up)

    def loss(self, rows, group=None, give_up=False):
        token, pair = self.features(rows["ids"], group, give_up)
        logits = self.residue_head(token)
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        known = rows["structure"]
        if known.any():
            z = pair[known]
            score = torch.einsum("rip,pq,rjq->rij", z, self.contact, z)
            wanted = rows["contacts"][known].to(score.dtype)
            loss = (
                loss
                + SHARE
                * F.binary_cross_entropy_with_logits(score, wanted, reduction="none").triu(2).sum()
            )
        return loss


class Clean:
    give_up = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(STRUCTURE)
        ids = torch.randint(1, RESIDUES, (rows, LENGTH), generator=g)
        hidden = torch.rand(rows, LENGTH, generator=g) < 0.4
        hidden[:, 2] = True
        return {
            "ids": ids.masked_fill(hidden, 0),
            "labels": ids.masked_fill(~hidden, -100),
            "structure": torch.tensor(STRUCTURE),
            "contacts": torch.rand(rows, LENGTH, LENGTH, generator=g) < 0.3,
        }

    def loss_sum(self, model, rows):
        return model.loss(rows), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        for name, dim in CUT.items():
            layer, which = name.split(".")
            layer = getattr(model, layer)
            full = getattr(layer, which).detach()
            setattr(
                layer, which, nn.Parameter(distribute_tensor(full, ctx.mesh["tp"], [Shard(dim)]))
            )
        return model

    def step(self, model, batch, ctx):
        count = int((batch["labels"] != -100).sum())
        for low, high in PARTS[ctx.coords["dp"]]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (model.loss(rows, ctx.group("tp"), self.give_up) / count).backward()
        for p in model.parameters():
            dist.all_reduce(local(p.grad), group=ctx.group("dp"))


class Buggy(Clean):
    give_up = True


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rows? (2|3|6)|rows 2|without (a )?structure|structure|unused|None",
        r"(?i)lost|missing|dropped|no gradient|zero|never|cut|not (arriv|reach|pass)|stops?|absent|gone|throw|nothing",
        r"(?i)gather|collective|token|pair|projection|up\b|down|embed|trunk|below|backward|encoder",
    ],
    place=[r"(?i)gather|\btoken\b|token\.(weight|bias)|projection|below"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|missing (reduction|all.?reduce)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)residue_head\.(weight|bias) (is|are) wrong|\bcontact (is|are) wrong|pair\.(weight|bias) (is|are) wrong",
        r"(?i)only the last micro.?batch|first micro.?batch.{0,20}(is|are|was) (lost|dropped|missing)",
        r"(?i)rows? .{0,20}(never read|read twice)|only one data rank|only tensor rank",
    ],
)
WHY = (
    "Rows 0 and 5 have a structure, so micro-batch 0 of both data ranks (rows 0, 1 and rows 4, 5) uses both outputs of the gather and is right. Micro-batch 1 of both data ranks (rows 2, 3 and row 6) uses only the token output; GatherTwo.backward "
    "gets None for the other and returns None for both. So the gradient of the residue task of rows 2, 3 and 6 is lost for token.weight, token.bias, up, down, norm, mix and embed, on all four ranks (the DP sum only contains micro-batch 0). Right "
    "are: the forward, the losses, residue_head (above the gather), contact, and pair.weight and pair.bias (the contact task is complete). Copy, Reduce, the cut of the gradient, divisor and DP sum are right. The error is a missing part, not a factor. "
    "Fix: treat None as zeros, per output (or leave materialize_grads on)."
)
