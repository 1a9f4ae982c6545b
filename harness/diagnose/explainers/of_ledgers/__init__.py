"""Causes that the ledger shows: reductions by value, and how they differ from rank to rank."""
