"""A pointer-generator summariser: the target's probability mixes a vocabulary-parallel softmax
(three uneven shards) with the attention on the source positions that hold the target word.

The shards' parts of the probability are summed over the ranks. In the step each rank adds the
copied part, which all of them have, and not just the rank that owns the target word. After ports
of See et al.'s final distribution to vocabulary-parallel heads.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
VOCAB, DIM, SIZES = 13, 7, [5, 4, 4]


class SumOverRanks(torch.autograd.Function):
    """For a result that every rank goes on with in the same way."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumBothWays(SumOverRanks):
    """For a result that each rank goes on with for its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return SumOverRanks.forward(ctx, x, group)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.encoder = nn.GRU(DIM, DIM, batch_first=True)
        self.decoder = nn.GRU(DIM, DIM, batch_first=True)
        self.match = nn.Linear(DIM, DIM)
        self.switch = nn.Linear(2 * DIM, 1)
        self.vocab = nn.Linear(2 * DIM, VOCAB)

    def states(self, source, target):
        memory, last = self.encoder(self.embed(source))
        h, _ = self.decoder(self.embed(target[:, :-1]), last)
        attention = (self.match(h) @ memory.transpose(1, 2)).softmax(-1)
        h = torch.cat([h, attention @ memory], dim=-1)
        same = source[:, None, :] == target[:, 1:, None]
        copied = (attention * same).sum(-1)
        return h, torch.sigmoid(self.switch(h)).squeeze(-1), copied

    def forward(self, source, target):
        h, gate, copied = self.states(source, target)
        word = self.vocab(h).softmax(-1).gather(-1, target[:, 1:, None]).squeeze(-1)
        return gate * word + (1 - gate) * copied


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(151 + self.seed)
        return Pointer()

    def batch(self):
        g = torch.Generator().manual_seed(161 + self.seed)
        source = torch.randint(VOCAB, (5, 8), generator=g)
        target = torch.randint(VOCAB, (5, 6), generator=g)
        target[:, 1::2] = source[:, 2:5]
        return {"source": source, "target": target}

    def loss_sum(self, model, rows):
        return -model(rows["source"], rows["target"]).log().sum(), rows["target"][:, 1:].numel()

    def distribute(self, model, ctx):
        rank = dist.get_rank(ctx.group("tp"))
        for name in ("weight", "bias"):
            whole = getattr(model.vocab, name).detach()
            setattr(model.vocab, name, nn.Parameter(whole.split(SIZES)[rank].clone()))
        return model

    def part(self, gate, word, copied, own):
        """What this rank adds to the probability of the targets."""
        return (gate * word + (1 - gate) * copied) * own

    def probability(self, model, source, target, group):
        rank = dist.get_rank(group)
        h, gate, copied = model.states(source, target)
        logits = h @ model.vocab.weight.T + model.vocab.bias
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        e = (logits - top[..., None]).exp()
        norm = SumBothWays.apply(e.sum(-1), group)
        local = target[:, 1:] - sum(SIZES[:rank])
        own = (local >= 0) & (local < SIZES[rank])
        word = e.gather(-1, local.clamp(0, SIZES[rank] - 1)[..., None]).squeeze(-1) / norm
        return SumOverRanks.apply(self.part(gate, word, copied, own), group)

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        p = self.probability(model, batch["source"], batch["target"], group)
        (-p.log().mean()).backward()
        for name, param in model.named_parameters():
            if not name.startswith("vocab."):
                dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def part(self, gate, word, copied, own):
        """What this rank adds to the probability of the targets."""
        return gate * word * own + (1 - gate) * copied


EXPECT = {
    "right": [
        r"cop(y|ied|ying)|pointer|attention (mass|part|term)",
        (
            r"(every|each|all|per) (of the )?(rank|shard)|three times|3 ?x|3 times|tp times|"
            r"times (the )?(tp|world|number)|multipl|not (just|only)|own(s|er)\b|"
            r"more than once|repeated|triple"
        ),
    ],
    "place": [r"\bpart\b", r"\bcopied\b", r"probability", r"SumOverRanks", r"1 - gate"],
    "wrong": [
        (
            r"norm(ali[sz]er|alization)? (is )?(local|not reduced|over (the )?own)|"
            r"softmax (is )?(taken )?over (the )?own"
        ),
        r"max\S* (is )?(local|not reduced)",
        r"identity backward|backward (is )?(missing|lacks)|gradient (is )?(summed|reduced) twice",
        r"repeated (source )?words|first match",
        r"clamp|out of range",
    ],
}

WHY = (
    "The probability of a target is summed over the vocabulary shards; only the owner may "
    "contribute the copied part (1 - gate) * copied, which every rank holds in full. The step "
    "masks the softmax part by ownership but not the copied part, so the sum has the copy "
    "term three times (tp times) and the probability is wrong wherever the target is in the "
    "source. All gradients that such targets give are wrong: embedding, encoder, decoder, "
    "attention, switch and the vocabulary shards. A right cause says that the copied part is "
    "added on every rank inside the sum. Fix: mask it by own."
)
