"""The register of planted Programs: target -> what the bug is, and which cause names it."""

from __future__ import annotations

from typing import Any

PLANTED: dict[str, dict[str, Any]] = {}


def planted(workload: str, name: str, operator: str, story: str, *named: str) -> Any:
    """A decorator. operator: of the catalogue; named: kinds of cause that name it."""

    def register(cls: type) -> type:
        PLANTED[f"{cls.__module__}:{cls.__name__}"] = {
            "workload": workload, "name": name, "operator": operator, "story": story,
            "named": named,
        }  # fmt: skip
        return cls

    return register
