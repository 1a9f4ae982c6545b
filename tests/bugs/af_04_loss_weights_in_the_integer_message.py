"""Data parallelism (2) by hand times tensor parallelism (2) with DTensor (parallelize_module: Colwise up, Rowwise down). Only tensor rank 0 has the loader; for each of two micro-batches it sends ids, labels and per-token loss weights to
its tensor partner in one flat message, as get_batch with broadcast_data does. The loss is the weighted cross entropy, divided by the number of tokens.

The bug: the message is int64 for all keys, so that the partner receives the loss weights cut to integers (0.5 becomes 0, 1.5 becomes 1), while the loader's rank goes on with the weights it has. After EleutherAI/gpt-neox issue #865 (a
loss mask column with weights in get_batch, where all keys go through broadcast_data with one integer datatype) and Megatron-LM's tensor_parallel/data.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
TOKENS, VOCABULARY, WIDTH, HIDDEN = 5, 11, 6, 8
PARTS = [[(0, 2), (2, 3)], [(3, 6), (6, 8)]]
LEVELS = [0.5, 1.0, 1.5, 2.0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(F.silu(self.up(self.norm(x)))))


def weighted_loss(model, rows):
    each = F.cross_entropy(
        model(rows["ids"]).flatten(0, 1), rows["labels"].flatten(), reduction="none"
    )
    return (each * rows["weights"].flatten().to(each.dtype)).sum()


class Clean:
    message = None

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "weights": torch.tensor(LEVELS)[torch.randint(4, (rows, TOKENS), generator=g)],
        }

    def loss_sum(self, model, rows):
        return weighted_loss(model, rows), rows["labels"].numel()

    def distribute(self, model, ctx):
        mesh = DeviceMesh.from_group(ctx.group("tp"), "cpu")
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def share(self, rows, group):
        """The rows of the tensor rank that has the loader, on all tensor ranks."""
        source = dist.get_global_rank(group, 0)
        kind = self.message or rows["weights"].dtype
        if dist.get_rank(group) == 0:
            flat = torch.cat([v.to(kind).flatten() for v in rows.values()])
        else:
            flat = torch.empty(sum(v.numel() for v in rows.values()), dtype=kind)
        dist.broadcast(flat, source, group=group)
        if dist.get_rank(group) == 0:
            return rows
        pieces = flat.split([v.numel() for v in rows.values()])
        return {k: p.view(v.shape).to(v.dtype) for (k, v), p in zip(rows.items(), pieces)}

    def step(self, model, batch, ctx):
        tokens = batch["labels"].numel()
        for low, high in PARTS[dist.get_rank(ctx.group("dp"))]:
            rows = self.share({k: v[low:high] for k, v in batch.items()}, ctx.group("tp"))
            (weighted_loss(model, rows) / tokens).backward()
        for p in model.parameters():
            local = p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(local, group=ctx.group("dp"))


class Buggy(Clean):
    message = torch.int64


EXPECT = dict(
    right=[
        r"(?i)ranks? \(?1|tp ?(rank)?.{0,3}1|second tensor|tensor rank|tp ranks?"
        r"|ranks? .{0,12}\b3\b|along tp|over tp|\btp\b",
        r"(?i)loss|weights? of (the )?(tokens?|rows?|loss)|coefficient|token weight|loss_weight"
        r"|batch\W+weights?|target|labels|head|input",
        r"(?i)differ|other|wrong|unequal|not (the )?same|truncat|integer|round|int64|floor"
        r"|between 0 and|"
        r"coefficient.{0,40}(0|0\.\d+)|foreign|disagree|diverg",
    ],
    place=[r"(?i)loss|weights|head|coefficient|input|batch"],
    wrong=[
        r"(?i)forward of .{0,25}(embed|norm|up|down|head) .{0,12}(is|goes) wrong"
        r"|goes wrong in the forward (at|of) (embed|norm|up|down)",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?2\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)(backward|adjoint) of .{0,30}(gather|all.?reduce|Colwise|Rowwise).{0,15}wrong",
        r"(?i)only (on )?rank [0-3]\b|all (four )?ranks (use|have|see) the same",
    ],
)
WHY = (
    "Tensor rank 1 of both data ranks (global ranks 1 and 3) has the loss weights 0.5 and 1.5 as 0 and 1 (1.0 and 2.0 survive), in all micro-batches; tensor rank 0 has the right ones. Ids and labels are the same, the forward up "
    "to the logits is right on all four ranks; the loss on ranks 1 and 3 is another one. Wrong: on ranks 1 and 3 head, down.bias and the shards of up and down held there; embed and norm on all ranks, since the gradient at the "
    "input of `up` is the sum over tp of one right and one wrong part. On ranks 0 and 2 head, down.bias and their shards of up and down are right. Divisor 40 tokens, sum over dp, DTensor placements are right. Fix: send the "
    "weights in a float message of their own (as Megatron's get_batch does)."
)
