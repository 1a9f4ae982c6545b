"""Losses that people train with: contrastive, DPO, GRPO, two losses of a GAN, tables, batch norm.

sumgrad run examples/dp3.yaml --workload examples/losses.py:Contrastive
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from wrappers import CLASSES, ROWS, WIDTH, Net, Plain


class Contrastive(Plain):
    """Every row against every other: embeddings are gathered, and their gradients with them."""

    def batch(self):
        batch = super().batch()
        g = torch.Generator().manual_seed(self.seed + 2)
        return {"x": batch["x"][:9], "other": torch.randn(9, WIDTH, generator=g)}

    def similarity(self, model, x, other):
        return F.normalize(model(x), dim=-1), F.normalize(model(other), dim=-1)

    def loss_sum(self, model, rows):
        a, b = self.similarity(model, rows["x"], rows["other"])
        target = torch.arange(len(a))
        logits = 5 * a @ b.T
        loss = F.cross_entropy(logits, target, reduction="sum")
        return loss + F.cross_entropy(logits.T, target, reduction="sum"), len(a)

    def distribute(self, model, ctx):
        return model

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        a, b = self.similarity(model, mine["x"], mine["other"])
        # The backward of this gather sums what all ranks' losses say of a row.
        all_a, all_b = (torch.cat(collective.all_gather(t)) for t in (a, b))
        target = torch.arange(len(a)) + sum(
            len(batch["x"].tensor_split(ctx.world_size)[r]) for r in range(ctx.rank)
        )
        loss = F.cross_entropy(5 * a @ all_b.T, target, reduction="sum")
        loss = loss + F.cross_entropy(5 * b @ all_a.T, target, reduction="sum")
        (loss / len(batch["x"])).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class DPO(Plain):
    """Pairs of a chosen and a rejected answer against a frozen reference model."""

    def batch(self):
        batch = super().batch()
        g = torch.Generator().manual_seed(self.seed + 2)
        return {**batch, "rejected": (batch["y"] + 1 + torch.randint(
            CLASSES - 1, (ROWS,), generator=g)) % CLASSES}  # fmt: skip

    def reference(self):
        torch.manual_seed(self.seed + 7)
        model = Net().requires_grad_(False)
        return model.to(torch.get_default_dtype())

    def loss_sum(self, model, rows):
        margin = 0.0
        for sign, net in ((1, model), (-1, self.reference())):
            scores = net(rows["x"]).log_softmax(-1)
            chosen = scores.gather(1, rows["y"][:, None])
            margin = margin + sign * (chosen - scores.gather(1, rows["rejected"][:, None]))
        return -F.logsigmoid(0.3 * margin).sum(), len(rows["x"])

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss * ctx.world_size / ROWS).backward()


class GRPO(Plain):
    """Advantages within groups of answers that stay on one rank; tokens of all ranks count."""

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (6, 3, 5)  # prompts, answers, tokens
        lengths = torch.randint(1, 6, (*shape[:2], 1), generator=g)
        return {
            "x": torch.randn(*shape, WIDTH, generator=g),
            "y": torch.randint(CLASSES, shape, generator=g),
            "mask": torch.arange(5) < lengths,
            "old": torch.randn(shape, generator=g) * 0.1 - 1.4,
            "reward": torch.randn(shape[:2], generator=g),
        }

    def loss_sum(self, model, rows):
        reward = rows["reward"]
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        new = model(rows["x"]).log_softmax(-1).gather(-1, rows["y"][..., None])[..., 0]
        ratio = (new - rows["old"]).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.minimum(ratio * advantage[..., None], clipped * advantage[..., None])
        return -(gain * rows["mask"]).sum(), rows["mask"].sum()


class GAN(Plain):
    """Generator and discriminator, each by its own loss; both are checked at once."""

    def build(self):
        torch.manual_seed(self.seed)
        return nn.ModuleDict({"make": nn.Linear(WIDTH, WIDTH), "tell": Net()})

    def losses(self, make, tell, rows):
        fake = make(rows["x"])
        real = F.softplus(-tell(rows["x"] + 1)[:, 0]).sum()
        caught = F.softplus(tell(fake.detach())[:, 0]).sum()
        frozen = {n: p.detach() for n, p in tell.named_parameters()}
        fooled = F.softplus(-torch.func.functional_call(tell, frozen, fake)[:, 0]).sum()
        return real + caught, fooled

    def loss_sum(self, model, rows):
        telling, making = self.losses(model["make"], model["tell"], rows)
        return telling + making, len(rows["x"])

    def distribute(self, model, ctx):
        return model

    def step(self, model, batch, ctx):
        telling, making = self.losses(model["make"], model["tell"], self.mine(batch, ctx))
        (making / ROWS).backward()
        (telling / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class SparseTable(Plain):
    """An embedding with sparse gradients; gloo reduces them."""

    def build(self):
        torch.manual_seed(self.seed)
        return nn.ModuleDict({"table": nn.Embedding(13, WIDTH, sparse=True), "net": Net()})

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {**super().batch(), "id": torch.randint(13, (ROWS,), generator=g)}

    def loss_sum(self, model, rows):
        x = rows["x"] + model["table"](rows["id"])
        loss = F.cross_entropy(model["net"](x), rows["y"], reduction="none")
        return (loss * rows["weight"]).sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, self.mine(batch, ctx))
        dist.all_reduce(count)
        (loss / count).backward()
        for param in model.parameters():
            param.grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
            dist.all_reduce(param.grad)


class BatchNorm(Plain):
    """Statistics of all ranks, by collectives that differentiate (SyncBatchNorm needs a GPU)."""

    def build(self):
        torch.manual_seed(self.seed)
        return nn.Sequential(nn.Linear(WIDTH, 8), Norm(8), nn.Tanh(), nn.Linear(8, CLASSES))

    def step(self, model, batch, ctx):
        with whole_batch(model.module[1], ROWS):
            super().step(model, batch, ctx)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, broadcast_buffers=False)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.rows = None

    def forward(self, x):
        total = collective.all_reduce if self.rows else lambda t: t
        rows = self.rows or len(x)
        mean = total(x.sum(0)) / rows
        var = total((x - mean).square().sum(0)) / rows
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
        return (x - mean) * (var + 1e-5).rsqrt() * self.weight + self.bias


class whole_batch:
    """While a step runs, the statistics are those of all ranks' rows."""

    def __init__(self, norm, rows):
        self.norm, self.rows = norm, rows

    def __enter__(self):
        self.norm.rows = self.rows

    def __exit__(self, *_):
        self.norm.rows = None


class Penalised(Plain):
    """A gradient penalty: a gradient is part of the loss."""

    def loss_sum(self, model, rows):
        x = rows["x"].clone().requires_grad_()
        loss = F.cross_entropy(model(x), rows["y"], reduction="none") * rows["weight"]
        (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        return loss.sum() + 0.1 * slope.square().sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, self.mine(batch, ctx))
        dist.all_reduce(count)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Faint(Plain):
    """A second term of a millionth of the loss: it is seen like the first."""

    def terms(self):
        return {"fit": lambda m, r: Plain.loss_sum(self, m, r), "decay": self.decay}

    def decay(self, model, rows):
        return 1e-6 * sum(p.square().sum() for p in model.parameters()), 1

    def loss_sum(self, model, rows):
        loss, count = super().loss_sum(model, rows)
        return loss + count * self.decay(model, rows)[0], count

    def step(self, model, batch, ctx):
        loss, count = Plain.loss_sum(self, model, self.mine(batch, ctx))
        dist.all_reduce(count)
        decay, _ = self.decay(model.module, None)
        (loss * ctx.world_size / count + decay).backward()
