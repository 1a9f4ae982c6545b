"""Shipped Programs: PyTorch's own parallelisms under the SUM law, a page each, to copy from."""
