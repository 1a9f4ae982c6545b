"""Fine-tuning a small Llama with accelerate: a prepared DataLoader over 13 rows, three ranks, two rows to a batch, even_batches=False, so that rank 0 has three micro-batches (the last of one row)
and the others two. The whole epoch is one accumulation window: batches are fetched first, target tokens are counted over all ranks, as transformers' Trainer does in get_batch_samples, every
micro-batch adds the gradient of its sum of losses, and the sums are reduced once and divided by the count.

The bug: the counts are collected with `accelerator.gather_for_metrics` (transformers' run_wav2vec2_pretraining_no_trainer.py gathers its `num_losses` so) and not with `accelerator.gather`. At the
end of a data loader gather_for_metrics cuts the gathered tensor to `remainder` entries, to drop repeated samples: huggingface/accelerate PR #578, issues #952 and #2007. A tensor of one count per rank is
no tensor of samples: 13 % 6 = 1, so only the count of rank 0 is left.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTHS = [9, 5, 7, 4, 8, 10, 6, 3, 9, 7, 5, 8, 6]
ROWS, WIDTH, WORDS = len(LENGTHS), max(LENGTHS), 23


def target_tokens(rows):
    return (rows["labels"][:, 1:] != -100).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=20,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                initializer_range=0.3,
                tie_word_embeddings=False,
                use_cache=False,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, WORDS, (ROWS, WIDTH), generator=g)
        there = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
        ids = ids.masked_fill(~there, 0)
        return {"ids": ids, "mask": there.long(), "labels": ids.masked_fill(~there, -100)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            rows["labels"][:, 1:].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        return loss, target_tokens(rows)

    def accelerator(self, ctx):
        os.environ.update(
            {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
        )
        return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))

    def all_counts(self, accelerator, own):
        return accelerator.gather(own)

    def step(self, model, batch, ctx):
        accelerator = self.accelerator(ctx)
        loader = accelerator.prepare_data_loader(DataLoader(range(ROWS), batch_size=2))
        batches = iter(loader)
        window = [
            {k: v[next_rows] for k, v in batch.items()}
            for next_rows in (next(batches) for _ in range(len(loader)))
        ]
        own = torch.stack([target_tokens(rows) for rows in window]).sum().reshape(1)
        count = self.all_counts(accelerator, own).sum()
        for rows in window:
            self.loss_sum(model, rows)[0].backward()
        for p in model.parameters():
            p.grad = accelerator.reduce(p.grad, reduction="sum") / count
        next(batches, None)


class Buggy(Clean):
    def all_counts(self, accelerator, own):
        return accelerator.gather_for_metrics(own)


EXPECT = dict(
    right=[
        r"factor|scale|times|too large|denominator|divi|count|normalis|normaliz",
        r"rank 0|own|one rank|first rank|local|token|all parameters|every parameter|all tensors|whole gradient",
        r"count|denominator|divi|normalis|normaliz|number of|token|N\b",
    ],
    place=[
        r"denominator|divi|count|normalis|normaliz|number of|token|loss scale|all (parameters|ranks)"
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"rows? .{0,20}(never read|read twice|lost|missing|dropped)",
        r"micro.?batch\S* .{0,20}(lost|dropped|missing|overwritten)",
        r"each rank (divides|is divided) by its own|differs? (between|from rank to)",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
    ],
)
WHY = (
    "All gradients of all ranks are too large by one and the same factor, (target tokens of all ranks) / (target tokens of rank 0). Rank 0 has rows 0, 1, 6, 7 and 12 with 8+4+5+2+5 = 24 target tokens of 74, "
    "so the factor is 74/24 = 37/12, about 3.08. Direction, sums over micro-batches and the reduction over ranks are right, and so is the forward; all ranks agree with each other. The place is the denominator: "
    "the counts of three ranks are gathered with gather_for_metrics, which at the end of the loader keeps only the first `remainder` = 13 % 6 = 1 of the three. The fix is accelerator.gather (or reduce) for "
    "anything that is not one entry per sample."
)
