"""Control policy (state -> torques) as a pipeline of two stages with split backward.

Each rank keeps the layers of its stage. Backward is split as in zero-bubble schedules: autograd
computes the gradients of the activations only (the linear layers see detached weights), every
linear layer keeps its input and its output, and the weight gradients are computed from those
after the last micro-batch has been walked back.

The bug: the activation became ``inplace=True`` to save memory. The layer's output is kept with
``retain_grad()``, and a retained gradient follows the tensor through in-place operations:
``out.grad`` is then the gradient behind the activation, not of the linear layer's own output.
After the note on in-place modification of tensors with hooks in torch's autograd documentation,
and zero-bubble implementations with a queue of weight gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}

STATE, WIDTH, TORQUES, ROWS, MICRO = 5, 9, 3, 7, 3


class SplitLinear(nn.Linear):
    """A linear layer whose weight gradient may be left for later."""

    queue = None

    def forward(self, x):
        if self.queue is None:
            return F.linear(x, self.weight, self.bias)
        out = F.linear(x, self.weight.detach(), self.bias.detach())
        out.retain_grad()
        self.queue.append((self, x.detach(), out))
        return out


def weight_gradients(queue):
    for layer, x, out in queue:
        g = out.grad
        dw, db = g.t() @ x, g.sum(0)
        layer.weight.grad = dw if layer.weight.grad is None else layer.weight.grad + dw
        layer.bias.grad = db if layer.bias.grad is None else layer.bias.grad + db
    queue.clear()


class Policy(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.stages = nn.ModuleDict(
            {
                "0": nn.Sequential(
                    SplitLinear(STATE, WIDTH),
                    nn.LeakyReLU(0.2, inplace=inplace),
                    SplitLinear(WIDTH, WIDTH - 2),
                    nn.LeakyReLU(0.2, inplace=inplace),
                ),
                "1": nn.Sequential(
                    SplitLinear(WIDTH - 2, WIDTH),
                    nn.LeakyReLU(0.2, inplace=inplace),
                    SplitLinear(WIDTH, TORQUES),
                ),
            }
        )

    def forward(self, x):
        for stage in self.stages.values():
            x = stage(x)
        return x


class Clean:
    inplace = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(101 + self.seed)
        return Policy(self.inplace)

    def batch(self):
        g = torch.Generator().manual_seed(202 + self.seed)
        return {
            "state": torch.randn(ROWS, STATE, generator=g),
            "torque": torch.randn(ROWS, TORQUES, generator=g),
        }

    def loss_sum(self, model, rows):
        return F.smooth_l1_loss(model(rows["state"]), rows["torque"], reduction="sum"), rows[
            "state"
        ].shape[0]

    def distribute(self, model, ctx):
        mine = str(ctx.coords["pp"])
        for name in list(model.stages):
            if name != mine:
                del model.stages[name]
        model.queue = []
        for layer in model.modules():
            if isinstance(layer, SplitLinear):
                layer.queue = model.queue
        return model

    def step(self, model, batch, ctx):
        group, stage = ctx.group("pp"), ctx.coords["pp"]
        ranks = dist.get_process_group_ranks(group)
        states = torch.tensor_split(batch["state"], MICRO)
        torques = torch.tensor_split(batch["torque"], MICRO)
        kept = []
        for state, torque in zip(states, torques, strict=True):
            if stage == 0:
                out = model.stages["0"](state.clone().requires_grad_(True))
                dist.send(out.detach().contiguous(), ranks[1], group=group)
                kept.append(out)
            else:
                x = state.new_empty(state.shape[0], WIDTH - 2)
                dist.recv(x, ranks[0], group=group)
                x.requires_grad_(True)
                out = model.stages["1"](x)
                kept.append((x, F.smooth_l1_loss(out, torque, reduction="sum") / ROWS))
        for item in kept:
            if stage == 1:
                x, loss = item
                loss.backward()
                dist.send(x.grad.contiguous(), ranks[0], group=group)
            else:
                g = torch.empty_like(item)
                dist.recv(g, ranks[1], group=group)
                item.backward(g)
        weight_gradients(model.queue)


class Buggy(Clean):
    inplace = True


EXPECT = dict(
    right=[
        r"in[- _]?place",
        (
            r"retain_?(ed)?[_ ]?grad|retained|out\.grad|kept output|saved "
            r"output|(grad\w*|derivative).{0,80}(after|behind|post|downstream|"
            r"past).{0,40}(activation|relu)|(activation|relu).{0,60}(derivative|slope|"
            r"mask).{0,60}(missing|left out|skipp|omit|lost|not)"
        ),
    ],
    place=[
        r"SplitLinear",
        r"LeakyReLU",
        r"inplace=True",
        r"retain_grad",
        r"weight_gradients",
        r"queue",
    ],
    wrong=[
        r"micro-?batch(es)? (is|are) (lost|dropped|counted twice)",
        r"divis(or|ion)|divided by|normali[sz]",
        r"receive buffer|recv buffer",
        r"order of the queue|stale input|wrong input",
    ],
)

WHY = (
    "The split linear layer calls retain_grad() on its output and the weight gradient is "
    "later made from out.grad. With LeakyReLU(inplace=True) the output tensor itself is "
    "modified, and torch moves a retained gradient on to the newest version of the tensor, "
    "so out.grad is the gradient with respect to the activation's result: the slope of the "
    "LeakyReLU is missing from it. Weights and biases of every linear layer that is followed "
    "by an activation are wrong (entries with negative pre-activations are five times too "
    "large); the last layer, which has no activation behind it, and the activation gradients "
    "sent between the stages are right. A right cause says that the in-place activation "
    "changes what the retained gradient refers to. The fix is an activation that is not in "
    "place (or a hook on the output before the activation)."
)
