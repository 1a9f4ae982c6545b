"""PyTorch's pipeline parallelism: 1F1B, three stages, an embedding tied to the head, under dp.

    sumgrad run topologies/pipeline.yaml

The first and the last stage hold the tied weight; each has a part of its gradient, and a SUM over
those two ranks finishes it. The schedule's own division by micro-batches is switched off.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

ROWS, LENGTH, VOCABULARY, WIDTH = 12, 4, 11, 5
MICRO_BATCHES = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pipeline:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Tied()

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "tokens": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "targets": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "valid": torch.arange(LENGTH) < lengths,
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        return self.token_loss(model(rows["tokens"]), rows["targets"], rows["valid"]), rows[
            "valid"
        ].sum()

    @staticmethod
    def token_loss(logits, targets, valid):
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (loss * valid.flatten()).sum()

    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        cuts = [len(model.layers) * i // stages for i in range(stages + 1)]
        parts: list[nn.Module] = list(model.layers[cuts[stage] : cuts[stage + 1]])
        if stage == 0:
            parts.insert(0, model.embed)
        if stage == stages - 1:
            parts.append(model.head)
        ends = [ctx.mesh.mesh[0], ctx.mesh.mesh[-1]]  # the ranks of the first and last stage
        pairs = [sorted({int(a), int(b)}) for a, b in zip(*(e.tolist() for e in ends), strict=True)]
        groups = {tuple(pair): dist.new_group(pair) for pair in pairs}
        self.tie = next((g for pair, g in groups.items() if ctx.rank in pair), None)
        return nn.Sequential(*parts)

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        mine = {k: v.chunk(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = mine["valid"].sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        target = torch.stack([mine["targets"], mine["valid"].long()], dim=-1)

        def loss_of(logits, target):
            return self.token_loss(logits, target[..., 0], target[..., 1]) / count

        place = PipelineStage(model, stage, stages, ctx.device, group=ctx.group("pp"))
        schedule = Schedule1F1B(place, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
        if stages == 1 or 0 < stage < stages - 1:
            schedule.step(*([mine["tokens"]] if stages == 1 else []),
                          **({"target": target} if stages == 1 else {}))  # fmt: skip
        elif stage == 0:
            schedule.step(mine["tokens"])
        else:
            schedule.step(target=target)
        self.reduce(model, ctx)

    def reduce(self, model: nn.Module, ctx) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
        if self.tie is not None and ctx.axes["pp"] > 1:
            tied = model[0].weight if ctx.coords["pp"] == 0 else model[-1].weight
            dist.all_reduce(tied.grad, group=self.tie)
