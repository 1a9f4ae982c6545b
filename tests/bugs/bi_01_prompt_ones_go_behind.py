"""A sentence encoder for retrieval: a small BertModel of transformers, frozen, with prompt tuning of peft (three virtual tokens) and a trained dense layer, under DDP on three ranks, two micro-batches each of uneven size. A row has a
query and three passages, the first of which is right; texts are padded on the right. Pooling is the mean over the virtual tokens and the words.

The bug: the model gives three vectors more than there are ids, so the pooling's mask is made longer by three ones, but on the right: peft puts the virtual tokens at the front. After huggingface/sentence-transformers PR 3000 (If AutoModel
is wrapped with PEFT for prompt learning, then extend the attention mask).
"""

import contextlib

import torch
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, WIDTH, PROMPT, PASSAGES, ROWS = 17, 7, 8, 3, 3, 11
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 8)], [(8, 10), (10, 11)]]
SHARPNESS = 5.0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=TOKENS + PROMPT,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.5,
        )
        config._attn_implementation = "eager"
        prompt = PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=PROMPT)
        self.auto_model = get_peft_model(BertModel(config, add_pooling_layer=False), prompt)
        self.dense = nn.Linear(WIDTH, 6)
        self.prompt_first = True

    def pooling_mask(self, mask):
        ones = mask.new_ones(len(mask), PROMPT)
        return torch.cat([ones, mask] if self.prompt_first else [mask, ones], 1)

    def forward(self, ids, mask):
        tokens = self.auto_model(input_ids=ids, attention_mask=mask).last_hidden_state
        keep = self.pooling_mask(mask)[:, :, None].to(tokens.dtype)
        pooled = (tokens * keep).sum(1) / keep.sum(1)
        return F.normalize(self.dense(pooled), dim=-1)


def ranking_loss(model, rows):
    ids, lengths = rows["ids"], rows["lengths"]
    mask = (torch.arange(TOKENS) < lengths[:, :, None]).long()
    texts = model(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, ids.shape[:2])
    scores = SHARPNESS * (texts[:, :1] * texts[:, 1:]).sum(-1)
    return F.cross_entropy(scores, ids.new_zeros(len(ids)), reduction="sum")


class Clean:
    prompt_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, TOKENS + 1, (ROWS, 1 + PASSAGES), generator=g)
        ids = torch.randint(1, VOCABULARY, (ROWS, 1 + PASSAGES, TOKENS), generator=g)
        ids = ids.masked_fill(torch.arange(TOKENS) >= lengths[:, :, None], 0)
        return {"ids": ids, "lengths": lengths}

    def loss_sum(self, model, rows):
        return ranking_loss(model, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        model.prompt_first = self.prompt_first
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (ranking_loss(model, rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    prompt_first = False


EXPECT = dict(
    right=[
        r"(?i)pool|mask|keep|dense|prompt_first|mean over|divi|auto_model",
        r"(?i)mask|keep|prompt_first|ones|padding|other (places|positions|tokens)|wrong (places|"
        r"positions|tokens)|which (places|positions|tokens)|left out|argument|multipl|mul\b",
    ],
    place=[
        r"(?i)pool|keep|prompt_first|between .{0,60}(auto_model|encoder|layer|bert).{0,60}dense|dense"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (rows|count)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(prompt_encoder|word_embeddings|auto_model|attention\.self|encoder\.layer\.\d)[\w.]* "
        r"(goes|is) wrong in (the|its) forward",
        r"(?i)only (on )?rank [012]\b|recomput|dropout|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "What BertModel gives (three virtual tokens, then seven places of ids) is right on all ranks, and so is the attention mask inside. In Encoder.pooling_mask the three ones for the virtual tokens are put after the mask of the ids instead of "
    "before it, so of a text with n words the mean takes the places 0..n-1 (the virtual tokens and only the first n-3 words) and the last three places (padding, or the last words of long texts), instead of places 0..n+2. The number of "
    "places is the same, n + 3, so the divisor of the mean is right. Texts of full length (7) are right. It is so on all ranks and in all micro-batches, for queries and passages; dense is the first module that gets something wrong. Wrong "
    "are the gradients of the prompt embedding and of dense. DDP, no_sync, the divisor 11 are right. Fix: torch.cat([ones, mask], 1)."
)
