"""Long sequences and large vocabularies: Ulysses, vocabulary-parallel loss, packed documents.

sumgrad run examples/dp3.yaml --workload examples/sequences.py:Ulysses
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 12, 12, 3, 36


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, swap=lambda t, _: t):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(-3)
        q, k, v = (swap(t, "heads").transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(swap(y, "positions").flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, positions=None, **more):
        place = self.position if positions is None else self.position[positions]
        x = self.embed(ids) + place
        for layer in self.layers:
            x = layer(x, **more)
        return self.head(x)


class Ulysses:
    """Positions are sharded; around the attention an all-to-all shards the heads instead."""

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    def loss_sum(self, model, rows, **more):
        logits = model(rows["ids"], **more)
        labels = rows["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def step(self, model, batch, ctx):
        def swap(x, wanted):
            """(rows, positions / ranks, heads, size) <-> (rows, positions, heads / ranks, size)"""
            cut, joined = (2, 1) if wanted == "heads" else (1, 2)
            parts = [t.contiguous() for t in x.tensor_split(ctx.world_size, dim=cut)]
            got = collective.all_to_all([torch.empty_like(parts[ctx.rank]) for _ in parts], parts)
            return torch.cat(got, dim=joined)

        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        positions = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        loss, _ = self.loss_sum(model, mine, positions=positions, swap=swap)
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class VocabularyParallel(Ulysses):
    """The head is sharded by vocabulary, and so are the logits: nothing gathers them."""

    def distribute(self, model, ctx):
        plan = {"head": ColwiseParallel(use_local_output=False)}
        return parallelize_module(model, ctx.mesh, plan)

    def loss_sum(self, model, rows, **more):
        logits, labels = model(rows["ids"]), rows["labels"]
        if isinstance(logits, DTensor):
            labels = distribute_tensor(labels, logits.device_mesh, [Replicate()])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def step(self, model, batch, ctx):
        with loss_parallel():
            loss, count = self.loss_sum(model, batch)
            (loss / count).backward()


class VocabularyByHand(Ulysses):
    """The same with plain tensors: each rank has some rows of the head, and the loss is computed
    from its own logits, a maximum and two sums over the ranks."""

    def distribute(self, model, ctx):
        kept = VOCABULARY // ctx.world_size
        start = ctx.rank * kept
        self.start, self.kept = start, kept
        model.head.weight = nn.Parameter(model.head.weight[start : start + kept].detach().clone())
        return model

    def step(self, model, batch, ctx):
        x = model.embed(batch["ids"]) + model.position
        for layer in model.layers:
            x = layer(x)
        own, labels = F.linear(Copied.apply(x), model.head.weight), batch["labels"]
        largest = own.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total = Summed.apply((own - largest[..., None]).exp().sum(-1))
        here = (labels >= self.start) & (labels < self.start + self.kept)
        index = (labels - self.start).clamp(0, self.kept - 1)
        chosen = own.gather(-1, index[..., None])[..., 0].masked_fill(~here, 0.0)
        loss = total.log() + largest - Summed.apply(chosen)
        valid = labels != -100
        ((loss * valid).sum() / valid.sum()).backward()


class Copied(torch.autograd.Function):
    """The same on every rank; gradients of all ranks' parts are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """A sum over ranks; the gradient of the sum is that of every part."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Sharded(VocabularyByHand):
    """Embedding and head are DTensors, cut by vocabulary and by width."""

    def distribute(self, model, ctx):
        for module, dim in ((model.embed, 1), (model.head, 0)):
            cut = distribute_tensor(module.weight.detach(), ctx.mesh, [Shard(dim)])
            module.weight = nn.Parameter(cut)
        return model

    def step(self, model, batch, ctx):
        embed = model.embed.weight.full_tensor(grad_placements=[Replicate()])
        head = model.head.weight.full_tensor(grad_placements=[Replicate()])
        x = F.embedding(batch["ids"], embed) + model.position
        for layer in model.layers:
            x = layer(x)
        labels = batch["labels"]
        loss = F.cross_entropy(F.linear(x, head).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / (labels != -100).sum()).backward()
