"""Whether this machine's Triton kernels are interpreted, decided before anything imports triton.

torch._dynamo, torch._inductor and every optimizer import triton, and it looks at TRITON_INTERPRET
while it is imported. So the commands and the pytest plugin decide first; ranks inherit it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def decide_interpreter() -> None:
    """Choose Triton's interpreter on a machine without a GPU, unless the user chose already."""
    if "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules and not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"


def has_gpu() -> bool:
    """Whether there is an NVIDIA or AMD GPU; looks at device files, imports nothing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
