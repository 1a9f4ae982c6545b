"""A trainer like torchtitan's: a config, a 2-d mesh, sequence-parallel norms under fully_shard,
accumulation, a loss divided by the tokens of the whole step, a clip over both axes."""

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from net import VOCABULARY, Net
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

IGNORED = -100


@dataclass
class JobConfig:
    seed: int
    bug: str
    tensor_parallel: int
    microbatches: int = 2
    global_rows: int = 8
    length: int = 8
    max_norm: float = 0.1
    warmup: int = 2


class Trainer:
    def __init__(self, config: JobConfig):
        self.config = config
        dist.init_process_group("gloo")
        tp = min(config.tensor_parallel, dist.get_world_size())
        shape = (dist.get_world_size() // tp, tp)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.dp, self.tp = self.mesh["dp"], self.mesh["tp"]
        torch.manual_seed(config.seed)
        self.model = Net()
        if tp > 1:
            self.apply_tensor_parallel()
        for part in (*self.model.layers, self.model):
            fully_shard(part, mesh=self.dp)
            part.set_gradient_divide_factor(1.0)  # the loss is divided, not the gradient
            part.set_force_sum_reduction_for_comms(True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (config.warmup + 1))
        )

    def apply_tensor_parallel(self):
        parallelize_module(self.model, self.tp, {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        })  # fmt: skip
        for layer in self.model.layers:
            parallelize_module(layer, self.tp, {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            })  # fmt: skip

    def batches(self, step):
        """This rank's micro-batches; rows are of unequal length, their ends are ignored."""
        g = torch.Generator().manual_seed(1000 * self.config.seed + step)
        shape = (self.config.global_rows, self.config.length)
        ids, labels = (torch.randint(VOCABULARY, shape, generator=g) for _ in range(2))
        ends = torch.randint(2, self.config.length + 1, (len(ids), 1), generator=g)
        labels[torch.arange(self.config.length) >= ends] = IGNORED
        rows = torch.arange(len(ids)).tensor_split(self.dp.size())[self.dp.get_local_rank()]
        return [(ids[part], labels[part]) for part in rows.chunk(self.config.microbatches)]

    def train_step(self, step):
        self.optimizer.zero_grad()
        batches = self.batches(step)
        tokens = torch.tensor(float(sum((labels != IGNORED).sum() for _, labels in batches)))
        if self.config.bug == "tokens of one rank":
            tokens *= self.dp.size()
        else:
            dist.all_reduce(tokens, group=self.dp.get_group())
        for number, (ids, labels) in enumerate(batches):
            self.model.set_requires_gradient_sync(number == len(batches) - 1)
            logits = self.model(ids)
            loss = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / tokens).backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.config.bug == "clip by the norm of a shard":
            grads = [g.to_local() for g in grads]
        norm = torch.nn.utils.get_total_norm(grads, foreach=False)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(
            list(self.model.parameters()), self.config.max_norm, norm, foreach=False
        )
        self.optimizer.step()
        self.schedule.step()


parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--tensor-parallel", type=int, default=2)
parser.add_argument("--bug", default="")
args = parser.parse_args()
trainer = Trainer(JobConfig(args.seed, args.bug, args.tensor_parallel))
for step in range(5):
    trainer.train_step(step)
dist.destroy_process_group()
