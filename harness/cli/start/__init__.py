"""What `sumgrad init` writes, as it stands: a step, its topology, and a test of both."""
