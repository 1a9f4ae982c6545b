"""Expert parallelism on four ranks, two experts each, with the group-limited routing of DeepSeek-V3: sigmoid scores plus a correction bias choose the two best of the four groups (one group per rank) and in them the two best experts; the
weights are the scores without the bias, made to add up to one. Tokens travel with all-to-all; two micro-batches of uneven size. Router and dense layers are summed over the ranks, experts get their gradients from the tokens that came.

The bug: experts of the groups that were not chosen get the score 0 and not minus infinity. With a negative bias an open expert may score below zero, and a closed one is taken. After deepseek-ai/DeepSeek-V3 issue 741, vllm-project/vllm PR 13474
(Fix deepseekv3 grouped topk error) and huggingface/transformers PR 45441.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 4}}}}
WIDTH, HIDDEN, CLASSES, TOKENS = 6, 5, 3, 5
EXPERTS, GROUPS, OPEN, CHOSEN = 8, 4, 2, 2
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 6)], [(6, 7), (7, 8)], [(8, 10), (10, 13)]]
ROWS = 13


class Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(back, grad.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return back, None, None, None


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("correction", -0.2 - 0.6 * torch.rand(EXPERTS))
        self.closed = -math.inf

    def forward(self, x):
        scores = torch.sigmoid(self.score(x))
        choice = scores.detach() + self.correction
        groups = choice.unflatten(-1, (GROUPS, -1)).topk(2, -1).values.sum(-1)
        is_open = torch.zeros_like(groups).scatter(1, groups.topk(OPEN, -1).indices, 1.0) > 0
        is_open = is_open.repeat_interleave(EXPERTS // GROUPS, 1)
        chosen = choice.masked_fill(~is_open, self.closed).topk(CHOSEN, -1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.group, self.own = None, range(EXPERTS)

    def forward(self, x):
        weights, chosen = self.router(x)
        expert, order = chosen.flatten().sort(stable=True)
        token = order // CHOSEN
        y = x[token]
        if self.group is None:
            y = self.local(y, expert)
        else:
            ranks = dist.get_world_size(self.group)
            sent = torch.bincount(expert // (EXPERTS // ranks), minlength=ranks)
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            sent, received = sent.tolist(), received.tolist()
            arrived = Travel.apply(expert, sent, received, self.group)
            y = self.local(Travel.apply(y, sent, received, self.group), arrived)
            y = Travel.apply(y, received, sent, self.group)
        y = y * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, y)

    def local(self, x, expert):
        out = torch.zeros_like(x)
        for n in self.own:
            place = (expert == n).nonzero().squeeze(1)
            out = out.index_add(0, place, self.experts[n](x[place]))
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.mixture, self.head = Mixture(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        return self.head(x + self.mixture(self.norm(x)))


def tag_loss(model, rows):
    logits = model(rows["x"].flatten(0, 1))
    return F.cross_entropy(logits, rows["tag"].flatten(), reduction="sum")


class Clean:
    closed = -math.inf

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": 2 * torch.randn(ROWS, TOKENS, WIDTH, generator=g),
            "tag": torch.randint(CLASSES, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        return tag_loss(model, rows), rows["tag"].numel()

    def distribute(self, model, ctx):
        mixture, each = model.mixture, EXPERTS // ctx.world_size
        mixture.router.closed, mixture.group = self.closed, ctx.group("ep")
        mixture.own = range(ctx.rank * each, (ctx.rank + 1) * each)
        for n in range(EXPERTS):
            if n not in mixture.own:
                mixture.experts[n] = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (tag_loss(model, rows) / batch["tag"].numel()).backward()
        for name, p in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    closed = 0.0


EXPECT = dict(
    right=[
        r"(?i)router|routing|choice|chosen|expert",
        r"(?i)forward|cho(ice|sen|oses)|other experts?|wrong experts?|index|indices|selection|mask|picks?|value",
    ],
    place=[r"(?i)router|routing"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|never summed",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone|tokens? (is|are) lost",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|recomput|detached|all.to.all.{0,30}wrong",
        r"(?i)(?<!not )(enter|norm|router\.score)(\.\w+)? (goes|is) (first )?wrong in the forward|the forward is right",
    ],
)
WHY = (
    "In Router.forward the experts of groups that were not chosen get `closed` = 0.0 in place of minus infinity before the top-2. The correction bias is negative (-0.2 to -0.8), so the scores of open experts can be below 0, and then an expert of "
    "a closed group is chosen. Tokens with fewer than two open scores above 0 go to wrong experts with other weights, on all ranks in all micro-batches; tokens with two positive open scores are right. The forward goes wrong in mixture.router (its "
    "indices and weights; router.score is right). Gradients of experts, router and dense layers are wrong. Dispatch, its way back, the reductions, the divisor 65 are right. Fix: -inf."
)
