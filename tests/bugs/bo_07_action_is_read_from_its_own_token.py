"""transformers' DecisionTransformerModel (2 layers, random tiny config) trained to imitate actions, in a pipeline of two ranks: rank 0 has the embeddings of return, state and action and the first block, rank 1
the second block, the last norm and the head. The pipeline's stages are functions of their own; 7 trajectories of 5 steps in three micro-batches, all forwards before all backwards. Parameters that a rank doesn't
use get zeros, and the gradients are summed over the ranks.

The bug: the last stage's own head takes the third of the three streams (return, state, action) where the action has to be predicted from the state's token, so that the head sees the answer. After questions and
issues about ports of the Decision Transformer (x[:, 1] against x[:, 2] in the heads).
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import DecisionTransformerConfig, DecisionTransformerModel

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
STATE, ACTION, WIDTH, STEPS, ROWS, MICRO = 3, 2, 8, 5, 7, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = DecisionTransformerConfig(
            state_dim=STATE,
            act_dim=ACTION,
            hidden_size=WIDTH,
            max_ep_len=9,
            n_layer=2,
            n_head=2,
            n_inner=12,
            vocab_size=1,
            n_positions=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.3,
            attn_implementation="sdpa",
        )
        return DecisionTransformerModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        first = torch.randint(4, (ROWS, 1), generator=g)
        return {
            "states": torch.randn(ROWS, STEPS, STATE, generator=g),
            "actions": torch.rand(ROWS, STEPS, ACTION, generator=g) * 2 - 1,
            "togo": torch.rand(ROWS, STEPS, 1, generator=g),
            "timesteps": first + torch.arange(STEPS),
        }

    def loss_sum(self, model, rows):
        out = model(
            states=rows["states"],
            actions=rows["actions"],
            returns_to_go=rows["togo"],
            timesteps=rows["timesteps"],
            return_dict=True,
        )
        return (out.action_preds - rows["actions"]).square().sum(), len(rows["states"])

    def first_stage(self, model, part):
        time = model.embed_timestep(part["timesteps"])
        streams = [
            model.embed_return(part["togo"]) + time,
            model.embed_state(part["states"]) + time,
            model.embed_action(part["actions"]) + time,
        ]
        x = model.embed_ln(torch.stack(streams, 2).flatten(1, 2))
        x = x + model.encoder.wpe.weight[0]
        return model.encoder.h[0](x)

    def last_stage(self, model, x):
        x = model.encoder.ln_f(model.encoder.h[1](x))
        return self.actions(model, x)

    def actions(self, model, x):
        returns, states, actions = x.unflatten(1, (STEPS, 3)).unbind(2)
        return model.predict_action(states)

    def forward_stage(self, model, part, ctx):
        group = ctx.group("pp")
        if ctx.rank == 0:
            x = self.first_stage(model, part)
            dist.send(x.detach().contiguous(), 1, group=group)
            return x, None
        x = part["states"].new_empty(len(part["states"]), 3 * STEPS, WIDTH)
        dist.recv(x, 0, group=group)
        x.requires_grad_()
        loss = (self.last_stage(model, x) - part["actions"]).square().sum() / ROWS
        return x, loss

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        for p in model.parameters():
            p.grad = None
        parts = [{k: v.tensor_split(MICRO)[n] for k, v in batch.items()} for n in range(MICRO)]
        for x, loss in [self.forward_stage(model, part, ctx) for part in parts]:
            if ctx.rank == 0:
                grad = torch.empty_like(x)
                dist.recv(grad, 1, group=group)
                x.backward(grad)
            else:
                loss.backward()
                dist.send(x.grad, 0, group=group)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def actions(self, model, x):
        returns, states, actions = x.unflatten(1, (STEPS, 3)).unbind(2)
        return model.predict_action(actions)


EXPECT = dict(
    right=[
        r"predict_action|head|actions?\b",
        r"state|stream|token|position|input|slice|select|index|rows of|unbind|reads|third|fed|given",
    ],
    place=[
        r"predict_action",
        r"\bactions\(|\.actions\b|in actions|Buggy\.actions|actions`",
        r"last_stage",
        r"unbind",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing (all.?)?reduc|wrong group",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped|mixed)|only the last micro.?batch",
        r"(ln_f|h\.0|h\.1|encoder\.h|embed_\w+|first_stage) .{0,25}(computes|is) wrong|received .{0,30}(wrong|stale)|causal mask",
        r"backward formula|wrong gradient is sent|detach",
    ],
)
WHY = (
    "Buggy.actions splits the last norm's output into the streams of return, state and action and gives the action's tokens to predict_action; the model gives it the state's (x[:, 1]). So the head's input is wrong on "
    "rank 1, the last stage, in all rows and micro-batches; all that comes before it (embeddings, both blocks, ln_f, what the pipeline sends) is right. Prediction, loss and the gradients of all parameters are wrong, "
    "those of rank 0 because of the gradient it is sent. Send order, divisor and the final sum are right. Fix: predict_action(states)."
)
