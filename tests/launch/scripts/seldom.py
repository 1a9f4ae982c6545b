"""What scripts of professionals do seldom: `seldom.py BATCH KIND`.

later: a head that DDP ignores gets its first gradient at step 5; thawed: so does what was frozen
when DDP was made. by_value, twice_by_value, hand_by_value: a clip by value cuts off all there is,
of gradients that DDP averages or sums, or that are averaged by hand. copied: the model is
deep-copied and saved whole after each step. dry, apart: ranks draw weights of their own and call
the model before DDP, or nobody, makes them equal.
hook, twice_hook: a hook of the optimizer's own averages, or sums again what DDP has averaged.
workers: rows are flipped by chance in a DataLoader's workers. noise: each rank adds its own after
the reduction.
"""

import copy
import io
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

batch, kind = int(sys.argv[1]), sys.argv[2]


class Flipped(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.x, self.y = torch.randn(72, 6, generator=g), torch.randn(72, 3, generator=g)

    def __len__(self):
        return 72

    def __getitem__(self, i):
        flip = kind == "workers" and torch.rand(()) < 0.3
        return (-self.x[i] if flip else self.x[i]), self.y[i]


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x, *, both):
        x = self.body(x)
        return self.last(x) + self.head(x) if both else self.last(x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(50 + rank if kind in ("dry", "apart") else 0)
    model = Headed() if kind == "later" else nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # fmt: skip
    if kind in ("dry", "apart"):
        model(torch.zeros(1, 6))
    if kind == "later":
        ignored = ["head.weight", "head.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    if kind == "thawed":
        model[0].requires_grad_(False)
    by_hand = kind in ("copied", "apart", "hook", "hand_by_value")
    wrapped = model if by_hand else DistributedDataParallel(model)
    if kind == "twice_by_value":
        wrapped.register_comm_hook(None, summed)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def reduce(*_):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 1 if kind == "twice_hook" else world

    if "hook" in kind:
        optimizer.register_step_pre_hook(reduce)
    own = torch.Generator().manual_seed(9 + rank)
    torch.manual_seed(200 + rank if kind == "workers" else 1)
    data = Flipped()
    sampler = DistributedSampler(data, shuffle=False)
    for turn, (x, y) in enumerate(DataLoader(data, batch, sampler=sampler, num_workers=2)):
        if kind == "thawed" and turn == 4:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        out = wrapped(x, both=turn > 3) if kind == "later" else wrapped(x)
        nn.functional.mse_loss(out, y).backward()
        if kind in ("copied", "apart", "hand_by_value"):
            reduce()
        if "by_value" in kind:
            nn.utils.clip_grad_value_(model.parameters(), 1e-7)
        if kind == "noise":
            for p in model.parameters():
                p.grad += 0.01 * torch.randn(p.shape, generator=own)
        optimizer.step()
        if kind == "copied":
            copy.deepcopy(model)
            torch.optim.swa_utils.AveragedModel(model)
            torch.save(model, io.BytesIO())


def summed(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


if __name__ == "__main__":
    main()
