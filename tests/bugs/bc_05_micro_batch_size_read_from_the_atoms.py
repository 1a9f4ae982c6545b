"""Energies of molecules under DDP on three ranks, two micro-batches each (no_sync for the first). The collator joins the atoms of all molecules of a micro-batch into one tensor; the loss is the mean over the molecules of the micro-batch,
weighted by its size over the size of all. Sizes come from accelerate.utils.find_batch_size and are summed over the ranks.

The bug: find_batch_size takes the first dimension of the first tensor in the dict, and the collator's dict begins with the atoms. Micro-batches count by their atoms, where each molecule should count once. Like catalyst-team/catalyst
issue 850 (the batch size is that of the first value of the dict) and the rule of accelerate's find_batch_size (huggingface/accelerate issue 2108 quotes it).
"""

import contextlib

import torch
import torch.distributed as dist
from accelerate.utils import find_batch_size
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ATOMS = [2, 5, 3, 6, 4, 2, 7, 3, 1, 5, 6, 2, 2]
MOST, FEATURES = 7, 4
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 9)], [(9, 11), (11, 13)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Sequential(nn.Linear(FEATURES, 9), nn.SiLU(), nn.Linear(9, 6))
        self.out = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 1))

    def forward(self, atoms, molecule, molecules):
        x = self.atom(atoms)
        pooled = x.new_zeros(molecules, x.shape[1]).index_add(0, molecule, x)
        return self.out(pooled).squeeze(1)


def collate(rows):
    there = torch.arange(MOST) < rows["atoms"][:, None]
    return {"x": rows["x"][there], "molecule": there.nonzero()[:, 0], "energy": rows["energy"]}


class Clean:
    sized_by = "energy"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(len(ATOMS), MOST, FEATURES, generator=g),
            "atoms": torch.tensor(ATOMS),
            "energy": torch.randn(len(ATOMS), generator=g),
        }

    def loss_sum(self, model, rows):
        joint = collate(rows)
        energy = model(joint["x"], joint["molecule"], len(joint["energy"]))
        return F.mse_loss(energy, joint["energy"], reduction="sum"), len(energy)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def size(self, joint):
        return find_batch_size(joint[self.sized_by] if self.sized_by else joint)

    def step(self, model, batch, ctx):
        parts = [{k: v[a:b] for k, v in batch.items()} for a, b in PARTS[ctx.rank]]
        turns = [collate(rows) for rows in parts]
        total = torch.tensor([sum(self.size(joint) for joint in turns)])
        dist.all_reduce(total, group=ctx.group("dp"))
        for turn, joint in enumerate(turns):
            with contextlib.nullcontext() if turn == len(turns) - 1 else model.no_sync():
                energy = model(joint["x"], joint["molecule"], len(joint["energy"]))
                loss = F.mse_loss(energy, joint["energy"])
                weight = self.size(joint) / total.item()
                (loss * weight * ctx.world_size).backward()


class Buggy(Clean):
    sized_by = None


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|rank|rows|call",
        r"(?i)atoms|weigh|count|size|factor|divi(des?|ded|sor)|times|molecules",
        r"(?i)own|atoms|find_batch_size|weight|10/|13/48|\d+/\d+|0\.\d+|each|loss \* weight|size",
    ],
    place=[
        r"(?i)loss \* weight|weight|size|find_batch_size|total|mse_loss|backward|bc_05\S*:\d+|loss"
    ],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(row|rows|molecules) .{0,25}(never read|read twice|on no rank)",
        r"(?i)only (on )?rank [012]\b|labels? .{0,20}(is|are) wrong|targets? .{0,20}(is|are) wrong",
        r"(?i)all (micro.?batches|ranks) .{0,30}same factor|one factor for all",
        r"(?i)backward of \S+ is wrong",
    ],
)
WHY = (
    "`size` gives the number of atoms (first tensor of the dict, x) instead of that of molecules, both in `weight` and in `total` (48 atoms in all, 13 molecules). A micro-batch with n molecules and a atoms gets the mean over its molecules "
    "times a / 48 where n / 13 is right, i.e. the factor (a / n) * 13 / 48. Rank 0: micro-batch 0 (rows 0-2, 10 atoms) 65/72, micro-batch 1 (rows 3, 4; 10 atoms) 65/48; rank 1: (row 5, 2 atoms) 13/24, (rows 6-8, 11 atoms) 143/144; "
    "rank 2: (rows 9, 10; 11 atoms) 143/96, (rows 11, 12; 4 atoms) 13/24. Outputs and losses are right, the coefficient of each micro-batch's gradient is wrong, in all parameters. DDP, no_sync, rows are right. Fix: the size of joint['energy']."
)
