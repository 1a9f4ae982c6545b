"""The flagship workload: four loss terms on three kinds of pools.

role ci     one pool,    the CI function; computes g for every site, and the term imp
role block  some pools,  each owns some sites' V and U; computes stoch and faith
role ppgd   one pool,    a replica of all V and U; computes ppgd on persistent sources
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from sumgrad.subjects.planned.workload import Produced
from sumgrad.topology.declaration import Declaration, Param, Quantity, Role, Term
from sumgrad.topology.pools import Where, validate_model
from sumgrad.workloads.three_pool import documents, draws, model
from torch import Tensor

COEFFICIENTS = {"stoch": 5.0, "faith": 3.0, "imp": 0.7, "ppgd": 2.0}
IMP_POWER, IMP_BETA = 2, 0.5
ASCENT_STEPS, ASCENT_RATE, ASCENT_SOFTENING = 2, 0.01, 0.1
UNEMBED_GAIN = 2.0
MAX_KEPT_RUNS = 128
MOVE = 0.03  # size of the drawn weight perturbation between steps, relative to the initialisation
PUBLISHED: dict[str, Any] = {
    "rows": 4,
    "length": 3,
    "vocabulary": 16,
    "width": 8,
    "mlp": 16,
    "components": 2,
    "ci_width": 8,
    "lengths": [3, 3, 2, 3],
}
Count = Annotated[int, Field(ge=1, le=4096)]


class Options(BaseModel):
    """`options:` of a three-pool topology."""

    model_config = ConfigDict(extra="forbid", strict=True)

    preset: Literal["default", "published"] = "default"
    rows: Annotated[int, Field(ge=1, le=10**7)] = 29
    length: Annotated[int, Field(ge=2, le=1024)] = 16
    vocabulary: Annotated[int, Field(ge=2, le=256)] = 256
    width: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 16
    layers: Annotated[int, Field(ge=1, le=256)] = 2  # planning grows with their square
    heads: Literal[1, 2] = 2
    mlp: Count = 24
    components: Count = 4
    ci_width: Annotated[int, Field(ge=2, le=4096, multiple_of=2)] = 16
    lengths: list[Annotated[int, Field(ge=1)]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("preset") == "published":
            return {**PUBLISHED, **data}
        return data

    @model_validator(mode="after")
    def _check_lengths(self) -> Options:
        if self.lengths is not None and (
            len(self.lengths) != self.rows or max(self.lengths) > self.length
        ):
            raise ValueError(f"lengths: expected {self.rows} numbers of at most {self.length}")
        return self


class ThreePool:
    """The workload: declaration, float64 weights of every step, and formulas in any dtype."""

    def __init__(self, options: Mapping[str, Any], *, seed: int, where: Where) -> None:
        chosen = validate_model(Options, dict(options), where=where, prefix=("options",))
        fields = chosen.model_dump(exclude={"preset", "lengths"})
        self.sizes = model.Sizes(**fields)
        self.seed = seed
        self._lengths = chosen.lengths
        self.declaration = _declare(self.sizes, self.lengths())

    def lengths(self) -> np.ndarray:
        """int64 (rows,): valid positions of each row."""
        if self._lengths is not None:
            return np.asarray(self._lengths, dtype=np.int64)
        return documents.row_lengths(self.sizes.rows, self.sizes.length)

    def params(self, step: int) -> dict[str, Tensor]:
        """float64 weights: the initialisation, moved `step` times by drawn perturbations."""
        out = {}
        for param in self.declaration.params:
            base, scale = _initialisation(param)
            values = base + scale * draws.normal(self.seed, f"init:{param.name}", param.shape)
            for k in range(1, step + 1):
                values += MOVE * scale * draws.normal(self.seed, f"{k}:{param.name}", param.shape)
            out[param.name] = torch.from_numpy(values)
        return out

    def formulas(
        self,
        dtype: torch.dtype,
        device: str,
        *,
        rounded_to: torch.dtype | None = None,
        kernels: str = "torch",
    ) -> ThreePoolFormulas:
        """kernels: "torch", or "triton": norms, attention and linear layers by sumgrad.kernels."""
        ops = model.TORCH
        if kernels == "triton":
            from sumgrad.workloads.three_pool.kernels import triton_operators

            ops = triton_operators()
        return ThreePoolFormulas(
            self, dtype=dtype, device=device, rounded_to=rounded_to or dtype, ops=ops
        )


def _declare(sizes: model.Sizes, lengths: np.ndarray) -> Declaration:
    sites, c, w = sizes.sites, sizes.components, sizes.ci_width
    params = []
    for site in sites:
        d_out, d_in = sizes.site_shape(site)
        params.append(Param(name=f"{site}.V", unit=site, shape=(c, d_in)))
        params.append(Param(name=f"{site}.U", unit=site, shape=(d_out, c)))
    num_inputs = sum(sizes.site_shape(site)[1] for site in sites)
    ci_shapes = {
        "in.weight": (w, num_inputs),
        "in.bias": (w,),
        "norm1.weight": (w,),
        "q.weight": (w, w),
        "k.weight": (w, w),
        "v.weight": (w, w),
        "o.weight": (w, w),
        "norm2.weight": (w,),
        "up.weight": (2 * w, w),
        "down.weight": (w, 2 * w),
        "head.weight": (len(sites) * c, w),
        "head.bias": (len(sites) * c,),
    }
    params += [Param(name=f"ci.{n}", unit="ci_fn", shape=s) for n, s in ci_shapes.items()]
    per_row = (sizes.length, c)
    return Declaration(
        workload="three_pool",
        row_lengths=tuple(lengths.tolist()),
        params=tuple(params),
        roles=(
            Role(name="ci", units=("ci_fn",), home=True),
            Role(name="block", units=sites, home=True, shared_by_pools=True),
            Role(name="ppgd", units=sites, home=False),
        ),
        quantity=Quantity(name="g", role="ci", shapes=dict.fromkeys(sites, per_row)),
        terms=(
            Term(name="stoch", role="block", kind="rows", reads_quantity=True),
            Term(name="faith", role="block", kind="replicated"),
            Term(name="imp", role="ci", kind="statistic", statistic_numel=len(sites) * c),
            Term(name="ppgd", role="ppgd", kind="rows", reads_quantity=True),
        ),
    )


def _initialisation(param: Param) -> tuple[float, float]:
    """Mean and standard deviation of a parameter's start.

    Chosen with the coefficients so that every term is at least 1 % of every tensor it reaches
    (tests/workloads/test_three_pool.py): a fault on a smaller term would hide in the others' noise.
    """
    if param.name == "ci.head.bias":
        return 0.15, 0.1
    if param.name.endswith(("norm1.weight", "norm2.weight")):
        return 1.0, 0.1
    if param.name == "ci.in.bias":
        return 0.0, 0.1
    fan_in = param.shape[-1]
    gain = {"V": 1.75, "U": 1.75}.get(param.name.rsplit(".", 1)[-1], 1.0)
    if param.name == "ci.head.weight":
        gain = 0.3
    return 0.0, gain * fan_in**-0.5


def _frozen_weights(sizes: model.Sizes, seed: int) -> dict[str, np.ndarray]:
    d = sizes.width
    shapes = {
        "embed": (sizes.vocabulary, d),
        "position": (sizes.length, d),
        "unembed": (sizes.vocabulary, d),
    }
    for layer in range(sizes.layers):
        shapes |= {f"{layer}.q": (d, d), f"{layer}.k": (d, d)}
    shapes |= {f"W.{site}": sizes.site_shape(site) for site in sizes.sites}
    fan_in = {
        name: 1 if name in ("embed", "position") else shape[-1] for name, shape in shapes.items()
    }
    return {
        name: draws.normal(seed, f"frozen:{name}", shape)
        * fan_in[name] ** -0.5
        * (UNEMBED_GAIN if name == "unembed" else 1.0)
        for name, shape in shapes.items()
    }


class ThreePoolFormulas:
    """The formulas in one dtype on one device. Global data, no rank: rows come as indices."""

    def __init__(
        self,
        workload: ThreePool,
        *,
        dtype: torch.dtype,
        device: str,
        rounded_to: torch.dtype,
        ops: model.Operators = model.TORCH,
    ) -> None:
        self.ops = ops
        self.sizes, self.seed = workload.sizes, workload.seed
        self.dtype, self.device = dtype, torch.device(device)
        sizes = self.sizes
        ids = documents.tokens(
            sizes.rows, sizes.length, vocabulary=sizes.vocabulary, seed=self.seed
        )
        valid = np.arange(sizes.length) < workload.lengths()[:, None]
        self.valid = torch.from_numpy(valid).to(self.device)
        self.tokens = torch.from_numpy(ids).to(self.device)
        self._target_runs: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.frozen = {
            name: torch.from_numpy(values).to(rounded_to).to(device=self.device, dtype=dtype)
            for name, values in _frozen_weights(sizes, self.seed).items()
        }

    def _cast(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device=self.device, dtype=self.dtype)

    def _weight(self, site: str) -> Tensor:
        return self.frozen[f"W.{site}"]

    def _draw(self, stream: str, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return self._cast(draws.uniform(self.seed, stream, rows.cpu().numpy(), shape))

    @torch.no_grad()
    def _target_run(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Frozen logits (n, T, vocabulary) and all sites' inputs side by side (n, T, sum d_in).

        Kept, because every term of a step asks for the same rows and the target never changes.
        """
        key = tuple(rows.tolist())
        if key in self._target_runs:
            return self._target_runs[key]
        inputs: list[Tensor] = []

        def site(name: str, x: Tensor) -> Tensor:
            inputs.append(x.to(self.dtype))
            return self.ops.linear(x, self._weight(name))

        logits = model.target(
            self.frozen, self.tokens[rows], self.valid[rows], self.sizes, site, self.ops
        )
        if len(self._target_runs) >= MAX_KEPT_RUNS:
            self._target_runs.clear()
        self._target_runs[key] = logits, torch.cat(inputs, dim=-1)
        return self._target_runs[key]

    def produce(self, params: Mapping[str, Tensor], rows: Tensor) -> Produced:
        """g by site, (n, T, C); inner: the logits z (n, T, S, C)."""
        _, inputs = self._target_run(rows)
        z = model.ci_logits(params, inputs, self.valid[rows], self.sizes, self.ops)
        g = model.lower(z)
        return Produced(
            quantity={site: g[..., i, :] for i, site in enumerate(self.sizes.sites)}, inner=z
        )

    def count(self, term: str, rows: Tensor) -> int:
        """P x S, P or the number of frozen weight elements: what divides the term."""
        if term == "faith":
            return sum(prod(self.sizes.site_shape(site)) for site in self.sizes.sites)
        num_valid = int(self.valid[rows].sum().item())
        return num_valid * len(self.sizes.sites) if term == "stoch" else num_valid

    def coefficient(self, term: str) -> float:
        return COEFFICIENTS[term]

    def loss_sum(
        self,
        term: str,
        *,
        params: Mapping[str, Tensor],
        quantity: Mapping[str, Tensor],
        rows: Tensor,
        units: tuple[str, ...],
        step: int,
        state: Mapping[str, Tensor],
    ) -> Tensor:
        if term == "faith":
            return self._faith_sum(params, units)
        if term == "stoch":
            return self._stoch_sum(params, quantity, rows, units, step)
        assert term == "ppgd", term
        return self._ppgd_sum(params, quantity, rows, state)

    def _faith_sum(self, params: Mapping[str, Tensor], units: tuple[str, ...]) -> Tensor:
        """Sum over sites of |W - U V|^2."""
        wide = model.wide
        parts = [
            (wide(self._weight(s)) - wide(params[f"{s}.U"]) @ wide(params[f"{s}.V"])).square().sum()
            for s in units
        ]
        return torch.stack(parts).sum()

    def _stoch_sum(
        self,
        params: Mapping[str, Tensor],
        quantity: Mapping[str, Tensor],
        rows: Tensor,
        units: tuple[str, ...],
        step: int,
    ) -> Tensor:
        """Sum over sites, each masked alone by g + (1 - g) u: all of them in one batched pass."""
        clean, _ = self._target_run(rows)
        length, c = self.sizes.length, self.sizes.components

        def site(name: str, x: Tensor) -> Tensor:
            y = self.ops.linear(x, self._weight(name))
            if name not in units:
                return y
            i = units.index(name)
            g = quantity[name]
            draw = self._draw(f"stoch:{step}:{name}", rows, (length, c + 1))
            mask, d = g + (1 - g) * draw[..., :c], draw[..., c:]
            own = x[i] if x.dim() == 4 else x
            masked = model.masked_site(
                own, self._weight(name), params[f"{name}.V"], params[f"{name}.U"], mask, d, self.ops
            )
            y = y.expand(len(units), *masked.shape)
            return torch.cat([y[:i], masked[None], y[i + 1 :]])

        valid = self.valid[rows]
        logits = model.target(self.frozen, self.tokens[rows], valid, self.sizes, site, self.ops)
        return model.recon_sum(logits, clean, valid)

    def _ppgd_sum(
        self,
        params: Mapping[str, Tensor],
        quantity: Mapping[str, Tensor],
        rows: Tensor,
        state: Mapping[str, Tensor],
    ) -> Tensor:
        """Recon with every site masked at once by g + (1 - g) r."""
        clean, _ = self._target_run(rows)
        c = self.sizes.components

        def site(name: str, x: Tensor) -> Tensor:
            g, r = quantity[name], state["sources"][:, :, self.sizes.sites.index(name)]
            mask, d = g + (1 - g) * r[..., :c], r[..., c:]
            return model.masked_site(
                x, self._weight(name), params[f"{name}.V"], params[f"{name}.U"], mask, d, self.ops
            )

        valid = self.valid[rows]
        logits = model.target(self.frozen, self.tokens[rows], valid, self.sizes, site, self.ops)
        return model.recon_sum(logits, clean, valid)

    def statistics(self, term: str, produced: Produced, rows: Tensor) -> Tensor:
        """q (S * C,): sum over valid positions of (upper(z) + 1e-12)^p."""
        assert term == "imp", term
        powered = (model.upper(model.wide(produced.inner)) + 1e-12) ** IMP_POWER
        return powered.masked_fill(~self.valid[rows][..., None, None], 0).sum((0, 1)).flatten()

    def value(self, term: str, statistics: Tensor, count: int) -> Tensor:
        """sum of q / P + beta sum of (q / P) log2(1 + q)."""
        assert term == "imp", term
        mean = statistics / count
        return mean.sum() + IMP_BETA * (mean * torch.log2(1 + statistics)).sum()

    def initial_state(self, term: str, rows: Tensor) -> dict[str, Tensor]:
        """ppgd's sources r (n, T, S, C + 1), uniform in [0, 1]."""
        if term != "ppgd":
            return {}
        shape = (self.sizes.length, len(self.sizes.sites), self.sizes.components + 1)
        return {"sources": self._draw("sources", rows, shape)}

    def advance(
        self,
        term: str,
        *,
        params: Mapping[str, Tensor],
        quantity: Mapping[str, Tensor],
        rows: Tensor,
        step: int,
        state: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """K ascent steps of the sources on the unnormalised recon sum, row by row.

        The step is the gradient over its own root mean square per row, softened near zero: a
        continuous function of it, unlike the sign, which flips on rounding.
        """
        if term != "ppgd":
            return dict(state)
        sources = state["sources"].detach()
        fixed = {k: v.detach() for k, v in params.items()}
        g = {k: v.detach() for k, v in quantity.items()}
        for _ in range(ASCENT_STEPS):
            sources = sources.requires_grad_()
            with torch.enable_grad():
                loss = self._ppgd_sum(fixed, g, rows, {"sources": sources})
                (slope,) = torch.autograd.grad(loss, sources)
            size = slope.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
            move = ASCENT_RATE * slope / (size + ASCENT_SOFTENING)
            sources = (sources.detach() + move).clamp(0, 1)
        return {"sources": sources}
