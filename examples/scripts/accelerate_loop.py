"""accelerate: prepared model, optimizer and loader, accumulation, clipping."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from net import VOCABULARY, Net, loss_of
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
)
torch.manual_seed(args.seed)
data = TensorDataset(*(torch.randint(VOCABULARY, (96, 7)) for _ in range(2)))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=args.batch, shuffle=True)
)
for ids, targets in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model(ids), targets)
        if args.bug == "multiplied by world size":  # as where a sum of all ranks is meant
            loss = loss * accelerator.num_processes
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
