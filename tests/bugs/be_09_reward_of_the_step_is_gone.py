"""Offline RL: a tiny DecisionTransformerModel of transformers with accelerate (accumulate, prepared model) on two ranks, three micro-batches each. A row is a trajectory and the start of a window of four steps (shorter at the end, padded on
the right and masked). The model gets returns to go, states, actions, time steps and predicts the actions; squared error over valid steps, divided by the valid steps of all ranks.

The bug: the returns to go are the total minus the running sum of the rewards, which already contains the step's own reward: each step is given the return of the next one. After takuseno/d3rlpy issue 401 (Differences in RTG computation
between inference and training time) and kzl/decision-transformer issue 22 (Possible misalignment in calculating rtg in Atari).
"""

import torch
from accelerate import Accelerator
from torch import nn
from transformers import DecisionTransformerConfig, DecisionTransformerModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
STATE, ACTION, STEPS, WINDOW = 3, 2, 9, 4
STARTS = [0, 3, 7, 5, 6, 2, 8, 1, 4, 7]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9), (9, 10)]]


def windows(rows, inclusive=True):
    rewards = rows["rewards"]
    to_go = rewards.sum(1, keepdim=True) - rewards.cumsum(1)
    if inclusive:
        to_go = to_go + rewards
    places = rows["start"][:, None] + torch.arange(WINDOW)
    mask = places < STEPS
    places = places.clamp(max=STEPS - 1)
    turn = torch.arange(len(places))[:, None]
    return {
        "returns_to_go": (to_go[turn, places] * mask)[..., None],
        "states": rows["states"][turn, places] * mask[..., None],
        "actions": rows["actions"][turn, places] * mask[..., None],
        "timesteps": places,
        "attention_mask": mask.long(),
    }


def action_error(model, window):
    guess = model(**window, return_dict=True).action_preds
    error = (guess - window["actions"]).pow(2).sum(-1)
    return (error * window["attention_mask"]).sum()


def valid_steps(rows):
    return int((STEPS - rows["start"]).clamp(max=WINDOW).sum())


class Clean:
    inclusive = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = DecisionTransformerConfig(
            state_dim=STATE,
            act_dim=ACTION,
            hidden_size=8,
            max_ep_len=STEPS,
            n_layer=2,
            n_head=2,
            n_inner=12,
            n_positions=3 * WINDOW,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.4,
        )
        model = DecisionTransformerModel(config)
        for unused in (model.predict_state, model.predict_return, model.encoder.wte):
            unused.requires_grad_(False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(STARTS)
        return {
            "rewards": torch.randn(rows, STEPS, generator=g) + 0.5,
            "states": torch.randn(rows, STEPS, STATE, generator=g),
            "actions": torch.rand(rows, STEPS, ACTION, generator=g) * 1.6 - 0.8,
            "start": torch.tensor(STARTS),
        }

    def loss_sum(self, model, rows):
        return action_error(model, windows(rows)), valid_steps(rows)

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        return self.accelerator.prepare_model(model)

    def step(self, model, batch, ctx):
        accelerator, total = self.accelerator, valid_steps(batch)
        scale = ctx.world_size * accelerator.gradient_accumulation_steps / total
        for low, high in PARTS[ctx.rank]:
            with accelerator.accumulate(model):
                window = windows({k: v[low:high] for k, v in batch.items()}, self.inclusive)
                accelerator.backward(action_error(model, window) * scale)


class Buggy(Clean):
    inclusive = False


EXPECT = dict(
    right=[
        r"(?i)return|embed_return|reward|to.?go|input",
        r"(?i)forward|input|value|return|reward|shift|off.?by.?one|next",
    ],
    place=[r"(?i)embed_return|return|windows|to_go|reward|input"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b|gradient_accumulation_steps.{0,30}(wrong|twice)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|stale|left over",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)goes wrong (first )?(at|in) [\w.]*(embed_state|embed_action|embed_timestep|predict_action)|time.?steps (is|are) wrong",
        r"(?i)attention.mask .{0,20}wrong|dropout|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "`windows(rows, inclusive=False)` gives total - cumsum(rewards), the sum of the rewards after the step; the return to go of step t contains the reward of t. So each valid step of all rows, ranks and micro-batches gets the return to go of "
    "step t + 1 (the last step of a trajectory: zero). The forward goes wrong at the input of `embed_return`; states, actions, time steps, mask, targets are right. All trained parameters' gradients are wrong. Accelerate's accumulation (loss divided by 3, "
    "multiplied back in scale), the divisor and DDP are right. Fix: to_go + rewards (inclusive = True)."
)
