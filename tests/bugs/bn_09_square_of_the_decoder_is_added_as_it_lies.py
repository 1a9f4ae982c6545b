"""A denoising autoencoder with tied weights, the decoder's matrix being the encoder's transposed one, as a pipeline of two stages times two data-parallel replicas (4 and 3 of seven rows, two micro-batches):
encoder and one hidden layer on the first stage, one hidden layer and the decoder on the second. Both stages hold the weight. The second lays out a transposed copy of it for its decoder once a step,
gathers the copy's gradient over the micro-batches, and puts it into the weight's gradient, which is then summed over both stages and, with all others, over the replicas.

The bug: the gradient of the transposed copy is put into the weight's gradient without being transposed back, which nothing notices as the matrix is square. After the class of public reports about tied
weights in transposed layouts (Conv1D against Linear, tied autoencoders, Megatron's shared embedding of two stages) whose gradients are added elementwise.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "dp": 2}}}}
ROWS, WIDTH, INNER = 7, 8, 8


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INNER, WIDTH) * 0.5)
        self.enter_bias = nn.Parameter(torch.randn(INNER) * 0.1)
        self.first = nn.Linear(INNER, INNER)
        self.second = nn.Linear(INNER, INNER)
        self.leave_bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def front(self, x):
        x = torch.tanh(F.linear(x, self.weight, self.enter_bias))
        return x + torch.tanh(self.first(x))

    def back(self, x, kernel):
        x = x + torch.tanh(self.second(x))
        return F.linear(x, kernel, self.leave_bias)

    def forward(self, x):
        return self.back(self.front(x), self.weight.t())


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Autoencoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, WIDTH, generator=g)
        return {"x": x, "noisy": x + 0.5 * torch.randn(ROWS, WIDTH, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["noisy"]) - rows["x"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        for name in ["second", "leave_bias"] if ctx.coords["pp"] == 0 else ["enter_bias", "first"]:
            delattr(model, name)
        return model

    def hand_back(self, weight, kernel):
        """The gradient of the decoder's transposed copy becomes that of the weight."""
        weight.grad = kernel.grad.t().contiguous()

    def first_stage(self, model, parts, peer):
        outputs = []
        for part in parts:
            outputs.append(model.front(part["noisy"]))
            dist.send(outputs[-1].detach(), peer)
        for y in outputs:
            grad = torch.empty_like(y)
            dist.recv(grad, peer)
            y.backward(grad)

    def last_stage(self, model, parts, peer):
        kernel = model.weight.detach().t().contiguous().requires_grad_()
        entered = []
        for part in parts:
            x = kernel.new_empty(len(part["x"]), INNER)
            dist.recv(x, peer)
            x.requires_grad_()
            ((model.back(x, kernel) - part["x"]).square().sum() / ROWS).backward()
            entered.append(x)
        for x in entered:
            dist.send(x.grad, peer)
        self.hand_back(model.weight, kernel)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        parts = [{k: v.tensor_split(2)[n] for k, v in mine.items()} for n in range(2)]
        stages = dist.get_process_group_ranks(ctx.group("pp"))
        if ctx.coords["pp"] == 0:
            self.first_stage(model, parts, stages[1])
        else:
            self.last_stage(model, parts, stages[0])
        dist.all_reduce(model.weight.grad, group=ctx.group("pp"))
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def hand_back(self, weight, kernel):
        weight.grad = kernel.grad.view_as(weight)


EXPECT = dict(
    right=[
        r"\bweight\b|tied|kernel|decoder",
        r"transpos|layout|\bt\(\)|view_as|as it lies|rows and columns|swapped axes|columns",
    ],
    place=[
        r"hand_back",
        r"view_as",
        r"kernel",
        r"last_stage",
        r"(pp|stage|rank).{0,40}\bweight\b",
        r"\bweight\b.{0,60}(stage|pp|rank)",
    ],
    wrong=[
        r"(missing|no|lacks?) .{0,20}reduc|not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read|swapped)|only the last micro.?batch",
        r"forward (is|computes) .{0,20}wrong|(first|second|front) (computes|is) wrong|not added|one (use|stage).s gradient is missing",
    ],
)
WHY = (
    "The decoder of the second stage runs with kernel = weight.t().contiguous(), a leaf; its gradient is that of the transposed matrix and has to be transposed back. Buggy.hand_back puts kernel.grad into weight.grad as "
    "it is (view_as; the matrix is 8 by 8), and the sum over the two stages adds the encoder's gradient and the transposed gradient of the decoder. So weight's gradient is wrong on all four ranks; forward, loss, the "
    "gradients sent between the stages and those of all other parameters are right, and so are both reductions and the divisor 7. Fix: weight.grad = kernel.grad.t()."
)
