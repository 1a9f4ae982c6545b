"""Preference tuning without a reference model (ORPO) of a transformers OLMo 2 with LoRA adapters of
peft on q_proj and v_proj (the base is frozen), data parallel over two ranks (3 and 2 of 5 pairs),
micro-batches of two pairs; chosen and rejected answers go through the model together.

Loss of a pair: mean negative log-likelihood of the chosen answer, less a weight times the
log-sigmoid of the log odds ratio. log odds(p) = log p - log(1 - p).

Bug: brackets are missing in the log odds ratio of the step, so that log(1 - p) of the rejected
answer is subtracted instead of added. After re-writings of the ORPO loss in preference trainers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
PAIRS, PROMPT, T, VOCAB, WEIGHT = 5, 3, 9, 7, 0.8


def answer_log_probs(model, ids, lengths):
    """Mean log-probability of the answers' tokens, a number for each row."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    at = torch.arange(1, ids.shape[1])[None]
    answer = (at >= PROMPT) & (at < PROMPT + lengths[:, None])
    return (found * answer).sum(-1) / lengths


def log_rest(log_p):
    return torch.log1p(-log_p.exp())


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 99)
        config = Olmo2Config(
            vocab_size=VOCAB,
            hidden_size=8,
            intermediate_size=11,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.3,
            pad_token_id=0,
            use_cache=False,
            attn_implementation="eager",
        )
        lora = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = get_peft_model(Olmo2ForCausalLM(config), lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 990)
        prompt = torch.randint(1, VOCAB, (PAIRS, PROMPT), generator=g)
        rows = {}
        for kind in ("chosen", "rejected"):
            answer = torch.randint(1, VOCAB, (PAIRS, T - PROMPT), generator=g)
            rows[kind] = torch.cat([prompt, answer], 1)
            rows[kind + "_length"] = torch.randint(2, T - PROMPT + 1, (PAIRS,), generator=g)
        return rows

    def loss_sum(self, model, rows):
        odds = []
        for kind in ("chosen", "rejected"):
            log_p = answer_log_probs(model, rows[kind], rows[kind + "_length"])
            odds.append(log_p - log_rest(log_p))
            if kind == "chosen":
                loss = -log_p.sum()
        loss = loss - WEIGHT * F.logsigmoid(odds[0] - odds[1]).sum()
        return loss, rows["chosen"].shape[0]

    def log_odds_ratio(self, chosen, rejected):
        return (chosen - rejected) - (log_rest(chosen) - log_rest(rejected))

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(PAIRS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            ids = torch.cat([batch["chosen"][part], batch["rejected"][part]])
            lengths = torch.cat([batch["chosen_length"][part], batch["rejected_length"][part]])
            chosen, rejected = answer_log_probs(model, ids, lengths).chunk(2)
            ratio = F.logsigmoid(self.log_odds_ratio(chosen, rejected))
            loss = -(chosen + WEIGHT * ratio).sum()
            (loss / PAIRS).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def log_odds_ratio(self, chosen, rejected):
        return (chosen - rejected) - log_rest(chosen) - log_rest(rejected)


EXPECT = dict(
    right=[
        r"odds|log_rest|log1p|1 - p|logsigmoid|ratio|reject",
        r"\bsign|bracket|parenthes|subtract|minus|added|negat|opposite|plus",
        r"log_rest\(rejected\)|log_odds_ratio|odds|reject|log1p",
    ],
    place=[r"log_odds_ratio", r"log_rest\(rejected\)", r"logsigmoid", r"\bratio\b"],
    wrong=[
        r"(length|mean|average).{0,40}(wrong|prompt|padding)",
        r"lora.{0,40}(scal|not reduc|twice|missing)",
        r"(not|never|missing).{0,30}(all.?reduc|summed over dp)",
        r"(chosen|rejected).{0,20}(swapped|exchanged)",
        r"micro.?batch.{0,30}(mean of means|twice)",
        r"WEIGHT.{0,30}(wrong|missing)",
    ],
)
WHY = """The log odds ratio is (c - r) - (log(1 - e^c) - log(1 - e^r)). Buggy.log_odds_ratio lost
the brackets around the second difference, so log(1 - e^r) of the rejected answer has the wrong
sign. The log-probabilities, the likelihood term, the count and the reduction are right; what goes
into logsigmoid is wrong, and so are all adapters' gradients. A right cause names the sign of the
rejected answer's log(1 - p) in log_odds_ratio. Fix: the brackets."""
