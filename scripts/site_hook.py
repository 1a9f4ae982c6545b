"""What mkdocs needs of files that stand in the project's root: README and the convention are pages,
and a link to a file that is no page is left as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "SUM_GRAD_CONVENTION.md": "convention.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to the root's pages, and to files of the repository."""

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        name = target.removeprefix("../")
        if name in PAGES:
            return f"[{text}]({PAGES[name]})"
        path, _, _ = target.partition("#")
        if "://" in target or not path or files.get_file_from_path(path):
            return match[0]
        return text

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)
