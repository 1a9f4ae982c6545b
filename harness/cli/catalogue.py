"""What there is: shipped workloads, topologies, faults and operators."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.faults.collective import KINDS
from sumgrad.faults.operators import OPERATORS as FAULT_OPERATORS
from sumgrad.faults.plan import plan_faults
from sumgrad.subjects.loading import SHIPPED
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import shipped_topologies, topologies_directory

OPERATORS = {  # of `sumgrad ops`; written down, so that listing them imports no torch
    "rms_norm": "x / rms(x) * weight; weight gradient by the canonical tree",
    "layer_norm": "the mean kept as two numbers, two-pass variance",
    "linear": "x W^T + b, fixed tiles, no split but at tree nodes",
    "swiglu": "silu(gate) * up",
    "attention": "causal, grouped heads, any lengths, chunked prefill through a cache",
    "rope": "rotary positions",
    "embedding": "a segmented tree for each token",
    "cross_entropy": "SUM and count, by the canonical tree",
    "chain": "a decoder of all of these, forward and backward",
}


def catalogue() -> dict[str, Any]:
    """Names and one line each, as plain data."""
    topologies = [load_topology(path) for path in shipped_topologies()]
    return {
        "workloads": {name: target for name, target in sorted(SHIPPED.items())},
        "topologies": {
            t.name: {
                "ranks": t.world_size,
                "pools": {p.name: dict(p.axes) for p in t.pools},
                "why": t.why,
            }
            for t in topologies
        },
        "faults": {name: fault.story for name, fault in plan_faults().items()},
        "collective faults": {kind.name: kind.story for kind in KINDS.values()},
        "fault operators": {
            op.id: f"{op.story} ({op.report}): "
            f"{', '.join(op.planted) or 'not planted, ' + op.why_not}"
            for op in FAULT_OPERATORS
        },
        "operators": OPERATORS,
        "directory": str(topologies_directory()),
    }


def render_catalogue(found: dict[str, Any]) -> RenderableType:
    """The catalogue as tables."""
    parts: list[RenderableType] = []
    for title, listed in found.items():
        if title == "directory":
            continue
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
            show_header=False,
        )
        for name, what in listed.items():
            if title == "topologies":
                table.add_row(name, f"{what['ranks']} ranks", what["why"])
            else:
                table.add_row(name, what)
        parts += [table, Text("")]
    parts.append(Text(f"topology files are in {found['directory']}", style="dim"))
    return Group(*parts)
