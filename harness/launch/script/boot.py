"""Copied as `sitecustomize.py` to where a script's Python looks first: waits for torch's import.

Nothing but the standard library until then, and nothing at all where nobody asks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

VARIABLE, FALLBACK, LAUNCHER = "SUMGRAD_WATCH", "SUMGRAD_PACKAGE", "SUMGRAD_LAUNCHER_PID"
PR_SET_PDEATHSIG, SIGKILL = 1, 9


class _Waiting(MetaPathFinder):
    """Stands in the way of `import torch` once, and starts the watch when torch is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            if importlib.util.find_spec("sumgrad") is None:  # another environment than ours
                sys.path.append(os.environ[FALLBACK])
            from sumgrad.launch.script.watched.watch import start

            start(os.environ[VARIABLE])

        loader.exec_module = exec_module
        return spec


def _die_with_the_launcher() -> None:
    """Of a process that it started itself: nobody else would end it if the launcher is killed."""
    if sys.platform == "linux" and os.environ.get(LAUNCHER) == str(os.getppid()):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


def _load_the_next() -> None:
    """The `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.abspath(folder or ".") != here and os.path.isfile(path):
            spec: Any = importlib.util.spec_from_file_location("sitecustomize", path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if os.environ.get(VARIABLE):
    _die_with_the_launcher()
    sys.meta_path.insert(0, _Waiting())
_load_the_next()
