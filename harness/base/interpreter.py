"""Whether this machine's Triton kernels are interpreted, decided before anything imports triton.

torch._dynamo, torch._inductor and every optimizer import triton, and it looks at TRITON_INTERPRET
while it is imported. So the commands and the pytest plugin decide first; ranks inherit it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def has_gpu() -> bool:
    """Whether there is an NVIDIA or AMD GPU; looks at device files, imports nothing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
