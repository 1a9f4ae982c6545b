"""Image-text contrastive training with rows that do not divide over the ranks (5, 4, 4): the texts are padded to the largest share for
the all-gather. Modelled on the reports on gathering uneven batches (open_clip and Lightning's `all_gather` of uneven tensors: zero
rows stay in the gathered tensor): nobody cuts the padding off, and its rows are negatives with a logit of zero.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"clip": {"axes": {"dp": 3}}}}
ROWS, IMAGE, TEXT, WIDTH = 13, 7, 5, 6


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(IMAGE, 9), nn.ReLU(), nn.Linear(9, WIDTH))
        self.text = nn.Sequential(
            nn.Linear(TEXT, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, WIDTH)
        )
        self.log_scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, rows):
        return F.normalize(self.image(rows["image"]), dim=-1), F.normalize(
            self.text(rows["text"]), dim=-1
        )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clip()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, IMAGE, generator=g),
            "text": torch.randn(ROWS, TEXT, generator=g),
        }

    @staticmethod
    def contrast(model, image, text, first):
        target = first + torch.arange(len(image))
        return F.cross_entropy(model.log_scale.exp() * image @ text.T, target, reduction="sum")

    def loss_sum(self, model, rows):
        return self.contrast(model, *model(rows), 0), len(rows["image"])

    def collect(self, parts, sizes, rank):
        """The texts of all ranks, and where the own ones begin."""
        return torch.cat([p[:n] for p, n in zip(parts, sizes)]), sum(sizes[:rank])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        image, text = model(mine)
        sizes = [None] * ctx.world_size
        dist.all_gather_object(sizes, len(text))
        padded = F.pad(text, (0, 0, 0, max(sizes) - len(text)))
        texts, first = self.collect(Gathered.apply(padded), sizes, ctx.rank)
        (self.contrast(model, image, texts, first) / sum(sizes)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def collect(self, parts, sizes, rank):
        return torch.cat(list(parts)), rank * max(sizes)


EXPECT = dict(
    right=[
        r"loss|softmax|negativ|logit|normali[sz]er|contrast|coupl|other rows|not additive|non.?additive|depend",
        r"pad|zero|gather|extra|additional|uneven|unequal|other ranks|rows? (count|number)|loss (itself|value|differs|is wrong|"
        r"is different)|gradient (at|of|entering|into) "
        r"(the )?(output|loss|towers?|image|text|last)",
    ],
    place=[
        r"loss|logit|softmax|contrast|output",
        r"(all|every|each) ranks?|ranks? \W?[012]",
        r"log_scale|image|text",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again|\d times)",
        r"(output|forward|activations?) of (the )?(image|text)\S* (is|are|was|were) wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad|without (a )?gradient",
        r"own rank'?s? texts only|negatives of the own rank only",
    ],
)
WHY = (
    "The gathered texts keep the two rows of zeros that pad the shares of ranks 1 and 2, and every image takes them for two further "
    "negatives with logit 0. The towers' outputs are right; the softmax of the loss has two terms too many, so all gradients are wrong "
    "on all ranks."
)
