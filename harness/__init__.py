"""sumgrad: checks every rank's gradient of a distributed training step.

Start with `sumgrad run topologies/three_pool.yaml`; docs/architecture.md shows the house.
Importing this package imports nothing else: `import sumgrad.convention` is what a trainer needs.
"""

__version__ = "0.1.0"
