"""Continued pretraining of a tiny Llama under DDP on three ranks with one to two micro-batches each (no_sync before the last): rows are documents of several lengths concatenated with the end token as separator, no padding anywhere,
next-token loss summed and divided by the tokens of all ranks. Input embedding and head are not tied.

The bug: the tokenizer has no padding token, so the script takes the end token for it and tells the model: config.pad_token_id and the padding_idx of the input embedding. nn.Embedding gives no gradient to its padding_idx, so the row of
the end token never gets one, although it is read in every sequence. As in h2oai/h2o-llmstudio PR 298 (eos as pad token: llama ignores that index in the embedding), tloen/alpaca-lora issue 7.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
END, VOCABULARY, TOKENS, WIDTH = 2, 12, 7, 8
PARTS = [[(0, 2), (2, 3)], [(3, 5)], [(5, 6), (6, 8)]]
SEPARATORS = [(2, 5), (3,), (1, 4), (4,), (0, 3, 6), (5,), (2,), (1, 6)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=16,
                initializer_range=0.3,
                tie_word_embeddings=False,
                pad_token_id=None,
                bos_token_id=1,
                eos_token_id=END,
            )
        )

    def forward(self, ids):
        return self.lm(input_ids=ids, use_cache=False).logits


def token_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


class Clean:
    pad_is_end = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(3, VOCABULARY, (len(SEPARATORS), TOKENS + 1), generator=g)
        for row, places in zip(ids, SEPARATORS):
            row[list(places)] = END
        return {"ids": ids}

    def loss_sum(self, model, rows):
        return token_loss(model, rows["ids"]), rows["ids"][:, 1:].numel()

    def distribute(self, model, ctx):
        if self.pad_is_end:
            model.lm.config.pad_token_id = END
            model.lm.get_input_embeddings().padding_idx = END
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = batch["ids"][:, 1:].numel()
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = token_loss(model, batch["ids"][low:high])
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    pad_is_end = True


EXPECT = dict(
    right=[
        r"(?i)embed",
        r"(?i)\b(row|index|token|entry|entries|vocabulary|id|slice)s?\b.{0,40}\b2\b"
        r"|padding_idx|\[2\b|(end|eos|pad\w*|separator) token|one (single )?row|single row",
        r"(?i)zero|no gradient|missing|nothing|lost|dropped|without|ignored|never|left out"
        r"|padding_idx",
    ],
    place=[r"(?i)embed_tokens|input embedding|\bembedding\b"],
    wrong=[
        r"(?i)(lm_head|self_attn|mlp|norm)\S* (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[2-9]",
        r"(?i)forward (is|goes|was) wrong|goes wrong in the forward",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)(mask|labels?|targets?) .{0,20}(is|are) (wrong|ignored)"
        r"|\btied\b.{0,30}(wrong|twice|lost)",
    ],
)
WHY = (
    "The forward is right everywhere (padding_idx changes no value of a lookup), and so are all gradients but one row: lm.model.embed_tokens.weight[2], the row of the end token, is zero on all three ranks, because the backward of the "
    "embedding skips positions with padding_idx, in all rows and all micro-batches. All other rows of embed_tokens, the layer, the norm and lm_head (not tied; its row 2 is right) are right. The reduction, the divisor 56, no_sync and "
    "the labels are right. Fix: do not give the embedding the end token as padding_idx (a padding token of its own, or padding by attention mask and labels only)."
)
