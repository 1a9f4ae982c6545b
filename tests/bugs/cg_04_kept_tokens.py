"""GPT-2 (transformers, small config) tuned on completions, DDP with two micro-batches under
no_sync.

The loss counts the tokens of the completion that are no padding; their number is summed over the
ranks before the first backward.

The bug: the mask is written ``completion & labels != -100``. In Python ``&`` binds more tightly
than ``!=``, so this is ``(completion & labels) != -100``, which is true for every token. After
masks rewritten from ``torch.ne`` to operators; the same precedence slip is found in pandas and
torch code alike.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, LENGTH, WORDS = 7, 10, 29


def kept_tokens(completion, labels):
    return completion & (labels != -100)


def kept_operators(completion, labels):
    return completion & labels != -100


class Clean:
    kept = staticmethod(kept_tokens)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(3 + self.seed)
        config = GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=12,
            n_layer=2,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="sdpa",
        )
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(4 + self.seed)
        ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=g)
        end = torch.randint(7, LENGTH + 1, (ROWS, 1), generator=g)
        begin = torch.randint(2, 6, (ROWS, 1), generator=g)
        place = torch.arange(LENGTH)
        return {
            "input_ids": ids.masked_fill(place >= end, 2),
            "labels": ids.masked_fill(place >= end, -100),
            "completion": (place >= begin).expand(ROWS, -1).clone(),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["input_ids"]).logits[:, :-1]
        keep = rows["completion"][:, 1:] * (rows["labels"][:, 1:] >= 0)
        labels = rows["labels"][:, 1:].masked_fill(~keep, -100)
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, keep.sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rank, world = ctx.coords["dp"], dist.get_world_size(group)
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        tokens = self.kept(mine["completion"][:, 1:], mine["labels"][:, 1:]).sum()
        dist.all_reduce(tokens, group=group)
        micro = zip(*(torch.tensor_split(v, 2) for v in mine.values()), strict=True)
        for turn, (ids, labels, completion) in enumerate(micro):
            with model.no_sync() if turn == 0 else contextlib.nullcontext():
                logits = model(input_ids=ids).logits[:, :-1]
                targets = labels[:, 1:]
                loss = F.cross_entropy(
                    logits.transpose(1, 2), targets, ignore_index=-100, reduction="none"
                )
                keep = self.kept(completion[:, 1:], targets)
                ((loss * keep).sum() * world / tokens).backward()


class Buggy(Clean):
    kept = staticmethod(kept_operators)


EXPECT = dict(
    right=[
        r"mask|kept|keep|prompt|complet",
        (
            r"preceden|binds?|parenthes|bracket|always (be )?true|all true|true (for|at) "
            r"(every|all)|(every|all) (of the )?(token|position)s?|prompt tokens? "
            r"(is|are|also|too|get|enter|count|included|contribut)|includ\w* (the "
            r")?(prompt|padding)|(prompt|padding)\b.{0,60}(not "
            r"(masked|excluded)|includ|count|contribut|in the loss)"
        ),
    ],
    place=[r"kept_operators", r"kept_tokens", r"completion & labels", r"\bkept\b", r"!= -100"],
    wrong=[
        r"no_sync|synchroni[sz]",
        r"world size (factor|is (missing|applied twice))|average of ddp",
        r"local (token )?count|own (token )?count|not (all-?)?reduced",
        r"shift(ed)? (twice|by one)|not shifted",
    ],
)

WHY = (
    "`completion & labels != -100` is parsed as `(completion & labels) != -100`; the bitwise "
    "and of a truth value with a token id is 0 or 1, so the comparison is true everywhere "
    "and the mask keeps all tokens. The prompt tokens, whose labels are real ids, enter the "
    "loss, and the token count contains prompt and padding as well, so the divisor is too "
    "large too (the padding itself costs nothing, for the cross entropy ignores it). Every "
    "gradient of the model is wrong; the sum of the counts over ranks, no_sync and the "
    "factor world are right. A right cause says that the mask keeps every token, prompts "
    "included, by operator precedence. The fix is parentheses: completion & (labels != -100)."
)
