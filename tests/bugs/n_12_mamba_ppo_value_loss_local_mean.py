"""PPO with a Mamba backbone, a language-model head and a value head, DDP with no_sync over two micro-batches. After TRL and verl threads on
masked_mean in PPO: the policy term is divided by the global number of answer tokens, the value term by that of the micro-batch.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import MambaConfig, MambaModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, ACCUMULATION = 9, 7, 27, 12, 2
CLIP, VALUE_CLIP, VALUE_COEFFICIENT = 0.2, 0.3, 0.5


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = MambaModel(
            MambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                state_size=4,
                conv_kernel=3,
                expand=2,
                time_step_rank=2,
                use_cache=False,
                residual_in_fp32=False,
                initializer_range=0.5,
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.v_head = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, ids):
        hidden = self.backbone(input_ids=ids).last_hidden_state
        hidden = hidden.to(self.lm_head.weight.dtype)
        return self.lm_head(hidden), self.v_head(hidden)[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids,
            "answer": torch.arange(LENGTH) < lengths,
            "old_logprob": -3.3 + 0.3 * torch.randn(ROWS, LENGTH, generator=g),
            "advantage": torch.randn(ROWS, LENGTH, generator=g),
            "old_value": 0.4 * torch.randn(ROWS, LENGTH, generator=g),
            "returns": torch.randn(ROWS, LENGTH, generator=g),
        }

    def ppo_losses(self, model, rows):
        logits, value = model(rows["ids"][:, :-1])
        logprob = -F.cross_entropy(logits.mT, rows["ids"][:, 1:], reduction="none")
        ratio, advantage = (logprob - rows["old_logprob"]).exp(), rows["advantage"]
        policy = torch.max(-ratio * advantage, -ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        near = rows["old_value"] + (value - rows["old_value"]).clamp(-VALUE_CLIP, VALUE_CLIP)
        critic = torch.max((value - rows["returns"]) ** 2, (near - rows["returns"]) ** 2)
        return (policy * rows["answer"]).sum(), (critic * rows["answer"]).sum()

    def loss_sum(self, model, rows):
        policy, critic = self.ppo_losses(model, rows)
        return policy + VALUE_COEFFICIENT * critic, rows["answer"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def value_loss(self, critic, answer, total, ctx):
        return critic * ctx.world_size / total

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        total = batch["answer"].sum()
        for i in range(ACCUMULATION):
            rows = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            last = i == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                policy, critic = self.ppo_losses(model, rows)
                # DDP averages
                loss = policy * ctx.world_size / total
                loss = loss + VALUE_COEFFICIENT * self.value_loss(
                    critic, rows["answer"], total, ctx
                )
                loss.backward()


class Buggy(Clean):
    def value_loss(self, critic, answer, total, ctx):
        return critic / answer.sum() / ACCUMULATION


EXPECT = dict(
    right=[
        r"mean of (the )?means|means|(own|local|its|their|each|per) .{0,40}(count|denominator|number|divisor|mean|tokens|normali[sz])|"
        r"micro.?batch.{0,60}(count|mean|denominator|divisor|weigh)|weigh|scal|divis|divid|normali[sz]",
        r"v_head|value|critic",
    ],
    place=[r"v_head", r"value|critic"],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"lm_head\S* (is|are|has|was) (a )?(wrong|missing|partial)",
        r"(missing|without|lacks?) .{0,20}(all.?)?reduc",
        r"forward (is|was|differs|pass is) (wrong|different)",
    ],
)
WHY = (
    "The value loss is a mean over the answer tokens of the own micro-batch (and these means are averaged over micro-batches and ranks), while "
    "the policy term is divided by the global token count. So the value head's gradient, and the value part in the Mamba backbone, is a mean of "
    "means; lm_head, which gets only the policy term, is right."
)
