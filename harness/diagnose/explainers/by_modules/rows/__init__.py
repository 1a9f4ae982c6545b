"""Words for rows: which the ranks read, in which order, and whose gradients they end up with."""
