"""The pytest plugin: tests that run on real ranks, started in a fraction of a second.

    @pytest.mark.distributed(ranks=3)
    def test_sum(ranks):                       # runs on every rank, default group initialised
        x = torch.ones(2) * ranks.rank
        torch.distributed.all_reduce(x)
        assert x.tolist() == [3.0, 3.0]

    @pytest.mark.distributed
    def test_my_topology(sumgrad_check):       # runs once, checks a topology
        assert sumgrad_check("three_pool.yaml").status == "pass"

Fixtures are made once, by pytest, and their values sent to the ranks; so are what they set in the
test's class and module, filters of warnings, the environment, the working directory and sys.path.
What a fixture patches elsewhere in pytest's own process is not, and the test fails with a word of
it, as where it fills what a fixture looks at in its teardown; a `monkeypatch` asked for by the test
itself is each rank's own. The first failing rank's traceback and output are shown. Another
project's `distributed` marker is left alone: this plugin takes part where `ranks=N` is given or our
fixtures are used; `sumgrad_markers = true` in pytest's configuration makes any other use of the
marker an error.
Coverage of ranks: `patch = ["subprocess", "fork", "_exit"]` and `parallel = true` in coverage's own
configuration, since ranks are forked and leave by os._exit. Importing this module imports no torch.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from sumgrad.base.outcome import RankOutcome
    from sumgrad.base.verdict import Verdict
    from sumgrad.launch.local.launcher import Launcher
    from sumgrad.launch.plugin_rank import Call

MAX_RANKS = 512
SET_BY_FIXTURES: pytest.StashKey[dict[Any, dict[str, Any]]] = pytest.StashKey()
PASSED: pytest.StashKey[bool] = pytest.StashKey()  # of a test's own body
REPORT = "_sumgrad_report"  # attribute of an exception: what to show of it
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
    parser.addini(
        "sumgrad_markers",
        help="every `distributed` marker of this project is sumgrad's: one with a slip is an error",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def sumgrad_launcher() -> Iterator[Launcher]:
    """A warm fork server, one for each pytest process (so also for each xdist worker)."""
    from sumgrad.launch.local.launcher import Launcher

    with Launcher(preload=["pytest", "sumgrad.launch.plugin_rank"]) as launcher:
        yield launcher


@pytest.fixture
def sumgrad_check(
    sumgrad_launcher: Launcher, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Verdict]]:
    """`sumgrad_check(topology, seed=0, fault=None, ...)` -> Verdict; flags as in CheckOptions.

    topology: a path, from where pytest runs or beside the test's file, or the name of a shipped
    one. A `file.py:Class` is found in the same way. UserError if there is none. A test that passes
    and never asks a verdict that is no PASS for anything fails in the end.
    """
    from sumgrad.launch.ask import CheckOptions
    from sumgrad.launch.check import run_check
    from sumgrad.launch.tests_verdict import never_asked, told_apart
    from sumgrad.topology.shipped import find_topology

    timeout_s = float(request.config.getoption("--sumgrad-timeout"))

    def check(topology: str | Path, **flags: Any) -> Verdict:
        beside = request.path.parent
        path = Path(topology)
        if not path.exists():
            near = [beside / path, beside / f"{path}.yaml"]
            path = next((p for p in near if p.is_file()), None) or find_topology(path)
        file, colon, name = str(flags.get("workload") or "").rpartition(":")
        own = beside / file
        if colon and file.endswith(".py") and not Path(file).exists() and own.is_file():
            flags["workload"] = f"{own}:{name}"
        flags = {"timeout_s": timeout_s, **flags}
        if "out" not in flags:
            flags["out"] = Path(tempfile.mkdtemp(dir=tmp_path))
        verdict, _ = run_check(CheckOptions(topology=path, **flags), launcher=sumgrad_launcher)
        given.append(told_apart(verdict))
        return given[-1]

    given: list[Verdict] = []
    yield check
    unread = [one for one in given if never_asked(one) and one.status != "pass"]
    if unread and request.node.stash.get(PASSED, False):
        pytest.fail(
            f"{request.node.name}: sumgrad_check gave {unread[0]!r}, and the test did not look at "
            f"it; end the call with .assert_pass()",
            pytrace=False,
        )


@pytest.fixture
def sumgrad_ranks(
    sumgrad_launcher: Launcher, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[..., list[RankOutcome]]:
    """`sumgrad_ranks(function, num_ranks, **arguments)` -> one outcome for each rank.

    function: module-level, `function(ranks, **arguments)`; nothing is raised if a rank fails.
    """
    timeout_s = float(request.config.getoption("--sumgrad-timeout"))

    def run(function: Callable[..., Any], num_ranks: int, **arguments: Any) -> list[RankOutcome]:
        from sumgrad.launch.plugin_call import pickled
        from sumgrad.launch.plugin_rank import Call

        limit = arguments.pop("timeout_s", timeout_s)
        call = Call(
            file=Path(function.__code__.co_filename),
            module=function.__module__,
            name=function.__qualname__,
            arguments=pickled(function.__qualname__, arguments),
        )
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        return _run(sumgrad_launcher, call, num_ranks, limit, directory)

    return run


class _OnRanks:
    """Stands for the RankEnv in pytest's own process."""


