"""LoRA adapters with an orthogonality penalty on replicated weights; gradients are summed over dp.
After FAULTS class C06 and peft AdaLoRA ports: every rank adds the penalty before the SUM."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, WIDTH, RANK, CLASSES, PENALTY = 10, 10, 3, 5, 0.02


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, inputs) / 3)
        self.lora_B = nn.Parameter(torch.randn(outputs, RANK) / 3)

    def forward(self, x):
        return self.base(x) + 2.0 * (x @ self.lora_A.T) @ self.lora_B.T

    def penalty(self):
        eye = torch.eye(RANK, dtype=self.lora_A.dtype)
        a, b = self.lora_A @ self.lora_A.T, self.lora_B.T @ self.lora_B
        return (a - eye).square().sum() + (b - eye).square().sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.q_proj, self.v_proj = LoraLinear(WIDTH, WIDTH), LoraLinear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + torch.tanh(self.q_proj(y)) * self.v_proj(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)

    def penalty(self):
        return PENALTY * sum(m.penalty() for m in self.modules() if isinstance(m, LoraLinear))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"task": self.task, "orthogonal": lambda model, _: (model.penalty(), 1)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def task(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def loss_sum(self, model, rows):
        loss, count = self.task(model, rows)
        return loss + count * model.penalty(), count

    def with_penalty(self, loss, model, ctx):
        return loss + model.penalty() if ctx.rank == 0 else loss

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.task(model, mine)
        self.with_penalty(loss / ROWS, model, ctx).backward()
        for param in model.parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def with_penalty(self, loss, model, ctx):
        return loss + model.penalty()


EXPECT = dict(
    right=[
        r"orthogonal|penalty|lora|term without rows",
        r"\b4\.0|times 4|4 times|every rank|each rank|all ranks|counted|world|replicated",
    ],
    place=[r"orthogonal|penalty", r"lora_[AB]"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\btask\b.*(times 4|4 times|wrong)",
        r"\bforward (is )?wrong",
        r"micro.?batch",
    ],
)
WHY = (
    "The penalty on replicated adapters is added on all 4 ranks before the SUM and counts 4 times; "
    "lora_A and lora_B are wrong, the classifier and the task term are right."
)
