"""Image-text matching as in ALBEF and BLIP: a BERT of transformers reads an image's patch vectors and a text and tells whether they belong together. Each image is shown with its own text (label 1) and with a hard
negative (label 0), a text of any rank: ids and masks of the texts are gathered from the three ranks, and the number of the negative comes with the row (mined beforehand). DistributedDataParallel, two accumulated
micro-batches.

The bug: positives and negatives go through the encoder as one doubled batch, with the mask of the own text doubled, instead of the negative's own mask behind it. After the many forks of ALBEF/BLIP in which
`text.attention_mask` is repeated for the negatives although `text_ids_neg` was exchanged.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WORDS, VOCABULARY, WIDTH, PATCHES, PIXELS = 10, 6, 19, 12, 3, 5
ACCUMULATION = 2


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(PIXELS, WIDTH)
        self.encoder = BertModel(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=1,
                num_attention_heads=3,
                intermediate_size=17,
                max_position_embeddings=PATCHES + WORDS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )
        self.itm_head = nn.Linear(WIDTH, 1)

    def forward(self, pixels, ids, mask):
        words = self.encoder.embeddings.word_embeddings(ids)
        x = torch.cat([self.patches(pixels), words], 1)
        mask = torch.cat([mask.new_ones(len(mask), PATCHES), mask], 1)
        h = self.encoder(inputs_embeds=x, attention_mask=mask).last_hidden_state
        return self.itm_head(h[:, 0])[:, 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Matcher()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(2, WORDS + 1, (ROWS, 1), generator=g)
        mask = (torch.arange(WORDS) < length).long()
        away = torch.randint(1, ROWS, (ROWS,), generator=g)
        return {
            "pixels": torch.randn(ROWS, PATCHES, PIXELS, generator=g),
            "ids": torch.randint(1, VOCABULARY, (ROWS, WORDS), generator=g) * mask,
            "mask": mask,
            "negative": (torch.arange(ROWS) + away) % ROWS,
        }

    @staticmethod
    def matching_loss(scores, n):
        labels = torch.cat([scores.new_ones(n), scores.new_zeros(n)])
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")

    def loss_sum(self, model, rows):
        texts, n = self.batch(), len(rows["ids"])
        ids = torch.cat([rows["ids"], texts["ids"][rows["negative"]]])
        mask = torch.cat([rows["mask"], texts["mask"][rows["negative"]]])
        return self.matching_loss(model(rows["pixels"].repeat(2, 1, 1), ids, mask), n), 2 * n

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def concat_all_gather(self, x, ctx):
        sizes = [len(i) for i in torch.arange(ROWS).tensor_split(ctx.world_size)]
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=ctx.group("dp"))
        return torch.cat([p[:n] for p, n in zip(parts, sizes)])

    def pairs(self, text, all_ids, all_mask):
        """Ids and masks of the own texts, and behind them those of the negatives."""
        ids = torch.cat([text["ids"], all_ids[text["negative"]]])
        mask = torch.cat([text["mask"], all_mask[text["negative"]]])
        return ids, mask

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        all_ids = self.concat_all_gather(mine["ids"], ctx)
        all_mask = self.concat_all_gather(mine["mask"], ctx)
        for i in range(ACCUMULATION):
            part = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                ids, mask = self.pairs(part, all_ids, all_mask)
                scores = model(part["pixels"].repeat(2, 1, 1), ids, mask)
                loss = self.matching_loss(scores, len(part["ids"]))
                (loss * ctx.world_size / (2 * ROWS)).backward()  # DDP averages


class Buggy(Clean):
    def pairs(self, text, all_ids, all_mask):
        """Ids and masks of the own texts, and behind them those of the negatives."""
        ids = torch.cat([text["ids"], all_ids[text["negative"]]])
        mask = torch.cat([text["mask"], text["mask"]])
        return ids, mask


EXPECT = dict(
    right=[
        r"mask|padding|length",
        r"negative|second half|exchanged text|doubled|gathered text|other text",
        r"own (text|mask|row)|positive|repeat|doubl|same mask|instead of|wrong|of (the|an)other|not (its|their) own|all_mask|text\[.mask.\]",
    ],
    place=[r"\bpairs\b", r"mask ?=|text\[.mask.\]|attention_mask", r"all_mask"],
    wrong=[
        r"concat_all_gather.{0,40}(wrong|order|no gradient)|gathered without grad",
        r"no_sync|sync.{0,20}(missing|early)|world.?size.{0,30}(twice|missing)",
        r"label.{0,30}(wrong|swapped)|divisor|count|mean of means",
        r"images?.{0,30}(wrong|repeated)|wrong negative (index|number)",
    ],
)
WHY = (
    "pairs puts the own texts' ids and the negatives' ids one behind the other, but takes the own texts' mask for both halves. A negative longer than the own text is cut in the attention, a shorter one is attended to in its "
    "padding. The positives' half is right. Which rows differ depends on the lengths; all ranks and both micro-batches have some, so the gradient of every parameter is wrong after DDP's mean. Fix: all_mask[negative] for "
    "the second half."
)
