"""A causal depthwise convolution (width 4) with its state handed from rank to rank under context parallelism (cp 3, slices of 5, 2 and 4 tokens), two micro-batches. The convolution is a Function (x, initial state) -> (y, final state) with its
own backward in the form of the Triton kernels; the state holds the last three inputs; gradients of the state come back from the next rank.

The bug: in the backward, the slot of the final state that holds token t is counted from max(0, T - 3); in a slice shorter than three tokens the clamp moves every slot, and the part of the initial state that is still in the final state gets no
gradient through it. fla-org/flash-linear-attention PR 1141 (issue 1140): correct the final-state gradient for chunks shorter than W - 1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, VOCABULARY, WIDTH, FILTER, MICRO = 5, 13, 6, 4, 3
SLICES = (5, 2, 4)
STATE = FILTER - 1
TOKENS = sum(SLICES)


class CausalConv(torch.autograd.Function):
    """y[t] = sum over k of weight[k] * (state, x)[t + k]; the final state is the last three of (state, x)."""

    @staticmethod
    def forward(ctx, x, state, weight, clamped):
        whole = torch.cat([state, x], 1)
        ctx.save_for_backward(whole, weight)
        ctx.clamped = clamped
        y = sum(whole[:, k : k + x.shape[1]] * weight[k] for k in range(FILTER))
        return y, whole[:, -STATE:].clone()

    @staticmethod
    def backward(ctx, dy, dfinal):
        whole, weight = ctx.saved_tensors
        length = dy.shape[1]
        dwhole, dweight = torch.zeros_like(whole), torch.zeros_like(weight)
        for k in range(FILTER):
            dwhole[:, k : k + length] += dy * weight[k]
            dweight[k] = (dy * whole[:, k : k + length]).sum((0, 1))
        dx, dstate = dwhole[:, STATE:], dwhole[:, :STATE]
        if ctx.clamped:
            start = max(0, length - STATE)
            for t in range(start, length):
                dx[:, t] += dfinal[:, t - start]
        else:
            for t in range(max(0, length - STATE), length):
                dx[:, t] += dfinal[:, t - (length - STATE)]
            for slot in range(
                length, STATE
            ):  # a short slice leaves a part of the initial state in the final one
                dstate[:, slot] += dfinal[:, slot - length]
        return dx, dstate, dweight, None


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.gate, self.leave = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.filter = nn.Parameter(torch.randn(FILTER, WIDTH) * 0.6)
        self.clamped, self.sharded = False, False

    def forward(self, x, state=None):
        h = torch.tanh(self.enter(x))
        if self.sharded:
            mixed, final = CausalConv.apply(h, state, self.filter, self.clamped)
        else:
            padded = F.pad(h, (0, 0, STATE, 0))
            mixed, final = (
                sum(padded[:, k : k + x.shape[1]] * self.filter[k] for k in range(FILTER)),
                None,
            )
        return x + self.leave(F.silu(mixed) * self.gate(x)), final


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mixer = Mixer()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, state=None):
        x, final = self.mixer(self.embed(ids), state)
        return self.head(self.norm(x)), final


class Clean:
    clamped = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits, _ = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.mixer.sharded, model.mixer.clamped = True, self.clamped
        return model

    def step(self, model, batch, ctx):
        rank, last = ctx.rank, ctx.world_size - 1
        mine = slice(sum(SLICES[:rank]), sum(SLICES[: rank + 1]))
        for part in torch.arange(ROWS).split(MICRO):
            state = torch.zeros(
                len(part), STATE, WIDTH, dtype=model.head.weight.dtype, device=ctx.device
            )
            if rank > 0:
                dist.recv(state, rank - 1)
            state.requires_grad_()
            logits, final = model(batch["ids"][part, mine], state)
            if rank < last:
                dist.send(final.detach(), rank + 1)
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"][part, mine].flatten(), reduction="sum"
            ) / (ROWS * TOKENS)
            if rank < last:
                dfinal = torch.empty_like(final)
                dist.recv(dfinal, rank + 1)
                torch.autograd.backward([loss, final], [None, dfinal])
            else:
                loss.backward()
            if rank > 0:
                dist.send(state.grad, rank - 1)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    clamped = True


EXPECT = dict(
    right=[
        r"(?i)conv|mixer|state|filter",
        r"(?i)backward|adjoint|gradient (of|to|for|that) .{0,40}(state|input|token)|hands? (back|on)|state",
        r"(?i)rank 1\b|ranks? 0(-| and |, )1|rank 0\b|slice|short|boundary|border|between|tokens? (5|6|2|3|4)|positions? [2-6]|state",
    ],
    place=[r"(?i)CausalConv|mixer(\.enter)?\b|state|rank 1\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|norm|mixer\.leave|mixer\.gate)\.(weight|bias) (is|are) wrong|mixer\.filter (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|of another)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)rank 2.{0,40}(is wrong|goes wrong|wrong gradient)",
        r"(?i)(detach|no gradient (comes|flows) back|state .{0,20}(is|gets) no gradient at all)",
    ],
)
WHY = (
    "Only rank 1's slice (tokens 5 and 6) is shorter than the three slots of the state. Its final state is (slot 2 of its initial state = token 4, token 5, token 6). The gradient of the final state that comes from rank 2 has its slots "
    "0, 1, 2 for these three; the backward gives slot 0 to token 5 and slot 1 to token 6 (they are for tokens 4 and 5), drops slot 2 (token 6's), and passes nothing on to the initial state for token 4. So on rank 1 the gradients of the "
    "convolution's inputs at tokens 5 and 6 are wrong, and the gradient of the state sent to rank 0 lacks a part for its token 4. The wrong parameters are those before the convolution: mixer.enter.* and embed (embed also has right "
    "parts through the residual and the gate), after the sum over cp on all ranks, in both micro-batches and all rows. Ranks 0's and 2's own backward is right. mixer.filter (its gradient uses dy only), gate, leave, norm, head are right, "
    "and so are the forward, the state handed on, the divisor 55 and the sum. Fix: slot t - (T - 3) without the clamp, and the pass-through slots to the initial state."
)
