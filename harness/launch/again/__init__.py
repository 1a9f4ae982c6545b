"""What is run after a check failed: the step with eyes on it, on one rank, with changes."""
