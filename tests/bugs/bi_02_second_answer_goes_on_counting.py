"""DPO with a shared prompt: a row is the prompt, the chosen answer and the rejected answer one after the other, in one pass of a small LlamaForCausalLM of transformers. A mask keeps the rejected answer from seeing the chosen one. FSDP2
on three ranks, two micro-batches each (no gradient sync in the first). The reference model's margins are in the batch; the divisor is the number of pairs.

The bug: the place numbers run on through the row, where those of the rejected answer must begin again after the prompt. After frankxwang/dpo-prefix-sharing (DPO with shared prefixes: its position ids restart for the rejected answer) and
huggingface/trl issue 6800 on position ids in the log-probability forwards.
"""

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, BETA = 13, 12, 0.4
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 9)]]
PROMPT = [3, 2, 4, 3, 2, 3, 4, 2, 3]
CHOSEN = [4, 3, 5, 2, 5, 4, 3, 4, 2]
REJECTED = [3, 4, 2, 5, 3, 4, 5, 3, 4]


def layout(rows, restart):
    """The part of each place (0 prompt, 1 chosen, 2 rejected, 3 padding), its number, and the place before it."""
    at = torch.arange(TOKENS)
    prompt = rows["prompt"][:, None]
    second = prompt + rows["chosen"][:, None]
    end = second + rows["rejected"][:, None]
    part = (at >= prompt).long() + (at >= second) + (at >= end)
    place = at.expand(len(prompt), -1)
    if restart:
        place = torch.where(at >= second, place - rows["chosen"][:, None], place)
    before = torch.where(at == second, prompt - 1, (at - 1).clamp(min=0))
    return part, place, before


def pair_loss(model, rows, restart=True):
    ids = rows["ids"]
    part, place, before = layout(rows, restart)
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    dtype = rows["margin"].dtype
    mask = torch.zeros(len(ids), 1, TOKENS, TOKENS, dtype=dtype)
    mask = mask.masked_fill(~(seen & causal)[:, None], torch.finfo(dtype).min)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=place, use_cache=False).logits
    logs = logits.log_softmax(-1)
    logs = logs.gather(1, before[:, :, None].expand(-1, -1, VOCABULARY))
    logs = logs.gather(2, ids[:, :, None]).squeeze(2)
    chosen, rejected = [(logs * (part == n)).sum(1) for n in (1, 2)]
    return -F.logsigmoid(BETA * (chosen - rejected - rows["margin"])).sum()


class Clean:
    restart = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=14,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(PROMPT), TOKENS), generator=g),
            "prompt": torch.tensor(PROMPT),
            "chosen": torch.tensor(CHOSEN),
            "rejected": torch.tensor(REJECTED),
            "margin": torch.randn(len(PROMPT), generator=g),
        }

    def loss_sum(self, model, rows):
        return pair_loss(model, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            loss = pair_loss(model, rows, restart=self.restart)
            (loss * ctx.world_size / len(PROMPT)).backward()


class Buggy(Clean):
    restart = False


EXPECT = dict(
    right=[
        r"(?i)position|rotary|rope|place",
        r"(?i)position_ids|position ids|places?|numbers?|cos|sin\b|rotary|rope|index|offset|shift",
    ],
    place=[r"(?i)position_ids|rotary|layout|self_attn|layers?\.0|model is handed"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|gradient.?sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)attention_mask (is|are) (wrong|another)|mask is wrong",
        r"(?i)only (on )?rank [012]\b|recomput|labels? .{0,20}(is|are) wrong|embed_tokens .{0,25}goes wrong",
    ],
)
WHY = (
    "In layout() the numbers of the places of the rejected answer are not set back by the length of the chosen answer, so position_ids is 0..11 for every row; right is prompt + k for the k-th token of the rejected answer. The rotary "
    "embedding of layers 0 and 1 then turns queries and keys of rejected tokens by too much against those of the prompt (tokens inside of the rejected answer keep their distance). Prompt and chosen places are right (the places of padding "
    "are counted differently, too, but are not in the loss). All rows, ranks and micro-batches; first wrong is rotary_emb's cos and sin, then the self attention of layer 0 at the rejected places. The attention mask, the place before the "
    "first rejected token (last of the prompt), FSDP2, its sync, and the divisor 9 are right. Fix: subtract the chosen length from the places of the rejected answer."
)
