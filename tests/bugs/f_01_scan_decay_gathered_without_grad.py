"""A selective state-space (Mamba-like) layer whose sequence is cut over ranks: every rank scans its own
part from zero, the last states and the decays of the parts are gathered and give the state that comes in.
After FAULTS C07-11/C07-12 (a value fetched by a collective without autograd; forward right, gradient not).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, WIDTH, INNER, VOCAB = 5, 13, 6, 9, 11


class Gathered(torch.autograd.Function):
    """All ranks' tensors, stacked; each rank needs the gradient of all uses of its own."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank()]


def plain_gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return torch.stack(parts)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.dt_proj = nn.Linear(INNER, INNER)
        self.c_proj = nn.Linear(INNER, INNER, bias=False)
        self.A_log = nn.Parameter(torch.linspace(-2.5, -1.0, INNER))
        self.D = nn.Parameter(torch.ones(INNER))
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, incoming=None):
        u, gate = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        dt = F.softplus(self.dt_proj(u))
        decay = torch.exp(-dt * self.A_log.exp())
        h, p, states, products = torch.zeros_like(u[:, 0]), torch.ones_like(u[:, 0]), [], []
        for t in range(u.shape[1]):
            h, p = decay[:, t] * h + dt[:, t] * u[:, t], decay[:, t] * p
            states.append(h)
            products.append(p)
        states, products = torch.stack(states, 1), torch.stack(products, 1)
        if incoming is not None:
            states = states + products * incoming(h, p)[:, None]
        y = states * self.c_proj(u).tanh() + self.D * u
        return x + self.out_proj(y * F.silu(gate))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, incoming=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, incoming)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def collect(self, state, decay):
        return Gathered.apply(state), Gathered.apply(decay)

    def step(self, model, batch, ctx):
        def incoming(state, decay):
            states, decays = self.collect(state, decay)
            h = torch.zeros_like(state)
            for r in range(ctx.world_size - 1):  # the same graph on all ranks
                before = float(r < ctx.rank)
                h = h + before * ((decays[r] - 1) * h + states[r])
            return h

        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        loss = self.token_loss(model(mine["ids"], incoming), mine["labels"])
        (loss / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def collect(self, state, decay):
        # the decays are only coefficients: a plain collective is cheaper
        return Gathered.apply(state), plain_gather(decay)


EXPECT = dict(
    right=[
        r"dt_proj|A_log|in_proj|layers\.[01]|decay|scan|mixer|state.?space",
        r"missing|lack|lost|loses?|detach|no.?grad|without (a |any )?(gradient|autograd|graph)|not differentiable|"
        r"non.?differentiable|cut|does not (flow|pass|reach|cross)|never (flow|reach|cross|pass)|incomplete|"
        r"part of (the|its|their)|path|(only|just) (the |its |their )?own|adjoint|backward of (the|a) "
        r"(collective|gather|exchange|all.?gather)|gradient .{0,40}(of|from|through) (other|the other|another|later) ranks?",
    ],
    place=[
        r"dt_proj|A_log|in_proj|layers\.[01]",
        r"ranks? \W?1\b",
        r"gather|collective|exchange",
        r"decay",
    ],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced over",
        r"counted (twice|three times|[23] times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"\bhead\S* (is|are) (wrong|missing)",
        r"rows? .{0,30}(dropped|read twice)",
    ],
)
WHY = (
    "The decay of a whole part is gathered by a collective without autograd, so the state that rank 2 receives from rank 0 "
    "through rank 1 has no gradient with respect to rank 1's decays: rank 1's contribution to dt_proj, A_log, in_proj, norm of the "
    "layers (and what lies before them) lacks that path. The forward is right; the head and the final norm are exact."
)
