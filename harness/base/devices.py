"""Where a rank's tensors are: on the CPU, or on one of its machine's GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from sumgrad.base.errors import UserError
from sumgrad.base.interpreter import has_gpu

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]


def chosen_device(asked: str, where: str) -> Kind:
    """ "cpu" or "cuda"; auto is cuda where this machine has a GPU. where: who asked.

    Looks at device files: the process that starts ranks must not have begun CUDA. Raises UserError.
    """
    if asked == "cpu" or (asked == "auto" and not has_gpu()):
        return "cpu"
    if not has_gpu():
        raise UserError(f"{where}: cuda, and this machine has no GPU; use cpu or auto")
    return "cuda"


def take_device(kind: str) -> torch.device:
    """This rank's own device: GPUs are dealt in turn to the ranks of a machine, which may share
    one. It becomes torch's current one. RuntimeError where torch sees none."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError("device cuda: this torch sees no GPU")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(device)
    return device


def has_gpu_each() -> bool:
    """Whether every rank of this machine has a GPU of its own, as NCCL needs it."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks
