"""GPT-2 of transformers under DistributedDataParallel, in one page.

    pip install sumgrad transformers
    sumgrad run examples/dp3.yaml --workload examples/gpt2_ddp.py:GPT2

Rows have unequal lengths. Each rank divides by the tokens of all ranks; DDP averages, so the loss
is multiplied by the number of ranks: a mean of the ranks' own means would be another gradient.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

ROWS, LENGTH, VOCABULARY = 7, 10, 61


class GPT2:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LENGTH,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        mask = torch.arange(LENGTH) < lengths
        return {"ids": ids * mask, "mask": mask, "labels": ids.masked_fill(~mask, -100)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        labels = rows["labels"][:, 1:]
        loss = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss * ctx.world_size / count).backward()
