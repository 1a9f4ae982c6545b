"""Policy gradient with a KL penalty to the base model, LoRA adapters under DDP: the reference is the same network with the adapters
switched off. After reports on TRL/PEFT's `disable_adapter` as reference model (the KL is zero or far too small because adapters are
still active; huggingface/trl and modelscope/ms-swift): the switch reaches the direct children alone.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, RANK, BETA = 9, 6, 17, 8, 2, 0.7


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.5 * torch.randn(outputs, RANK))
        self.enabled = True

    def forward(self, x):
        y = self.base(x)
        return y + F.linear(F.linear(x, self.a), self.b) if self.enabled else y


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.gate, self.out = LoraLinear(WIDTH, 2 * WIDTH), LoraLinear(WIDTH, WIDTH)

    def forward(self, x):
        value, gate = self.gate(self.norm(x)).chunk(2, -1)
        seen = value.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.out(seen * gate.sigmoid())


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.head = LoraLinear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


@contextlib.contextmanager
def switched_off(modules):
    adapters = [m for m in modules if isinstance(m, LoraLinear)]
    for adapter in adapters:
        adapter.enabled = False
    yield
    for adapter in adapters:
        adapter.enabled = True


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda model, rows: (self.parts(model, rows)[0], rows["mask"].sum()),
            "kl": lambda model, rows: (BETA * self.parts(model, rows)[1], rows["mask"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "mask": torch.arange(1, LENGTH) <= lengths,
            "advantage": torch.randn(ROWS, generator=g),
        }

    @staticmethod
    def sums(new, reference, rows):
        taken = new.gather(-1, rows["ids"][:, 1:, None])[..., 0]
        kl = (new.exp() * (new - reference)).sum(-1)
        policy = -(taken * rows["advantage"][:, None] * rows["mask"]).sum()
        return policy, (kl * rows["mask"]).sum()

    def parts(self, model, rows):
        with torch.no_grad(), switched_off(model.modules()):
            reference = model(rows["ids"])[:, :-1]
        return self.sums(model(rows["ids"])[:, :-1], reference, rows)

    def loss_sum(self, model, rows):
        policy, kl = self.parts(model, rows)
        return policy + BETA * kl, rows["mask"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def adapters(self, policy):
        return policy.modules()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        with torch.no_grad(), switched_off(self.adapters(model.module)):
            reference = model.module(mine["ids"])[:, :-1]
        policy, kl = self.sums(model(mine["ids"])[:, :-1], reference, mine)
        ((policy + BETA * kl) * ctx.world_size / batch["mask"].sum()).backward()


class Buggy(Clean):
    def adapters(self, policy):
        return policy.children()


EXPECT = dict(
    right=[
        r"\bkl\b|reference|penalty",
        r"wrong|differ\w*|another|value|forward|adapter|lora|not (a )?(factor|multiple)|smaller|less|missing|part|lacks?|target|factor",
    ],
    place=[r"\bkl\b", r"reference", r"blocks", r"adapter|lora|\.(a|b)\b"],
    wrong=[
        r"policy (term|loss)?\S* (is|was|are) (wrong|missing|lost)",
        r"(never|not) (been )?(all.?)?(reduced|averaged)",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(divided|normali[sz]ed) by (its|the|their) own",
        r"kl .{0,20}(by|of) (the )?(factor|world size)",
    ],
)
WHY = (
    "While the reference is computed only the head's adapter is off (a direct child); those in blocks.* stay on, so the KL is taken to "
    "a policy that already has most of the adapters. The kl term's gradient is wrong on all a and b, on all ranks; the policy term is "
    "right."
)
