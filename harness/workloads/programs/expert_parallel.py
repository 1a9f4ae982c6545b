"""Expert parallelism: tokens travel to the rank that holds their expert, and back.

    sumgrad run topologies/expert_parallel.yaml

Experts are split over ep, unevenly; every rank has tokens of its own. The balance loss needs the
global routing statistics inside a product, so it uses their global value and the local derivative
(a detached global residual). Router and embedding are summed over all ranks, an expert over the
ranks that hold it: its gradient already has every token that was sent to it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

ROWS, LENGTH, VOCABULARY, WIDTH, EXPERTS = 11, 4, 13, 5, 5
BALANCE = 0.1


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def route(self, tokens: torch.Tensor):
        """(n,) -> values (n, W), probabilities (n, E), chosen expert (n,)."""
        x = self.embed(tokens)
        probabilities = self.router(x).softmax(-1)
        return x, probabilities, probabilities.argmax(-1)


class ExpertParallel:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.terms = {"main": self.main, "balance": (self.load, self.balance)}

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = Model()
        with torch.no_grad():  # token e prefers expert e, so that every expert has work
            model.router.weight.copy_(model.embed.weight[:EXPERTS])
        return model

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "y": torch.randn(ROWS, LENGTH, WIDTH, generator=g),
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        loss, count = self.main(model, rows)
        balance = self.balance(self.load(model, rows), len(rows["tokens"]))
        return loss + count * balance, count

    def main(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        tokens = rows["tokens"].flatten()
        x, probabilities, chosen = model.route(tokens)
        out = torch.zeros_like(x)
        for e, expert in enumerate(model.experts):
            out = out.index_add(0, torch.nonzero(chosen == e)[:, 0], expert(x[chosen == e]))
        return self.error(out, probabilities, chosen, rows["y"]), tokens.numel()

    @staticmethod
    def error(out, probabilities, chosen, y):
        gate = probabilities.gather(1, chosen[:, None])
        return (gate * out - y.flatten(0, 1)).square().sum()

    def load(self, model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        """Additive statistics: tokens sent to each expert, and probability mass for each."""
        _, probabilities, chosen = model.route(rows["tokens"].flatten())
        sent = torch.nn.functional.one_hot(chosen, EXPERTS).sum(0).to(probabilities.dtype)
        return torch.cat([sent, probabilities.sum(0)])

    @staticmethod
    def balance(load: torch.Tensor, rows: int) -> torch.Tensor:
        sent, mass = load.chunk(2)
        return BALANCE * EXPERTS * (sent * mass).sum() / (rows * LENGTH) ** 2

    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        held = self.holders(ctx)
        for e in range(EXPERTS):
            if held[e] != ctx.coords["ep"]:
                model.experts[e] = nn.Identity()
        return model

    def holders(self, ctx) -> list[int]:
        """The ep coordinate of each expert, as even as they go."""
        parts = torch.arange(EXPERTS).tensor_split(ctx.axes["ep"])
        return [i for i, part in enumerate(parts) for _ in part]

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        x, probabilities, chosen = model.route(mine["tokens"].flatten())
        out = self.experts(model, x, chosen, ctx)
        loss = self.error(out, probabilities, chosen, mine["y"]) / (ROWS * LENGTH)
        (loss + self.local_balance(model, mine)).backward()
        self.reduce(model, ctx)

    def local_balance(self, model: nn.Module, mine: dict[str, torch.Tensor]) -> torch.Tensor:
        local = self.load(model, mine)
        sent = local.detach()[:EXPERTS].clone()
        dist.all_reduce(sent)  # the mass is only needed where it is differentiated
        return self.balance(torch.cat([sent, local[EXPERTS:]]), ROWS)

    def experts(self, model: nn.Module, x, chosen, ctx) -> torch.Tensor:
        """Send each token to its expert's rank, compute there, send the result back."""
        group, held = ctx.group("ep"), torch.tensor(self.holders(ctx), device=x.device)
        order = torch.argsort(chosen, stable=True)  # experts are ordered by rank
        sent = torch.bincount(held[chosen], minlength=ctx.axes["ep"])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        which = chosen.new_empty(int(got.sum()))
        sizes = got.tolist(), sent.tolist()
        dist.all_to_all_single(which, chosen[order].contiguous(), *sizes, group=group)
        there = x.new_empty(len(which), WIDTH)
        there = all_to_all_single(there, x[order], *sizes, group=group)
        done = torch.zeros_like(there)
        for e, expert in enumerate(model.experts):
            if not isinstance(expert, nn.Identity):
                done = done.index_add(0, torch.nonzero(which == e)[:, 0], expert(there[which == e]))
        back = all_to_all_single(torch.empty_like(x), done, *reversed(sizes), group=group)
        return torch.zeros_like(back).index_copy(0, order, back)

    def reduce(self, model: nn.Module, ctx) -> None:
        for name, param in model.named_parameters():
            group = ctx.group("dp") if name.startswith("experts") else ctx.group()
            dist.all_reduce(param.grad, group=group)
