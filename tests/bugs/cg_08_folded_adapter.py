"""ViT classifier (transformers, small config) with MiSS adapters (peft), its MLPs tensor parallel
over three ranks.

fc1 is cut by columns, fc2 by rows (17 hidden features: 6, 6 and 5). MiSS adds ``fold(x) @ block``
to fc2, where fold adds up the input in pieces of r = 5 features. The block is replicated; each
rank folds its own features, the products are summed with those of the base layer, the block's
gradients over the ranks.

The bug: each rank folds its features from its own first one, as peft's forward does, although the
shard begins in the middle of a piece. Feature i then meets row (i - begin) % r of the block
instead of i % r. After tensor parallel ports of peft layers that keep peft's forward for the
local input.
"""

import torch
import torch.distributed as dist
from peft import MissConfig, get_peft_model
from peft.tuners.miss.layer import MissLinear
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}

ROWS, CLASSES, INNER, RANK = 5, 3, 17, 5


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ColumnLinear(nn.Linear):
    def forward(self, x):
        return F.linear(Enter.apply(x, self.group), self.weight, self.bias)


class RowMiss(MissLinear):
    def fold(self, x, r):
        x = F.pad(x, (self.begin % r, 0))
        x = F.pad(x, (0, -x.shape[-1] % r))
        return x.unflatten(-1, (-1, r)).sum(-2)

    def forward(self, x):
        block = self.miss_block["default"]
        out = F.linear(x, self.base_layer.weight) + self.fold(x, block.shape[0]) @ block
        return Leave.apply(out, self.group) + self.base_layer.bias


class LocalRowMiss(RowMiss):
    def fold(self, x, r):
        x = F.pad(x, (0, -x.shape[-1] % r))
        return x.unflatten(-1, (-1, r)).sum(-2)


class Clean:
    row_class = RowMiss

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(11 + self.seed)
        config = ViTConfig(
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=INNER,
            image_size=6,
            patch_size=2,
            num_channels=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
            num_labels=CLASSES,
            attn_implementation="sdpa",
        )
        adapters = MissConfig(
            r=RANK,
            target_modules=["fc2", "q_proj"],
            init_weights=False,
            modules_to_save=["classifier"],
        )
        return get_peft_model(ViTForImageClassification(config), adapters)

    def batch(self):
        g = torch.Generator().manual_seed(12 + self.seed)
        return {
            "pixel_values": torch.randn(ROWS, 1, 6, 6, generator=g),
            "label": torch.randint(0, CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["pixel_values"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), rows["label"].shape[0]

    def distribute(self, model, ctx):
        group, rank, world = ctx.group("tp"), ctx.coords["tp"], ctx.axes["tp"]
        own = torch.tensor_split(torch.arange(INNER), world)[rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for name, module in list(model.named_modules()):
            if name.endswith("mlp.fc1"):
                module.__class__ = ColumnLinear
                module.weight = nn.Parameter(
                    module.weight.detach()[lo:hi].clone(), requires_grad=False
                )
                module.bias = nn.Parameter(module.bias.detach()[lo:hi].clone(), requires_grad=False)
                module.group = group
            elif name.endswith("mlp.fc2"):
                base = module.base_layer
                base.weight = nn.Parameter(
                    base.weight.detach()[:, lo:hi].clone(), requires_grad=False
                )
                module.__class__ = self.row_class
                module.group, module.begin = group, lo
        return model

    def step(self, model, batch, ctx):
        for pixels, label in zip(*(torch.tensor_split(v, 2) for v in batch.values()), strict=True):
            loss, _ = self.loss_sum(model, {"pixel_values": pixels, "label": label})
            (loss / ROWS).backward()
        for name, parameter in model.named_parameters():
            if "mlp.fc2.miss_block" in name:
                dist.all_reduce(parameter.grad, group=ctx.group("tp"))


class Buggy(Clean):
    row_class = LocalRowMiss


EXPECT = dict(
    right=[
        r"fold|miss|adapter|block|piece",
        (
            r"offset|phase|begin|start|align|modulo|% ?r\b|global (feature|index|position)|local "
            r"(feature|index|position)|own "
            r"first|shard.{0,60}(multiple|middle|boundary)|(restart|anew|from zero)|wrong "
            r"rows?|row of the block|shifted"
        ),
    ],
    place=[r"LocalRowMiss", r"RowMiss", r"\bfold\b", r"miss_block", r"fc2"],
    wrong=[
        r"(not|never|missing).{0,40}(all-?)?reduc|summed (twice|again)",
        r"bias",
        r"padding (is|enters|of zeros)|zero[- ]padd",
        r"divis(or|ion)|normali[sz]|micro-?batch",
    ],
)

WHY = (
    "MiSS adds up the input features in pieces of r = 5, so that feature i of fc2's input "
    "meets row i % 5 of the block. Under row parallelism the shards begin at features 0, 6 "
    "and 12, no multiples of 5, but each rank folds from its own first feature, so on ranks "
    "1 and 2 the rows of the block are turned by 1 and 2. The gradients of the fc2 "
    "miss_block fall on wrong rows, and as the output of fc2 changes, those of the q_proj "
    "adapters and the classifier are wrong as well; the base layer, the sums over tp and the "
    "cut of the weights are right. A right cause says that the fold (the piece index) starts "
    "anew at the shard's first feature and ignores the shard's offset. The fix is begin % r "
    "zeros in front of the local input, or indexing the block's rows by global feature "
    "number."
)
