"""A loop like nanoGPT's: the environment decides, accumulation is shared out, tied weights."""

import os
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

batch_size, block_size, vocab_size, n_embd, n_head, n_layer = 2, 16, 65, 24, 3, 2
gradient_accumulation_steps, dropout, grad_clip = 12, 0.1, 1.0
seed, bug = int(os.environ.get("SEED", "0")), os.environ.get("BUG", "")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        rows, length, width = x.size()
        parts = self.c_attn(x).split(n_embd, dim=2)
        heads = (p.view(rows, length, n_head, width // n_head).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(
            *heads, dropout_p=dropout if self.training else 0.0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(n_embd, bias=False), Attention()
        self.ln_2 = nn.LayerNorm(n_embd, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * n_embd, n_embd, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


ddp = int(os.environ.get("RANK", "-1")) != -1
rank, world = 0, 1
if ddp:
    init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world == 0
    gradient_accumulation_steps //= world
torch.manual_seed(1337 + seed)
text = torch.randint(vocab_size, (5000,), generator=torch.Generator().manual_seed(seed))
drawn = 0


def get_batch():
    """The next micro-batch of this rank: together they deal one sequence of draws."""
    global drawn
    g = torch.Generator().manual_seed(10000 * seed + drawn * world + rank)
    drawn += 1
    starts = torch.randint(len(text) - block_size, (batch_size,), generator=g)
    return tuple(torch.stack([text[s + o : s + o + block_size] for s in starts]) for o in (0, 1))


model = GPT()
if os.environ.get("COMPILE"):
    model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
if ddp:
    model = DistributedDataParallel(model)
amp = torch.amp.autocast("cpu", torch.bfloat16) if os.environ.get("AMP") else nullcontext()
x, y = get_batch()
for iteration in range(20):
    if iteration == 0 and rank == 0:
        model.eval()
        with torch.no_grad():
            print("val loss", model(x, y)[1].item())
        model.train()
    for micro in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro == gradient_accumulation_steps - 1
        with amp:
            _, loss = model(x, y)
            loss = loss / (12 if bug == "divided by all" else gradient_accumulation_steps)
        x, y = get_batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {iteration}: loss {loss.item():.4f}")
if ddp:
    destroy_process_group()
