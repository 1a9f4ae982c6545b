"""Clean steps of the kind people run, in examples/: no FAIL, and why one is UNKNOWN.

    python scripts/clean_steps.py --seeds 5 --out docs/data/clean_steps.json

Needs what the pages need (`pip install -e .[examples]`); a page whose library is missing is said to
be left out. Writes one line for each step and seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.versions import versions

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SHIPPED = (
    "context_parallel", "data_parallel", "ddp", "expert_parallel", "fsdp2", "hsdp", "megatron",
    "sequence_parallel", "tensor_parallel", "two_pools",
)  # fmt: skip
NEEDS = {
    "gpt2_ddp": ("transformers",),
    "transformers_models": ("transformers",),
    "libraries": ("transformers", "accelerate"),
}
MORE = {"LoRA": ("peft",), "Titan": ("torchtitan",)}
CHOICES = {  # steps that are UNKNOWN by their own choice, and the words that say so
    "Titan": "fewer digits than float32",
    "Joined": "it had no rows left",
}
DTYPES = {"LlamaMixed": "bfloat16", "CompressedHalf": "float16"}  # the digits that a step chose
PAGES = {
    "gpt2_ddp": {"dp3": ("GPT2",)},
    "transformers_models": {
        "dp3": (
            "Llama", "Qwen3", "GPT2Checkpointed", "GPT2FSDP2", "LlamaFSDP2", "Qwen3FSDP2",
            "LlamaMixed", "GPT2FSDP1", "Mixtral", "QwenMoE", "Bert", "T5",
        ),
        "tp2": ("LlamaTP",),
    },
    "libraries": {"dp3": ("TrainerStep", "Accelerated", "LoRA", "Titan")},
    "wrappers": {
        "dp3": (
            "Plain", "CompiledModel", "CompiledDDP", "Checkpointed", "CheckpointedReentrant",
            "Accumulating", "StaticGraph", "Unused", "Joined", "Zero1", "Averaged",
            "CompressedHalf", "Dropout", "DropoutHalf", "DropoutDefault",
        ),
        "hsdp6": ("Hybrid",),
    },
    "losses": {
        "dp3": (
            "Contrastive", "DPO", "GRPO", "GAN", "SparseTable", "BatchNorm", "Penalised", "Faint",
        ),
    },
    "pipelines": {
        "pp3": ("GPipe", "OneForwardOneBackward", "Interleaved"), "dp2_pp3": ("DataAndPipeline",),
    },
    "sequences": {"dp3": ("Ulysses", "VocabularyParallel", "VocabularyByHand", "Sharded")},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One clean step. workload: None where the topology names it."""

    name: str
    topology: Path
    workload: str | None
    needs: tuple[str, ...]


def steps() -> list[Step]:
    """Every page's steps, then the shipped Programs."""
    found = [
        Step(
            name=name,
            topology=EXAMPLES / f"{topology}.yaml",
            workload=f"{EXAMPLES / page}.py:{name}",
            needs=(*NEEDS.get(page, ()), *MORE.get(name, ())),
        )
        for page, topologies in PAGES.items()
        for topology, names in topologies.items()
        for name in names
    ]
    shipped = EXAMPLES.parent / "topologies"
    return found + [
        Step(name=name, topology=shipped / f"{name}.yaml", workload=None, needs=())
        for name in SHIPPED
    ]


def missing(step: Step) -> list[str]:
    """Libraries that are not installed."""
    return [name for name in step.needs if importlib.util.find_spec(name) is None]


def check(step: Step, seed: int, launcher: Launcher, *, timeout_s: float = 600.0) -> dict:
    """One check, as data."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        options = CheckOptions(
            topology=step.topology, workload=step.workload, seed=seed, out=Path(place) / "run",
            timeout_s=timeout_s, dtype=DTYPES.get(step.name, "float32"),
        )  # fmt: skip
        try:
            verdict, _ = run_check(options, launcher=launcher)
        except UserError as error:
            return {"step": step.name, "seed": seed, "status": "error", "why": str(error)}
    reasons = [reason for tier in verdict.tiers for reason in tier.reasons]
    why = [*(d.cause for d in verdict.diagnoses), *verdict.findings, *verdict.reasons, *reasons]
    return {
        "step": step.name,
        "seed": seed,
        "dtype": DTYPES.get(step.name, "float32"),
        "status": verdict.status,
        "tiers": {tier.name: tier.status for tier in verdict.tiers},
        "why": why[0] if why and verdict.status != "pass" else None,
        "lifted": sum(entry["times"] for entry in verdict.data["lifted"]),
        "seconds": round(time.monotonic() - start, 1),
    }


def as_it_should_be(row: dict) -> bool:
    """PASS, or UNKNOWN by a choice of the step's own."""
    choice = CHOICES.get(row["step"])
    if row["status"] == "pass":
        return choice is None
    return row["status"] == "unknown" and choice is not None and choice in (row["why"] or "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these steps")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = [step for step in steps() if not args.names or step.name in args.names]
    left_out = {step.name: missing(step) for step in chosen if missing(step)}
    rows = []
    with Launcher() as launcher:
        for step in chosen:
            if step.name in left_out:
                print(f"{step.name}: left out, needs {', '.join(left_out[step.name])}")
                continue
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                rows.append(check(step, seed, launcher))
                row, good = rows[-1], as_it_should_be(rows[-1])
                print(f"{'ok ' if good else 'BAD'} {row['step']} {row['seed']}: {row['status']} "
                      f"{row['why'] or ''}"[:200], flush=True)  # fmt: skip
    bad = [row for row in rows if not as_it_should_be(row)]
    passed = sum(row["status"] == "pass" for row in rows)
    summary = {
        "steps": len({row["step"] for row in rows}), "runs": len(rows), "pass": passed,
        "fail": sum(row["status"] == "fail" for row in rows), "not_as_expected": len(bad),
        "left_out": left_out, "versions": versions(),
    }  # fmt: skip
    print(json.dumps(summary))
    if args.out:
        args.out.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
