"""KTO with LoRA: losses of desirable and undesirable answers against a baseline, the mean KL of mismatched answers over the whole batch.
After TRL's KTOTrainer (the KL estimate is gathered over all processes before the mean) and FAULTS C18: every micro-batch takes the
estimate of its own rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"kto": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, RANK = 16, 6, 9, 7, 2
MICRO_BATCHES, BETA, UNDESIRABLE = 2, 0.5, 1.4


class LoRALinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.3 * torch.randn(outputs, RANK))

    def forward(self, x):
        return super().forward(x) + 2.0 * F.linear(F.linear(x, self.a), self.b)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.mix, self.up = LoRALinear(2 * WIDTH, WIDTH), LoRALinear(WIDTH, 10)
        self.down = LoRALinear(10, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False).requires_grad_(False)

    def forward(self, tokens, labels, mask):
        """Log-probability of each answer."""
        x = self.embed(tokens)
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        x = x + torch.tanh(self.mix(torch.cat([x, before], dim=-1)))
        log_probs = self.head(x + self.down(F.gelu(self.up(x)))).log_softmax(-1)
        return (log_probs.gather(-1, labels[..., None])[..., 0] * mask).sum(1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)

        def answers():
            tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
            lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
            mask = torch.arange(LENGTH) < lengths
            ref = -2.4 * lengths[:, 0] + torch.randn(ROWS, generator=g)
            return tokens[:, :-1], tokens[:, 1:], mask, ref

        names = "tokens", "labels", "mask", "ref"
        batch = dict(zip(names, answers()))
        batch |= {"kl_" + k: v for k, v in zip(names, answers())}
        drift = 0.3 * torch.arange(ROWS) - 14.8
        batch["kl_ref"] = batch["kl_ref"] - batch["kl_ref"].mean() + drift
        batch["desirable"] = torch.rand(ROWS, generator=g) < 0.6
        return batch

    @staticmethod
    def kl_sum(model, rows):
        with torch.no_grad():
            log_probs = model(rows["kl_tokens"], rows["kl_labels"], rows["kl_mask"])
        return (log_probs - rows["kl_ref"]).sum()

    @staticmethod
    def answer_loss(model, rows, kl):
        reward = model(rows["tokens"], rows["labels"], rows["mask"]) - rows["ref"]
        good = 1 - torch.sigmoid(BETA * (reward - kl))
        bad = UNDESIRABLE * (1 - torch.sigmoid(BETA * (kl - reward)))
        return torch.where(rows["desirable"], good, bad).sum()

    def loss_sum(self, model, rows):
        full, dtype = self.batch(), rows["ref"].dtype
        full = {k: v.to(dtype) if v.is_floating_point() else v for k, v in full.items()}
        kl = (self.kl_sum(model, full) / ROWS).clamp(min=0)
        return self.answer_loss(model, rows, kl), len(rows["ref"])

    def baseline(self, model, micro, mine):
        total = self.kl_sum(model, mine)
        dist.all_reduce(total)
        return (total / ROWS).clamp(min=0)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            kl = self.baseline(model, micro, mine)
            (self.answer_loss(model, micro, kl) / ROWS).backward()
        for param in model.parameters():
            if param.requires_grad:
                dist.all_reduce(param.grad)


class Buggy(Clean):
    def baseline(self, model, micro, mine):
        return (self.kl_sum(model, micro) / len(micro["ref"])).clamp(min=0)


EXPECT = dict(
    right=[
        r"loss|gradient (at|of|into|entering) the (output|logits|head)|weight|rows?|coefficient|head",
        r"rank|rows?|micro.?batch|own|local|batch|statistic|enter|backward|loss|differ",
    ],
    place=[
        r"loss",
        r"rows?",
        r"micro.?batch",
        r"(all|every|each) (rank|parameter)s?|ranks? \W?[012]",
    ],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"reduced (twice|again)|counted (twice|\d times)",
        r"(output|forward) of (the )?(mix|up|down|head|embed)\S* (is|was) wrong|forward (pass )?(is|was) wrong",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
        r"only (the )?(mix|up|down)\S* (is|are) wrong",
        r"\.(a|b) (is|are|was) (frozen|not trained)",
    ],
)
WHY = (
    "The baseline in the sigmoid is the mean KL of the micro-batch's own 2 or 3 rows instead of all 16, so each row's loss (and the "
    "factor on its gradient) is wrong, other in each micro-batch and rank. The model's forward is right; all LoRA parameters are "
    "wrong on all ranks."
)
