"""Fine-tuning of a small mixture of six experts on three ranks (two experts each, rows dealt out unevenly, two micro-batches). Every token goes to its two best experts; each expert has three slots per sequence, first choices are
seated before second ones, and whoever finds no slot is left out. Slots travel with an all-to-all in both directions, dense parameters are summed over ranks.

The bug: the second choices' slots are counted from zero, not from the number of first choices of that expert, so that a first and a second choice sit on one slot and the expert gets the sum of two tokens. After top2gating of DeepSpeed
(deepspeedai/DeepSpeed PR 5156, MOE gate fixes and enhancements; GShard), which adds the first choices to the second ones' locations.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
VOCABULARY, TOKENS, WIDTH, EXPERTS, SLOTS = 11, 6, 7, 6, 3
PROMPT = [1, 3, 2, 2, 1, 4, 3, 1, 2, 3]
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 7)], [(7, 9), (9, 10)]]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.splits = send, receive, group
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive, group = ctx.splits
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=group)
        return out, None, None, None


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.behind = True

    def forward(self, x):
        gates = self.score(x).softmax(-1)
        value, index = gates.topk(2, -1)
        first, second = F.one_hot(index, EXPERTS).unbind(2)
        seat_first = first.cumsum(1) - 1
        seat_second = second.cumsum(1) - 1
        if self.behind:
            seat_second = seat_second + first.sum(1, keepdim=True)
        value = value / value.sum(-1, keepdim=True)
        seated, weighted = 0, 0
        for n, (chosen, seat) in enumerate([(first, seat_first), (second, seat_second)]):
            seat = (seat[..., None] == torch.arange(SLOTS)) & (chosen[..., None] > 0)
            seat = seat.to(x.dtype)
            seated = seated + seat
            weighted = weighted + seat * value[:, :, n, None, None]
        return seated, weighted


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleDict(
            {
                str(n): nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH))
                for n in range(EXPERTS)
            }
        )
        self.group, self.others = None, None

    def forward(self, x):
        seated, weighted = self.gate(x)
        slots = torch.einsum("gsec,gsd->egcd", seated, x)
        shape = slots.shape
        slots = slots.flatten(1, 2)
        if self.group is None:
            out = torch.stack([f(s) for f, s in zip(self.experts.values(), slots)])
        else:
            own = len(self.experts)
            sizes = [own * rows * SLOTS for rows in self.others]
            sent = [own * slots.shape[1]] * len(sizes)
            came = Exchange.apply(slots.flatten(0, 1), sent, sizes, self.group)
            came = torch.cat([c.unflatten(0, (own, -1)) for c in came.split(sizes)], 1)
            done = torch.stack([f(s) for f, s in zip(self.experts.values(), came)])
            done = done.split([rows * SLOTS for rows in self.others], 1)
            done = torch.cat([d.flatten(0, 1) for d in done])
            out = Exchange.apply(done, sizes, sent, self.group)
        return torch.einsum("gsec,egcd->gsd", weighted, out.view(shape))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blend = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mixture, self.norm = Mixture(), nn.LayerNorm(WIDTH)
        self.words = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.blend(self.embed(ids))[0]
        return self.words(self.norm(x + self.mixture(x)))


def answer_loss(model, rows):
    logits = model(rows["ids"])[:, :-1]
    place = torch.arange(1, TOKENS)
    target = rows["ids"][:, 1:].masked_fill(place[None] < rows["prompt"][:, None], -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    behind = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(PROMPT), TOKENS), generator=g),
            "prompt": torch.tensor(PROMPT),
        }

    def loss_sum(self, model, rows):
        return answer_loss(model, rows), int((TOKENS - rows["prompt"]).sum())

    def distribute(self, model, ctx):
        mixture, own = model.mixture, EXPERTS // ctx.world_size
        names = [str(n) for n in range(ctx.rank * own, (ctx.rank + 1) * own)]
        mixture.experts = nn.ModuleDict({n: mixture.experts[n] for n in names})
        mixture.group, mixture.gate.behind = ctx.group("ep"), self.behind
        return model

    def step(self, model, batch, ctx):
        answers = int((TOKENS - batch["prompt"]).sum())
        model.zero_grad()
        for turn, (low, high) in enumerate(PARTS[ctx.rank]):
            model.mixture.others = [parts[turn][1] - parts[turn][0] for parts in PARTS]
            rows = {k: v[low:high] for k, v in batch.items()}
            (answer_loss(model, rows) / answers).backward()
        for name, p in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    behind = False


EXPECT = dict(
    right=[
        r"(?i)gate|mixture|seat|slots?|second|dispatch|experts",
        r"(?i)seat|slot|cumsum|place|position|behind|offset|add|sum of|twice|collid|same|another|"
        r"other (tokens|rows|places|vectors)|puts?|index|einsum|nowhere",
    ],
    place=[r"(?i)gate|seat|mixture|slots|behind|einsum"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|all.?to.?all.{0,20}(is|are|goes) (wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(score|embed|blend)(\.weight)? (is|goes) wrong in (its|the) forward|top.?k (is )?wrong",
        r"(?i)experts? .{0,25}(on the wrong rank|in another order|swapped)|only (on )?rank [012]\b|recomput",
    ],
)
WHY = (
    "In Gate.forward the second choices of an expert must be seated behind all first choices of that expert in the sequence: seat = cumsum(second) - 1 + number of first choices. Without the addition they start at slot 0 like the first "
    "choices: a slot then holds the sum of a first choice's and a second choice's token, the expert computes on the sum, and both tokens get its result (also, second choices that should have been left out for lack of slots get one). "
    "Scores, top-2 and gate weights are right. The forward goes wrong at what the gate gives (seats, weights), i.e. in mixture, in what goes into the experts; on all ranks, micro-batches, in sequences where an expert has first and second "
    "choices. The all-to-all, its backward, the reduction of dense parameters and the divisor are right. Fix: seat_second + first.sum(1, keepdim=True)."
)
