"""What a Python process begins with: whether Triton's kernels are interpreted, its hash's seed.

torch._dynamo, torch._inductor and every optimizer import triton, and it looks at TRITON_INTERPRET
while it is imported. So the commands and the pytest plugin decide first; ranks inherit it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

HASH_SEED = "PYTHONHASHSEED"


def decide_interpreter(*, on_cpu: bool | None = None) -> None:
    """Choose Triton's interpreter for tensors on the CPU, unless the user chose already.

    on_cpu: where the tensors will be (default: on the CPU if there is no GPU).
    """
    interpreted = not has_gpu() if on_cpu is None else on_cpu
    if "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules and interpreted:
        os.environ["TRITON_INTERPRET"] = "1"


def server_environment() -> dict[str, str]:
    """What a process that starts ranks needs in its environment: it has not imported triton yet."""
    chosen = "TRITON_INTERPRET" in os.environ or has_gpu()
    return {} if chosen else {"TRITON_INTERPRET": "1"}


def shared_hash_seed(environment: Mapping[str, str]) -> str | None:
    """What all processes of it begin their hashes of strings with; None where each has its own."""
    given = environment.get(HASH_SEED, "random")
    return None if given == "random" else given


def has_gpu() -> bool:
    """Whether there is an NVIDIA or AMD GPU; looks at device files, imports nothing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
