"""The pytest plugin: tests that run on real ranks, started in a fraction of a second.

    @pytest.mark.distributed(ranks=3)
    def test_sum(ranks):                       # runs on every rank, default group initialised
        x = torch.ones(2) * ranks.rank
        torch.distributed.all_reduce(x)
        assert x.tolist() == [3.0, 3.0]

    @pytest.mark.distributed
    def test_my_topology(sumgrad_check):       # runs once, checks a topology
        assert sumgrad_check("three_pool.yaml").status == "pass"

Arguments other than `ranks` must be plain data (parametrize does that). The first failing rank's
traceback and output are shown, the others' are not. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sumgrad.interpreter import decide_interpreter

if TYPE_CHECKING:
    from sumgrad.launch import Launcher
    from sumgrad.outcome import RankOutcome
    from sumgrad.rank import RankGuard
    from sumgrad.verdict import Verdict

MAX_RANKS = 512
MARKER = (
    "distributed(ranks=N, timeout=60): starts real ranks; with `ranks`, the test itself runs on "
    "every one of them"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sumgrad")
    group.addoption(
        "--sumgrad-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="until every rank of a distributed test must be done (default: 60)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    decide_interpreter()


@pytest.fixture(scope="session")
def sumgrad_launcher() -> Iterator[Launcher]:
    """A warm fork server, one for each pytest process (so also for each xdist worker)."""
    from sumgrad.launch import Launcher

    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def sumgrad_check(
    sumgrad_launcher: Launcher, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., Verdict]:
    """`sumgrad_check(topology, seed=0, fault=None, ...)` -> Verdict; flags as in CheckOptions.

    topology: a path, or the name of a shipped file.
    """
    from sumgrad.catalogue import topologies_directory
    from sumgrad.check import CheckOptions, run_check

    timeout_s = float(request.config.getoption("--sumgrad-timeout"))

    def check(topology: str | Path, **flags: Any) -> Verdict:
        path = Path(topology)
        if not path.exists():
            path = topologies_directory() / path
        flags = {"timeout_s": timeout_s, **flags}
        if "out" not in flags:
            flags["out"] = Path(tempfile.mkdtemp(dir=tmp_path))
        verdict, _ = run_check(CheckOptions(topology=path, **flags), launcher=sumgrad_launcher)
        return verdict

    return check


@pytest.fixture
def sumgrad_ranks(
    sumgrad_launcher: Launcher, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., list[RankOutcome]]:
    """`sumgrad_ranks(function, num_ranks, **arguments)` -> one outcome for each rank.

    function: module-level, `function(ranks, **arguments)`; nothing is raised if a rank fails.
    """
    timeout_s = float(request.config.getoption("--sumgrad-timeout"))

    def run(function: Callable[..., Any], num_ranks: int, **arguments: Any) -> list[RankOutcome]:
        file, name = Path(function.__code__.co_filename), function.__qualname__
        limit = arguments.pop("timeout_s", timeout_s)
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        return _run(sumgrad_launcher, file, name, num_ranks, arguments, limit, directory)

    return run


@pytest.fixture
def ranks() -> None:
    """Inside a rank: the RankEnv (rank, world_size, directory). Only for tests with `ranks=N`."""
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked with `ranks=N` on every rank instead of here."""
    marker = pyfuncitem.get_closest_marker("distributed")
    if marker is None:
        return None
    _check_marker(pyfuncitem.name, marker)
    if "ranks" not in marker.kwargs:
        return None
    num_ranks, arguments = marker.kwargs["ranks"], _plain_arguments(pyfuncitem)
    default = float(pyfuncitem.config.getoption("--sumgrad-timeout"))
    limit = float(marker.kwargs.get("timeout", default))
    launcher = pyfuncitem._request.getfixturevalue("sumgrad_launcher")
    with tempfile.TemporaryDirectory(prefix="sumgrad-") as directory:
        file, name = Path(str(pyfuncitem.path)), pyfuncitem.function.__qualname__
        outcomes = _run(launcher, file, name, num_ranks, arguments, limit, Path(directory))
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        pytest.fail(_describe(failed, len(outcomes)), pytrace=False)
    return True


def _check_marker(name: str, marker: pytest.Mark) -> None:
    """A marker with a slip in it must not become a test that runs on no rank."""
    unknown = set(marker.kwargs) - {"ranks", "timeout"}
    num_ranks = marker.kwargs.get("ranks", 1)
    integer = isinstance(num_ranks, int) and not isinstance(num_ranks, bool)
    if marker.args or unknown or not integer or not 1 <= num_ranks <= MAX_RANKS:
        pytest.fail(
            f"{name}: got distributed({', '.join([*map(repr, marker.args), *map(str, unknown)])}) "
            f"with ranks={num_ranks!r}, expected distributed(ranks=N, timeout=SECONDS), N >= 1",
            pytrace=False,
        )


def run_test_on_rank(guard: RankGuard, *, file: str, name: str, arguments: dict[str, Any]) -> Any:
    """What a rank does: make the default group, call the test function, end the group."""
    from sumgrad.check_rank import local_group
    from sumgrad.workload import import_file

    function: Any = import_file(Path(file))
    for part in name.split("."):
        function = getattr(function, part)
        if isinstance(function, type):
            function = function()
    with local_group(guard):
        return function(ranks=guard.env, **arguments)


def _run(
    launcher: Launcher,
    file: Path,
    name: str,
    num_ranks: int,
    arguments: dict[str, Any],
    timeout_s: float,
    directory: Path,
) -> list[RankOutcome]:
    from sumgrad.launch import RankJob

    job = RankJob(
        target="sumgrad.pytest_plugin:run_test_on_rank",
        num_ranks=num_ranks,
        directory=directory,
        arguments={"file": str(file), "name": name, "arguments": arguments},
        timeout_s=timeout_s,
    )
    return launcher.run(job)


def _plain_arguments(item: pytest.Function) -> dict[str, Any]:
    names = [n for n in item._fixtureinfo.argnames if n != "ranks"]
    arguments = {n: item.funcargs[n] for n in names}
    arguments = {n: str(v) if isinstance(v, Path) else v for n, v in arguments.items()}
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            pytest.fail(
                f"{item.name}: argument {name!r} is a {type(value).__name__}; a test that runs on "
                f"ranks takes plain data only",
                pytrace=False,
            )
    return arguments


def _describe(failed: list[RankOutcome], num_ranks: int) -> str:
    from sumgrad.outcome import first_to_fail

    first = first_to_fail(failed)
    lines = [f"{len(failed)} of {num_ranks} ranks did not end well; the first to fail:"]
    lines.append(f"rank {first.rank} {first.status}: {first.detail}")
    if first.waiting_in:
        lines.append(f"in {first.waiting_in}")
    output = (first.output or "").replace(first.stack or "\0", "")  # shown once
    for title, text in (("traceback", first.stack), ("output", output)):
        if text and text.strip():
            lines += [f"---- {title} of rank {first.rank}", text.rstrip()]
    others = ", ".join(f"rank {o.rank} {o.status}" for o in failed if o is not first)
    return "\n".join([*lines, f"---- others: {others}"] if others else lines)