@pytest.fixture
def ranks() -> Any:
    """Inside a rank: the RankEnv (rank, world_size, directory). Only for tests with `ranks=N`."""
    return _OnRanks()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what pytest would run here although it is marked for ranks."""
    from sumgrad.launch.plugin_rank import is_unittest

    marker = item.get_closest_marker("distributed")
    if marker is None or "ranks" not in marker.kwargs:
        return
    if not isinstance(item, pytest.Function) or is_unittest(item.cls):
        pytest.fail(
            f"{item.name}: distributed(ranks=N) is for test functions and methods of plain "
            f"classes; this is a {type(item).__name__}, and no rank would run it",
            pytrace=False,
        )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked with `ranks=N` on every rank instead of here."""
    marker = pyfuncitem.get_closest_marker("distributed")
    mine = any(isinstance(value, _OnRanks) for value in pyfuncitem.funcargs.values())
    strict = bool(pyfuncitem.config.getini("sumgrad_markers"))
    given = marker is not None and "ranks" in marker.kwargs
    if not (given or mine or (strict and marker is not None)):
        return None
    _check_marker(pyfuncitem.name, marker, needs_ranks=mine)
    if marker is None or not given:
        return None
    from sumgrad.launch.plugin_call import call_of, refuse_patches

    refuse_patches(pyfuncitem)
    ranks_as = [n for n, v in pyfuncitem.funcargs.items() if isinstance(v, _OnRanks)]
    known = pyfuncitem.config.stash.get(SET_BY_FIXTURES, {})
    call, num_ranks = call_of(pyfuncitem, ranks_as, known), marker.kwargs["ranks"]
    default = float(pyfuncitem.config.getoption("--sumgrad-timeout"))
    limit = float(marker.kwargs.get("timeout", default))
    launcher = pyfuncitem._request.getfixturevalue("sumgrad_launcher")
    with launcher.temporary_directory() as directory:
        outcomes = _run(launcher, call, num_ranks, limit, directory)
        _conclude(outcomes, directory, _expected(pyfuncitem))
    return True


