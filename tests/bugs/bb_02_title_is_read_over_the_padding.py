"""A T5ForConditionalGeneration that learns a summary and a title of each article in one go, sharded with fully_shard on two ranks, two micro-batches of uneven size each. The article is encoded once and the decoder is run twice on it. The
divisor is the number of all target words (summaries and titles) of both ranks.

The bug: the second run of the decoder gets the kept encoder_outputs, but no attention_mask; without it T5 lets the cross attention see every place of the encoder's output, the padding too. After huggingface/transformers issue 23179 (How does
the decoder handle pad encodings without encoder attention mask?).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, ARTICLE, SUMMARY, TITLE = 19, 9, 5, 3
LENGTHS = [9, 6, 4, 9, 9, 9, 7, 5, 9]
SUMMARIES = [5, 3, 4, 5, 2, 4, 5, 3, 4]
TITLES = [3, 2, 3, 1, 2, 3, 3, 2, 1]
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 9)]]


class Writer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.t5 = T5ForConditionalGeneration(config)
        self.short = False

    def begin(self, words):
        return F.pad(words[:, :-1], (1, 0), value=self.t5.config.decoder_start_token_id)

    def forward(self, article, length, summary, title):
        seen = (torch.arange(article.shape[1])[None] < length[:, None]).long()
        kept = self.t5.get_encoder()(input_ids=article, attention_mask=seen)[0]
        kept = BaseModelOutput(last_hidden_state=kept)
        known = dict(encoder_outputs=kept, attention_mask=seen, use_cache=False)
        first = self.t5(decoder_input_ids=self.begin(summary), **known).logits
        if self.short:
            known = dict(encoder_outputs=kept, use_cache=False)
        second = self.t5(decoder_input_ids=self.begin(title), **known).logits
        return first, second


def words_loss(logits, words, length):
    beyond = torch.arange(words.shape[1])[None] >= length[:, None]
    target = words.masked_fill(beyond, -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


def both_losses(model, rows):
    first, second = model(rows["article"], rows["length"], rows["summary"], rows["title"])
    return words_loss(first, rows["summary"], rows["summary_length"]) + words_loss(
        second, rows["title"], rows["title_length"]
    )


class Clean:
    short = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=8,
            d_kv=4,
            d_ff=12,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=2,
            relative_attention_num_buckets=6,
            relative_attention_max_distance=10,
            dropout_rate=0.0,
            feed_forward_proj="gated-silu",
            decoder_start_token_id=0,
            initializer_factor=1.0,
        )
        config._attn_implementation = "eager"
        model = Writer(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "relative_attention_bias" in name:
                    p.copy_(torch.randn_like(p) * 0.5)
                elif p.dim() == 2:
                    p.copy_(torch.randn_like(p) * 0.4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = len(LENGTHS)
        return {
            "article": torch.randint(2, VOCABULARY, (n, ARTICLE), generator=g),
            "length": torch.tensor(LENGTHS),
            "summary": torch.randint(2, VOCABULARY, (n, SUMMARY), generator=g),
            "summary_length": torch.tensor(SUMMARIES),
            "title": torch.randint(2, VOCABULARY, (n, TITLE), generator=g),
            "title_length": torch.tensor(TITLES),
        }

    def loss_sum(self, model, rows):
        count = int(rows["summary_length"].sum() + rows["title_length"].sum())
        return both_losses(model, rows), count

    def distribute(self, model, ctx):
        model.short = self.short
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def step(self, model, batch, ctx):
        words = int(batch["summary_length"].sum() + batch["title_length"].sum())
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (both_losses(model, rows) * ctx.world_size / words).backward()


class Buggy(Clean):
    short = True


EXPECT = dict(
    right=[
        r"(?i)attention_mask|mask|padd|EncDecAttention|cross|second|call 1|decoder",
        r"(?i)attention_mask|mask|padd|is nothing|None|not handed|without|"
        r"(EncDecAttention|decoder|layer\.1).{0,120}(wrong|call)|forward.{0,80}(wrong|call)|argument|keyword",
    ],
    place=[r"(?i)attention_mask|mask|decoder|EncDecAttention|cross|layer\.1|bb_02\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)encoder\.block.{0,60}goes wrong in the forward|encoder.{0,20}(forward|output) is wrong",
        r"(?i)labels? .{0,20}(is|are) wrong|title_length .{0,20}wrong|shift(ed)? (twice|once more)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
    ],
)
WHY = (
    "The encoder and the first decoder run (summary) are right. The second decoder run (title) is called with the kept encoder_outputs and no attention_mask, so decoder.block.*.layer.1.EncDecAttention attends to the encoder's padding places "
    "as well. Wrong are the titles' logits of the rows whose article is shorter than 9: rows 1, 2 (rank 0, micro-batch 0) and 6, 7 (rank 1, micro-batch 1); rows 0, 3, 4, 5, 8 have no padding and are right. The gradients of all parameters "
    "are wrong, the forward goes wrong first in the cross attention of decoder block 0 in the decoder's second call. Divisor, sharding, reduction, labels are right. Fix: pass attention_mask with encoder_outputs in the second call too."
)
