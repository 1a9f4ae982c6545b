"""One user's bug planted in each of these pages, as a change of its source: never a PASS.

    python scripts/example_bugs.py --out docs/data/example_bugs.json

Written before they were run, as people write them: a mean of means, a reduction that is missing or
done twice, local counts, positions that start anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import clean_steps
from sumgrad.launch.local.launcher import Launcher

BUGS = (  # page, step, topology, what, from, to
    ("gpt2_ddp", "GPT2", "dp3", "a mean of the ranks' means",
     "(loss * ctx.world_size / count).backward()",
     "(loss / (mine['labels'][:, 1:] != -100).sum()).backward()"),
    ("gpt2_ddp", "GPT2", "dp3", "DDP's average is forgotten",
     "(loss * ctx.world_size / count).backward()", "(loss / count).backward()"),
    ("gpt2_ddp", "GPT2", "dp3", "tokens are counted without the shift",
     "        dist.all_reduce(count)\n",
     "        count = (mine['labels'] != -100).sum()\n        dist.all_reduce(count)\n"),
    ("transformers_models", "LlamaFSDP2", "dp3", "divided by the ranks once more",
     "part.set_gradient_divide_factor(1.0)", "part.set_gradient_divide_factor(3.0)"),
    ("transformers_models", "LlamaTP", "tp2", "the norms' gradients are halved on one rank",
     "        (loss / count).backward()\n\n\nclass Mixtral",
     "        (loss / count).backward()\n"
     "        for name, param in model.named_parameters():\n"
     "            if 'norm' in name and ctx.rank:\n"
     "                param.grad /= 2\n\n\nclass Mixtral"),
    ("transformers_models", "Mixtral", "dp3", "the balance of the own rows only",
     "whole = tuple(gathered(x, mine[\"mask\"], batch[\"mask\"], ctx) for x in out.router_logits)\n"
     "        balance = self.coefficient * self.balance_of(model, whole, batch[\"mask\"])",
     "balance = self.coefficient * self.balance_of(model, out.router_logits, mine[\"mask\"])"),
    ("transformers_models", "Bert", "dp3", "masked tokens are counted on rank 0 for all",
     "        return loss, (rows[\"labels\"] != -100).sum()\n\n    def distribute",
     "        return loss, (rows[\"labels\"] != -100).sum() + 0 * loss.detach().long()\n\n"
     "    def step(self, model, batch, ctx):\n"
     "        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}\n"
     "        loss, count = self.loss_sum(model, mine)\n"
     "        dist.broadcast(count, 0)\n"
     "        (loss / count).backward()\n\n"
     "    def distribute"),
    ("libraries", "TrainerStep", "dp3", "num_items_in_batch of this rank",
     "        dist.all_reduce(count)\n        for i, micro", "        for i, micro"),
    ("libraries", "Accelerated", "dp3", "accelerate's division by the accumulation is forgotten",
     "loss * 2 * ctx.world_size / count", "loss * ctx.world_size / count"),
    ("wrappers", "Plain", "dp3", "local counts",
     "        dist.all_reduce(count)\n        (loss * ctx.world_size / count).backward()\n"
     "\n\nclass CompiledModel",
     "        (loss / count).backward()\n\n\nclass CompiledModel"),
    ("wrappers", "Accumulating", "dp3", "divided by the micro-batches as well",
     "(self.loss_sum(model, micro)[0] * ctx.world_size / count).backward()\n\n\nclass StaticGraph",
     "(self.loss_sum(model, micro)[0] * ctx.world_size / count / 2).backward()\n\n\n"
     "class StaticGraph"),
    ("wrappers", "Accumulating", "dp3", "no_sync around the last one",
     "model.no_sync() if i == 0", "model.no_sync() if i == 1"),
    ("wrappers", "Hybrid", "hsdp6", "sharded ranks read the rows of their replica's number",
     "        loss, count = self.loss_sum(model, self.mine(batch, ctx))\n"
     "        dist.all_reduce(count)\n"
     "        (loss / count).backward()\n"
     "\n"
     "\n"
     "class CompressedHalf",
     "        part = ctx.coords['replicate'] * 2 + ctx.coords['shard']\n"
     "        mine = {k: v.tensor_split(6)[part] for k, v in batch.items()}\n"
     "        loss, count = self.loss_sum(model, mine)\n        dist.all_reduce(count)\n"
     "        (loss / count).backward()\n\n\nclass CompressedHalf"),
    ("wrappers", "Dropout", "dp3", "seeded by the row's number on its rank",
     "for row in rows[\"row\"].tolist():", "for row in range(len(rows[\"row\"])):"),
    ("losses", "Contrastive", "dp3", "the gather has no backward",
     "all_a, all_b = (torch.cat(collective.all_gather(t)) for t in (a, b))",
     "all_a, all_b = (torch.cat(collective.all_gather(t)).detach() for t in (a, b))"),
    ("losses", "GRPO", "dp3", "a mean of every answer's own mean",
     "return -(gain * rows[\"mask\"]).sum(), rows[\"mask\"].sum()",
     "if torch.distributed.is_initialized():\n"
     "            gain = gain / rows[\"mask\"].sum(-1, keepdim=True) * rows[\"mask\"].sum() "
     "/ rows[\"mask\"].shape[0] / 3\n"
     "        return -(gain * rows[\"mask\"]).sum(), rows[\"mask\"].sum()"),
    ("losses", "GAN", "dp3", "the generator's loss trains the discriminator too",
     "frozen = {n: p.detach() for n, p in tell.named_parameters()}",
     "frozen = {n: p if torch.distributed.is_initialized() else p.detach() "
     "for n, p in tell.named_parameters()}"),
    ("losses", "BatchNorm", "dp3", "each rank has statistics of its own",
     "        with whole_batch(model.module[1], ROWS):\n"
     "            super().step(model, batch, ctx)",
     "        super().step(model, batch, ctx)"),
    ("losses", "Faint", "dp3", "the faint term on every rank, and summed",
     "(loss * ctx.world_size / count + decay).backward()",
     "((loss / count + decay) * ctx.world_size).backward()"),
    ("pipelines", "GPipe", "pp3", "the schedule divides by the micro-batches as well",
     "scale_grads=False)\n        x = [batch", "scale_grads=True)\n        x = [batch"),
    ("pipelines", "DataAndPipeline", "dp2_pp3", "the other pipeline is not summed",
     "            dist.all_reduce(param.grad, group=ctx.group(\"dp\"))", "            pass"),
    ("sequences", "Ulysses", "dp3", "positions start at zero on every rank",
     "positions = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]",
     "positions = torch.arange(LENGTH // ctx.world_size)"),
    ("sequences", "VocabularyByHand", "dp3", "what enters the head is not summed in the backward",
     "F.linear(Copied.apply(x), model.head.weight)", "F.linear(x, model.head.weight)"),
)  # fmt: skip


def plant(page: str, old: str, new: str, place: Path) -> Path:
    """The pages with one of them changed. Raises LookupError where the source is another by now."""
    pages = place / "examples"
    shutil.copytree(clean_steps.EXAMPLES, pages, dirs_exist_ok=True)
    source = (pages / f"{page}.py").read_text()
    if source.count(old) != 1:
        raise LookupError(f"{page}.py: {source.count(old)} times, expected once: {old!r}")
    (pages / f"{page}.py").write_text(source.replace(old, new))
    return pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    by_name = {step.name: step for step in clean_steps.steps()}
    for page, name, topology, what, old, new in BUGS:
        step = by_name[name]
        if lacking := clean_steps.missing(step):
            print(f"{name}: left out, needs {', '.join(lacking)}")
            continue
        with tempfile.TemporaryDirectory() as place, Launcher() as launcher:
            pages = plant(page, old, new, Path(place))
            changed = replace(
                step, topology=pages / f"{topology}.yaml", workload=f"{pages / page}.py:{name}"
            )
            row = {"bug": what, **clean_steps.check(changed, 0, launcher, timeout_s=120)}
        rows.append(row)
        good = "ok " if row["status"] in ("fail", "unknown") else "BAD"
        print(f"{good} {name}, {what}: {row['status']} {row['why'] or ''}"[:220], flush=True)
    missed = [row for row in rows if row["status"] not in ("fail", "unknown")]
    print(json.dumps({"bugs": len(rows), "missed": len(missed)}))
    if args.out:
        args.out.write_text(json.dumps({"missed": len(missed), "rows": rows}, indent=1) + "\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
