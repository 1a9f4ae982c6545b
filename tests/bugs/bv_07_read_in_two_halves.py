"""Long prompts are read in two halves to save memory: a Llama of transformers reads the first half into a DynamicCache that keeps its graph, then the second half with the cache; one backward through both.
Rows are padded on the left. Three data-parallel ranks by hand, two micro-batches, sum of token losses over the global token count, gradients all-reduced.

The bug: the attention mask handed over with the second half is the second half's own; with a cache the mask has to cover everything read so far. After the many transformers issues on past_key_values with an
attention_mask of the new tokens only (padding of the past is attended, or the past's keys take the mask of other columns).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, HALF, WORDS = 7, 8, 4, 19


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=12,
            intermediate_size=14,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, WORDS, (ROWS, LENGTH + 1), generator=g)
        empty = torch.tensor([0, 3, 1, 2, 0, 3, 2])[:, None]
        mask = (torch.arange(LENGTH) >= empty).long()
        return {
            "ids": ids[:, :-1] * mask,
            "mask": mask,
            "labels": ids[:, 1:].masked_fill(mask == 0, -100),
        }

    @staticmethod
    def positions(mask):
        return (mask.cumsum(1) - 1).clamp(min=0)

    @staticmethod
    def token_losses(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        out = model(
            rows["ids"],
            attention_mask=rows["mask"],
            position_ids=self.positions(rows["mask"]),
            use_cache=False,
        )
        return self.token_losses(out.logits, rows["labels"]), (rows["labels"] != -100).sum()

    def half_mask(self, mask, lo, hi):
        return mask[:, :hi]

    def read_in_halves(self, model, part):
        positions = self.positions(part["mask"])
        cache, loss = DynamicCache(), 0.0
        for lo in range(0, LENGTH, HALF):
            hi = lo + HALF
            out = model(
                part["ids"][:, lo:hi],
                attention_mask=self.half_mask(part["mask"], lo, hi),
                position_ids=positions[:, lo:hi],
                past_key_values=cache,
                use_cache=True,
            )
            loss = loss + self.token_losses(out.logits, part["labels"][:, lo:hi])
        return loss

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            if len(part["ids"]):
                (self.read_in_halves(model, part) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def half_mask(self, mask, lo, hi):
        return mask[:, lo:hi]


EXPECT = dict(
    right=[
        r"mask|padding|pad\b|visible|attend",
        r"half|chunk|cache|past|second|piece|part|segment|earlier|prefix|columns?|slice|\blo\b|later|other (positions|tokens|keys)|new tokens|short",
    ],
    place=[
        r"half_mask",
        r"attention_mask|part\[.mask.\]|\bmask\b",
        r"read_in_halves",
        r"cache|past_key_values",
    ],
    wrong=[
        r"gradient.{0,40}(cut|detached|not flow|lost)|detach",
        r"(not|never) reduced|reduced (twice|again)|missing (all.?)?reduc|wrong group",
        r"position_ids.{0,30}(wrong|restart)|token count|divisor|mean of means|labels .{0,20}(shifted|wrong)",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "With a cache of four tokens and four new ones the model needs a mask of eight columns; half_mask hands over columns 4 to 7, which transformers lays on the keys 0 to 3 and takes the rest for padding. So the second "
    "half sees the padding of the first half and does not see its own tokens: logits, loss and gradients of the second half are wrong on all three ranks, in both micro-batches, and after the all-reduce every "
    "gradient is wrong alike; the first half is right, as are positions, count and reduction. A right cause names the attention mask of the second half (with the cache). Fix: mask[:, :hi]."
)
