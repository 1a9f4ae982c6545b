"""Words for a forward that goes wrong: what enters the first wrong module, and what comes out."""
