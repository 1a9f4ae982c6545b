"""Where a rank's tensors are: on the CPU, or on one of its machine's GPUs."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from sumgrad.base.errors import UserError
from sumgrad.base.interpreter import has_gpu

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]


def chosen_device(asked: str, where: str) -> Kind:
    """ "cpu" or "cuda"; auto is cuda where this machine has a GPU. where: who asked.

    Looks at files only: the process that starts ranks must not have begun CUDA. Raises UserError.
    """
    lacks = "" if asked == "cpu" else _lacks()
    if asked == "cpu" or (asked == "auto" and lacks):
        return "cpu"
    if lacks:
        raise UserError(f"{where}: cuda, and {lacks}; use cpu or auto")
    return "cuda"


def _lacks() -> str:
    """Why no tensor can be on a GPU here; "" where one can."""
    if not has_gpu():
        return "this machine has no GPU"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES shows none of its GPUs"
    if metadata.version("torch").endswith("+cpu"):
        return "this torch is for CPUs only"
    return ""


def take_device(kind: str) -> torch.device:
    """This rank's own device: GPUs are dealt in turn to the ranks of a machine, which may share
    one. It becomes torch's current one, and convolutions compute in the digits that they are asked
    for, as products do by default. RuntimeError where torch sees no GPU."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError("device cuda: this torch sees no GPU")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    return device


def has_gpu_each() -> bool:
    """Whether every rank of this machine has a GPU of its own, as NCCL needs it."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks
