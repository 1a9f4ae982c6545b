"""What it costs a script to be watched: its steps plain and under `sumgrad diff`, side by side.

    python scripts/benchmark_diff.py --ranks 4 --out docs/data/benchmark_diff.json

A GPT of 14 million parameters under DistributedDataParallel, written as people write it. The plain
run and the watched one take turns; steps are timed by the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sumgrad.launch.script.sides import Command, rank_environments, run_side
from sumgrad.subjects.script.asked import Asked

SCRIPT = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import os
WIDTH, HEADS, DEPTH, VOCABULARY = 256, 8, 8, 16000
ROWS, LENGTH = int(os.environ["ROWS"]), int(os.environ["LENGTH"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.at = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.at(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = GPT()
if rank == 0:
    print("parameters", sum(p.numel() for p in net.parameters()), flush=True)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    g = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g) for _ in range(2))
    began = time.perf_counter()
    logits = model(ids[rank::world])
    F.cross_entropy(logits.flatten(0, 1), targets[rank::world].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print("seconds", time.perf_counter() - began, flush=True)
"""
WARM = 1  # steps that are left out of a run's figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="of all ranks, in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {"ROWS": str(args.rows), "LENGTH": str(args.length)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        script = place / "train.py"
        script.write_text(SCRIPT)
        single = watched(place / "single", script, 1, None)
        plain, seen = [], []
        for turn in range(args.turns):
            plain += steps_of(plainly(script, args.ranks))
            seen += steps_of(watched(place / f"many {turn}", script, args.ranks, place / "single"))
            print(f"turn {turn}: plain {plain[-1]:.2f} s, watched {seen[-1]:.2f} s", flush=True)
        size = int(re.findall(r"parameters (\d+)", single)[0])
    data = {
        "parameters": size,
        "ranks": args.ranks,
        "tokens": args.rows * args.length,
        "cores": os.cpu_count(),
        "plain_step_s": statistics.median(plain),
        "watched_step_s": statistics.median(seen),
        "ratio": statistics.median(seen) / statistics.median(plain),
        "all_plain": plain,
        "all_watched": seen,
    }
    print(json.dumps({k: v for k, v in data.items() if not k.startswith("all")}))
    if args.out:
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 0


def plainly(script: Path, ranks: int) -> str:
    """What the script prints without us."""
    base = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        environments = stack.enter_context(rank_environments(ranks))
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, script],
                    env={**base, **more},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for more in environments
        ]
        return "".join(process.communicate()[0] for process in running)


def watched(folder: Path, script: Path, ranks: int, start: Path | None) -> str:
    """What it prints under our eyes, in its own dtype."""
    asked = Asked(
        directory=str(folder), steps=6, tier="precision", lift=False,
        start=None if start is None else str(start), jitter=0, seconds=600.0,
    )  # fmt: skip
    ended = run_side(Command(words=(sys.executable, str(script)), ranks=ranks), asked)
    assert ended.ok, ended.outcomes
    return ended.output.read_text()


def steps_of(text: str) -> Sequence[float]:
    return [float(x) for x in re.findall(r"seconds ([\d.]+)", text)][WARM:]


if __name__ == "__main__":
    sys.exit(main())
