"""A tagger cut by tensor parallelism: its loss is a DTensor, and its table's gradient lies
otherwise than the table. argv: --wrong, where the ranks' labels are drawn from seeds of their own.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

WORDS, WIDTH, TAGS, LENGTH = 10, 6, 5, 4


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.tags = nn.Linear(WIDTH, TAGS, bias=False)

    def forward(self, ids):
        x = self.norm(self.words(ids))
        return self.tags(x + self.down(F.gelu(self.up(x))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(11)
    whole, parts = Replicate(), Shard(1)
    model = tp.parallelize_module(Tagger(), mesh, {
        "words": tp.RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": tp.SequenceParallel(use_local_output=True),
        "up": tp.ColwiseParallel(input_layouts=parts),
        "down": tp.RowwiseParallel(output_layouts=parts),
        "tags": tp.ColwiseParallel(input_layouts=parts, output_layouts=whole,
                                   use_local_output=False),
    })  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    draws = torch.Generator().manual_seed(5)
    own = torch.Generator().manual_seed(dist.get_rank() if "--wrong" in sys.argv else 0)
    for _ in range(3):
        ids = torch.randint(WORDS, (3, LENGTH), generator=draws)
        labels = torch.randint(TAGS, (3 * LENGTH,), generator=own)
        labels = distribute_tensor(labels, mesh, [whole], src_data_rank=None)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
