"""Right steps on a machine without time for them: at nice 19, beside what only computes.

    python scripts/slow_machine.py --count 50 --at-once 10 --out docs/data/slow_machine.json

What every run must show: PASS. A rank that computes is never taken for one that stands still,
however seldom it is its turn. In half of the runs one rank computes for long while the others wait
for it in a collective. Of each run: the wall time, the processor time that its processes got, and
the quotient, which is what was left of a processor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

PROGRAM = """
import time
import torch
from sumgrad.convention import ddp_sum_hook, global_count
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Step:
    def __init__(self, options):
        self.late = options["late"]

    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def batch(self):
        torch.manual_seed(1)
        return {"x": torch.randn(11, 5), "y": torch.randn(11, 3)}

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, ddp_sum_hook)
        return ddp

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        until = time.process_time() + (self.late if ctx.rank == 1 else 0)
        while time.process_time() < until:  # seconds of its own processor time
            pass
        (loss / global_count(count)).backward()
"""
LATE_S = 0.3  # processor time of the rank that the others wait for
LIMIT_S = 1500  # --timeout of every run: what hangs ends there


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. share: of one processor, that all of its processes had together."""

    number: int
    late: bool
    verdict: str
    exit_code: int
    seconds: float
    cpu_seconds: float
    share: float
    why: str | None


def one(number: int, place: Path) -> Row:
    """A check of its own, at nice 19."""
    late = number % 2 == 1
    here = place / f"{number:03}"
    here.mkdir()
    (here / "step.py").write_text(PROGRAM)
    (here / "dp.yaml").write_text(
        f"workload: step.py:Step\noptions: {{late: {LATE_S if late else 0}}}\n"
        "pools: {train: {axes: {dp: 3}}}\n"
    )
    command = [
        sys.executable, "-c", TIMED, "run", "dp.yaml", "--seed", str(number), "--json", "v.json",
        "--timeout", str(LIMIT_S), "--quiet",
    ]  # fmt: skip
    started = time.monotonic()
    process = subprocess.run(
        command, cwd=here, check=False, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=lambda: os.nice(19),
    )  # fmt: skip
    seconds = time.monotonic() - started
    cpu = float(process.stderr.rsplit("CPU ", 1)[-1] or 0)
    verdict = here / "v.json"
    data = json.loads(verdict.read_text()) if verdict.exists() else {}
    said = [*data.get("findings", ()), *data.get("not_compared", ())]
    return Row(
        number=number, late=late, verdict=data.get("status", "none"), exit_code=process.returncode,
        seconds=round(seconds, 1), cpu_seconds=round(cpu, 1), share=round(cpu / seconds, 4),
        why=None if data.get("status") == "pass" else "; ".join(said[:2]) or process.stderr[-300:],
    )  # fmt: skip


TIMED = """
import resource, sys
from sumgrad.cli.main import main
code = main(sys.argv[1:])
spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(f"CPU {sum(s.ru_utime + s.ru_stime for s in spent):.2f}", file=sys.stderr)
sys.exit(code)
"""


def burn() -> None:
    """A process that only computes, at the usual priority."""
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--burners", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(args.burners)]
    for burner in burners:
        burner.start()
    rows = []
    try:
        with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(args.at_once) as pool:
            for row in pool.map(lambda n: one(n, Path(place)), range(args.count)):
                rows.append(row)
                print(row, flush=True)
    finally:
        for burner in burners:
            burner.kill()
    shares = sorted(row.share for row in rows)
    head = {
        "runs": len(rows), "at_once": args.at_once, "burners": args.burners, "nice": 19,
        "verdicts": dict(Counter(row.verdict for row in rows)),
        "median_seconds": sorted(row.seconds for row in rows)[len(rows) // 2],
        "slowest_seconds": max(row.seconds for row in rows),
        "median_share": shares[len(shares) // 2], "smallest_share": shares[0],
    }  # fmt: skip
    print(json.dumps(head))
    if args.out:
        args.out.write_text(
            json.dumps({**head, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )
    sys.exit(any(row.verdict != "pass" for row in rows))


if __name__ == "__main__":
    main()
