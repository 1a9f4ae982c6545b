"""Text tower of CLIP (transformers) with two learnt placeholder words, FSDP2 over three ranks.

Captions are matched to fixed image features by cosine; some captions contain a placeholder ("a
photo of <thing>"), whose token was added behind the vocabulary, so that its number is higher than
that of the end token. The caption's feature is the hidden state at the end token.

The bug: the sharded tower pools at the position of the highest token number, as the original CLIP
code does (text.argmax(dim=-1)), which in captions with a placeholder is the placeholder. After
huggingface/transformers PR #24773 and the textual inversion code before it.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import CLIPTextConfig, CLIPTextModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WIDTH = 8, 9, 12
START, END, WORDS = 18, 19, 18
PLACEHOLDERS = (20, 21)


def end_of_text(ids):
    return (ids == END).int().argmax(-1)


def end_by_highest(ids):
    return ids.argmax(dim=-1)


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=22,
                hidden_size=WIDTH,
                intermediate_size=19,
                projection_dim=7,
                num_hidden_layers=2,
                num_attention_heads=3,
                max_position_embeddings=LENGTH,
                bos_token_id=START,
                eos_token_id=END,
                pad_token_id=0,
                initializer_factor=4.0,
            )
        )
        self.project = nn.Linear(WIDTH, 7, bias=False)
        self.place = end_of_text

    def forward(self, ids):
        hidden = self.text(input_ids=ids).last_hidden_state
        return self.project(hidden[torch.arange(len(ids)), self.place(ids)])


def match_loss(model, rows):
    return (1 - nn.functional.cosine_similarity(model(rows["ids"]), rows["image"])).sum()


class Clean:
    place = staticmethod(end_of_text)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        return TextTower()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 72)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        for row in range(ROWS):
            words = 3 + row % 4
            ids[row, 0] = START
            ids[row, 1 : 1 + words] = torch.randint(1, WORDS, (words,), generator=g)
            if row % 3:
                ids[row, 1 + row % 2] = PLACEHOLDERS[row % 2]
            ids[row, 1 + words] = END
        return {"ids": ids, "image": torch.randn(ROWS, 7, generator=g)}

    def loss_sum(self, model, rows):
        return match_loss(model, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        model.place = self.place
        encoder = next(m for m in model.modules() if type(m).__name__ == "CLIPEncoder")
        for layer in encoder.layers:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (match_loss(model, own) * ctx.world_size / len(batch["ids"])).backward()


class Buggy(Clean):
    place = staticmethod(end_by_highest)


EXPECT = dict(
    right=[
        r"pool|position|place|argmax|hidden state|token (it|that)|end.?of.?text|\beos\b|end token",
        (
            r"highest|largest|argmax|maxim|placeholder|added (token|word)|wrong (position|"
            r"token|place|index)|instead of (the |at the )?(end|eos)|new token"
        ),
    ],
    place=[r"end_by_highest", r"argmax", r"\bplace\b", r"pool", r"TextTower"],
    wrong=[
        r"padding (tokens? )?(is|are) (attended|counted|in)",
        r"causal mask",
        r"averag(es|ed)|divided (by|twice)",
        r"embedding of the placeholder (is )?(frozen|not (trained|reduced|sharded))",
        r"padding_idx",
    ],
)
WHY = (
    "end_by_highest takes the position of the highest token number for the end of the text; the "
    "placeholders 20 and 21 were added behind the end token 19, so captions that contain one "
    "are pooled at the placeholder, before the rest of the caption was read. The features of "
    "those rows (5 of 8) are wrong and with them the gradients of all parameters of the tower; "
    "rows without a placeholder contribute rightly, and sharding and averaging are right. A "
    "right cause says that the hidden state is taken at the placeholder (the highest id) "
    "instead of the end token. The fix is (ids == END).int().argmax(-1)."
)
