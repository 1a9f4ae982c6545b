"""A vision transformer with token merging in a pipeline of three stages (one block each, GPipe by hand, three micro-batches of 3, 2 and 3 images). The first two blocks merge the most similar patches (12 to 9 to 7), each token has a size:
the number of patches in it. Sizes weigh the mean of a merge, and the attention adds log(size) to the scores. The divisor is the number of images.

The bug: a stage sends its tokens, and not their sizes; the next begins with ones. After facebookresearch/ToMe, whose blocks keep the sizes in a dict beside the model (tome_info), and reports of a proportional attention that does nothing
as in anhtuanhsgs/GitMerge3D issue 3.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
PATCHES, PIXELS, WIDTH, CLASSES, ROWS = 12, 5, 8, 4, 8
TOKENS = [12, 9, 7]
NAMES = ["first", "second", "third"]
PARTS = [(0, 3), (3, 5), (5, 8)]


def merge(x, size, away):
    """Put the `away` tokens at even places that are most like one at an odd place into it."""
    with torch.no_grad():
        unit = F.normalize(x, dim=-1)
        best, to = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).max(-1)
        order = best.argsort(-1, descending=True)
    gone, stay = order[:, :away, None], order[:, away:, None]
    both = torch.cat([x * size, size], -1)
    even, odd = both[:, ::2], both[:, 1::2]
    width = both.shape[-1]
    to = to[..., None].gather(1, gone).expand(-1, -1, width)
    odd = odd.scatter_add(1, to, even.gather(1, gone.expand(-1, -1, width)))
    both = torch.cat([even.gather(1, stay.expand(-1, -1, width)), odd], 1)
    return both[..., :-1] / both[..., -1:], both[..., -1:].detach()


class Block(nn.Module):
    def __init__(self, away):
        super().__init__()
        self.norm, self.joint = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)
        )
        self.away = away

    def forward(self, x, size):
        q, k, v = self.joint(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + size.log()[:, None, None, :, 0]
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if self.away:
            x, size = merge(x, size, self.away)
        return x + self.wide(x), size


class Stage(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH) if number == 0 else None
        self.places = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.7) if number == 0 else None
        away = TOKENS[number] - TOKENS[number + 1] if number < 2 else 0
        self.block = Block(away)
        self.head = nn.Linear(WIDTH, CLASSES) if number == 2 else None

    def forward(self, x, size=None):
        if self.embed is not None:
            x = self.embed(x) + self.places
        if size is None:
            size = torch.ones_like(x[..., :1])
        x, size = self.block(x, size)
        return (x, size) if self.head is None else self.head(x.mean(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = Stage(0), Stage(1), Stage(2)

    def forward(self, image):
        return self.third(*self.second(*self.first(image)))


class Clean:
    sends = 2

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, PATCHES, PIXELS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum")
        return loss, len(rows["label"])

    def distribute(self, model, ctx):
        for number, name in enumerate(NAMES):
            if number != ctx.rank:
                setattr(model, name, None)
        return model

    def step(self, model, batch, ctx):
        rank, stage = ctx.rank, getattr(model, NAMES[ctx.rank])
        for p in stage.parameters():
            p.grad = None
        like = next(stage.parameters())
        kept = []
        for low, high in PARTS:
            if rank == 0:
                inputs = [batch["image"][low:high]]
            else:
                shape = (high - low, TOKENS[rank])
                inputs = [like.new_empty(*shape, width) for width in (WIDTH, 1)[: self.sends]]
                for x in inputs:
                    dist.recv(x, src=rank - 1)
                inputs[0].requires_grad_()
            result = stage(*inputs)
            if rank < 2:
                for x in result[: self.sends]:
                    dist.send(x.detach().contiguous(), dst=rank + 1)
                kept.append((inputs[0], result[0]))
            else:
                loss = F.cross_entropy(result, batch["label"][low:high], reduction="sum")
                kept.append((inputs[0], loss / ROWS))
        for x, result in kept:
            if rank < 2:
                grad = torch.empty_like(result)
                dist.recv(grad, src=rank + 1)
                result.backward(grad)
            else:
                result.backward()
            if rank > 0:
                dist.send(x.grad.contiguous(), dst=rank - 1)


class Buggy(Clean):
    sends = 1


EXPECT = dict(
    right=[
        r"(?i)second|third|stage|rank [12]|ranks 1|block|size|merge|softmax|scores",
        r"(?i)forward|size|log|argument|other (value|number)|ones|not sent|receive|weigh|zeros?",
    ],
    place=[r"(?i)second|block|size|merge|scores|log"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read|swapped|mixed)",
        r"(?i)first.{0,25}forward.{0,15}(is|goes) wrong|(goes wrong|is wrong) in (the )?first\b",
        r"(?i)labels? .{0,20}(is|are) wrong|backward formula|wrong gradient (is|was) sent",
    ],
)
WHY = (
    "Stages send only the tokens; the sizes (third dimension of one, 1 to several patches) stay behind, and Stage.forward of ranks 1 and 2 makes ones of them (size is None). The tokens that rank 1 gets are right; its block goes wrong in all "
    "micro-batches and rows: log(size) is 0 in the attention's scores, and merge takes the plain mean of tokens that stand for several patches. Rank 2's block has the same (it gets wrong tokens already, and its sizes are ones, too). The forward "
    "of rank 0 is right; its gradients are wrong because those that come back from rank 1 are of other values. All gradients are wrong. Sends and receives, their order, divisor 8, labels are right. Fix: send and receive the sizes, too (sends = 2)."
)
