"""Words for lines: the first that is wrong, what it takes, what ranks alone run."""
