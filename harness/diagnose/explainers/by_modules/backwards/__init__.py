"""Words for a backward that goes wrong: the way back, formulas, functions of the user's own."""
