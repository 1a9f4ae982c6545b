"""Personalised text encoder (textual inversion with the encoder unfrozen) under DDP on three ranks, two micro-batches each (no_sync for the first): transformers' CLIPTextModel reads prompts, two words of which are new placeholder tokens,
and a projection of the pooled output is classified against five fixed image prototypes (sum of cross entropies over rows / 13 rows). The placeholders were added behind the old vocabulary: their numbers are higher than the end token's.

The bug: the encoder still has the checkpoint's old eos_token_id = 2, so CLIPTextModel pools at the highest token number of each row instead of the end token: in rows with a placeholder it pools at the placeholder. As in
huggingface/transformers issues 21029 and 24650 (CLIP pooling is not compatible with adding new tokens), PR 24777, and huggingface/diffusers issue 10754.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPTextConfig, CLIPTextModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
START, END, NEW, VOCABULARY, LENGTH, WIDTH, CLASSES = 1, 14, (15, 16), 17, 8, 8, 5
PARTS = [[(0, 3), (3, 5)], [(5, 7), (7, 9)], [(9, 10), (10, 13)]]
# the words before the end token, per row; 15 and 16 are the new placeholders
PROMPTS = [
    [4, 5, 6],
    [7, 15, 8, 9],
    [3, 10, 11, 12, 13],
    [5, 6],
    [16, 4],
    [9, 8, 7],
    [6, 10, 3, 5],
    [15, 11, 12],
    [13, 4, 16, 3, 8],
    [12],
    [8, 8, 5],
    [15, 16, 9, 10],
    [11, 7, 6, 4],
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=12,
                projection_dim=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=LENGTH,
                initializer_factor=8.0,
                bos_token_id=START,
                eos_token_id=END,
                pad_token_id=0,
            )
        )
        self.project = nn.Linear(WIDTH, 6, bias=False)
        self.register_buffer("prototypes", torch.randn(CLASSES, 6))

    def pooling(self, eos):
        for module in self.text.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = eos

    def forward(self, ids):
        pooled = self.text(input_ids=ids).pooler_output
        return self.project(pooled) @ self.prototypes.T


class Clean:
    eos = END

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.zeros(len(PROMPTS), LENGTH, dtype=torch.long)
        for row, words in zip(ids, PROMPTS):
            row[: len(words) + 2] = torch.tensor([START, *words, END])
        return {"ids": ids, "label": torch.randint(CLASSES, (len(PROMPTS),), generator=g)}

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum")
        return loss, len(rows["ids"])

    def distribute(self, model, ctx):
        model.pooling(self.eos)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum")
                (loss * ctx.world_size / len(PROMPTS)).backward()


class Buggy(Clean):
    eos = 2


EXPECT = dict(
    right=[
        r"(?i)forward|pool|end token|eos|argmax|features?|output|input",
        r"(?i)rows?|pool|placeholder|eos|argmax|end token",
        r"(?i)wrong|other|different|instead|not the|deviat|differ|mis",
        r"(?i)text|clip|pool|project|encoder|eos|argmax",
    ],
    place=[r"(?i)\btext\b|clip|pool|project|eos|end token"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is|agrees|was) (right|correct)|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)(padding|attention mask|positions? ids?) .{0,20}(is|are) (wrong|missing)",
        r"(?i)labels? (is|are) (wrong|shifted)|prototypes.{0,20}wrong",
    ],
)
WHY = (
    "CLIPTextModel pools at argmax(ids) because its eos_token_id is 2 (legacy branch). Rows without a placeholder have the end token (14) as the highest number and are right. Rows 1, 4, 7, 8 and 11 contain 15 or 16 and are pooled at "
    "the (first, highest) placeholder: rows 1 and 4 (rank 0, micro-batches 0 and 1), 7 and 8 (rank 1, micro-batch 1), 11 (rank 2, micro-batch 1). Rank 1's micro-batch 0 and rank 2's micro-batch 0 are right. The last hidden state is "
    "right everywhere, the pooled vector (the input of project) is not: the forward is wrong in these rows, and so are the gradients of project and of the whole text encoder, equally on all ranks after DDP's average. Divisor 13, "
    "labels, no_sync and reduction are right. Fix: set eos_token_id of the text encoder to the tokenizer's (14)."
)
