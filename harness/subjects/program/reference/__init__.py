"""The reference of a Program: single-process runs of its own loss_sum."""
