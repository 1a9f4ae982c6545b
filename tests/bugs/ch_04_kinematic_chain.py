"""An arm of seven joints (forward kinematics with unit quaternions), the chain cut over pp 2, rows
over dp 2, two micro-batches.

A replicated trunk makes features of a row; each joint has a head for its own rotation and a bone.
The orientation along the chain is the product of the joints' quaternions; orientation and
position of the last joint of a rank are handed on to the next. The Hamilton product is a
hand-written Function.

The bug: in its backward the gradient of the right factor is grad * conj(a) instead of
conj(a) * grad. Quaternions do not commute. After fused quaternion kernels in pose estimation and
body model code (rotation chains of SMPL-like models), whose two lines of backward look alike.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}

ROWS, INPUTS, FEATURES, JOINTS = 9, 5, 6, 7


def multiply(a, b):
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    return torch.stack(
        [
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ],
        -1,
    )


def conjugate(q):
    return torch.cat([q[..., :1], -q[..., 1:]], -1)


def rotate(q, v):
    u, v = q[..., 1:], v.expand(q.shape[0], 3)
    twist = 2 * torch.linalg.cross(u, v)
    return v + q[..., :1] * twist + torch.linalg.cross(u, twist)


class Hamilton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return multiply(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return multiply(grad, conjugate(b)), multiply(conjugate(a), grad)


class FusedHamilton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return multiply(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return multiply(grad, conjugate(b)), multiply(grad, conjugate(a))


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Linear(FEATURES, 4)
        self.bone = nn.Parameter(torch.randn(3) * 0.5)


class Arm(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(INPUTS, FEATURES)
        self.joints = nn.ModuleList(Joint() for _ in range(JOINTS))
        self.product = multiply

    def forward(self, x, turn, place, joints):
        features = torch.tanh(self.trunk(x))
        places = []
        for k in joints:
            joint = self.joints[k]
            turn = self.product(turn, F.normalize(joint.turn(features), dim=-1))
            place = place + rotate(turn, joint.bone)
            places.append(place)
        return turn, place, torch.stack(places, 1)


def origin(x):
    turn = torch.cat([x.new_ones(x.shape[0], 1), x.new_zeros(x.shape[0], 3)], -1)
    return turn, x.new_zeros(x.shape[0], 3)


class Clean:
    product = Hamilton

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(51 + self.seed)
        return Arm()

    def batch(self):
        g = torch.Generator().manual_seed(52 + self.seed)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "goal": torch.randn(ROWS, JOINTS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        _, _, places = model(rows["x"], *origin(rows["x"]), range(JOINTS))
        return (places - rows["goal"]).square().sum(), rows["x"].shape[0]

    def distribute(self, model, ctx):
        own = torch.tensor_split(torch.arange(JOINTS), 2)[ctx.coords["pp"]].tolist()
        for k in range(JOINTS):
            if k not in own:
                model.joints[k] = nn.Identity()
        model.own, model.product = own, self.product.apply
        return model

    def step(self, model, batch, ctx):
        pipe, data = ctx.group("pp"), ctx.group("dp")
        ranks = dist.get_process_group_ranks(pipe)
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        kept = []
        for x, goal in zip(*(torch.tensor_split(v, 2) for v in mine.values()), strict=True):
            if ctx.coords["pp"] == 0:
                turn, place, places = model(x, *origin(x), model.own)
                state = torch.cat([turn, place], -1)
                dist.send(state.detach(), ranks[1], group=pipe)
            else:
                state = x.new_empty(x.shape[0], 7)
                dist.recv(state, ranks[0], group=pipe)
                state.requires_grad_(True)
                _, _, places = model(x, state[:, :4], state[:, 4:], model.own)
            loss = (places - goal[:, model.own]).square().sum() / ROWS
            kept.append((state, loss))
        for state, loss in kept:
            if ctx.coords["pp"] == 0:
                back = torch.empty_like(state)
                dist.recv(back, ranks[1], group=pipe)
                torch.autograd.backward([state, loss], [back, torch.ones_like(loss)])
            else:
                loss.backward()
                dist.send(state.grad, ranks[0], group=pipe)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)
        for parameter in model.trunk.parameters():
            dist.all_reduce(parameter.grad, group=pipe)


class Buggy(Clean):
    product = FusedHamilton


EXPECT = dict(
    right=[
        r"quaternion|hamilton|product|multipl",
        r"order|commut|left|right|wrong side|swap|exchang|conj\w*\(a\) ?\*",
        r"backward|gradient|grad\b|adjoint",
    ],
    place=[
        r"FusedHamilton",
        r"Hamilton",
        r"multiply\(grad, ?conjugate\(a\)\)",
        r"conjugate",
        r"\.product",
    ],
    wrong=[
        r"missing conj|conjugate is (missing|left out|forgotten)|without (the )?conj",
        r"(missing|without|through the) normali[sz]|not (of )?unit (norm|length)",
        r"(not|never|missing).{0,40}(all-?)?reduc|summed (twice|again)",
        r"state.{0,40}(lost|overwrit|not handed)",
    ],
)

WHY = (
    "For y = a b the gradients are g conj(b) for a and conj(a) g for b; FusedHamilton returns "
    "g conj(a) for b. The forward is right, and so is the gradient that runs down the chain "
    "through the left factor, so the bones, and everything behind the last product, are right. "
    "Wrong are the gradients of the joints' turn heads and through them of the trunk; the very "
    "first joint, whose left factor is the identity, is right in its own head. A right cause says "
    "that the order of the factors in the backward for the second factor is wrong (quaternion "
    "multiplication does not commute). The fix is multiply(conjugate(a), grad)."
)
