"""Factors that predict a gradient: on everything, on parameters, blocks, terms, rows or ranks."""
