"""Policy fine-tuning on several answers per prompt with prefix sharing: GPT-2 of transformers (tiny config) on two data-parallel ranks, five prompts with three answers each, two micro-batches a rank. The prompt but for its last token is run once
and its keys and values are kept in a DynamicCache, which is repeated for the answers; the answers (after the prompt's last token) read it. Each answer token's log-probability is weighted by the answer's advantage. Gradients are summed over the ranks.

The bug: the prompt is run as in inference, under torch.no_grad(), so no gradient goes through its keys and values. After prefix-sharing / shared-prompt training patches (GRPO prefix grouper discussions), where the cache filled for generation
is taken for training because a cache with a graph can't be copied.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, PROMPT, ANSWER, ANSWERS, VOCABULARY = 5, 6, 4, 3, 19


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=16,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.3,
            attn_implementation="eager",
            bos_token_id=0,
            eos_token_id=0,
        )
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, ANSWER + 1, (ROWS, ANSWERS, 1), generator=g)
        return {
            "prompt": torch.randint(VOCABULARY, (ROWS, PROMPT), generator=g),
            "answers": torch.randint(VOCABULARY, (ROWS, ANSWERS, ANSWER), generator=g),
            "mask": torch.arange(ANSWER) < lengths,
            "advantages": torch.randn(ROWS, ANSWERS, generator=g),
        }

    @staticmethod
    def weighted(logits, rows):
        answers, mask = rows["answers"].flatten(0, 1), rows["mask"].flatten(0, 1)
        nll = F.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
        return (nll * mask * rows["advantages"].flatten()[:, None]).sum()

    def loss_sum(self, model, rows):
        prompts = rows["prompt"].repeat_interleave(ANSWERS, 0)
        ids = torch.cat([prompts, rows["answers"].flatten(0, 1)], 1)
        logits = model(ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        return self.weighted(logits, rows), rows["mask"].sum()

    def prefill(self, model, ids):
        return model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values

    def policy_loss(self, model, part):
        prompt = part["prompt"]
        cache = self.prefill(model, prompt[:, :-1])
        cache.batch_repeat_interleave(ANSWERS)
        last = prompt[:, -1:].repeat_interleave(ANSWERS, 0)
        ids = torch.cat([last, part["answers"].flatten(0, 1)], 1)
        logits = model(ids, past_key_values=cache, use_cache=True).logits[:, :-1]
        return self.weighted(logits, part)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            (self.policy_loss(model, part) / tokens).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    @torch.no_grad()
    def prefill(self, model, ids):
        return model(ids, past_key_values=DynamicCache(), use_cache=True).past_key_values


EXPECT = dict(
    right=[
        r"no_grad|detach|without (a )?(graph|gradient|grad)|no gradient|graph (is )?cut|cut (off|from)|(gradient|path|part).{0,40}(missing|lost|dropped|stop|never|does not (reach|flow|pass))|requires.?grad|(missing|lost|dropped).{0,40}(gradient|path|part)",
        r"prefill|cache|prefix|prompt|past_key_values|keys|values|k/v|c_attn|attention",
    ],
    place=[
        r"prefill",
        r"cache|past_key|prompt|prefix",
        r"policy_loss",
        r"keys|values|c_attn|attn|wpe|wte",
    ],
    wrong=[
        r"all.?reduce.{0,40}(missing|twice|wrong)|not reduced|reduced twice",
        r"divisor|token count|mean of means|own count",
        r"position (ids|s)?.{0,30}wrong|wrong position|last micro.?batch|overwritten|wrong rows",
        r"forward (value|loss)?.{0,20}(is|are) (wrong|different)|logits (are|is) wrong",
    ],
)
WHY = (
    "prefill runs the prompt under torch.no_grad(), so the keys and values in the cache carry no graph: the loss is right, but what the answers' tokens send to the prompt's positions (through keys and values of both layers to c_attn, embeddings, norms) is missing "
    "on both ranks in both micro-batches; only the path through the answers' own positions and the prompt's last token remains. Sums over the ranks and the token count are right. A right cause says that the gradient through the cached prompt is cut. Fix: fill the cache with a graph."
)
