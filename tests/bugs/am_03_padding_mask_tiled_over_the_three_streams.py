"""Offline RL with a Decision Transformer on GPT2Model of transformers (tiny, from a config) under DDP on three ranks, two micro-batches each: return-to-go, state and action of every step are stacked to one sequence (R1, s1, a1, R2, s2,
...), short trajectories are padded on the left, the action is predicted from the state token. The divisor is the number of valid steps of all ranks.

The bug: the padding mask of the steps is repeated block after block (mask, mask, mask) instead of step by step (every entry three times), so it does not fit the stacked sequence: padding tokens are attended and valid ones are hidden.
The mask of kzl/decision-transformer (stack, permute, reshape) is often asked about (issue 30) and rewritten with repeat.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2Model

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STEPS, STATE, ACTION, WIDTH, HORIZON = 5, 3, 2, 8, 12
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 8)], [(8, 9), (9, 11)]]
VALID = [5, 3, 5, 2, 5, 4, 1, 5, 5, 3, 5]


class DecisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=1,
            n_positions=3 * STEPS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
            use_cache=False,
        )
        self.trunk = GPT2Model(config)
        self.trunk.wte.weight.requires_grad_(False)
        self.time = nn.Embedding(HORIZON, WIDTH)
        self.of_return, self.of_state = nn.Linear(1, WIDTH), nn.Linear(STATE, WIDTH)
        self.of_action = nn.Linear(ACTION, WIDTH)
        self.act = nn.Linear(WIDTH, ACTION)
        for p in self.trunk.h.parameters():
            nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
        self.tiled = False

    def forward(self, rows):
        time, mask = self.time(rows["time"]), rows["mask"]
        streams = [
            self.of_return(rows["return"][..., None]) + time,
            self.of_state(rows["state"]) + time,
            self.of_action(rows["action"]) + time,
        ]
        x = torch.stack(streams, 2).flatten(1, 2)
        mask = mask.repeat(1, 3) if self.tiled else mask.repeat_interleave(3, 1)
        hidden = self.trunk(inputs_embeds=x, attention_mask=mask).last_hidden_state
        return torch.tanh(self.act(hidden.unflatten(1, (-1, 3))[:, :, 1]))


def action_loss(model, rows):
    wrong = (model(rows) - rows["action"]).square().sum(-1)
    return (wrong * rows["mask"]).sum()


class Clean:
    tiled = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return DecisionTransformer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows, valid = len(VALID), torch.tensor(VALID)[:, None]
        start = torch.randint(0, HORIZON - STEPS + 1, (rows, 1), generator=g)
        mask = (torch.arange(STEPS)[None] >= STEPS - valid).long()
        reward = torch.rand(rows, STEPS, generator=g) * mask
        there = mask[..., None].to(torch.get_default_dtype())
        return {
            "return": reward.flip(1).cumsum(1).flip(1),
            "state": torch.randn(rows, STEPS, STATE, generator=g) * there,
            "action": torch.rand(rows, STEPS, ACTION, generator=g) * there + 10.0 * (there - 1),
            "time": (start + torch.arange(STEPS)[None] - (STEPS - valid)).clamp(min=0) * mask,
            "mask": mask,
        }

    def loss_sum(self, model, rows):
        return action_loss(model, rows), int(rows["mask"].sum())

    def distribute(self, model, ctx):
        model.tiled = self.tiled
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        steps = int(batch["mask"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (action_loss(model, rows) * ctx.world_size / steps).backward()


class Buggy(Clean):
    tiled = True


EXPECT = dict(
    right=[
        r"(?i)forward|mask|attention|input|rows?",
        r"(?i)mask|attn|attention|padd|short|trunk\.h|\bh\.0",
    ],
    place=[r"(?i)mask|attn|attention|trunk|\bh\.0|padd"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward is right|wrong only in the backward|backward (alone )?is wrong",
        r"(?i)(labels?|targets?|actions?) (is|are) (wrong|shifted)|causal mask .{0,20}(wrong|missing)",
        r"(?i)only (on )?rank [0-2]\b|all rows|position(s| ids?) (is|are|start)",
    ],
)
WHY = (
    "Only the attention mask is wrong, in the forward of the trunk's attention, for trajectories shorter than 5 steps (left padded): rank 0 micro-batch 0 row 1; rank 1 micro-batch 0 row 3 and micro-batch 1 rows 5 and 6; rank 2 "
    "micro-batch 1 row 9. Their mask over 15 tokens is (mask, mask, mask) instead of every entry three times: some padding tokens are attended, some valid tokens hidden as keys. Rows of five valid steps have a mask of ones and are right; "
    "rank 0 micro-batch 1 and rank 2 micro-batch 0 are right. The forward is the first wrong at trunk.h.0.attn; all parameters get wrong gradients (embeddings of return, state, action, time too), equally on all ranks. Causal mask, "
    "positions, targets, the loss mask, the divisor, no_sync and DDP are right. Fix: repeat_interleave(3, dim=1), or stack, permute, reshape."
)
