"""What a whole check costs, in plain steps and in the memory of the plain job.

    python scripts/benchmark_cost.py --model 14m --layout ddp --out cost.json

The plain job is the same Program's own `step` in float32 on as many real ranks, without the
harness; both run here, one after the other, several times in turn. Memory is the summed
proportional set size (Pss) of the process tree, sampled; disk is what the check leaves.
Needs `pip install -e .[examples]` for transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark_launch import Sampler

SHAPES = {  # of GPT-2: layers, heads, width; vocabulary 50,257, 1,024 positions
    "1m": (2, 2, 16),
    "4m": (4, 4, 64),
    "14m": (10, 6, 192),
    "124m": (12, 12, 768),
}
PLAIN_STEPS = 5

PROGRAM = """
import torch, torch.distributed as dist
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

class GPT2:
    def __init__(self, options):
        self.options = options
    def build(self):
        torch.manual_seed(0)
        layers, heads, width = self.options["shape"]
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=heads, n_embd=width,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))
    def batch(self):
        g = torch.Generator().manual_seed(1)
        shape = (self.options["rows"], self.options["length"])
        return {"ids": torch.randint(50257, shape, generator=g)}
    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return loss, ids[:, 1:].numel()
    def distribute(self, model, ctx):
        if self.options["layout"] == "fsdp2":
            from torch.distributed.fsdp import fully_shard
            for block in model.transformer.h:
                fully_shard(block, mesh=ctx.mesh)
            fully_shard(model, mesh=ctx.mesh)
            for part in model.modules():
                if hasattr(part, "set_force_sum_reduction_for_comms"):
                    part.set_force_sum_reduction_for_comms(True)
                    part.set_gradient_divide_factor(1.0)
            return model
        from torch.nn.parallel import DistributedDataParallel
        return DistributedDataParallel(model)
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        count = torch.tensor(float(count))
        dist.all_reduce(count)
        scale = 1 if self.options["layout"] == "fsdp2" else ctx.world_size
        (loss * scale / count).backward()
"""

PLAIN = """
import json, os, sys, time, types
import torch, torch.distributed as dist
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from program import GPT2
dist.init_process_group("gloo")
from torch.distributed.device_mesh import init_device_mesh
size = dist.get_world_size()
ctx = types.SimpleNamespace(rank=dist.get_rank(), world_size=size,
                            mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
program = GPT2(json.loads(sys.argv[2]))
model, batch = program.distribute(program.build(), ctx), program.batch()
times = []
for _ in range(int(sys.argv[3])):
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    program.step(model, batch, ctx)
    dist.barrier()
    times.append(time.perf_counter() - start)
if ctx.rank == 0:
    print(json.dumps(times))
dist.destroy_process_group()
"""


def run(command: list[str]) -> tuple[float, float, str]:
    """(seconds, peak GiB, what it printed)."""
    start = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    with Sampler(child.pid, every_s=0.3) as sampler:
        out, _ = child.communicate()
        seconds = time.perf_counter() - start
    if child.returncode:
        print(out, file=sys.stderr)
    return seconds, sampler.peak_kib / 2**20, out


def measure(options: dict[str, Any], ranks: int, place: Path) -> dict[str, Any]:
    """One plain job and one check, side by side."""
    (place / "program.py").write_text(PROGRAM)
    (place / "plain.py").write_text(PLAIN)
    topology = place / "topology.yaml"
    topology.write_text(
        f"name: cost\nworkload: {place / 'program.py'}:GPT2\noptions: {json.dumps(options)}\n"
        f"pools:\n  train: {{axes: {{dp: {ranks}}}}}\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    port = f"--master-port={20000 + os.getpid() % 20000}"
    plain = [*torchrun, port, str(place / "plain.py"), str(place), json.dumps(options)]
    _, plain_gib, out = run([*plain, str(PLAIN_STEPS)])
    times = json.loads(out.strip().splitlines()[-1])
    step_s = sorted(times[1:])[len(times[1:]) // 2]
    stored = place / "run"
    check = [sys.executable, "-m", "sumgrad", "run", str(topology), "--out", str(stored)]
    seconds, gib, out = run([*check, "--timeout", "3600"])
    disk = sum(path.stat().st_size for path in stored.rglob("*") if path.is_file())
    params = json.loads((stored / "run.json").read_text())["facts"]["params"]
    numel = sum(_numel(shape) for shape in params.values())
    return {
        **options,
        "ranks": ranks,
        "parameters": numel,
        "plain_step_s": round(step_s, 3),
        "plain_gib": round(plain_gib, 2),
        "check_s": round(seconds, 1),
        "check_gib": round(gib, 2),
        "disk_gib": round(disk / 2**30, 3),
        "status": json.loads((stored / "verdict.json").read_text())["status"],
        "steps_of_plain": round(seconds / step_s, 1),
        "steps_beyond_20_s": round((seconds - 20) / step_s, 1),
        "memory_of_plain": round(gib / plain_gib, 2),
    }


def _numel(shape: list[int]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, action="append")
    parser.add_argument("--layout", choices=("ddp", "fsdp2"), action="append")
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="leave the runs here, a folder each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("needs GPT-2: pip install -e .[examples]")
    rows = []
    for model in args.model or ["14m"]:
        for layout in args.layout or ["ddp", "fsdp2"]:
            for ranks in args.ranks or [4]:
                for num_rows in args.rows or [16]:
                    options = {
                        "shape": SHAPES[model], "layout": layout, "rows": num_rows,
                        "length": args.length,
                    }  # fmt: skip
                    for _ in range(args.times):
                        kept = f"{model}-{layout}-{ranks}-{num_rows}-{len(rows)}"
                        place = args.keep / kept if args.keep else Path(tempfile.mkdtemp())
                        place.mkdir(parents=True, exist_ok=True)
                        rows.append({"model": model, **measure(options, ranks, place)})
                        print(json.dumps(rows[-1]), flush=True)
                        if not args.keep:
                            shutil.rmtree(place)
    if args.out:
        args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
