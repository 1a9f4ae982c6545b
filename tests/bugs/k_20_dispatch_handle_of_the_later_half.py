"""Expert parallelism with the rows of a rank in two halves, so that the exchange of one overlaps with the other's work. After
DeepEP's dispatch handles under two-batch overlap (vLLM, SGLang, Megatron-LM's batch-level overlap) and FAULTS C13: the layer keeps
one handle, and the first half is combined by that of the second.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, HIDDEN, EXPERTS = 8, 5, 17, 6, 8, 4


class Exchanged(torch.autograd.Function):
    """(rank, ...) -> (source, ...): all-to-all of equal parts, which is its own transpose"""

    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx, grad):
        y = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(y, grad.contiguous())
        return y


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x, chosen):
        y = torch.einsum("nw,nwh->nh", x, self.up[chosen])
        return torch.einsum("nh,nhw->nw", F.gelu(y), self.down[chosen])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.past, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x, dispatch):
        x = x + torch.tanh(self.past(x.cumsum(1)))
        h = self.norm(x).flatten(0, 1)
        gate, chosen = (2 * self.router(h)).softmax(-1).max(-1)
        y = dispatch(self.experts, h, chosen) if dispatch else self.experts(h, chosen)
        return x + (gate[:, None] * y).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens, dispatch=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, dispatch)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows, dispatch=None):
        logits, labels = model(rows["tokens"], dispatch), rows["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        for layer in model.layers:
            for name in ("up", "down"):
                whole = getattr(layer.experts, name).data
                setattr(
                    layer.experts,
                    name,
                    nn.Parameter(distribute_tensor(whole, ctx.mesh, [Shard(0)])),
                )
        return model

    def handle_of(self, handles, half):
        return handles[half]

    def dispatch(self, experts, h, chosen):
        """Every token has a slot in the buffer of its expert; buffers travel to the experts' ranks and back."""
        ranks, handles, results = dist.get_world_size(), [], []
        for x, goal in zip(h.chunk(2), chosen.chunk(2)):
            slot = (F.one_hot(goal, EXPERTS).cumsum(0) - 1).gather(1, goal[:, None])[:, 0]
            handles.append(goal * len(x) + slot)
            buffer = x.new_zeros(EXPERTS * len(x), WIDTH).index_copy(0, handles[-1], x)
            there = Exchanged.apply(buffer.view(ranks, EXPERTS // ranks, len(x), WIDTH))
            y = F.gelu(torch.einsum("renw,ewh->renh", there, experts.up.to_local()))
            results.append(torch.einsum("renh,ehw->renw", y, experts.down.to_local()))
        back = [Exchanged.apply(y).flatten(0, 2) for y in results]
        return torch.cat([y[self.handle_of(handles, half)] for half, y in enumerate(back)])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine, self.dispatch)
        dist.all_reduce(count)
        (loss / count).backward()
        for name, param in model.named_parameters():
            if "experts." not in name:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def handle_of(self, handles, half):
        return handles[-1]


EXPECT = dict(
    right=[
        r"layers\.0|experts?|combin|dispatch",
        r"forward|output|activation|input of|values?|order|permut|wrong (tokens|rows)|handle|slot",
    ],
    place=[r"layers\.0", r"experts?", r"(all|every|each|both) ranks?|ranks? \W?[01]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"first wrong (module |output )?(is |at |in )?\S{0,12}(embed|past|norm|router)",
        r"(output|forward) of \S*(embed|layers\.0\.(past|norm|router))\S* (is|was) wrong",
        r"detach|no_grad",
    ],
)
WHY = (
    "The results of the first half of a rank's tokens are read from the slots of the second half (other tokens' results, or empty "
    "slots), on both ranks; the second half is right. The forward is wrong from the expert outputs of layers.0 on, and with it the "
    "gradients of nearly all parameters."
)
