"""Planted variants."""
PLANTED: dict = {}
