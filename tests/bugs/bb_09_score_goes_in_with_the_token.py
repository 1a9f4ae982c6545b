"""A mixture of seven experts, two for each token, dealt out to four ranks (expert parallel: 2, 2, 2, 1), data parallel over the same ranks with uneven rows and two micro-batches. Tokens are sorted by expert, sent by all-to-all, and come back to
be weighted with the router's scores and summed. Router, embedding and head are on all ranks and their gradients are summed; the divisor is the number of all tokens.

The bug: the dispatch multiplies the tokens with their scores before they are sent (as Llama 4 does it, with one expert for each token), and the combine sums without them. The experts are not linear, so this is another function. After
vllm-project/llm-compressor PR 1907 (Fix llama4 calibration: router scores before experts, whereas most mixtures apply them after) and NVIDIA/TensorRT-LLM PR 3492 (option apply_router_weight_on_input).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 4}}}}
VOCABULARY, TOKENS, WIDTH, EXPERTS, CHOSEN, ROWS = 12, 4, 6, 7, 2, 11
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 6)], [(6, 7), (7, 9)], [(9, 10), (10, 11)]]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(x, send, receive, group):
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict(
            {
                str(n): nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, WIDTH))
                for n in range(EXPERTS)
            }
        )
        self.group, self.owner, self.on_input = None, None, False

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        scores = scores / scores.sum(-1, keepdim=True)
        if self.group is None:
            out = torch.zeros_like(x)
            for name, expert in self.experts.items():
                token, slot = (chosen == int(name)).nonzero(as_tuple=True)
                out = out.index_add(0, token, expert(x[token]) * scores[token, slot, None])
        else:
            out = self.dispatched(x, scores, chosen)
        return out.view(shape)

    def dispatched(self, x, scores, chosen):
        order = chosen.flatten().argsort(stable=True)
        token, weight = order // CHOSEN, scores.flatten()[order]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        world = dist.get_world_size(self.group)
        held = [[n for n in range(EXPERTS) if self.owner[n] == r] for r in range(world)]
        mine = held[dist.get_rank(self.group)]
        there = exchange(counts, [len(h) for h in held], [len(mine)] * world, self.group)
        there = there.view(world, len(mine))
        send = [int(counts[h].sum()) for h in held]
        receive = there.sum(1).tolist()

        ahead = x[token] * weight[:, None] if self.on_input else x[token]
        inbox = Exchange.apply(ahead, send, receive, self.group)
        kind = torch.arange(len(mine)).repeat(world).repeat_interleave(there.flatten())
        result = torch.zeros_like(inbox)
        for n, name in enumerate(mine):
            at = (kind == n).nonzero()[:, 0]
            result = result.index_add(0, at, self.experts[str(name)](inbox[at]))
        result = Exchange.apply(result, receive, send, self.group)
        if not self.on_input:
            result = result * weight[:, None]
        return torch.zeros_like(x).index_add(0, token, result)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm, self.mixture = nn.LayerNorm(WIDTH), Mixture()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + F.silu(self.mix(x.cumsum(1)))
        return self.head(x + self.mixture(self.norm(x)))


def text_loss(model, rows):
    logits = model(rows["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows["ids"][:, 1:].flatten(), reduction="sum")


class Clean:
    on_input = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=g)}

    def loss_sum(self, model, rows):
        return text_loss(model, rows), len(rows["ids"]) * TOKENS

    def distribute(self, model, ctx):
        mixture = model.mixture
        mixture.owner = [n // 2 for n in range(EXPERTS)]
        mixture.group, mixture.on_input = ctx.group("ep"), self.on_input
        mixture.experts = nn.ModuleDict(
            {k: v for k, v in mixture.experts.items() if mixture.owner[int(k)] == ctx.rank}
        )
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (text_loss(model, rows) / (ROWS * TOKENS)).backward()
        for name, p in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    on_input = True


EXPECT = dict(
    right=[
        r"(?i)experts?|mixture|dispatch|inbox|ahead|weight\b|scores?|bb_09\w*\.py:\d+",
        r"(?i)forward|what goes into|input|times|multipl|score|weight|before|nowhere|argument|handed|factor",
    ],
    place=[r"(?i)experts?|mixture|dispatch|inbox|ahead|bb_09\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|sum over ep .{0,20}missing",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (count|rows)|wrong (loss )?divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|tokens? .{0,20}(lost|dropped)",
        r"(?i)router('s)? (forward|output) is wrong|backward of Exchange is wrong",
        r"(?i)(wrong|other) experts? (is|are|gets?|receives?)|(another|wrong) order|permut|other places",
        r"(?i)only (on )?rank [0123]\b|rank [0123] alone|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "In Mixture.dispatched the tokens are multiplied with their router scores before the all-to-all (`x[token] * weight`), and what the experts give is summed without the scores; right is expert(x) * score. The experts (two linear layers with "
    "biases and SiLU) are not linear, so what they give is wrong. The router and its scores, the choice, the order of tokens, both exchanges are right. What goes into every expert is score times the right input, on all ranks, in all rows and "
    "micro-batches; all gradients are wrong. Sums over ep and the divisor 44 are right. Fix: multiply the result with the weight after it came back, not the input."
)
