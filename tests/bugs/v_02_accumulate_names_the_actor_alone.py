"""PPO with a GPT-2 actor and a GPT-2 critic of transformers, both prepared by accelerate; three micro-batches under accelerator.accumulate, DDP hooks that sum
(divided by the tokens of all ranks). After accelerate's threads on accumulation with more than one model (accumulate takes several since then).
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LENGTHS = [7, 3, 6, 2, 5, 7, 4, 3, 6]
ROWS, LENGTH, VOCABULARY, MICROS, CLIP = len(LENGTHS), max(LENGTHS), 41, 3, 0.2


def sum_hook(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        shape = dict(
            n_layer=1, n_head=2, n_embd=12, vocab_size=VOCABULARY, n_positions=LENGTH + 1, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, classifier_dropout=0.0, initializer_range=0.1, use_cache=False,
        )  # fmt: skip
        self.actor = GPT2LMHeadModel(GPT2Config(**shape))
        self.critic = GPT2ForTokenClassification(GPT2Config(**shape, num_labels=1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, LENGTH + 1), generator=g),
            "mask": torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None],
            "old": -3.7 + 0.2 * torch.randn(ROWS, LENGTH, generator=g),
            "advantage": torch.randn(ROWS, LENGTH, generator=g),
            "returns": torch.randn(ROWS, LENGTH, generator=g),
        }

    def policy_loss(self, model, rows):
        logits = model.actor(input_ids=rows["ids"][:, :-1]).logits
        logp = logits.log_softmax(-1).gather(-1, rows["ids"][:, 1:, None]).squeeze(-1)
        ratio, advantage = (logp - rows["old"]).exp(), rows["advantage"]
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return (loss * rows["mask"]).sum()

    def value_loss(self, model, rows):
        values = model.critic(input_ids=rows["ids"][:, :-1]).logits.squeeze(-1)
        return 0.5 * ((values - rows["returns"]).square() * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        return self.policy_loss(model, rows) + self.value_loss(model, rows), rows["mask"].sum()

    def distribute(self, model, ctx):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROS)
        model.actor = self.accelerator.prepare_model(model.actor)
        model.critic = self.accelerator.prepare_model(model.critic)
        for part in (model.actor, model.critic):
            part.register_comm_hook(None, sum_hook)
        return model

    def accumulating(self, model):
        return self.accelerator.accumulate(model.actor, model.critic)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count)
        for i in range(MICROS):
            micro = {k: v.tensor_split(MICROS)[i] for k, v in mine.items()}
            with self.accumulating(model):
                for loss in (self.policy_loss(model, micro), self.value_loss(model, micro)):
                    # accelerator.backward divides by the accumulation steps
                    self.accelerator.backward(loss * MICROS / count)


class Buggy(Clean):
    def accumulating(self, model):
        return self.accelerator.accumulate(model.actor)


EXPECT = dict(
    right=[
        r"critic",
        r"(every|each) (micro|backward|call)|again|twice|too early|early|several times|repeated|more than once|no_sync|"
        r"(2|4|two|four) times|(factors?|weights?) .{0,30}\b[24]\b|\b4\b.{0,20}\b2\b|before (the )?(last|later)",
    ],
    place=[r"critic"],
    wrong=[
        r"actor\S* (is|are|has|have|was|were) (a )?(wrong|missing|reduced (again|early|twice))",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(own|local) (count|denominator|divisor)",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"gradient of other targets|backward of \S+ is wrong",
    ],
)
WHY = (
    "accumulate gets the actor only, so the critic's DDP is not under no_sync: its gradients are all-reduced (summed) after each of the three micro-batches, and .grad holds the already "
    "reduced sum of the earlier ones, which is summed over both ranks again: micro-batch 1 counts 4 times, 2 twice, 3 once, in all parameters of the critic on both ranks. "
    "The actor is right; forwards, losses, divisor are right. Right: accumulate(actor, critic)."
)
