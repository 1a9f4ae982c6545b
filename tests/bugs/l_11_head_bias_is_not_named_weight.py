"""LoRA with FSDP2: the classifier head is fully trained (`modules_to_save`), is kept out of the shards and its gradients are summed by
hand. Modelled on FAULTS C05-14 (FastVideo: synchronise LoRA replicas outside FSDP) and PEFT's reports on `modules_to_save` under
FSDP: parameters to sum are chosen by the ending of the name.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"tune": {"axes": {"dp": 3}}}}
ROWS, WIDTH, RANK, CLASSES, MICRO_BATCHES = 16, 8, 3, 5, 2


class Lora(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(inputs, RANK, bias=False),
            nn.Linear(RANK, outputs, bias=False),
        )

    def forward(self, x):
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.up, self.down = Lora(WIDTH, 12), Lora(12, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Saved(nn.Module):
    """peft's wrapper: the frozen original beside the copy that learns."""

    def __init__(self):
        super().__init__()
        self.original_module = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.modules_to_save = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.modules_to_save(x)


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.classifier = Saved()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tuned()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh, ignored_params=set(model.classifier.parameters()))
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def by_hand(self, name):
        return ".modules_to_save." in name

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            loss, _ = self.loss_sum(
                model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            )
            (loss / ROWS).backward()
        for name, param in model.named_parameters():
            if self.by_hand(name):
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def by_hand(self, name):
        return name.endswith("modules_to_save.weight")


EXPECT = dict(
    right=[
        r"bias",
        r"classifier|modules_to_save",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|averag|combin|added|ranks|rows)|"
        r"differ\w*|partial|own rows",
    ],
    place=[r"classifier|modules_to_save"],
    wrong=[
        r"lora_\S+ (is|are|has|have) (a )?wrong",
        r"modules_to_save\.weight (is|are|has|have) (a )?(wrong|never|not)",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) wrong",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "classifier.modules_to_save.bias is not among the parameters summed by hand: each rank keeps the gradient of its own rows. The "
    "weight of the classifier and the sharded LoRA parameters are right, and so is the forward."
)
