"""A mixture of softmaxes as language model head (Yang et al., AWD-LSTM-MoS) under vocabulary parallelism: three components, each a softmax over all 17 words of logits from its own context vector, mixed with weights pi. The
words are cut over three tp ranks (6, 6 and 5); each rank has the exponentials of its own words, and the sums over the words and the target's are put together by all-reduce. The body is replicated, two micro-batches.

The bug: the vocabulary parallel loss was ported from the plain one: it mixes the exponentials first and normalises the mixture by one total, instead of normalising each component by its own total before mixing.
After ports of vocab-parallel cross entropy to mixture heads.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, FEATURES, WIDTH, COMPONENTS, VOCABULARY = 7, 5, 6, 3, 17


class MixtureModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(FEATURES, WIDTH)
        self.context = nn.Linear(WIDTH, COMPONENTS * WIDTH)
        self.prior = nn.Linear(WIDTH, COMPONENTS)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def contexts(self, x):
        h = torch.tanh(self.body(x))
        c = torch.tanh(self.context(h)).unflatten(-1, (COMPONENTS, WIDTH))
        return c, (2 * self.prior(h)).softmax(-1)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = MixtureModel()
        model.decoder.weight.data.mul_(4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "word": torch.randint(VOCABULARY, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        c, pi = model.contexts(rows["x"])
        p = (pi[..., None] * model.decoder(c).softmax(-1)).sum(1)
        return -p.gather(1, rows["word"][:, None]).log().sum(), len(p)

    def token_losses(self, pi, target, totals):
        return -(pi * target / totals).sum(1).log()

    def vocab_parallel_loss(self, model, rows, own, group):
        c, pi = model.contexts(rows["x"])
        c = CopyToRanks.apply(c, group)
        logits = c @ model.decoder.weight[own].T + model.decoder.bias[own]
        exps = logits.exp()
        place = rows["word"] - own.start
        here = (place >= 0) & (place < own.stop - own.start)
        place = place.clamp(0, own.stop - own.start - 1)
        found = exps.gather(2, place[:, None, None].expand(-1, COMPONENTS, 1)).squeeze(2)
        target = SumOverRanks.apply(found * here[:, None], group)
        totals = SumOverRanks.apply(exps.sum(2), group)
        return self.token_losses(pi, target, totals)

    def step(self, model, batch, ctx):
        group = ctx.group("tp")
        words = torch.arange(VOCABULARY).tensor_split(ctx.world_size)[ctx.rank]
        own = slice(int(words[0]), int(words[-1]) + 1)
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            (self.vocab_parallel_loss(model, rows, own, group).sum() / ROWS).backward()
        for p in model.decoder.parameters():
            dist.all_reduce(p.grad, group=group)  # zero outside the own words


class Buggy(Clean):
    def token_losses(self, pi, target, totals):
        return (pi * totals).sum(1).log() - (pi * target).sum(1).log()


EXPECT = dict(
    right=[
        r"normalis|normaliz|totals?|softmax|denominator|partition|mixture|component|token_losses|loss",
        r"each component|per component|component|own total|one total|mixture|mixed|before|order|after the (totals|sum|all.?reduce)|token_losses|loss (itself|value|function|formula)"
        r"|(formula|computation|value).{0,60}(differ|other|unlike|wrong|not what)",
    ],
    place=[
        r"token_losses",
        r"vocab_parallel_loss",
        r"totals|\bpi\b|target",
        r"normalis|normaliz|softmax",
    ],
    wrong=[
        r"not reduced|reduced twice|never reduced|missing (all.?)?reduc|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means|(own|local) (vocabulary|words|shard)",
        r"(backward|adjoint) of (Copy|Sum)|(Copy|Sum)(To|Over)Ranks.{0,40}(wrong|missing|should)",
        r"detached|no gradient|(wrong|other) (rows|labels|words)|mask",
    ],
)
WHY = (
    "With totals[k] the sum of the exponentials of component k over all words, the probability is sum_k pi_k e_k / totals_k; the Buggy token_losses computes sum_k pi_k e_k / sum_k pi_k totals_k, a mixture weighted by "
    "pi_k totals_k instead of pi_k. All sums over the ranks are right and complete; the loss is wrong alike on all tp ranks and in both micro-batches, and so are the gradients of every parameter (prior the most). A right "
    "cause points to the loss computation after the reduced totals: components normalised together, not each by its own. Fix: divide by totals inside the sum."
)
