"""Where the commands begin: signals are answered before anything heavy is imported."""

from __future__ import annotations

from sumgrad.cli import interrupts


def main() -> int:
    """The `sumgrad` command."""
    interrupts.install()
    from sumgrad.cli.main import main as command

    return command()


def torchrun_main() -> int:
    """What harness/run.py runs in every worker of torchrun."""
    interrupts.install()
    from sumgrad.cli.main import torchrun_main as command

    return command()
