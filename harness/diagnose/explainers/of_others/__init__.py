"""Gradients that belong elsewhere: to another parameter, other rows, other elements, a copy."""
