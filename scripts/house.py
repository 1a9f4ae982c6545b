"""The house: folders of harness/, who imports whom, on how many floors. Draws docs/architecture.md.

    scripts/house.py            # counts and rules; exits with 1 where one is broken
    scripts/house.py --draw     # writes the picture into docs/architecture.md

An arrow is an import anywhere in a file, late ones too. A room is a folder of harness/, with what
lies below it, or a module beside them. Rules: at most 20 entries in a folder; imports go down, on
eight floors at most; no more than two files of a folder share a prefix before `_`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HARNESS = ROOT / "harness"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by scripts/house.py -->", "<!-- end of the drawing -->"
MAX_ENTRIES, MAX_FLOORS, MAX_SHARING = 20, 8, 2
DOORS = ("__init__", "__main__", "run")
Arrows = dict[str, set[str]]


def modules(harness: Path = HARNESS) -> dict[str, Path]:
    """Import name below sumgrad -> file: `judge.checks.ledgers`; a package has its own name."""
    out = {}
    for path in sorted(harness.rglob("*.py")):
        parts = list(path.relative_to(harness).with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        out[".".join(parts)] = path
    return out


def imported(path: Path) -> Iterator[str]:
    """Names below sumgrad that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name[8:] for a in node.names if a.name.startswith("sumgrad."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sumgrad."):
            assert node.module is not None
            yield node.module[8:]
        elif isinstance(node, ast.ImportFrom) and node.module == "sumgrad":
            yield from (alias.name for alias in node.names)


def room_of(name: str) -> str:
    return name.partition(".")[0]


def arrows(harness: Path = HARNESS) -> Arrows:
    """Room -> rooms that its files import."""
    known = {room_of(name) for name in modules(harness)}
    out: Arrows = {room: set() for room in known}
    for name, path in modules(harness).items():
        found = {room_of(other) for other in imported(path)} & known
        out[room_of(name)] |= found - {room_of(name)}
    return out


def floors(found: Arrows) -> dict[str, int]:
    """Room -> its floor, one above the highest that it imports. ValueError where they go round."""
    out: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            raise ValueError(f"imports go round: {' -> '.join([*above, room])}")
        if room not in out:
            below = [floor(other, (*above, room)) for other in sorted(found[room])]
            out[room] = max(below, default=-1) + 1
        return out[room]

    for room in found:
        floor(room, ())
    return out


def num_floors(found: Arrows) -> int:
    """How many floors the rooms stand on; the doors stand before the house."""
    return max(floor for room, floor in floors(found).items() if room not in DOORS) + 1


def problems(harness: Path = HARNESS) -> list[str]:
    """Rules that are broken, a line each."""
    out = []
    try:
        number = num_floors(arrows(harness))
        if number > MAX_FLOORS:
            out.append(f"{number} floors, at most {MAX_FLOORS}")
    except ValueError as error:
        out.append(str(error))
    for folder in [harness, *(p for p in harness.rglob("*") if p.is_dir())]:
        held = entries(folder)
        if len(held) > MAX_ENTRIES:
            where = f"{folder.relative_to(harness.parent)}/"
            out.append(f"{len(held)} entries in {where}, at most {MAX_ENTRIES}: {', '.join(held)}")
        prefixes: dict[str, list[str]] = {}
        for path in sorted(folder.glob("*.py")):
            head, under, _ = path.stem.partition("_")
            if head and under:
                prefixes.setdefault(head, []).append(path.name)
        out += [
            f"{folder.relative_to(harness.parent)}: {', '.join(names)} share a prefix"
            for names in prefixes.values()
            if len(names) > MAX_SHARING
        ]
        held_in = [p for p in folder.glob("*.py") if p.stem != "__init__"]
        if held_in and folder != harness and not (folder / "__init__.py").exists():
            out.append(f"{folder.relative_to(harness.parent)}: no __init__.py says what lives here")
    return out


def entries(folder: Path = HARNESS) -> list[str]:
    """What a newcomer sees who opens a folder."""
    return sorted(p.name for p in folder.iterdir() if p.name != "__pycache__")


def drawing(harness: Path = HARNESS) -> str:
    """The picture: rooms by floors, and the arrows that no longer way implies."""
    found = arrows(harness)
    on = floors(found)
    below: Arrows = {}
    for room in sorted(found, key=lambda r: on[r]):
        below[room] = found[room] | {far for near in found[room] for far in below[near]}
    lines = ["```mermaid", "flowchart TD"]
    for floor in sorted(set(on.values()), reverse=True):
        rooms = sorted(r for r in on if on[r] == floor and r not in DOORS)
        if rooms:
            lines.append(f"    subgraph floor{floor}[floor {floor}]")
            lines += [f"        {room}" for room in rooms]
            lines.append("    end")
    for room in sorted(found, key=lambda r: (-on[r], r)):
        for other in sorted(found[room]):
            implied = any(other in below[near] for near in found[room] - {other})
            if room not in DOORS and other not in DOORS and not implied:
                lines.append(f"    {room} --> {other}")
    return "\n".join([*lines, "```"])


def page_with(text: str, picture: str) -> str:
    """A page whose drawing is this one. ValueError where it has no place for it."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"no place for the picture: expected {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{picture}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", action="store_true", help="write the picture into the page")
    args = parser.parse_args()
    bad = problems()
    for line in bad:
        print(line)
    if not bad:
        on = floors(arrows())
        for floor in sorted(set(on.values()), reverse=True):
            print(floor, " ".join(sorted(r for r in on if on[r] == floor)))
        lines = sum(len(p.read_text().splitlines()) for p in modules().values())
        print(f"{len(entries())} entries, {num_floors(arrows())} floors, {len(modules())} modules, "
              f"{lines} lines")  # fmt: skip
    if args.draw and not bad:
        PAGE.write_text(page_with(PAGE.read_text(), drawing()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
