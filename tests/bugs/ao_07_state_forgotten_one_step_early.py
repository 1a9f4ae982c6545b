"""Recurrent actor-critic on stored rollouts (A2C with a GRU) under DDP on three ranks with two micro-batches of environments each (no_sync for the first) and uneven numbers of environments. The state is carried from step to step, from
the stored state at the beginning of the rollout; where an episode ended, the next one begins in the same row with a state of zeros. Advantages and returns are given; loss: policy gradient, half the squared value error, an entropy bonus.
Divisor: all steps.

The bug: `done[t]` of the rollout says that the episode ended WITH step t, and the loop uses it as if it said that an episode begins at step t: the state is put to zero before the last step of the old episode, and the first step of the
new one gets the old episode's state. After luchris429/purejaxrl #23, sb3-contrib #169 (episode_start is shifted against done) and PKU-MARL/HARL #75.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STEPS, OBSERVED, WIDTH, ACTIONS = 8, 4, 7, 3
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8)], [(8, 11), (11, 13)]]
ENDS = [(2,), (), (4, 6), (7,), (0, 3), (5,), (), (1,), (2, 5), (), (6,), (3,), (7,)]


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Linear(OBSERVED, WIDTH)
        self.memory = nn.GRUCell(WIDTH, WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, seen, begins, state):
        steps = []
        for t in range(seen.shape[1]):
            state = state * (~begins[:, t, None])
            state = self.memory(torch.tanh(self.see(seen[:, t])), state)
            steps.append(state)
        steps = torch.stack(steps, 1)
        return self.actor(steps), self.critic(steps)[..., 0]


def begins_of(done):
    first = torch.zeros_like(done[:, :1])
    return torch.cat([first, done[:, :-1]], 1)


def agent_loss(model, rows, done_is_begin):
    begins = rows["done"] if done_is_begin else begins_of(rows["done"])
    scores, values = model(rows["seen"], begins, rows["state"])
    log = scores.log_softmax(-1)
    chosen = log.gather(2, rows["action"][..., None])[..., 0]
    entropy = -(log.exp() * log).sum(-1)
    policy = -(chosen * rows["advantage"]).sum()
    return policy + 0.5 * (values - rows["back"]).square().sum() - 0.02 * entropy.sum()


class Clean:
    done_is_begin = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(ENDS)
        done = torch.zeros(rows, STEPS, dtype=torch.bool)
        for row, ends in enumerate(ENDS):
            done[row, list(ends)] = True
        return {
            "seen": torch.randn(rows, STEPS, OBSERVED, generator=g),
            "state": torch.randn(rows, WIDTH, generator=g) * 0.7,
            "done": done,
            "action": torch.randint(ACTIONS, (rows, STEPS), generator=g),
            "advantage": torch.randn(rows, STEPS, generator=g),
            "back": torch.randn(rows, STEPS, generator=g),
        }

    def loss_sum(self, model, rows):
        return agent_loss(model, rows, False), rows["action"].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count, parts = batch["action"].numel(), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = agent_loss(model, rows, self.done_is_begin)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    done_is_begin = True


EXPECT = dict(
    right=[
        r"(?i)memory|GRU|state|recurren|step|begins|done|episode|reset",
        r"(?i)forward|input|state|reset|zero|begins|step",
        r"(?i)wrong|differ|other|early|earlier|late|shift|off by|not (the )?(right|same|its own)|too soon",
        r"(?i)memory|GRU|begins|done|reset|state|episode",
    ],
    place=[r"(?i)memory|GRU|begins|done|episode"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|no_sync.{0,40}(wrong|missing|too (early|late))|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|backward of .{0,30}wrong",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (in )?(the )?(first|last) micro.?batch",
        r"(?i)\bsee\b.{0,25}forward.{0,15}wrong|(actor|critic) alone|advantages? (is|are) wrong",
        r"(?i)all (the )?rows|every row",
    ],
)
WHY = (
    "All three ranks, the rows with an end in the rollout: 0, 2, 3, 4, 5, 7, 8, 10, 11, 12 (in rows 3 and 12 the last step alone; rows 1, 6 and 9 have no end and are right). For an end at step t, the GRU's state before step t is "
    "put to zero although the step belongs to the old episode, and before step t + 1 it is not, although an episode begins there. The forward goes wrong at the input state of `memory` from that step on; the outputs of `see` are "
    "right. So the gradients of memory, see, actor and critic are wrong on all ranks equally after DDP's average. Actions, advantages, returns, divisor 13 * 8, no_sync and reduction are right. Fix: reset before step t where done[t "
    "- 1] (begins_of)."
)
