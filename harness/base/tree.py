"""The canonical tree over rows: one order of addition, whoever owns which rows.

Node (h, k) covers the rows [k 2**h, (k + 1) 2**h) and is left + right, or the only child that has
rows. Only siblings merge, so the root has the same bits for every cut of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Key = tuple[int, int]  # (height, index)


class TreeError(ValueError):
    """A tree that is not complete, or a node that two have brought."""


def node_keys(a: int, b: int, num: int) -> tuple[Key, ...]:
    """The maximal complete nodes of the rows [a, b) of num; behind the last row nothing follows."""
    stop = 1 << (num - 1).bit_length() if b == num else b
    out: list[Key] = []
    at = a
    while at < min(stop, num) and a < b:
        height = (at & -at).bit_length() - 1 if at else stop.bit_length()
        while at + (1 << height) > stop:
            height -= 1
        out.append((height, at >> height))
        at += 1 << height
    return tuple(out)


def node(key: Key, held: Mapping[Key, Any], num: int) -> Any:
    """The value of a node from the nodes below it that are held; None behind the last row.

    Values need `+` alone, and are not changed. Raises TreeError where rows are missing.
    """
    if key in held:
        return held[key]
    height, index = key
    if index << height >= num:
        return None
    if height == 0:
        raise TreeError(f"nobody brought row {index}")
    left = node((height - 1, 2 * index), held, num)
    right = node((height - 1, 2 * index + 1), held, num)
    if left is None or right is None:
        return right if left is None else left
    return left + right


def root(held: Mapping[Key, Any], num: int) -> Any:
    """The sum of all rows, from complete nodes of whoever owns them."""
    return node(((num - 1).bit_length(), 0), held, num)
