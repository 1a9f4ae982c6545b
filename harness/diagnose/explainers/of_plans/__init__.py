"""Causes that need a plan: each edge of it, one at a time, and free factors on its partials."""
