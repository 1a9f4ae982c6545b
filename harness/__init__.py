"""sumgrad: checks every rank's gradient of a distributed training step.

Start with `sumgrad run topologies/three_pool.yaml`; docs/architecture.md shows the house.
Importing this package imports nothing else: `import sumgrad.convention` is what a trainer needs.
"""

import os as _os

__version__ = "0.1.0"


def watch() -> None:
    """Observe this process, where `sumgrad diff` started it and could not say so to its Python.

    One line at the top of a script for `python -I`, or a launcher that clears PYTHONPATH but keeps
    SUMGRAD_WATCH; nothing happens where nobody asks, or where the process is observed already.
    """
    asked = _os.environ.get("SUMGRAD_WATCH")
    if asked:
        from sumgrad.launch.script.watched.watch import start

        start(asked)
