"""A retrieval-augmented generator, the document index over three ranks (axis "docs", two of six documents each): p(answer | question) is the sum over documents of prior times likelihood. Every rank
scores its own documents' answers for all rows; the normaliser of the prior and the marginal are log-sum-exps over ranks, each with a backward of its own. Shared weights get partial gradients, which
are summed over the ranks once, after micro-batches of 3 and 2 rows.

The bug: the backward of the marginal saves the likelihood where it should save prior plus likelihood, so that the weights of the documents are likelihood over marginal, and not the posterior. After
the marginalisation in RAG (huggingface/transformers, modeling_rag.py, get_nll) and the class of hand-written log-sum-exp backwards that save another tensor than the one that was reduced.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"docs": 3}}}}
DOCS, WIDTH, FEATURES, WORDS, LENGTH, ROWS = 6, 5, 4, 7, 3, 5
PARTS = [(0, 3), (3, 5)]


def log_sum_exp(x, group):
    """Over the last dimension and, with a group, over its ranks."""
    top = x.max(-1).values
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    total = (x - top[:, None]).exp().sum(-1)
    if group is not None:
        dist.all_reduce(total, group=group)
    return top + total.log()


class Normaliser(torch.autograd.Function):
    """Its result goes into what each rank does with its own documents: the gradients are summed."""

    @staticmethod
    def forward(ctx, scores, group):
        total = log_sum_exp(scores, group)
        ctx.save_for_backward(scores, total)
        ctx.group = group
        return total

    @staticmethod
    def backward(ctx, grad):
        scores, total = ctx.saved_tensors
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, None] * (scores - total[:, None]).exp(), None


class Marginal(torch.autograd.Function):
    """Its result is the loss, the same on all ranks."""

    @staticmethod
    def forward(ctx, prior, likelihood, group):
        joint = prior + likelihood
        total = log_sum_exp(joint, group)
        ctx.save_for_backward(joint, total)
        return total

    @staticmethod
    def backward(ctx, grad):
        joint, total = ctx.saved_tensors
        weight = (joint - total[:, None]).exp()
        return grad[:, None] * weight, grad[:, None] * weight, None


class MarginalOfLikelihood(Marginal):
    @staticmethod
    def forward(ctx, prior, likelihood, group):
        joint = prior + likelihood
        total = log_sum_exp(joint, group)
        ctx.save_for_backward(likelihood, total)
        return total


class Rag(nn.Module):
    def __init__(self):
        super().__init__()
        self.question = nn.Linear(FEATURES, WIDTH)
        self.keys = nn.Parameter(torch.randn(DOCS, WIDTH))
        self.values = nn.Parameter(torch.randn(DOCS, WIDTH))
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.reader = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.group, self.marginal = None, Marginal

    def cut(self, rank, count, group):
        held = slice(rank * count, (rank + 1) * count)
        self.keys = nn.Parameter(self.keys.detach()[held].clone())
        self.values = nn.Parameter(self.values.detach()[held].clone())
        self.group = group

    def likelihood(self, q, answers):
        before = torch.cat([torch.full_like(answers[:, :1], WORDS), answers[:, :-1]], 1)
        x = self.words(before)[:, None] + q[:, None, None] + self.values[None, :, None]
        logp = self.head(torch.tanh(self.reader(x))).log_softmax(-1)
        index = answers[:, None, :, None].expand(-1, logp.shape[1], -1, -1)
        return logp.gather(-1, index).squeeze(-1).sum(-1)

    def forward(self, questions, answers):
        q = torch.tanh(self.question(questions))
        scores = q @ self.keys.T
        likelihood = self.likelihood(q, answers)
        if self.group is None:
            return -(scores.log_softmax(-1) + likelihood).logsumexp(-1).sum()
        prior = scores - Normaliser.apply(scores, self.group)[:, None]
        return -self.marginal.apply(prior, likelihood, self.group).sum()


class Clean:
    marginal = Marginal

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Rag()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "questions": torch.randn(ROWS, FEATURES, generator=g),
            "answers": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["questions"], rows["answers"]), len(rows["answers"])

    def distribute(self, model, ctx):
        model.cut(ctx.rank, DOCS // ctx.world_size, ctx.group("docs"))
        model.marginal = self.marginal
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS:
            loss = model(batch["questions"][low:high], batch["answers"][low:high])
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name not in ("keys", "values"):
                dist.all_reduce(p.grad, group=ctx.group("docs"))


class Buggy(Clean):
    marginal = MarginalOfLikelihood


EXPECT = dict(
    right=[
        r"backward|gradient formula|derivative|adjoint|way back|hand.?written|autograd|custom function",
        r"marginal|likelihood|prior|joint|posterior|log.?sum.?exp",
    ],
    place=[r"marginal", r"likelihood", r"\bprior\b", r"\bjoint\b"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(forward|loss value|value of the loss) (is|are) wrong|wrong (rows|documents|answers)",
    ],
)
WHY = (
    "MarginalOfLikelihood.forward saves `likelihood` for the backward and not `joint` (prior + likelihood). The forward values and the loss are right on all ranks. In the backward the weight of a document "
    "is exp(likelihood - total), that is its posterior divided by its prior; the weights of a row sum to more than 1 over the six documents. Both gradients, of prior and of likelihood, are wrong on all "
    "three ranks, in both micro-batches (3 and 2 rows), by the factor 1/prior for each row and document; so all parameters' gradients are wrong. The normaliser's backward, the cut of keys and values, the "
    "sum over docs of the shared weights' gradients and the divisor 5 are right. Fix: save joint."
)
