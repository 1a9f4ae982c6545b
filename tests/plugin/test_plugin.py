"""The pytest plugin as its users meet it: in a project of their own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.distributed

GOOD_AND_BAD = """
import pytest

@pytest.mark.distributed(ranks=3)
@pytest.mark.parametrize("value", [2.0])
def test_sum(ranks, value):
    import torch
    x = torch.full((2,), value * ranks.rank)
    torch.distributed.all_reduce(x)
    assert x.tolist() == [6.0, 6.0]

@pytest.mark.distributed(ranks=3)
def test_bad(ranks):
    print(f"I am rank {ranks.rank} and say hello")
    assert ranks.rank != 1, "rank one is wrong"

class TestInside:
    @pytest.mark.distributed(ranks=2)
    def test_method(self, ranks):
        assert ranks.world_size == 2

def test_plain():
    assert True
"""


def test_marker_and_failing_output(pytester):
    pytester.makepyfile(GOOD_AND_BAD)
    result = pytester.runpytest_subprocess("-m", "distributed", "--strict-markers")
    result.assert_outcomes(passed=2, failed=1, deselected=1)
    text = result.stdout.str()
    assert "rank one is wrong" in text
    assert "I am rank 1 and say hello" in text
    assert "I am rank 0 and say hello" not in text
    assert "1 of 3 ranks did not end well" in text
    assert text.index("rank one is wrong") < text.index("did not end well")


def test_beside_xdist(pytester):
    pytester.makepyfile(GOOD_AND_BAD)
    result = pytester.runpytest_subprocess("-n", "2", "-k", "not bad")
    result.assert_outcomes(passed=3)


def test_a_whole_check_and_a_timeout(pytester):
    pytester.makepyfile(
        """
        import time, pytest

        @pytest.mark.distributed
        def test_topology(sumgrad_check):
            verdict = sumgrad_check("three_pool_ones.yaml", tiers=("structure",))
            assert verdict.status == "pass"
            assert sumgrad_check("three_pool_ones.yaml", fault="drop_message",
                                 tiers=("structure",)).status == "fail"

        @pytest.mark.distributed(ranks=2, timeout=2)
        def test_slow(ranks):
            time.sleep(100)
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=1)
    assert "timed out after 2 s" in result.stdout.str()


@pytest.mark.parametrize("slip", ["ranks=0", "ranks=-3", "2", "rank=2", "ranks='2'", "ranks=True"])
def test_a_marker_with_a_slip_fails(pytester, slip):
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.distributed({slip})
        def test_slip(ranks):
            pass
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert "expected distributed(ranks=N" in result.stdout.str()


def test_no_torch_at_collection(pytester):
    pytester.makepyfile(
        """
        import sys, pytest

        @pytest.mark.distributed(ranks=2)
        def test_never_run(ranks):
            pass
        """
    )
    pytester.makeconftest(
        """
        import sys

        def pytest_collection_finish(session):
            assert "torch" not in sys.modules
        """
    )
    pytester.runpytest_subprocess("--collect-only").assert_outcomes()
    assert pytester.runpytest_subprocess("--collect-only").ret == 0


def test_a_verdict_is_true_where_it_passes_and_a_failing_one_is_not_overlooked(pytester):
    """Planted: AVG in place of SUM."""
    pytester.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.distributed

        def test_true(sumgrad_check):
            assert sumgrad_check("data_parallel")

        def test_false(sumgrad_check):
            assert sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")

        def test_overlooked(sumgrad_check):
            sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")

        def test_one_of_two_overlooked(sumgrad_check):
            sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")
            assert sumgrad_check("data_parallel")

        def test_asked(sumgrad_check):
            verdict = sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")
            assert verdict.status == "fail"

        def test_raises(sumgrad_check):
            sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")
            raise ValueError("mine")

        def test_passes(sumgrad_check):
            sumgrad_check("data_parallel")

        def test_skips(sumgrad_check):
            sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")
            pytest.skip()

        @pytest.mark.xfail(raises=ValueError, strict=True)
        def test_xfails(sumgrad_check):
            sumgrad_check("data_parallel", fault="avg:allreduce@dp#1")
            raise ValueError("mine")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=2, errors=2, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(
        ["*test_overlooked: sumgrad_check gave <FAIL: *did not look at it*"]
    )
