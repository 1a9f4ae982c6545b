"""Words for how shares of a loss are weighed: by row, token, term or rank, and by which line."""
