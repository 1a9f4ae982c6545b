"""Lightning's Trainer: the optimizer's step takes a closure that makes the gradients."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from net import VOCABULARY, Net, loss_of
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        ids, targets = batch
        return loss_of(self.net(ids), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(args.seed)
data = TensorDataset(*(torch.randint(VOCABULARY, (96, 7)) for _ in range(2)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    strategy=DDPStrategy(process_group_backend="gloo"),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    gradient_clip_val=1.0,
)
trainer.fit(Module(), DataLoader(data, batch_size=args.batch, shuffle=True))