def _expected(item: pytest.Item) -> tuple[type[BaseException], ...]:
    """What its marks say that the test may raise to count as one that is expected to fail."""
    found: list[type[BaseException]] = []
    for mark in item.iter_markers("xfail"):
        raises = mark.kwargs.get("raises") or ()
        found += raises if isinstance(raises, tuple) else [raises]
    return tuple(found)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Remember what a fixture sets in a test's class or module: ranks import these anew."""
    item = request._pyfuncitem
    owners = [o for o in (getattr(item, "cls", None), getattr(item, "module", None)) if o]
    before = [dict(vars(owner)) for owner in owners]
    value = yield
    if not fixturedef.argname.startswith("_xunit_"):  # setup_module and its like run there, too
        known = item.config.stash.setdefault(SET_BY_FIXTURES, {})
        for owner, held in zip(owners, before, strict=True):
            known.setdefault(owner, {}).update(
                (name, new) for name, new in vars(owner).items() if held.get(name, known) is not new
            )
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a rank's own traceback in place of this process's."""
    report = yield
    if call.when == "call":
        item.stash[PASSED] = report.passed and not hasattr(report, "wasxfail")
    text = getattr(call.excinfo.value, REPORT, None) if call.excinfo else None
    if text is not None and report.failed:
        report.longrepr = text
    return report


def _check_marker(name: str, marker: pytest.Mark | None, *, needs_ranks: bool) -> None:
    """A marker with a slip in it must not become a test that runs on no rank."""
    args, kwargs = (marker.args, marker.kwargs) if marker else ((), {})
    num_ranks = kwargs.get("ranks", None if needs_ranks else 1)
    integer = isinstance(num_ranks, int) and not isinstance(num_ranks, bool)
    if args or set(kwargs) - {"ranks", "timeout"} or not integer or not 1 <= num_ranks <= MAX_RANKS:
        shown = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
        got = f"distributed({', '.join(shown)})" if marker else "no distributed marker"
        pytest.fail(
            f"{name}: got {got}, expected distributed(ranks=N, timeout=SECONDS), "
            f"1 <= N <= {MAX_RANKS}",
            pytrace=False,
        )


def _run(
    launcher: Launcher, call: Call, num_ranks: int, timeout_s: float, directory: Path
) -> list[RankOutcome]:
    from sumgrad.launch.local.launcher import RankJob, start_where
    from sumgrad.subjects.hashed import hashed_lines, used_by

    call.store(directory)
    tested = sys.modules.get(call.module)
    job = RankJob(
        target="sumgrad.launch.plugin_rank:run_test_on_rank",
        num_ranks=num_ranks,
        directory=directory,
        timeout_s=timeout_s,
        start=start_where(hashed_lines(used_by(tested)) if tested else ()),
    )
    return launcher.run(job)


def _conclude(
    outcomes: Sequence[RankOutcome], directory: Path, expected: tuple[type[BaseException], ...]
) -> None:
    """End the test as its ranks ended: pass, skip, xfail, or the first failing rank's exception, of
    which those that are not expected come before those that are."""
    from sumgrad.record.endings import read_end_record

    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        _raise(failed, len(outcomes), directory, expected)
    results = [(read_end_record(directory, o.rank) or {}).get("result") or {} for o in outcomes]
    endings = [result.get("ending", "lost") for result in results]
    odd = next((r for r, ending in enumerate(endings) if ending != "passed"), None)
    if odd is None:
        return
    reason = results[odd].get("reason", "")
    if set(endings) == {"xfailed"}:
        pytest.xfail(reason)
    if set(endings) == {"skipped"}:
        pytest.skip(reason)
    shown = ", ".join(f"rank {rank} {ending}" for rank, ending in enumerate(endings))
    pytest.fail(f"the ranks do not agree on how the test ended: {shown} ({reason})", pytrace=False)


def _raise(
    failed: Sequence[RankOutcome],
    num_ranks: int,
    directory: Path,
    expected: tuple[type[BaseException], ...],
) -> NoReturn:
    """Raise the first failing rank's own exception, or a failure that says how it ended."""
    from sumgrad.base.outcome import first_to_fail
    from sumgrad.launch.plugin_rank import read_error

    first = first_to_fail(failed)
    if expected:
        errors = {o.rank: read_error(directory, o.rank) for o in failed}
        raised = {rank: own.exception() for rank, own in errors.items() if own is not None}
        # That a rank is gone is a RuntimeError to those who wait for it.
        odd = [o for o in failed if (error := raised.get(o.rank)) is not None
               and not isinstance(error, (*expected, RuntimeError))]  # fmt: skip
        first = first_to_fail(odd) if odd else first
    own = read_error(directory, first.rank)
    text = _describe(first, failed, num_ranks, own.text if own else None)
    error = own.exception() if own else None
    if error is None:
        pytest.fail(text, pytrace=False)
    setattr(error, REPORT, text)
    raise error


def _describe(
    first: RankOutcome, failed: Sequence[RankOutcome], num_ranks: int, traceback: str | None
) -> str:
    """The first failing rank, its traceback and output, then who else did not end well."""
    stack = traceback or first.stack
    output = (first.output or "").replace(first.stack or "\0", "")  # shown once
    lines = [f"rank {first.rank} {first.status}: {first.detail}"]
    if stack and stack.strip():
        lines.append(stack.rstrip())
    if first.waiting_in:
        lines.append(f"in {first.waiting_in}")
    if output.strip():
        lines += [f"---- output of rank {first.rank}", output.rstrip()]
    others = ", ".join(f"rank {o.rank} {o.status}" for o in failed if o is not first)
    head = f"---- {len(failed)} of {num_ranks} ranks did not end well"
    return "\n".join([*lines, f"{head}; the others: {others}" if others else head])
