"""PPO on token rollouts with accelerate: a small GPT-2 is the policy, a GPT-2 trunk with a scalar head the critic, both prepared by one Accelerator on three processes. Two micro-batches, the first of them
under no_sync; clipped policy loss plus value loss, normalised by all response tokens (DDP averages, so the loss is multiplied by the number of processes).

The bug: the critic is prepared with evaluation_mode=True, the line copied from the reference or reward model. Accelerate does not wrap such a model in DDP (it is for inference), no_sync of it is a
context that does nothing, and its gradients stay those of the own rows. After threads about prepare_model(..., evaluation_mode=True) and "second model not synchronised" in accelerate and TRL.
"""

import contextlib

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH = 12, 7, 19, 12
MICRO_BATCHES, CLIP = 2, 0.2


def config():
    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = GPT2Model(config())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids, mask):
        hidden = self.trunk(input_ids=ids, attention_mask=mask, use_cache=False)
        return self.head(hidden.last_hidden_state).squeeze(-1)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = GPT2LMHeadModel(config())
        self.value = Critic()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic().train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "mask": (torch.arange(LENGTH) < lengths).long(),
            "old": -2.9 + 0.2 * torch.randn(ROWS, LENGTH - 1, generator=g),
            "advantages": torch.randn(ROWS, LENGTH - 1, generator=g),
            "returns": torch.randn(ROWS, LENGTH - 1, generator=g),
        }

    def loss_sum(self, model, rows):
        ids, mask = rows["ids"], rows["mask"]
        logits = model.policy(input_ids=ids, attention_mask=mask, use_cache=False).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (log_probs - rows["old"]).exp()
        advantages = rows["advantages"]
        policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        value = 0.5 * (model.value(ids, mask)[:, :-1] - rows["returns"]).square()
        response = mask[:, 1:]
        return ((policy + value) * response).sum(), response.sum()

    def prepare(self, accelerator, model):
        model.policy = accelerator.prepare_model(model.policy)
        model.value = accelerator.prepare_model(model.value)
        return model

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True)
        return self.prepare(self.accelerator, model)

    def step(self, model, batch, ctx):
        accelerator = self.accelerator
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        tokens = mine["mask"][:, 1:].sum()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        for n in range(MICRO_BATCHES):
            part = {k: x.tensor_split(MICRO_BATCHES)[n] for k, x in mine.items()}
            with contextlib.ExitStack() as stack:
                if n < MICRO_BATCHES - 1:
                    for network in (model.policy, model.value):
                        stack.enter_context(accelerator.no_sync(network))
                loss, _ = self.loss_sum(model, part)
                accelerator.backward(loss * ctx.world_size / tokens)


class Buggy(Clean):
    def prepare(self, accelerator, model):
        model.policy = accelerator.prepare_model(model.policy)
        model.value = accelerator.prepare_model(model.value, evaluation_mode=True)
        return model


EXPECT = dict(
    right=[
        r"value|critic|trunk",
        (
            r"(not|never|no|without|n't|isn't|missing|lack)\b.{0,60}(reduc|synchron|averag|sum(med)?|all.?reduce|collective|wrapp|DDP|exchang|communicat)"
            r"|(local|own|its own|each rank's) (rows|gradient|part|share|batch)|unreduced|unsynchroni[sz]ed|evaluation_mode"
        ),
    ],
    place=[
        r"\bvalue\b",
        r"prepare",
        r"evaluation_mode",
        r"critic",
        r"DDP|DistributedDataParallel",
        r"head|trunk",
    ],
    wrong=[
        r"policy.{0,30}(not|never) (reduced|synchron)",
        r"no_sync.{0,40}(last|wrong|off by one)|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|first micro.?batch (is )?(lost|dropped)",
        r"reduced twice|counted twice|wrong group|detach|frozen|mean of means|own token count",
    ],
)
WHY = (
    "The critic is handed to prepare_model with evaluation_mode=True, which returns it unwrapped: no DDP, no reducer. All gradients of value.* (trunk and head) are on each of the three ranks those of its own "
    "four rows times three over the global token count, other ones on every rank, while those of policy.* are averaged and right; the number of micro-batches plays no part. A right cause says that the value "
    "network's gradients are never reduced over dp (not in DDP). Fix: prepare the critic without evaluation_mode."
)
