"""What there is to check, and how `--workload` finds it: a shipped name, a file, or a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sumgrad.base.errors import UserError
from sumgrad.base.files import PACKAGE
from sumgrad.base.plain_text import meant
from sumgrad.topology.pools import Topology

METHODS = ("build", "batch", "loss_sum", "step")  # of a Program
SHIPPED = {
    "three_pool": "sumgrad.workloads.three_pool.workload:ThreePool",
    "data_parallel": "sumgrad.workloads.programs.data_parallel:DataParallel",
    "ddp": "sumgrad.workloads.programs.ddp:DDP",
    "fsdp2": "sumgrad.workloads.programs.fsdp2:FullyShard",
    "tensor_parallel": "sumgrad.workloads.programs.tensor_parallel:TensorParallel",
    "sequence_parallel": "sumgrad.workloads.programs.tensor_parallel:SequenceTensorParallel",
    "megatron": "sumgrad.workloads.programs.megatron:Megatron",
    "pipeline": "sumgrad.workloads.programs.pipeline:Pipeline",
    "context_parallel": "sumgrad.workloads.programs.context_parallel:ContextParallel",
    "expert_parallel": "sumgrad.workloads.programs.expert_parallel:ExpertParallel",
    "two_pools": "sumgrad.workloads.programs.two_pools:TwoPools",
}


def chosen_workload(topology: Topology, flag: str | None) -> tuple[str, str]:
    """What `--workload` or else the topology names, and where that is written. Raises UserError."""
    if flag:
        return flag, "--workload"
    where = topology.where(("workload",))
    if topology.workload is None:
        raise UserError(f"{where}: missing; name one here or with --workload")
    return topology.workload, where


def takes(cls: Any, name: str) -> bool:
    """Whether something can be called with a keyword of this name."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def find_class(spec: str, where: str) -> Any:
    """What `NAME`, `file.py:Class` or `package.module:Class` names. Raises UserError."""
    target = SHIPPED.get(spec, spec)
    module_name, colon, class_name = target.rpartition(":")
    if not colon and spec.endswith(".py") and Path(spec).is_file():
        raise UserError(f"{where}: got {spec!r}, expected {spec}:Class{_classes_of(spec, where)}")
    if not colon:
        known = ", ".join(sorted(SHIPPED))
        raise UserError(
            f"{where}: got {spec!r}, expected one of {known}, or file.py:Class, or module:Class"
            f"{meant(spec, SHIPPED)}"
        )
    module = _imported(module_name, where)
    if not hasattr(module, class_name):
        near = meant(class_name, _classes(module))
        raise UserError(f"{where}: {module_name} has no {class_name}{near}")
    found = getattr(module, class_name)
    _check_methods(found, spec, where)
    return found


def _imported(module_name: str, where: str) -> Any:
    try:
        module = import_file(Path(module_name)) if module_name.endswith(".py") else None
        return module or importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}{_raised_at(error, module_name)}"
        raise UserError(f"{where}: {module_name} cannot be imported: {said}") from error


def _raised_at(error: BaseException, module_name: str) -> str:
    """The last line of the module's own file that was running, if one was."""
    own = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)
           if Path(f.filename).name == Path(module_name).name]  # fmt: skip
    return f" ({own[-1]})" if own else ""


def _classes(module: Any) -> list[str]:
    """Names of the classes that a module defines."""
    return [name for name, cls in vars(module).items()
            if inspect.isclass(cls) and cls.__module__ == module.__name__]  # fmt: skip


def _classes_of(file: str, where: str) -> str:
    """The Programs of a file, in words; of none, nothing."""
    module = _imported(file, where)
    known = [f"{file}:{name}" for name in _classes(module)
             if not lacking(getattr(module, name))]  # fmt: skip
    return f": it has {', '.join(known)}" if known else ""


def lacking(cls: Any) -> list[str]:
    """The methods that a Program must have and this has not."""
    return [name for name in METHODS if not callable(getattr(cls, name, None))]


def _check_methods(cls: Any, spec: str, where: str) -> None:
    """UserError where something is nearly a Program: it has some of its methods, and not all."""
    missing = lacking(cls)
    if not missing or len(missing) > len(METHODS) // 2 or hasattr(cls, "declaration"):
        return
    own = [name for name in dir(cls) if callable(getattr(cls, name, None)) and name[:1] != "_"]
    said = []
    for name in missing:
        near = get_close_matches(name, [n for n in own if n not in METHODS], n=1)
        said.append(f"{name}()" + (f" (did you mean it by {near[0]}()?)" if near else ""))
    raise UserError(f"{where}: {spec}{_place(cls)} has no {', no '.join(said)}; a Program has "
                    f"{', '.join(METHODS)}")  # fmt: skip


def _place(cls: Any) -> str:
    """` (PATH:LINE)` of a class, or of the class of an object."""
    try:
        cls = cls if inspect.isclass(cls) else type(cls)
        return f" ({inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return ""


def import_file(path: Path) -> Any:
    """Import a Python file by path, under a name of its own; it may import its neighbours."""
    path = path.resolve()
    name = f"sumgrad_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    _let_import_neighbours(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _let_import_neighbours(folder: Path) -> None:
    """Put a folder on the path for good, since functions import late: behind the standard library.

    A neighbour called `random` or `types` would else break whoever imports the real one later.
    Neighbours of the same names that a file of another folder brought are forgotten.
    """
    if folder.is_relative_to(PACKAGE):
        return  # our own modules have names of their own, sumgrad.*
    text = str(folder)
    if text in sys.path:
        sys.path.remove(text)
    standard = sysconfig.get_path("stdlib")
    own = [i for i, p in enumerate(sys.path) if p.startswith(standard) and "-packages" not in p]
    sys.path.insert(own[-1] + 1 if own else len(sys.path), text)
    for entry in folder.iterdir():
        held = sys.modules.get(entry.stem) if entry.suffix == ".py" or entry.is_dir() else None
        file = getattr(held, "__file__", None)
        if file and _is_users(Path(file)) and not Path(file).is_relative_to(folder):
            del sys.modules[entry.stem]


def _is_users(file: Path) -> bool:
    """Whether a module's file belongs to neither Python, nor what is installed, nor pytest."""
    roots = (sys.prefix, sys.base_prefix, str(PACKAGE))
    return file.stem != "conftest" and not any(file.is_relative_to(root) for root in roots)
