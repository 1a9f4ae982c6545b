"""What is wrapped around a model or a step: compile, checkpoints, accumulation, Join, ZeRO-1, EMA.

sumgrad run examples/dp3.yaml --workload examples/wrappers.py:CompiledDDP
"""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH, CLASSES = 11, 6, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 9),
            nn.Linear(9, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, wrap=lambda block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.wrap = nn.Linear(WIDTH, CLASSES), wrap

    def forward(self, x):
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(x)


class Plain:
    """A classifier with rows of unequal weight under DDP; the others change one thing of it."""

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "weight": torch.randint(1, 4, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["x"]), rows["y"], reduction="none")
        return (loss * rows["weight"]).sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, self.mine(batch, ctx))
        dist.all_reduce(count)
        (loss * ctx.world_size / count).backward()


class CompiledModel(Plain):
    def distribute(self, model, ctx):
        return DistributedDataParallel(torch.compile(model))


class CompiledDDP(Plain):
    def distribute(self, model, ctx):
        return torch.compile(DistributedDataParallel(model))


class Checkpointed(Plain):
    reentrant = False

    def build(self):
        torch.manual_seed(self.seed)
        return Net(lambda block, x: checkpoint(block, x, use_reentrant=self.reentrant))


class CheckpointedReentrant(Checkpointed):
    """Reentrant checkpoints need an input that takes a gradient."""

    reentrant = True

    def loss_sum(self, model, rows):
        return super().loss_sum(model, {**rows, "x": rows["x"].requires_grad_()})


class Accumulating(Plain):
    """Two micro-batches; DDP reduces after the last."""

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        count = mine["weight"].sum()
        dist.all_reduce(count)
        for i in range(2):
            with model.no_sync() if i == 0 else contextlib.nullcontext():
                micro = {k: v.tensor_split(2)[i] for k, v in mine.items()}
                (self.loss_sum(model, micro)[0] * ctx.world_size / count).backward()


class StaticGraph(Accumulating):
    def distribute(self, model, ctx):
        return DistributedDataParallel(model, static_graph=True)

    def step(self, model, batch, ctx):
        Plain.step(self, model, batch, ctx)


class Unused(Plain):
    """A head that no row of this task uses."""

    def build(self):
        model = super().build()
        model.spare = nn.Linear(WIDTH, 2)
        return model

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, find_unused_parameters=True)


class Joined(Plain):
    """The last rank has no rows left: Join shadows its reductions."""

    def step(self, model, batch, ctx):
        batches = [{k: v.tensor_split(2)[r] for k, v in batch.items()} for r in range(2)]
        total = batch["weight"].sum()
        with Join([model], divide_by_initial_world_size=True):
            for mine in batches[ctx.rank : ctx.rank + 1]:
                (self.loss_sum(model, mine)[0] * ctx.world_size / total).backward()


class Zero1(Plain):
    """ZeRO-1: what ZeroRedundancyOptimizer steps with are DDP's gradients; its step comes after."""

    def distribute(self, model, ctx):
        model = super().distribute(model, ctx)
        self.optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )
        return model

    def step(self, model, batch, ctx):
        self.optimizer.zero_grad()
        super().step(model, batch, ctx)


class Averaged(Plain):
    """An exponential moving average of the weights is kept beside them."""

    def distribute(self, model, ctx):
        self.ema = copy.deepcopy(model).requires_grad_(False)
        return super().distribute(model, ctx)

    def step(self, model, batch, ctx):
        super().step(model, batch, ctx)
        with torch.no_grad():
            for kept, now in zip(self.ema.parameters(), model.parameters(), strict=True):
                kept.lerp_(now, 0.1)


class Hybrid(Plain):
    """HSDP: sharded in a group, replicated between groups."""

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, self.mine(batch, ctx))
        dist.all_reduce(count)
        (loss / count).backward()


class CompressedHalf(Plain):
    """Gradients travel as float16: a choice that the precision tier names and does not judge."""

    def distribute(self, model, ctx):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        model = super().distribute(model, ctx)
        model.register_comm_hook(None, fp16_compress_hook)
        return model


class Dropout(Plain):
    """Seeded row by row, so that a row has its mask wherever it is; drawn in float32."""

    dtype = torch.float32

    def batch(self):
        return {**super().batch(), "row": torch.arange(ROWS)}

    def loss_sum(self, model, rows):
        masks = []
        for row in rows["row"].tolist():
            g = torch.Generator().manual_seed(1000 * self.seed + row)
            masks.append(torch.rand(WIDTH, generator=g, dtype=self.dtype) < 0.8)
        x = rows["x"] * torch.stack(masks) / 0.8 if masks else rows["x"]
        return super().loss_sum(model, {**rows, "x": x})


class DropoutHalf(Dropout):
    dtype = torch.bfloat16


class DropoutDefault(Dropout):
    dtype = None
