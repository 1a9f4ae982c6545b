"""`torchrun --nproc-per-node N harness/run.py --topology T.yaml`: the canonical run.

torchrun puts this folder first on the path, where our modules would hide others of the same name,
so it is taken off again before anything else is imported.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]

if __name__ == "__main__":
    from sumgrad.cli.entry import torchrun_main

    sys.exit(torchrun_main())
