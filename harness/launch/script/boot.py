"""Copied as `sitecustomize.py` to where a script's Python looks first: waits for torch's import.

Nothing but the standard library until then, and nothing at all where nobody asks.
"""

import importlib.util
import os
import sys

VARIABLE, FALLBACK = "SUMGRAD_WATCH", "SUMGRAD_PACKAGE"


class _Waiting:
    """Stands in the way of `import torch` once, and starts the watch when torch is there."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if importlib.util.find_spec("sumgrad") is None:  # another environment than ours
                sys.path.append(os.environ[FALLBACK])
            from sumgrad.launch.script.watch import start

            start(os.environ[VARIABLE])

        spec.loader.exec_module = exec_module
        return spec


def _load_the_next():
    """The `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in sys.path:
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.abspath(folder or ".") != here and os.path.isfile(path):
            spec = importlib.util.spec_from_file_location("sitecustomize", path)
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, _Waiting())
_load_the_next()
