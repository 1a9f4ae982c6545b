"""Small edits of a user's code, tried in a failing step: pieces of it that could be others."""
