"""What of a test reaches its ranks, what comes back, and what is none of the plugin's business."""

from __future__ import annotations

import sys
import textwrap

import pytest

pytestmark = pytest.mark.distributed

HEAD = """
import os, sys
from pathlib import Path
import pytest
import torch.distributed as dist
"""


def run(pytester, code: str, *flags: str, head: str = HEAD):
    pytester.makepyfile(head + textwrap.dedent(code))
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *flags)


def test_the_environment_of_each_test_reaches_its_ranks(pytester):
    """Set by monkeypatch, by a fixture, taken away, and read by torch when it is imported."""
    result = run(
        pytester,
        """
        @pytest.fixture(params=["one", "two"])
        def setting(monkeypatch, request, tmp_path):
            monkeypatch.setenv("MY_SETTING", request.param)
            monkeypatch.delenv("MY_OTHER", raising=False)
            monkeypatch.chdir(tmp_path)
            (tmp_path / "beside_test.py").write_text(f"VALUE = {request.param!r}")
            monkeypatch.syspath_prepend(tmp_path)
            return request.param

        @pytest.mark.distributed(ranks=2)
        def test_set(ranks, setting, tmp_path):
            import beside_test
            assert os.environ["MY_SETTING"] == setting == beside_test.VALUE
            assert "MY_OTHER" not in os.environ
            assert Path.cwd() == tmp_path
            os.environ["LEAK"] = "yes"

        @pytest.mark.distributed(ranks=2)
        def test_nothing_leaks(ranks):
            assert "MY_SETTING" not in os.environ
            assert "LEAK" not in os.environ
            assert os.environ["MY_OTHER"] == "here"
            assert "beside_test" not in sys.modules

        @pytest.fixture
        def read_on_import(monkeypatch):
            monkeypatch.setenv("TORCH_LOGS_FORMAT", "%(message)s here")

        @pytest.mark.distributed(ranks=2)
        def test_read_on_import(ranks, read_on_import):
            from torch._logging._internal import DEFAULT_FORMATTER
            assert DEFAULT_FORMATTER._fmt == os.environ["TORCH_LOGS_FORMAT"] == "%(message)s here"
        """,
        head=HEAD + "os.environ['MY_OTHER'] = 'here'\n",
    )
    result.assert_outcomes(passed=4)


def test_arguments_arrive_as_they_were_given(pytester):
    result = run(
        pytester,
        """
        from dataclasses import dataclass
        import torch

        @dataclass
        class Thing:
            x: int

        GIVEN = [(1, 2), {1: "one", (2, 3): "pair"}, Path("a/b"), {1, 2}, b"raw", None, Thing(3),
                 torch.arange(3), lambda x: x + 1, float("nan"), 1 << 80, torch.float64]

        @pytest.mark.distributed(ranks=2)
        @pytest.mark.parametrize("given", GIVEN, ids=str)
        def test_types(ranks, given):
            assert any(type(given) is type(wanted) for wanted in GIVEN)
            if isinstance(given, tuple):
                assert given == (1, 2)
            if isinstance(given, dict):
                assert given == {1: "one", (2, 3): "pair"}
            if isinstance(given, Thing):
                assert given == Thing(3)
            if callable(given) and not isinstance(given, torch.dtype):
                assert given(1) == 2

        @pytest.fixture
        def connection():
            import socket
            return socket.socket()

        @pytest.mark.distributed(ranks=2)
        def test_unsendable(ranks, connection):
            pass

        @pytest.mark.distributed(ranks=2)
        def test_capture(ranks, capsys):
            pass

        @pytest.fixture
        def patched(monkeypatch):
            monkeypatch.setattr(dist, "get_rank", lambda: 77)

        @pytest.mark.distributed(ranks=2)
        def test_patched(ranks, patched):
            pass

        @pytest.fixture
        def patched_item(monkeypatch):
            monkeypatch.setitem(sys.modules, "torch.nothing", 1)

        @pytest.mark.distributed(ranks=2)
        def test_patched_item(ranks, patched_item):
            pass

        @pytest.mark.distributed(ranks=2)
        def test_own_patch(ranks, monkeypatch):
            monkeypatch.setattr(dist, "get_rank", lambda: 77)
            assert dist.get_rank() == 77
        """,
    )
    result.assert_outcomes(passed=13, failed=4)
    text = result.stdout.str()
    assert "argument 'connection' is a socket, which does not pickle" in text
    assert "argument 'capsys' is a CaptureFixture, which acts on pytest's own process" in text
    assert "attribute 'get_rank' of torch.distributed in pytest's own process" in text
    assert "key 'torch.nothing' of a dict in pytest's own process" in text


