"""Supervised fine-tuning with DDP, several micro-batches and the trainer's `num_items_in_batch`. After transformers'
Trainer.get_batch_samples and the threads on PR 34191 / 34511 (the labels are shifted inside the loss, so the first label of a row is
never a target): the items are counted before the shift.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, MICRO_BATCHES = 14, 8, 8, 2, 22, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 12),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return CausalLM()

    def batch(self):
        """Two rows of three have a prompt, which is no target; the others are plain text."""
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g)
        prompts = (
            torch.randint(1, 5, (ROWS, 1), generator=g) * (torch.arange(ROWS) % 3 > 0)[:, None]
        )
        lengths = torch.randint(6, LENGTH + 1, (ROWS, 1), generator=g)
        at = torch.arange(LENGTH)
        return {"ids": ids, "labels": ids.masked_fill((at < prompts) | (at >= lengths), -100)}

    @staticmethod
    def token_loss(logits, labels):
        """As the model's own loss: shifts the labels."""
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (
            rows["labels"][:, 1:] != -100
        ).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    @staticmethod
    def num_items(labels):
        return (labels[:, 1:] != -100).sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        items = self.num_items(mine["labels"])
        dist.all_reduce(items)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            model.require_backward_grad_sync = i == MICRO_BATCHES - 1
            loss = self.token_loss(model(rows["ids"]), rows["labels"])
            (loss * ctx.world_size / items).backward()


class Buggy(Clean):
    @staticmethod
    def num_items(labels):
        return (labels != -100).sum()


EXPECT = dict(
    right=[
        r"divid|divisor|denominator|count|factor|scale|too small|normali|times|ratio",
        r"(all|every|each|whole) (the )?(parameters?|gradients?|ranks?|rows?|terms?|loss)|loss|everything|uniform|one factor|same factor",
    ],
    place=[
        r"(all|every|each) (parameters?|ranks?|gradients?)",
        r"loss",
        r"count|divisor|denominator",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' |micro-?batch )?means|divided by (its|their) own",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(number of ranks|world.?size) .{0,30}(too|twice|instead)",
        r"rows? .{0,20}(missing|lost|dropped)",
    ],
)
WHY = (
    "The divisor counts the labels before the shift and so includes the first label of the rows without a prompt, which is no "
    "target: every gradient is too small by the same factor, targets / labels, on all ranks. "
    "Nothing else is wrong."
)
