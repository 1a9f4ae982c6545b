"""The SUM-gradient convention as a library that a trainer can import in production.

Five rules, a function each; SUM_GRAD_CONVENTION.md has the reasoning. Needs torch only, works on
any process group (`group=None` is the default one), and never divides by the size of a group.

    count = global_count(num_valid_local, group=dp)          # rule 2: the honest global count
    loss = loss_sum_local / count                            # ... applied once
    loss = loss + contribute_once(regulariser, group=dp)     # rule 3
    S = global_residual(s_local, group=dp)                   # rule 4
    loss.backward()
    sum_reduce_gradients(model.parameters(), group=dp)       # rule 1, or in DDP's backward:
    ddp.register_comm_hook(dp, ddp_sum_hook)
    norm = global_grad_norm([(p.grad, dp) for p in model.parameters()], group=None)  # rule 5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def is_leader(group: Group = None) -> bool:
    """Whether this process is the one that emits replicated contributions: rank 0 of the group."""
    return dist.get_rank(group) == 0


def sum_reduce_(tensors: Sequence[torch.Tensor], *, group: Group = None) -> None:
    """SUM all-reduce of dense tensors in place, one collective for each (dtype, device).

    Every rank must pass tensors of the same shapes and dtypes in the same order. A tensor with a
    non-contiguous layout is reduced through a flat copy and written back.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for bucket in buckets.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
        sizes = [tensor.numel() for tensor in bucket]
        for tensor, part in zip(bucket, flat.split(sizes), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


def sum_over_ranks(tensor: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The SUM of a tensor over a group, as a new tensor."""
    total = tensor.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total


def sum_reduce_gradients(params: Iterable[torch.nn.Parameter], *, group: Group = None) -> None:
    """SUM all-reduce of `.grad` over a group of replicas.

    A parameter without a gradient on this rank (no rows, an unused branch, a contribution that
    another rank emits) takes part with zeros, so that every rank joins the same collective.
    DTensor gradients are reduced shard by shard: pass the group over which they are replicated.
    """
    grads = []
    for param in params:
        if not param.requires_grad:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grads.append(_local(param.grad))
    sum_reduce_(grads, group=group)


def ddp_sum_hook(group: Group, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's own overlapped reduction as a SUM: `ddp.register_comm_hook(group, ddp_sum_hook)`.

    Without a hook DistributedDataParallel divides every bucket by the number of ranks before it
    sums. group: the one that DDP was given; None is the default one.
    """
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


ddp_sum_hook.__annotations__ |= {  # DDP compares them with the types, not with their names
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[torch.Tensor],
}


def global_count(
    count_local: int | torch.Tensor, *, group: Group = None, device: Any = "cpu"
) -> int:
    """The number of tokens (positions, elements) of the whole batch, as an exact integer.

    `device`: where the group's backend reduces ("cuda" for NCCL).
    """
    if isinstance(count_local, bool) or not count_local >= 0 or count_local % 1:
        raise ValueError(f"got count_local={count_local!r}, expected an integer >= 0")
    total = torch.tensor([int(count_local)], dtype=torch.int64, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return int(total.item())


def contribute_once(loss: torch.Tensor, *, group: Group = None) -> torch.Tensor:
    """The loss on the group's leader, a constant zero on every other rank.

    For a term computed from replicated inputs (a weight penalty): after the SUM it counts once.
    The rejected alternative, loss / group size on every rank, puts a pool size into a gradient.
    """
    return loss if is_leader(group) else torch.zeros_like(loss, requires_grad=False)


def global_residual(local: torch.Tensor, *, group: Group = None) -> torch.Tensor:
    """The global sum in the forward pass, only this rank's part in the backward pass.

    local + (sum over ranks of local - local), the bracket detached. A loss f(S) of a global sum S
    built from it has on each rank the gradient <grad f(S), d local>: partial sums that SUM to the
    full gradient.
    """
    total = local.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return local + (total - local.detach())


def global_grad_norm(
    grads: Iterable[tuple[torch.Tensor | None, Group | Sequence[Group]]],
    *,
    group: Group = None,
    device: Any = "cpu",
) -> torch.Tensor:
    """The 2-norm over distinct parameters: each counted once, however many replicas hold it.

    grads: (fully reduced gradient, its replica group or groups) as this rank holds them. The
    leader of all replica groups counts it; pass an empty sequence for a shard that no other rank
    holds. Of a DTensor the local shard is counted, on the first coordinate of each replicated mesh
    axis. group: every rank that holds any part of the model. device: where the group's
    backend reduces. Returns a float64 scalar, the same on every rank; NaN if a gradient is NaN.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, replicas in grads:
        if grad is not None and _counts(grad, replicas):
            local = _local(grad).detach()
            wide = local if local.dtype == torch.float64 else local.float()
            total += wide.square().sum(dtype=torch.float64).to(total.device)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    return total.sqrt()


def clip_by_global_norm_(
    grads: Iterable[torch.Tensor | None], *, norm: torch.Tensor, max_norm: float
) -> torch.Tensor:
    """Scale gradients in place by min(1, max_norm / norm); returns that factor.

    norm: from `global_grad_norm`, so that every rank scales by the same bits. A norm that is not
    finite leaves NaN in the gradients: it is never hidden.
    """
    if not max_norm > 0:
        raise ValueError(f"got max_norm={max_norm!r}, expected a number > 0")
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        if grad is not None:
            local = _local(grad).detach()
            local.mul_(factor.to(device=local.device, dtype=local.dtype))
    return factor


def _counts(grad: torch.Tensor, replicas: Group | Sequence[Group]) -> bool:
    groups = replicas if isinstance(replicas, list | tuple) else (replicas,)
    if not all(is_leader(group) for group in groups):
        return False
    mesh = getattr(grad, "device_mesh", None)
    if mesh is None:
        return True
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    for place, coord in zip(grad.placements, coordinate, strict=True):  # type: ignore[attr-defined]
        if place.is_partial():
            raise ValueError(f"got a gradient placed {place}, expected a fully reduced one")
        if place.is_replicate() and coord != 0:
            return False
    return True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor
