"""Random numbers that do not depend on the sharding: a hash of (seed, stream, what, row, position).

Any rank that computes a row draws what the full batch draws, in any order. Uniform draws are odd
multiples of 1/256, the same number in every dtype down to bfloat16.
"""

from __future__ import annotations

import zlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014), elementwise on uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def hashed(seed: int, stream: str, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """uint64 (len(rows), *shape): one hash for each global row and index within the row."""
    num = int(np.prod(shape, dtype=np.int64))
    key = np.asarray([seed & (2**64 - 1), zlib.crc32(stream.encode())], dtype=np.uint64)
    with np.errstate(over="ignore"):
        base = _mix(key[:1] + _GOLDEN) + key[1:] * _GOLDEN
        by_row = _mix(base + rows.astype(np.uint64) * _GOLDEN)
        bits = _mix(by_row[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN)
    return bits.reshape(len(rows), *shape)


def uniform(seed: int, stream: str, rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """float64 (len(rows), *shape) in {1/256, 3/256, ..., 255/256}."""
    top = (hashed(seed, stream, rows, shape) >> np.uint64(57)).astype(np.float64)
    return (2 * top + 1) / 256


def normal(seed: int, stream: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 standard normal numbers, by Box and Muller's transform."""
    num = int(np.prod(shape, dtype=np.int64))
    bits = hashed(seed, stream, np.zeros(1, dtype=np.int64), (2, max(num, 1)))[0]
    u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    z: np.ndarray = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    return z[:num].reshape(shape)
