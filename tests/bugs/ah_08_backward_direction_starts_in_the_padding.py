"""A bidirectional tagger with its two directions on two ranks (axis tp: the forward GRU on rank 0 of the pair, the backward GRU on rank 1), times two data-parallel replicas (dp), two micro-batches per replica. Each rank of a pair
embeds the same rows, runs its direction, the two outputs are put side by side (all-reduce of zeros with the own half; its backward takes the own half) and a replicated head tags the words. Padding (word 0) is at the end, its labels are
-100.

The bug: the rank of the backward direction turns the padded sequence round as a whole (flip), so that its state runs through the padding before it sees the last word. Each sequence must be turned round within its own length. As in
pytorch issues #1811 (the wrong and the right case drawn) and #1794 (reverse_padded_sequence), lmnt-com/haste #12, tensorflow #403, compare state-spaces/mamba PR #52 (flip along the sequence).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
WORDS, WIDTH, HIDDEN, TAGS, STEPS = 9, 5, 4, 4, 7
PARTS = [[(0, 3), (3, 4)], [(4, 5), (5, 9)]]
LENGTHS = [7, 4, 6, 7, 2, 7, 5, 7, 3]


class SideBySide(torch.autograd.Function):
    """Both directions' outputs; all behind it is the same on both ranks of the pair."""

    @staticmethod
    def forward(ctx, x, turn, group):
        ctx.turn = turn
        out = x.new_zeros(*x.shape[:-1], 2 * HIDDEN)
        out[..., turn * HIDDEN : (turn + 1) * HIDDEN] = x
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        low = ctx.turn * HIDDEN
        return grad[..., low : low + HIDDEN].contiguous(), None, None


def turned(x, lengths):
    step = torch.arange(x.shape[1])[None]
    place = torch.where(step < lengths[:, None], lengths[:, None] - 1 - step, step)
    return x.gather(1, place[..., None].expand(-1, -1, x.shape[2]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.ahead = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.astern = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        self.head = nn.Linear(2 * HIDDEN, TAGS)
        self.group, self.within = None, True

    def run_ahead(self, x):
        return self.ahead(x)[0]

    def run_astern(self, x, lengths):
        if self.within:
            return turned(self.astern(turned(x, lengths))[0], lengths)
        return self.astern(x.flip(1))[0].flip(1)

    def forward(self, words, lengths):
        x = self.embed(words)
        if self.group is None:
            both = torch.cat([self.run_ahead(x), self.run_astern(x, lengths)], -1)
        else:
            turn = dist.get_rank(self.group)
            own = self.run_astern(x, lengths) if turn else self.run_ahead(x)
            both = SideBySide.apply(own, turn, self.group)
        return self.head(both)


class Clean:
    within = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.tensor(LENGTHS)
        there = torch.arange(STEPS)[None] < lengths[:, None]
        words = torch.randint(1, WORDS, (len(LENGTHS), STEPS), generator=g)
        tags = torch.randint(TAGS, (len(LENGTHS), STEPS), generator=g)
        return {"words": words * there, "lengths": lengths, "tags": tags.masked_fill(~there, -100)}

    def loss_sum(self, model, rows):
        logits = model(rows["words"], rows["lengths"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["tags"].flatten(), reduction="sum")
        return loss, int(rows["lengths"].sum())

    def distribute(self, model, ctx):
        model.group, model.within = ctx.group("tp"), self.within
        return model

    def step(self, model, batch, ctx):
        dp, tp = ctx.group("dp"), ctx.group("tp")
        count = int(batch["lengths"].sum())
        for low, high in PARTS[dist.get_rank(dp)]:
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / count).backward()
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=dp)
            if not name.startswith("head."):
                dist.all_reduce(p.grad, group=tp)


class Buggy(Clean):
    within = False


EXPECT = dict(
    right=[
        r"(?i)astern|backward direction|reverse|direction",
        r"(?i)forward|input|output|padd|flip|length|reverse",
        r"(?i)wrong|differ|padd|flip|length|other",
    ],
    place=[r"(?i)astern|run_astern|backward direction|second direction|flip"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|only the backward (pass|is)",
        r"(?i)ahead(\.\w+)? .{0,20}(is|are|goes) wrong|embed\w*('s)? (output|forward) .{0,12}wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [02]\b|rank [0-3] alone|all (four )?ranks .{0,25}(first|goes) wrong",
        r"(?i)SideBySide.{0,30}(adjoint|backward) .{0,12}wrong|labels? .{0,20}(is|are) (wrong|of|"
        r"shifted)",
    ],
)
WHY = (
    "Ranks 1 and 3 (tp rank 1 of each replica) run `astern` on the whole padded sequence turned round: in rows shorter than 7 (row 1, 2 of replica 0's micro-batch 0; row 4, replica 1's micro-batch 0; rows 6 and 8 of its "
    "micro-batch 1) the state is not zero but has taken in 3, 1, 5, 2 and 4 words of padding (embedding of word 0) before the last word. Its output at all words of these rows is wrong; rows 0, 3, 5, 7 (full length) are right, so "
    "replica 0's micro-batch 1 (row 3) is right. `ahead` on ranks 0 and 2 is right. By the side-by-side, the logits and the loss of these rows are wrong on both ranks of the pair, so after the reductions all parameters' gradients "
    "are wrong; embed row 0 gets a gradient although padding must have none at all. Loss mask, divisor 48, reductions over dp and tp are right. Fix: turn each sequence round within its length (turned), there and back, or "
    "pack_padded_sequence."
)
