"""Words for sums over ranks that are not what they should be, by what the ranks put in."""
