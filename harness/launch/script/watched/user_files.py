"""What a script writes beside its run: files that were there before are kept and put back.

Python says of every file that is opened, renamed or removed (an audit hook); torch.save and
safetensors write below it and are asked in front. A file that exists is set aside before its first
change; one that is made is noted, and so are links and folders. When the run has ended, what was
set aside goes back, and what was made moves into the run's own folder, so that the next run finds
what this one found.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "files"
JOURNAL = "journal.jsonl"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NOT_THE_USERS = ("/dev/", "/proc/", "/sys/")


class FileKeeper:
    """In a process of a script: sets files aside before they change. directory: of the side."""

    def __init__(self, directory: Path, work: Path, since: float) -> None:
        """work: where the script works; since: when the run began, in seconds since the epoch."""
        self._since = since
        self.folder = directory / FOLDER
        self.folder.mkdir(exist_ok=True)
        self._own, self._work = os.path.realpath(directory.parent), os.path.realpath(work)
        self._caches = tuple(os.path.realpath(folder) + os.sep for folder in _caches())
        self._done: set[str] = set()
        self._busy = False

    def install(self) -> None:
        """Listen, from here on and for good."""
        sys.addaudithook(self._heard)

    def touch(self, name: Any) -> None:
        """A file is about to be written, replaced or removed."""
        if not isinstance(name, str | bytes | os.PathLike) or self._busy:
            return
        path = os.path.realpath(os.fsdecode(name))
        if path in self._done or self._is_none_of_the_users(path):
            return
        self._busy = True
        try:
            self._set_aside(path)
        finally:
            self._busy = False
        self._done.add(path)

    def _is_none_of_the_users(self, path: str) -> bool:
        return (
            path.startswith(_NOT_THE_USERS)
            or path.startswith((self._own + os.sep, sys.prefix + os.sep))
            or "__pycache__" in path
            or (not path.startswith(self._work + os.sep) and self._is_the_runs(path))
        )

    def _is_the_runs(self, path: str) -> bool:
        """Elsewhere than where the script works: a cache's or a temporary file, or one that
        something else of the run has made."""
        try:
            return os.stat(path).st_ctime >= self._since
        except OSError:
            return path.startswith(self._caches)

    def _set_aside(self, path: str) -> None:
        with self._first(path) as key:
            if key is None:
                return
            entry: dict[str, Any] = {"path": path, "was": None}
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.stat(path).st_mode):
                    shutil.copy2(path, self.folder / key)
                    entry["was"] = key
            self._note(entry)

    def _touch_link(self, name: Any, *, made: bool = False) -> None:
        """A link is about to be made, replaced or removed; what it leads to is another matter."""
        path = _place(name)
        if path is None or self._is_none_of_the_users(path):
            return
        target = os.readlink(path) if os.path.islink(path) else None
        if target is None and not made:
            return
        with self._first(f"link {path}") as key:
            if key is not None:
                self._note({"path": path, "link": target})

    def _touch_folder(self, name: Any) -> None:
        """A folder is about to be made, or removed when it is empty."""
        path = _place(name)
        if path is None or self._is_none_of_the_users(path):
            return
        with self._first(f"folder {path}") as key:
            if key is not None:
                self._note({"path": path, "folder": os.path.isdir(path)})

    @contextlib.contextmanager
    def _first(self, what: str) -> Iterator[str | None]:
        """The key of what is to be noted; None if a process of this run has noted it."""
        key = hashlib.sha256(what.encode()).hexdigest()[:16]
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.folder / f"{key}.known"
            yield None if known.exists() else key
            known.touch()

    def _note(self, entry: dict[str, Any]) -> None:
        with (self.folder / JOURNAL).open("a") as journal:
            journal.write(json.dumps(entry) + "\n")

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self._busy:
            return
        if event in ("os.remove", "os.rename", "os.symlink", "os.mkdir", "os.rmdir"):
            self._busy = True
            try:
                self._heard_of_names(event, args)
            finally:
                self._busy = False
        if (
            event == "open" and len(args) == 3 and isinstance(args[2], int) and args[2] & _WRITES
        ) or event in ("os.truncate", "sqlite3.connect"):
            self.touch(args[0])
        elif event == "os.remove":
            self.touch(_at(*args[:2]))
        elif event == "os.rename":
            self._touch_all(_at(args[0], args[2] if len(args) > 2 else -1))
            self._touch_all(_at(args[1], args[3] if len(args) > 3 else -1))
        elif event == "shutil.rmtree":
            self._touch_all(_at(*args[:2]))

    def _heard_of_names(self, event: str, args: tuple[Any, ...]) -> None:
        """What changes a name in a folder rather than a file."""
        if event in ("os.mkdir", "os.rmdir"):
            self._touch_folder(_at(args[0], args[-1]))
        elif event == "os.symlink":
            self._touch_link(_at(args[1], args[-1]), made=True)
        elif event == "os.remove":
            self._touch_link(_at(*args[:2]))
        else:
            self._touch_link(_at(args[0], args[2] if len(args) > 2 else -1))
            leads = os.path.islink(_place(_at(args[0], args[2] if len(args) > 2 else -1)) or "")
            self._touch_link(_at(args[1], args[3] if len(args) > 3 else -1), made=leads)

    def _touch_all(self, name: Any) -> None:
        """A file, or every file below a folder, which moves or goes as a whole."""
        if isinstance(name, str | bytes | os.PathLike) and os.path.isdir(name):
            for folder, _, files in os.walk(os.fsdecode(name)):
                for file in files:
                    self.touch(os.path.join(folder, file))
        else:
            self.touch(name)

    def in_front(self, function: Callable[..., Any], place: int, key: str) -> Callable[..., Any]:
        """A function that writes a file below Python, which is its argument `place` or `key`."""

        def write(*args: Any, **kwargs: Any) -> Any:
            self.touch(kwargs.get(key, args[place] if len(args) > place else None))
            return function(*args, **kwargs)

        write.__wrapped__ = function  # type: ignore[attr-defined]
        return write


def _caches() -> Iterator[str]:
    """Folders in which libraries keep what they may make again."""
    yield from (
        tempfile.gettempdir(),
        os.path.expanduser("~/.cache"),
        os.path.expanduser("~/.triton"),
    )
    for name, value in os.environ.items():
        if value and ("CACHE" in name or name in ("HF_HOME", "TORCH_HOME", "TRITON_HOME")):
            yield value


def _at(name: Any, folder: Any = -1) -> Any:
    """A name as a path from here: it may be one in an open folder."""
    if not isinstance(folder, int) or folder < 0 or not isinstance(name, str | bytes):
        return name
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(name))
    except OSError:
        return name


def _place(name: Any) -> str | None:
    """The full path of a name in a folder, without following it where it is a link."""
    if not isinstance(name, str | bytes | os.PathLike):
        return None
    folder, base = os.path.split(os.path.abspath(os.fsdecode(name)))
    return os.path.join(os.path.realpath(folder), base)


def put_back(directory: Path) -> tuple[list[str], list[str]]:
    """After a run: the user's files as they were. Returns those that it had changed, and made."""
    folder = directory / FOLDER
    changed, made = [], []
    try:
        entries = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    except OSError:
        return [], []
    (folder / JOURNAL).rename(folder / f"done {JOURNAL}")  # once, whoever asks
    for entry in (e for e in entries if "was" in e):
        path = Path(entry["path"])
        if entry["was"] is None:
            if path.exists() and not path.is_symlink():  # a folder, if one was moved there
                kept = folder / "made" / path.name
                while kept.exists():
                    kept = kept.with_name(f"{kept.name}_")
                kept.parent.mkdir(exist_ok=True)
                shutil.move(path, kept)
                made.append(str(path))
            continue
        before = folder / entry["was"]
        if not path.is_file() or not _same(path, before):
            changed.append(str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(shutil.copy2(before, path.with_name(f".{path.name}.sumgrad")), path)
        before.unlink()
    for entry in (e for e in entries if "link" in e):
        _put_back_link(Path(entry["path"]), entry["link"])
    of_folders = [e for e in entries if "folder" in e]
    for entry in sorted(of_folders, key=lambda e: str(e["path"]).count(os.sep), reverse=True):
        if entry["folder"]:
            os.makedirs(entry["path"], exist_ok=True)
            continue
        with contextlib.suppress(OSError):  # not empty, or gone
            os.rmdir(entry["path"])
    return changed, made


def _put_back_link(path: Path, target: str | None) -> None:
    """target: what it led to before, None where there was none."""
    if path.is_symlink() and (target is None or os.readlink(path) != target):
        path.unlink()
    if target is not None and not os.path.lexists(path) and path.parent.is_dir():
        path.symlink_to(target)


def _same(a: Path, b: Path) -> bool:
    return a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()
