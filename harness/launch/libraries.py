"""The installed libraries that a Program imports: the fork server imports them once, for all.

A rank takes seconds to import transformers, and a check has a dozen processes. Only what lies in
the environment's own packages is imported beside the user's code; the user's files never are.
"""

from __future__ import annotations

import os
import sys
import sysconfig

import torch

SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR",)  # when it is imported
OF_CYTHON = "cython_runtime"  # that no file is imported for, as `_cython_3_1_2` is not


class Imports:
    """What this process imports from now on."""

    def __init__(self) -> None:
        self._known = frozenset(sys.modules)
        self._threads = _count_threads()
        self._environ = self._settings()

    def libraries(self) -> list[str]:
        """Installed modules, parents first.

        None where a process could not be forked behind them (one started a thread, or CUDA), or
        where they would be others: imported behind a variable that was set, or behind a stub.
        """
        if _count_threads() != self._threads or torch.cuda.is_initialized():
            return []
        if self._settings() != self._environ or self._made_by_hand():
            return []
        installed = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
        return [
            name
            for name, module in list(sys.modules.items())
            if name not in self._known
            and str(getattr(module, "__file__", None) or "").startswith(installed)
        ]

    def _made_by_hand(self) -> bool:
        """Whether there is a package now that was not imported: a stub. Parts of compiled ones and
        what Cython keeps for itself are none."""
        return any(
            getattr(module, "__spec__", None) is None
            and "." not in name
            and name[0] != "_"
            and name != OF_CYTHON
            for name, module in list(sys.modules.items())
            if name not in self._known
        )

    def _settings(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in SET_BY_TORCH}


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
