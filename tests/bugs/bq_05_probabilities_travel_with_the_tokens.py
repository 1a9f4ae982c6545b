"""A token-wise mixture of experts on three expert-parallel ranks (two experts each, top two of six): tokens and their gate probabilities are sent together to the ranks of the experts by one autograd Function, the expert multiplies its output by the probability it
received, and the results are sent back and added. Seven rows of three tokens, two micro-batches; the router has a small z-loss besides. All gradients are summed over the ranks (an expert's are zero where it does not live).

The bug: the backward of the dispatch sends the gradient of the tokens back and returns nothing for the probabilities. After DeepEP-like fused dispatch wrappers (Megatron-LM FusedDispatch, grad_token_probs) and reports of routers that learn from auxiliary losses alone.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, TOKENS, FEATURES, WIDTH, EXPERTS, TOP = 7, 3, 5, 6, 6, 2


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH))
            for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, 1)

    def route(self, h):
        logits = 3 * self.router(h)
        probs, chosen = logits.softmax(-1).topk(TOP, -1)
        return probs, chosen, logits.logsumexp(-1).square()

    def token_losses(self, h, mixed, z, y):
        return (self.head(h + mixed).squeeze(-1) - y).square() + 0.01 * z


def exchange(x, send, receive, group):
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, send, receive, group):
        fctx.args = (receive, send, group)
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(fctx, grad):
        return exchange(grad, *fctx.args), None, None, None


class Dispatch(torch.autograd.Function):
    """Tokens and probabilities to the experts' ranks."""

    @staticmethod
    def forward(fctx, tokens, probs, send, receive, group):
        fctx.args = (receive, send, group)
        return exchange(tokens, send, receive, group), exchange(probs, send, receive, group)

    @staticmethod
    def backward(fctx, grad_tokens, grad_probs):
        return exchange(grad_tokens, *fctx.args), exchange(grad_probs, *fctx.args), None, None, None


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(fctx, tokens, probs, send, receive, group):
        fctx.args = (receive, send, group)
        both = exchange(torch.cat([tokens, probs[:, None]], 1), send, receive, group)
        return both[:, :-1].contiguous(), both[:, -1].contiguous()

    @staticmethod
    def backward(fctx, grad_tokens, *grads):
        return exchange(grad_tokens, *fctx.args), None, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MoE()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, FEATURES, generator=g),
            "y": torch.randn(ROWS, TOKENS, generator=g),
        }

    def loss_sum(self, model, rows):
        h = torch.tanh(model.embed(rows["x"].flatten(0, 1)))
        probs, chosen, z = model.route(h)
        every = torch.stack([e(h) for e in model.experts], 1)
        picked = every.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        mixed = (picked * probs[..., None]).sum(1)
        return model.token_losses(h, mixed, z, rows["y"].flatten()).sum(), rows["y"].numel()

    def dispatch(self, tokens, probs, send, receive, group):
        return Dispatch.apply(tokens, probs, send, receive, group)

    def moe(self, model, h, ctx):
        group, n = ctx.group("ep"), ctx.world_size
        local = EXPERTS // n
        probs, chosen, z = model.route(h)
        order = chosen.flatten().argsort(stable=True)
        origin = order // TOP
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).view(n, local)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        send, receive = counts.sum(1).tolist(), theirs.sum(1).tolist()
        tokens, weights = self.dispatch(h[origin], probs.flatten()[order], send, receive, group)
        expert = torch.cat([torch.arange(local).repeat_interleave(c) for c in theirs])
        out = torch.zeros_like(tokens)
        for e in range(local):
            at = (expert == e).nonzero().squeeze(1)
            y = model.experts[ctx.rank * local + e](tokens[at]) * weights[at, None]
            out = out.index_add(0, at, y)
        back = AllToAll.apply(out, receive, send, group)
        return torch.zeros_like(h).index_add(0, origin, back), z

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for n in range(2):
            part = {k: v.tensor_split(2)[n].flatten(0, 1) for k, v in mine.items()}
            h = torch.tanh(model.embed(part["x"]))
            mixed, z = self.moe(model, h, ctx)
            (model.token_losses(h, mixed, z, part["y"]).sum() / (ROWS * TOKENS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    def dispatch(self, tokens, probs, send, receive, group):
        return FusedDispatch.apply(tokens, probs, send, receive, group)


EXPECT = dict(
    right=[
        r"missing|lost|drop|none|no gradient|never|does not (reach|return|pass)|not (returned|sent back|propagated|passed)|cut|zero|ignor|omit|absent|lacks?",
        r"prob|gate|router|weights|second (output|input|result|argument)|routing",
        r"gradient|backward|grad\b|way back|path",
    ],
    place=[r"dispatch", r"router", r"probs|weights|gate", r"\bmoe\b|route"],
    wrong=[
        r"all.?reduce.{0,40}(missing|twice|wrong)|not reduced|reduced twice",
        r"expert.{0,40}(wrong scale|divided|averaged)|divisor|capacity|dropped tokens?",
        r"wrong order|order of the tokens|permut|split sizes|wrong rank",
        r"forward.{0,20}(is )?(wrong|differs)|z.?loss.{0,30}(wrong|missing)",
    ],
)
WHY = (
    "FusedDispatch.backward returns None for probs: the probabilities that the experts multiply by arrive by it, so the router's weights (and the embedding through the router) get no gradient of the prediction loss on all three ranks in both micro-batches; the z-loss's gradient alone is left, "
    "so router.weight.grad isn't empty. Forward, the tokens' gradient and the experts' gradients are right. A right cause says that the gradient of the probabilities (gate weights, router) is missing from the dispatch's backward. Fix: send the gradient of the probabilities back, too."
)