ENDINGS = """
    @pytest.mark.distributed(ranks=2)
    def test_skip(ranks):
        pytest.skip("not today")

    @pytest.mark.distributed(ranks=2)
    def test_importorskip(ranks):
        pytest.importorskip("no_such_module_at_all")

    @pytest.mark.distributed(ranks=2)
    def test_xfail_inside(ranks):
        pytest.xfail("known")

    @pytest.mark.distributed(ranks=2)
    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    def test_xfail_raises(ranks):
        1 / 0

    class Mine(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    @pytest.mark.distributed(ranks=2)
    @pytest.mark.xfail(raises=ZeroDivisionError)
    def test_xfail_raises_another(ranks):
        raise Mine("this", "that")

    @pytest.mark.distributed(ranks=2)
    def test_one_skips(ranks):
        if ranks.rank == 1:
            pytest.skip("only here")

    @pytest.mark.distributed(ranks=2)
    def test_rewritten(ranks):
        wanted = [1, 2, 3 + ranks.rank]
        print("said on rank", ranks.rank)
        if ranks.rank:
            assert len(wanted) == wanted[2] - 5, "counted"
        dist.barrier()

    @pytest.mark.distributed(ranks=2)
    def test_exit(ranks):
        raise SystemExit(3)

    @pytest.mark.distributed(ranks=2)
    async def test_async(ranks):
        assert False

    class TestSetUp:
        @classmethod
        def setup_class(cls):
            cls.shared = [dist.is_initialized()]

        def setup_method(self, method):
            self.name = method.__name__
            os.environ["SET_UP"] = method.__name__

        def teardown_method(self):
            if dist.is_initialized():
                print("torn down on rank", dist.get_rank())

        @pytest.fixture(autouse=True)
        def given(self):
            self.from_fixture = (1, 2)

        @pytest.mark.distributed(ranks=2)
        def test_method(self, ranks):
            assert self.name == os.environ["SET_UP"] == "test_method"
            assert self.from_fixture == (1, 2)
            assert self.shared == [True]

        @pytest.mark.distributed(ranks=2)
        def test_teardown(self, ranks):
            raise ValueError("after set-up")

    import unittest

    class TestCase(unittest.TestCase):
        @pytest.mark.distributed(ranks=2)
        def test_no_rank(self):
            pass
"""


def test_a_test_ends_as_in_pytest(pytester):
    result = run(pytester, ENDINGS)
    result.assert_outcomes(passed=1, failed=6, errors=1, skipped=2, xfailed=2)
    text = result.stdout.str()
    assert "Mine: this and that" in text
    assert "do not agree on how the test ended: rank 0 passed, rank 1 skipped" in text
    assert "test_async is async" in text
    assert "torn down on rank" in text
    assert "this is a TestCaseFunction" in text


@pytest.mark.parametrize("flags", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_the_failing_ranks_own_traceback_is_first(pytester, flags):
    result = run(pytester, ENDINGS, "-k", "test_rewritten", *flags)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    parts = [
        '>           assert len(wanted) == wanted[2] - 5, "counted"',
        "E           AssertionError: counted",
        "E            +  where 3 = len([1, 2, 4])",
        "said on rank 1",
        "of 2 ranks did not end well",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "said on rank 0" not in text


def test_coverage_counts_what_ranks_ran(pytester):
    """With the configuration that the plugin documents; `of_rank_one` runs on rank 1 alone."""
    pytester.makepyfile(
        lib="def of_rank_one():\n    return 1\n\n\ndef of_nobody():\n    return 2\n",
        test_it="""
        import pytest
        from lib import of_rank_one

        @pytest.mark.distributed(ranks=2)
        def test_lines(ranks):
            assert ranks.rank == 0 or of_rank_one()
        """,
    )
    settings = "[run]\nsource = .\nparallel = true\npatch =\n  subprocess\n  fork\n  _exit\n"
    (pytester.path / ".coveragerc").write_text(settings)
    run = [sys.executable, "-m", "coverage"]
    assert pytester.run(*run, "run", "-m", "pytest", "-p", "no:cacheprovider").ret == 0
    pytester.run(*run, "combine")
    shown = pytester.run(*run, "report", "-m", "--include=lib.py").stdout.str()
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith("lib.py")] == ["6"]


FOREIGN = """
    @pytest.mark.distributed(num_gpus=2)
    def test_vllm_like():
        assert "TRITON_INTERPRET" not in os.environ

    @pytest.mark.distributed(2, backend="nccl")
    class TestDeepSpeedLike:
        def test_method(self):
            assert not dist.is_initialized()

    @pytest.mark.distributed
    def test_bare():
        pass
"""


def test_another_projects_marker_is_left_alone(pytester, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")  # of our own tests
    result = run(pytester, FOREIGN)
    result.assert_outcomes(passed=3)


def test_a_project_may_claim_the_marker(pytester):
    pytester.makeini("[pytest]\nsumgrad_markers = true\n")
    result = run(pytester, FOREIGN)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*got distributed(num_gpus=2), expected distributed(ranks=N*"])


def test_their_own_ranks_fixture_is_theirs(pytester):
    result = run(
        pytester,
        """
        @pytest.fixture
        def ranks():
            return [0, 1]

        @pytest.mark.distributed(num_gpus=2)
        def test_theirs(ranks):
            assert ranks == [0, 1]
        """,
    )
    result.assert_outcomes(passed=1)


def test_ranks_without_a_marker_is_an_error(pytester):
    result = run(pytester, "def test_forgotten(ranks):\n    pass\n")
    result.assert_outcomes(failed=1)
    assert "got no distributed marker, expected distributed(ranks=N" in result.stdout.str()


def test_ranks_have_hashes_of_their_own_where_a_test_goes_by_them(pytester, monkeypatch):
    """In its own file, or in one that it imports; others are forked, and share theirs."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    gathers = """
    @pytest.mark.distributed(ranks=2)
    def test_hash(ranks):
        here = [None] * 2
        dist.all_gather_object(here, ORDER())
        assert (here[0] != here[1]) == HAS_OWN
    """
    asks = HEAD + "def ORDER(): return hash('a name'), *set('abcdefgh')\n"
    imports = HEAD + "from by_hash_here import ORDER\n"
    pytester.makepyfile(
        by_hash_here="def ORDER(): return hash('a name')",
        test_own=asks + "HAS_OWN = True" + textwrap.dedent(gathers),
        test_imported=imports + "HAS_OWN = True" + textwrap.dedent(gathers),
        test_forked=HEAD + "from functools import partial\nHAS_OWN = False\n"
        "ORDER = partial(getattr(__import__('builtins'), 'hash'), 'a name')\n"
        + textwrap.dedent(gathers),
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)
