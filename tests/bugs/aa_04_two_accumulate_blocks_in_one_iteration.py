"""A policy (GPT-2, next-token loss) and a critic (BERT with a regression head) trained side by side with accelerate, gradient accumulation over three micro-batches, two ranks, each model wrapped by `accelerator.prepare_model`.

The bug: the iteration has one `with accelerator.accumulate(...)` block per model instead of one for both. Every entry into `accumulate` counts a step, whichever model it names, so the block of the critic and that of the policy take turns in the count
to three. Origin: huggingface/accelerate threads on gradient accumulation with several models / GANs ("accumulate" called twice per iteration; the documentation answers with `accumulate(model_a, model_b)`).
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, WIDTH, WORDS, MICRO = 11, 6, 21, 3


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=WIDTH,
                n_embd=12,
                n_layer=2,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                initializer_range=0.3,
                use_cache=False,
                attn_implementation="eager",
            )
        )
        self.critic = BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=10,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=14,
                max_position_embeddings=WIDTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                num_labels=1,
                attn_implementation="eager",
            )
        )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, WIDTH), generator=g),
            "reward": torch.randn(ROWS, generator=g),
        }

    @staticmethod
    def policy_loss(policy, rows):
        logits = policy(input_ids=rows["ids"]).logits[:, :-1]
        targets = rows["ids"][:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return each.view(targets.shape).mean(1).sum()

    @staticmethod
    def critic_loss(critic, rows):
        values = critic(input_ids=rows["ids"]).logits[:, 0]
        return F.mse_loss(values, rows["reward"].to(values.dtype), reduction="sum")

    def loss_sum(self, model, rows):
        loss = self.policy_loss(model.policy, rows) + self.critic_loss(model.critic, rows)
        return loss, len(rows["ids"])

    def distribute(self, model, ctx):
        os.environ.update(
            {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        model.policy = self.accelerator.prepare_model(model.policy)
        model.critic = self.accelerator.prepare_model(model.critic)
        return model

    def iteration(self, accelerator, model, rows, scale):
        with accelerator.accumulate(model.critic, model.policy):
            accelerator.backward(self.critic_loss(model.critic, rows) * scale)
            accelerator.backward(self.policy_loss(model.policy, rows) * scale)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        scale = MICRO * ctx.world_size / ROWS  # accelerate divides by MICRO, DDP by the ranks
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            self.iteration(self.accelerator, model, rows, scale)


class Buggy(Clean):
    def iteration(self, accelerator, model, rows, scale):
        with accelerator.accumulate(model.critic):
            accelerator.backward(self.critic_loss(model.critic, rows) * scale)
        with accelerator.accumulate(model.policy):
            accelerator.backward(self.policy_loss(model.policy, rows) * scale)


EXPECT = dict(
    right=[
        r"(?i)critic|bert\b",
        r"(?i)micro.?batch",
        r"(?i)last|third|micro.?batch(es)? (2|3)|final|after|early|too soon|before the last",
        r"(?i)reduc|sync|own rank|each rank'?s own|local|sum",
    ],
    place=[r"(?i)critic|micro.?batch"],
    wrong=[
        r"(?i)policy\S* (is|are) wrong|the policy.{0,20}(not|never) reduced",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)never reduced at all|no reduction at all",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)rows? .{0,20}(never read|read twice)",
        r"(?i)targets? (is|are) (wrong|other)",
    ],
)
WHY = (
    "accumulate() counts its entries: critic 1, policy 2, critic 3, policy 4, critic 5, policy 6. It synchronises at 3 and 6. So the critic is reduced by DDP in its second micro-batch (of three), which averages micro-batches 1 and 2 over the ranks (right so far); in the third, under no_sync, "
    "each rank adds its own gradient, unreduced: with the scale of 2 ranks / 11 rows it is 2 times too heavy for the rank's own rows and the other rank's rows of the third micro-batch are missing. The critic's gradients differ between ranks 0 and 1, in all its parameters (ranks' mean would be right; with seed 0 each is off by 15 to 50 percent of the maximum, by opposite amounts on the two ranks). "
    "The policy is synchronised at entry 6, its last micro-batch, and is right. Forward, rows, losses are right. The fix is one block: accumulate(critic, policy)."
)
