"""DPO on a small Llama (transformers) that computes the common prompt of a pair only once: a forward over the prompt with `use_cache=True`, then one over the chosen and one over the rejected answer with its keys and values (gradients flow through the
cache). DistributedDataParallel over three ranks; log-probabilities of the reference model are columns of the data set.

The bug: a `DynamicCache` is changed by the forward that gets it. After the chosen answer it contains the chosen answer's keys and values as well, and the rejected answer is read as its continuation. Origin: transformers' guide on re-using a prompt's cache
(copy.deepcopy of the cache for every continuation) and threads of users who forgot it; with gradients one crops instead.
"""

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PROMPT, ANSWER, WORDS, BETA = 10, 5, 4, 23, 0.3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=18,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=PROMPT + 2 * ANSWER,
                initializer_range=0.4,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        out = {"prompt": torch.randint(WORDS, (ROWS, PROMPT), generator=g)}
        for name in ("chosen", "rejected"):
            out[name] = torch.randint(WORDS, (ROWS, ANSWER), generator=g)
            out[name + "_length"] = torch.randint(2, ANSWER + 1, (ROWS,), generator=g)
            out[name + "_reference"] = -2 - torch.rand(ROWS, generator=g) * 6
        return out

    @staticmethod
    def answer_log_prob(logits, answer, length):
        each = logits.log_softmax(-1).gather(-1, answer[..., None])[..., 0]
        return (each * (torch.arange(ANSWER) < length[:, None])).sum(1)

    @staticmethod
    def preference(rows, chosen, rejected):
        margin = (chosen - rows["chosen_reference"]) - (rejected - rows["rejected_reference"])
        return -F.logsigmoid(BETA * margin).sum()

    def loss_sum(self, model, rows):
        """Whole sequences, no cache."""
        found = []
        for name in ("chosen", "rejected"):
            ids = torch.cat([rows["prompt"], rows[name]], 1)
            logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
            found.append(self.answer_log_prob(logits, rows[name], rows[name + "_length"]))
        return self.preference(rows, *found), len(rows["prompt"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def restore(self, cache, added):
        cache.crop(-added)

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        cache = DynamicCache(config=model.module.config)
        first = model(input_ids=rows["prompt"], past_key_values=cache, use_cache=True).logits
        found = []
        for name in ("chosen", "rejected"):
            fed = rows[name][:, :-1]  # the last token predicts nothing
            rest = model(input_ids=fed, past_key_values=cache, use_cache=True).logits
            self.restore(cache, fed.shape[1])
            logits = torch.cat([first[:, -1:], rest], 1)
            found.append(self.answer_log_prob(logits, rows[name], rows[name + "_length"]))
        loss = self.preference(rows, *found)
        (loss * ctx.world_size / len(batch["prompt"])).backward()


class Buggy(Clean):
    def restore(self, cache, added):
        pass


EXPECT = dict(
    right=[
        r"(?i)forward|attention|activation|cache|key|input|position|function|comput",
        r"(?i)reject|second|third|call|cache|forward|leak|earlier|chosen|attention|position",
    ],
    place=[r"(?i)forward|attention|cache|self_attn|key|reject|layers?\W{0,2}0|rotary|position"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)divided by (its|their) own|divisor is wrong|wrong divisor",
        r"(?i)rows? .{0,20}(lost|missing|never read|read twice)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)targets? (is|are) (wrong|other)|labels? (is|are) shifted",
        r"(?i)chosen .{0,30}(is|are) (computed )?wrong",
    ],
)
WHY = (
    "The cache that the prompt filled (5 tokens) is changed in place by the forward over the chosen answer (3 more tokens), and not cropped. The forward over the rejected answer then attends to prompt + chosen[:3] and sits at positions 8-10 instead of 5-7. So, on all three ranks and in all rows, the log-probability of the rejected answer is wrong except for its "
    "first token (predicted by the prompt's last logits); the log-probability of the chosen answer is right, but its weight in the gradient, sigmoid(-beta * margin), is not, since the margin is wrong. All parameters get wrong gradients, the same on all ranks (with seed 0 by 25 to 107 percent of the maximum). Rows, targets, divisor (10) and DDP's reduction are right. "
    "Fix: crop the cache by the answer's tokens (or a fresh cache of the prompt's layers) before the next answer."
)
