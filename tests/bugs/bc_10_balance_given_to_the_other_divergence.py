"""A small world model as a pipeline of two stages with two replicas: the first stage encodes the observations to a posterior (mean and log deviation), the second predicts it one step ahead with a recurrent cell (the prior) and decodes the
observations. The divergence between the two is balanced: 0.8 of it trains the prior, with the posterior held fixed, 0.2 the posterior, with the prior held fixed. Three micro-batches per replica, all forwards first; the second stage sends
back the gradients of mean and log deviation.

The bug: the share is given to the wrong one of the two, since its meaning turns round with the direction: the posterior gets 0.8 and the prior 0.2. The value of the loss is the same. After the KL balancing of DreamerV2 and 3 and
pytorch/rl PR 4073 (Match DreamerV3 categorical and KL semantics: other gradient weights of the two terms).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
SEEN, MOVES, LATENT, STATE, TIME, ROWS, SHARE = 5, 2, 3, 6, 4, 11, 0.8
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9), (9, 11)]]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(SEEN, 8), nn.Linear(8, 2 * LATENT)

    def forward(self, seen):
        return self.outer(F.elu(self.inner(seen)))


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(LATENT + MOVES, STATE)
        self.prior = nn.Linear(STATE, 2 * LATENT)
        self.decode = nn.Sequential(nn.Linear(STATE + LATENT, 8), nn.ELU(), nn.Linear(8, SEEN))

    def forward(self, posterior, moves):
        means, state = posterior[..., :LATENT], posterior.new_zeros(len(moves), STATE)
        last, priors, seen = torch.zeros_like(means[:, 0]), [], []
        for t in range(TIME):
            state = self.cell(torch.cat([last, moves[:, t]], 1), state)
            last = means[:, t]
            priors.append(self.prior(state))
            seen.append(self.decode(torch.cat([state, last], 1)))
        return torch.stack(priors, 1), torch.stack(seen, 1)


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.dynamics = Encoder(), Dynamics()

    def forward(self, seen, moves):
        posterior = self.encoder(seen)
        return posterior, *self.dynamics(posterior, moves)


def divergence(left, right):
    """KL(left || right) of diagonal Gaussians, summed."""
    mean, log = left.chunk(2, -1)
    mean_r, log_r = right.chunk(2, -1)
    gap = (2 * (log - log_r)).exp() + (mean - mean_r) ** 2 * (-2 * log_r).exp()
    return (log_r - log + 0.5 * gap - 0.5).sum()


def world_loss(posterior, prior, guess, seen, forward_kl=False):
    mix = 1 - SHARE if forward_kl else SHARE
    to_prior = divergence(posterior.detach(), prior)
    to_posterior = divergence(posterior, prior.detach())
    return (guess - seen).pow(2).sum() / 2 + mix * to_prior + (1 - mix) * to_posterior


class Clean:
    forward_kl = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return World()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "seen": torch.randn(ROWS, TIME, SEEN, generator=g),
            "moves": torch.randn(ROWS, TIME, MOVES, generator=g),
        }

    def loss_sum(self, model, rows):
        posterior, prior, guess = model(rows["seen"], rows["moves"])
        return world_loss(posterior, prior, guess, rows["seen"]), len(rows["seen"])

    def distribute(self, model, ctx):
        if dist.get_rank(ctx.group("pp")) == 0:
            model.dynamics = None
        else:
            model.encoder = None
        return model

    def step(self, model, batch, ctx):
        model.zero_grad()
        pipe, replicas = ctx.group("pp"), ctx.group("dp")
        parts = PARTS[dist.get_rank(replicas)]
        turns = [{k: v[a:b] for k, v in batch.items()} for a, b in parts]
        if dist.get_rank(pipe) == 0:
            self.first_stage(model.encoder, turns, dist.get_global_rank(pipe, 1), pipe)
        else:
            self.second_stage(model.dynamics, turns, dist.get_global_rank(pipe, 0), pipe)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=replicas)

    def first_stage(self, encoder, turns, peer, pipe):
        sent = []
        for rows in turns:
            sent.append(encoder(rows["seen"]))
            dist.send(sent[-1].detach(), peer, group=pipe)
        for posterior in sent:
            grad = torch.empty_like(posterior)
            dist.recv(grad, peer, group=pipe)
            posterior.backward(grad)

    def second_stage(self, dynamics, turns, peer, pipe):
        kept = []
        for rows in turns:
            posterior = rows["seen"].new_empty(len(rows["seen"]), TIME, 2 * LATENT)
            dist.recv(posterior, peer, group=pipe)
            posterior.requires_grad_()
            prior, guess = dynamics(posterior, rows["moves"])
            loss = world_loss(posterior, prior, guess, rows["seen"], self.forward_kl)
            kept.append((loss / ROWS, posterior))
        for loss, posterior in kept:
            loss.backward()
            dist.send(posterior.grad, peer, group=pipe)


class Buggy(Clean):
    forward_kl = True


EXPECT = dict(
    right=[
        r"(?i)prior|posterior|mix|divergence|world_loss|kl\b|to_prior|balance",
        r"(?i)factor|1/4|\b4\b|0\.25|0\.2|0\.8|weigh|times|coefficient|mix|share|multipl|mul\b|argument|counts?",
        r"(?i)mix|divergence|to_prior|to_posterior|dynamics\.prior|prior|world_loss|loss",
    ],
    place=[r"(?i)world_loss|mix|divergence|to_prior|to_posterior|dynamics\.prior|\bprior\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|average[ds]? over (dp|the replicas)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|of another)|(received|sent) .{0,25}(another micro.?batch|stale)",
        r"(?i)only (on )?rank [0123]\b|only on one replica",
        r"(?i)decode(\.\d)?(\.(weight|bias))? (is|are|has) (wrong|a wrong)",
        r"(?i)backward of (the )?(cell|encoder|GRUCell|decode)\S* is wrong",
    ],
)
WHY = (
    "In world_loss, called with forward_kl = True by the second stage (ranks of pp index 1, both replicas, all micro-batches, all rows), mix is 0.2 instead of 0.8: to_prior (trains the prior, posterior detached) counts 1/4 of what it should "
    "and to_posterior (prior detached) four times. Both have the same value, so the loss is right; wrong are the gradient that reaches the output of dynamics.prior (exactly 1/4) and, through it, prior's parameters (exactly 1/4) and the "
    "cell's; and the gradient of the posterior that is sent back to stage 0, hence the encoder's. The decoder's gradients are right. The messages, their order, the sums over dp and the divisor 11 are right. Fix: mix = SHARE."
)
