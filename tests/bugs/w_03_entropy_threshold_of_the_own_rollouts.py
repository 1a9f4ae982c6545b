"""Policy-gradient fine-tuning of a Llama of transformers under FSDP2: only the fifth of the tokens with the highest entropy at rollout is trained ("forking tokens"),
clipped ratios, all completion tokens in the divisor. After verl's and TRL's `top_entropy_quantile` (reports that the quantile is to be taken over the whole batch, not per
process).
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, PROMPT, LOW, HIGH, QUANTILE = 37, 3, 0.2, 0.28, 0.8
COMPLETIONS = [7, 4, 6, 5, 7, 3, 6, 7]  # three rows, three rows, two
ROWS, LENGTH = len(COMPLETIONS), max(COMPLETIONS)


def threshold(entropy, real):
    return entropy[real].quantile(QUANTILE, interpolation="lower")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=20,
            vocab_size=VOCABULARY, max_position_embeddings=PROMPT + LENGTH, bos_token_id=0, eos_token_id=0,
            initializer_range=0.2, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        real = torch.arange(LENGTH) < torch.tensor(COMPLETIONS)[:, None]
        hard = torch.tensor([0.2, 0.5, 0.3, 1.4, 1.0, 1.7, 0.8, 0.6])  # by prompt
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, PROMPT + LENGTH), generator=g),
            "real": real,
            "entropy": hard[:, None] * (0.4 + torch.rand(ROWS, LENGTH, generator=g)),
            "old": -3.7 + 0.3 * torch.randn(ROWS, LENGTH, generator=g),
            "advantage": torch.randn(ROWS, 1, generator=g),
        }

    def policy_loss(self, model, rows, least):
        logits = model(input_ids=rows["ids"][:, :-1]).logits[:, PROMPT - 1 :]
        logp = logits.log_softmax(-1).gather(-1, rows["ids"][:, PROMPT:, None]).squeeze(-1)
        ratio = (logp - rows["old"]).exp()
        gain = torch.min(
            ratio * rows["advantage"], ratio.clamp(1 - LOW, 1 + HIGH) * rows["advantage"]
        )
        trained = rows["real"] & (rows["entropy"] >= least)
        return -(gain * trained).sum()

    def loss_sum(self, model, rows):
        whole = self.batch()
        least = threshold(whole["entropy"], whole["real"])
        return self.policy_loss(model, rows, least), rows["real"].sum()

    def distribute(self, model, ctx):
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def least_entropy(self, mine, ctx):
        group = ctx.group("dp")
        own = mine["entropy"].masked_fill(~mine["real"], -1.0)
        own = torch.cat([own, own.new_full((3 - len(own), LENGTH), -1.0)])
        every = [torch.empty_like(own) for _ in range(ctx.world_size)]
        dist.all_gather(every, own, group=group)
        every = torch.cat(every)
        return threshold(every, every >= 0)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["real"].sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        loss = self.policy_loss(model, mine, self.least_entropy(mine, ctx))
        (loss / count).backward()


class Buggy(Clean):
    def least_entropy(self, mine, ctx):
        return threshold(mine["entropy"], mine["real"])


EXPECT = dict(
    right=[
        r"loss|token|mask|entropy|quantile|threshold|gain|trained|weight",
        r"entropy|quantile|threshold|mask|trained|other tokens|(some|certain|these|at|of|other|more|fewer|which|lost|missing|extra|\d) (\S+ )?(tokens?|positions?|elements?)|"
        r"tokens? .{0,80}(lost|missing|zero|not in|left out|extra|enter|counts?|weight)|>=|\bge\b|\bmul\b",
    ],
    place=[r"loss|token|entropy|mask|lm_head|logits|threshold|w_03\S*:\d+"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward|goes wrong in (model|lm_head)",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"divides? by (its|their) own (count|number)|own (denominator|divisor)",
        r"backward of \S+ is wrong|gradient of other targets",
        r"rows? .{0,20}(never read|read twice)",
        r"advantage\S* (is|are) (wrong|other)|unused|frozen",
    ],
)
WHY = (
    "Each rank takes the 80 percent quantile over its own rollouts, not over those of all ranks. Rank 0 has the easy prompts (low entropy): none of its tokens is in the batch's top fifth, yet it trains its own top fifth; rank 1 has the hard ones, its "
    "threshold is too high and it leaves tokens out; rank 2's is too low. So tokens enter the loss that should not (rank 0, rank 2) and others are missing (rank 1). The token's mask in the loss is wrong; the model's forward, log-probabilities, ratios, advantages, the divisor "
    "(all completion tokens) and the reduction are right. All parameters are affected."
)
