"""A language model (transformers, Qwen2 from scratch) trained together with a Medusa-like draft head that predicts the token after the next from the model's last hidden state, under DDP on three ranks with two micro-batches each (no_sync
for the first). The loss is the sum of both cross entropies (draft: times 0.5), divided by the number of tokens with a next token in the whole batch.

The bug: the draft head takes `hidden_states[-1]` for the output of the last block and puts the final norm in front of the head; but transformers' last entry is the state after the final norm. So the norm is applied twice. As in
waybarrios/vllm-mlx issue 657 (MTP receives post-final-norm hidden states and norms them again) and vllm-project/speculators PR 313 (the last hidden state of transformers comes after the last norm).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH = 10, 7, 19, 8
PARTS = [[(0, 1), (1, 4)], [(4, 6), (6, 7)], [(7, 9), (9, 10)]]


class WithDraft(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.draft = nn.Linear(WIDTH, WIDTH)
        self.norm_again = False

    def forward(self, ids):
        out = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        hidden = out.hidden_states[-1]
        if self.norm_again:
            hidden = self.model.model.norm(hidden)
        later = self.model.lm_head(hidden + F.silu(self.draft(hidden)))
        return out.logits, later


def both_losses(logits, later, rows):
    ids = rows["ids"].masked_fill(torch.arange(TOKENS)[None] >= rows["length"][:, None], -100)
    first = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    second = F.cross_entropy(later[:, :-2].flatten(0, 1), ids[:, 2:].flatten(), reduction="sum")
    return first + 0.5 * second


class Clean:
    norm_again = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        model = Qwen2ForCausalLM(config)
        nn.init.normal_(model.model.norm.weight, 1.0, 0.5)
        return WithDraft(model)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "length": torch.randint(3, TOKENS + 1, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        hidden = model.model.model(input_ids=rows["ids"], use_cache=False).last_hidden_state
        logits = model.model.lm_head(hidden)
        later = model.model.lm_head(hidden + F.silu(model.draft(hidden)))
        return both_losses(logits, later, rows), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        model.norm_again = self.norm_again
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["length"] - 1).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = both_losses(*model(rows["ids"]), rows)
                (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    norm_again = True


EXPECT = dict(
    right=[
        r"(?i)norm|draft",
        r"(?i)twice|two times|again|second (call|time|use)|once more|called 2|2 (calls|times)|"
        r"already|"
        r"input of `?draft|draft.{0,40}(input|reads|gets|wrong)|(more|one more) (often|call)|"
        r"extra|forward",
    ],
    place=[r"(?i)norm|draft"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (of "
        r")?(1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)attention|position|padding is (counted|scored)",
        r"(?i)forward is right|wrong only in the backward",
    ],
)
WHY = (
    "On all ranks, in all micro-batches, rows and tokens, the final norm (model.model.norm) is called a second time, on its own output (hidden_states[-1] is already behind the final norm), in front of the draft head and lm_head's second "
    "use. "
    "The logits of the first loss are right; the input of `draft`, and with it the draft logits, are wrong. The gradients of draft, lm_head, the norm's weight (used twice) and everything below through the draft term are wrong, equally on "
    "all "
    "ranks. Divisor, labels, no_sync, DDP are right. Fix: use hidden_states[-1] as it is."
)
