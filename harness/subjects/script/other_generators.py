"""What a script draws from numpy's and Python's own generators, which torch does not see.

Only numbers that are no integers: a mixture's share, a noise, a coin's toss. (Integers choose rows,
and which rows are read is compared by itself.)
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
from sumgrad.subjects.script.draws import Draws

_OF_BOTH = (
    "beta", "chisquare", "dirichlet", "exponential", "gamma", "gumbel", "laplace", "logistic",
    "lognormal", "multivariate_normal", "normal", "pareto", "power", "random", "rayleigh",
    "standard_cauchy", "standard_exponential", "standard_gamma", "standard_normal", "standard_t",
    "triangular", "uniform", "vonmises", "wald", "weibull",
)  # fmt: skip
_OF_NUMPY = (*_OF_BOTH, "rand", "randn", "random_sample", "ranf", "sample")
_OF_PYTHON = (
    "betavariate", "expovariate", "gammavariate", "gauss", "lognormvariate", "normalvariate",
    "paretovariate", "random", "triangular", "uniform", "vonmisesvariate", "weibullvariate",
)  # fmt: skip


def see_other_generators(draws: Draws) -> None:
    """From here on what this process draws by numpy or by `random` belongs to its draws."""
    for place, names in ((numpy.random, _OF_NUMPY), (random, _OF_PYTHON)):
        for name in names:
            own: Callable[..., Any] | None = getattr(place, name, None)
            if own is not None:
                setattr(place, name, _seen(own, draws))

    class Generator(numpy.random.Generator):
        """One of numpy's, whose draws are seen."""

    for name in _OF_BOTH:
        setattr(Generator, name, _seen(getattr(Generator, name), draws))
    default_rng = numpy.random.default_rng

    @functools.wraps(default_rng)
    def seen_rng(*args: Any, **kwargs: Any) -> Any:
        made = default_rng(*args, **kwargs)
        given = [*args, *kwargs.values()]
        return made if any(made is g for g in given) else Generator(made.bit_generator)

    numpy.random.default_rng = seen_rng


def _seen(own: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    @functools.wraps(own)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        draws.of_numbers(result)
        return result

    return drawn
