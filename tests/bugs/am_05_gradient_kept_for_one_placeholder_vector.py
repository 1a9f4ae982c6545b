"""Textual inversion (recipe of diffusers) with CLIPTextModel of transformers (tiny, from a config) and two micro-batches on each of three ranks, gradients summed over dp by hand: only the vectors of a placeholder of three tokens are
learnt; the model runs with the whole table and the gradients of all other rows are set to zero afterwards. A frozen linear map stands for the denoiser; the divisor is the number of images.

The bug: the rows to be cleared are found by "id != placeholder id", and the placeholder id is that of the first of the three tokens (the recipe with one vector, extended to several), so the gradients of the second and third vector are
cleared as well. As in huggingface/diffusers issue 369 and 4450 (only the first of several vectors is trained); later versions keep min(ids) .. max(ids).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from transformers import CLIPTextConfig, CLIPTextModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, OUT = 8, 24, 8, 5
PLACEHOLDER = [21, 22, 23]
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 10), (10, 11)]]
ROWS = 11


class Inversion(nn.Module):
    def __init__(self):
        super().__init__()
        config = CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            projection_dim=WIDTH,
            attention_dropout=0.0,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
            attn_implementation="eager",
        )
        self.text = CLIPTextModel(config)
        self.denoiser = nn.Linear(WIDTH, OUT)
        for p in self.parameters():
            nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
        self.requires_grad_(False)
        self.text.get_input_embeddings().weight.requires_grad_(True)

    def forward(self, ids):
        return self.denoiser(self.text(input_ids=ids).last_hidden_state)


def table_of(model):
    """Name and parameter of the token table."""
    weight = model.text.get_input_embeddings().weight
    return next((n, p) for n, p in model.named_parameters() if p is weight)


def noise_loss(predicted, rows):
    return (predicted - rows["noise"]).square().sum()


class Clean:
    kept = PLACEHOLDER

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Inversion()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, PLACEHOLDER[0], (ROWS, TOKENS), generator=g)
        ids[:, 0], ids[:, -1] = 0, 1
        place = torch.randint(1, TOKENS - 4, (ROWS,), generator=g)
        for row, start in enumerate(place.tolist()):
            ids[row, start : start + 3] = torch.tensor(PLACEHOLDER)
        return {"ids": ids, "noise": torch.randn(ROWS, TOKENS, OUT, generator=g)}

    def loss_sum(self, model, rows):
        name, table = table_of(model)
        learnt = torch.zeros(VOCABULARY, 1, dtype=torch.bool)
        learnt[PLACEHOLDER] = True
        frozen = torch.where(learnt, table, table.detach())
        predicted = functional_call(model, {name: frozen}, (rows["ids"],))
        return noise_loss(predicted, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        return model

    def step(self, model, batch, ctx):
        table = table_of(model)[1]
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (noise_loss(model(rows["ids"]), rows) / ROWS).backward()
        dist.all_reduce(table.grad, group=ctx.group("dp"))
        clear = torch.ones(VOCABULARY, dtype=torch.bool)
        for token in self.kept:
            clear &= torch.arange(VOCABULARY) != token
        table.grad[clear] = 0


class Buggy(Clean):
    kept = PLACEHOLDER[:1]


EXPECT = dict(
    right=[
        r"(?i)embed|table|row|token|vector|placeholder",
        r"(?i)zero|clear|missing|lost|lack|mask|absent|dropp|discard|without|no gradient|left out",
    ],
    place=[r"(?i)embed|token|table|rows? (22|23|2[12])|placeholder"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong labels?",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|(ranks? [012].{0,12}) (does|do) not (contribute|count)",
        r"(?i)attention .{0,30}wrong|position.{0,10} wrong",
    ],
)
WHY = (
    "Forward, backward and the all-reduce are right on all ranks and micro-batches. After the reduction the rows that are not learnt are set to zero; the mask of those rows compares with the first placeholder token (21) alone, so rows 22 "
    "and 23 of the token embedding of the text model are cleared on every rank, though they had a right gradient: they are exactly zero, row 21 is right, rows 0-20 are zero as they must be. No other parameter is trained. Divisor 11 is "
    "right. Fix: keep min(ids) to max(ids) (all placeholder tokens)."
)
