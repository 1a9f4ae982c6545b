"""The installed libraries that a Program imports: the fork server imports them once, for all.

A rank takes seconds to import transformers, and a check has a dozen processes. Only what lies in
the environment's own packages is imported beside the user's code; the user's files never are.
"""

from __future__ import annotations

import os
import sys
import sysconfig

import torch


class Imports:
    """What this process imports from now on."""

    def __init__(self) -> None:
        self._known = frozenset(sys.modules)
        self._threads = _count_threads()

    def libraries(self) -> list[str]:
        """Installed modules, parents first. None where a process could not be forked behind them:
        one started a thread, or CUDA."""
        if _count_threads() != self._threads or torch.cuda.is_initialized():
            return []
        installed = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
        return [
            name
            for name, module in list(sys.modules.items())
            if name not in self._known
            and str(getattr(module, "__file__", None) or "").startswith(installed)
        ]


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
