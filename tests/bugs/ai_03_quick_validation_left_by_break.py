"""Named-entity fine-tuning of a tiny BERT (transformers, from a config) with accelerate on three ranks: Accelerator(gradient_accumulation_steps=4), prepared loaders, accelerator.accumulate and accelerator.backward. Each rank has three
micro-batches of two rows, so that the window is closed (and the gradients are reduced) by the end of the loader. After the first micro-batch there is a validation loop over a second prepared loader. The loss is the sum over labelled
tokens divided by their number on all ranks.

The bug: the quick validation looks at one batch and leaves its loop by break. The validation loader stays the active one in accelerate's GradientState, so that end_of_dataloader is never true for the training loader and the last
micro-batch stays in no_sync. As in huggingface/accelerate issues 1050 and 960 / PR 1162 (nested loaders and GradientState), compare issue 2831 (gradients not synchronised at the end of the loader).
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TOKENS, VOCABULARY, CLASSES, MICRO, WINDOW = 18, 6, 19, 5, 2, 4
LENGTHS = [6, 2, 4, 5, 3, 6, 1, 6, 5, 2, 4, 4, 6, 3, 2, 5, 6, 1]


def losses(model, rows):
    logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
    return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")


class Clean:
    quick = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return BertForTokenClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=TOKENS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                num_labels=CLASSES,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).long()
        labels = torch.randint(CLASSES, (ROWS, TOKENS), generator=g)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g) * mask,
            "mask": mask,
            "labels": labels.masked_fill(mask == 0, -100),
        }

    def loss_sum(self, model, rows):
        return losses(model, rows), int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.update(
            RANK=str(ctx.rank),
            WORLD_SIZE=str(ctx.world_size),
            LOCAL_RANK=str(ctx.rank),
            LOCAL_WORLD_SIZE=str(ctx.world_size),
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
        self.train, self.valid = self.accelerator.prepare(
            DataLoader(torch.arange(ROWS), batch_size=MICRO),
            DataLoader(torch.arange(2 * MICRO * ctx.world_size), batch_size=MICRO),
        )
        return self.accelerator.prepare(model)

    def validate(self, model, batch):
        seen = 0.0
        with torch.no_grad():
            for part in self.valid:
                rows = {k: v[part] for k, v in batch.items()}
                seen += float(losses(self.accelerator.unwrap_model(model), rows))
                if self.quick:
                    break
        return seen

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        for turn, part in enumerate(self.train):
            rows = {k: v[part] for k, v in batch.items()}
            with self.accelerator.accumulate(model):
                loss = losses(model, rows) * ctx.world_size * WINDOW / tokens
                self.accelerator.backward(loss)
            if turn == 0:
                self.validate(model, batch)


class Buggy(Clean):
    quick = True


EXPECT = dict(
    right=[
        r"(?i)(never|not|no|without|missing|lacks?|skipp?ed|left out).{0,40}"
        r"(reduc|summ?|synchroni|average|all.?reduce|sync)"
        r"|(reduction|all.?reduce|average|synchroni[sz]ation|sum over).{0,40}"
        r"(missing|never|left out|skipp?ed|not)|no_sync|own gradient|local gradient",
        r"(?i)all (parameters|ranks|tensors|gradients|weights|micro.?batches)"
        r"|every (rank|parameter|micro.?batch)|each rank|dp\b|ranks",
    ],
    place=[r"(?i)no_sync|sync|reduc|dp\b|all.?reduce|average|accumulate|break"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|backward of .{0,40} is wrong",
        r"(?i)reduced (twice|again)|(summed|counted) (twice|again)",
        r"(?i)mean of means|own count|wrong number of tokens",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)|wrong rows|same rows",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|only the last micro.?batch is (missing|not)",
        r"(?i)(classifier|embeddings|encoder)[.\w]* (alone|only) (is|are) wrong",
        r"(?i)reduced too early|before the last micro.?batch",
    ],
)
WHY = (
    "No reduction happens at all in the step. The window of four micro-batches is closed early by the end of the training loader, at the third micro-batch, if accelerate sees that end. The break leaves the validation loader "
    "as the last entry of GradientState.dataloader_references; its end_of_dataloader is false, so at micro-batch 2 accumulate counts step 3 of 4, sync_gradients stays false and DDP stays in no_sync, as in micro-batches 0 and "
    "1 (right there). Each of the three ranks keeps the sum of its own three micro-batches, times world size over tokens: 3 times its own share, different on every rank, all parameters; the mean over the ranks is the right "
    "gradient. Forward, backward, rows (rank r has loader batches r, r+3, r+6), labels, divisor and the factor 4 (cancelled by accelerator.backward) are right. Fix: run the validation loop to its end, or call valid.end() "
    "after the break."
)
