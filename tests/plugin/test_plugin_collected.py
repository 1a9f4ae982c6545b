"""The ranks call what pytest has collected, with what its fixtures have set."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.distributed


def run(pytester, code: str, *flags: str):
    pytester.makepyfile("import functools\nimport pytest\n" + textwrap.dedent(code))
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *flags)


def test_an_inherited_test_is_the_subclasss(pytester):
    pytester.makepyfile(
        common_base="""
        import pytest
        class Base:
            n = 2
            @pytest.mark.distributed(ranks=2)
            def test_n(self, ranks):
                assert self.n == ranks.world_size
        """
    )
    result = run(
        pytester,
        """
        import common_base

        class TestRight(common_base.Base): pass
        class TestWrong(common_base.Base): n = 7
        class TestOuter:
            class TestInner(common_base.Base): n = 8
        """,
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["FAILED *TestWrong::test_n*", "FAILED *TestInner::test_n*"])


def test_a_wrapped_test_is_the_wrapper_and_one_that_was_made_is_found(pytester):
    result = run(
        pytester,
        """
        def body(ranks):
            assert ranks.world_size == 2

        def also(function):
            @functools.wraps(function)
            def test(ranks):
                function(ranks)
                assert False, "the check that was added"
            return test

        def make(n):
            def inner(ranks):
                assert n == ranks.world_size
            return inner

        test_wrapped = pytest.mark.distributed(ranks=2)(also(body))
        test_made = pytest.mark.distributed(ranks=2)(make(2))
        test_made_wrong = pytest.mark.distributed(ranks=2)(make(3))
        """,
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*the check that was added*"])


def test_what_fixtures_set_in_classes_and_modules_is_set_on_ranks(pytester):
    result = run(
        pytester,
        """
        SETTING, UNSENT = 1, None

        @pytest.fixture(autouse=True, scope="module")
        def setting():
            global SETTING
            SETTING = 5
            yield
            SETTING = 1

        @pytest.fixture(scope="class")
        def with_x(request):
            request.cls.x = [SETTING]

        @pytest.mark.usefixtures("with_x")
        class TestClass:
            @pytest.mark.distributed(ranks=2)
            def test_x(self, ranks):
                assert self.x == [5] == [SETTING]

        @pytest.fixture
        def unsent():
            global UNSENT_NEW
            UNSENT_NEW = (i for i in range(3))

        @pytest.mark.distributed(ranks=2)
        def test_unsent(ranks, unsent):
            pass
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*UNSENT_NEW was set by a fixture in pytest's own process*"])


def test_what_a_fixture_looks_at_afterwards_is_not_lost(pytester):
    result = run(
        pytester,
        """
        @pytest.fixture
        def errors():
            found = []
            yield found
            assert not found

        @pytest.fixture
        def plain():
            return []

        @pytest.mark.distributed(ranks=2)
        def test_soft(ranks, errors):
            errors.append("wrong sum")

        @pytest.mark.distributed(ranks=2)
        def test_right(ranks, errors, plain):
            plain.append(1)
        """,
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the test has changed 'errors', ?'wrong sum'?*"])


def test_what_is_changed_within_what_a_fixture_gave_is_not_lost(pytester):
    """In a dict, a nested list, an object; one that is torn down by a finalizer. What is only
    used up, as a counter or a model that is trained, is the test's own, and so is what a fixture
    ends without looking at it."""
    result = run(
        pytester,
        """
        import torch

        class Recorder:
            def __init__(self):
                self.bad, self.calls, self.odd, self.seen = [], 0, 0, torch.zeros(2)

            def check(self):
                assert not self.odd

        @pytest.fixture
        def state():
            given = {"errors": 0}
            yield given
            assert not given["errors"]

        @pytest.fixture
        def nested():
            yield (given := [[], {"a": [1]}])
            if given[1]["a"] != [1]:
                pytest.fail("it was changed")

        @pytest.fixture
        def recorder():
            yield (given := Recorder())
            assert not given.bad

        @pytest.fixture
        def finalized(request):
            found = {"wrong": 0}

            def look():
                assert not found["wrong"]

            request.addfinalizer(look)
            return found

        @pytest.fixture
        def counter():
            yield (given := Recorder())
            assert not given.odd
            assert not given.seen.any()

        @pytest.fixture
        def checked():
            yield (given := Recorder())
            given.check()
            assert given

        @pytest.fixture
        def sums():
            yield (given := torch.zeros(2))
            assert not given.any()

        @pytest.fixture
        def closed():
            yield (given := Recorder())
            given.bad.clear()

        @pytest.fixture
        def model():
            yield torch.nn.Linear(2, 2)

        @pytest.mark.distributed(ranks=2)
        def test_value(ranks, state):
            state["errors"] += 1

        @pytest.mark.distributed(ranks=2)
        def test_nested(ranks, nested):
            nested[1]["a"][0] = 2

        @pytest.mark.distributed(ranks=2)
        def test_object(ranks, recorder):
            recorder.bad.append("wrong")

        @pytest.mark.distributed(ranks=2)
        def test_finalized(ranks, finalized):
            finalized["wrong"] += 1

        @pytest.mark.distributed(ranks=2)
        def test_counter(ranks, counter):
            counter.odd += ranks.rank

        @pytest.mark.distributed(ranks=2)
        def test_tensor_in_it(ranks, counter):
            counter.seen += 1

        @pytest.mark.distributed(ranks=2)
        def test_by_a_method(ranks, checked):
            checked.odd += 1

        @pytest.mark.distributed(ranks=2)
        def test_tensor(ranks, sums):
            sums += ranks.rank

        @pytest.mark.distributed(ranks=2)
        def test_right(ranks, recorder, model, state, nested, closed):
            recorder.calls += 1
            closed.bad.append("as a trainer keeps its losses")
            model.weight.data.zero_()
            model.extra = {"a": 1}
        """,
    )
    result.assert_outcomes(passed=1, failed=8)


def test_one_rank_that_skips_as_unittest_does_skips_no_test(pytester):
    """Raised again in pytest's own process, it would."""
    result = run(
        pytester,
        """
        import unittest

        @pytest.mark.distributed(ranks=2)
        def test_others_pass(ranks):
            if ranks.rank == 1:
                raise unittest.SkipTest("only here")

        @pytest.mark.distributed(ranks=2)
        def test_others_fail(ranks):
            if ranks.rank == 1:
                raise unittest.SkipTest("only here")
            assert False

        @pytest.mark.distributed(ranks=2)
        def test_all(ranks):
            raise unittest.SkipTest("everywhere")
        """,
    )
    result.assert_outcomes(failed=2, skipped=1)


def test_filters_of_warnings_reach_the_ranks(pytester):
    pytester.makeini("[pytest]\nfilterwarnings =\n    error:of the file\n")
    result = run(
        pytester,
        """
        import warnings

        @pytest.mark.filterwarnings("error:of the mark")
        @pytest.mark.distributed(ranks=2)
        @pytest.mark.parametrize("of", ["the mark", "the file", "nobody"])
        def test_warns(ranks, of):
            warnings.warn(f"of {of}")
        """,
    )
    result.assert_outcomes(passed=1, failed=2)


def test_what_threads_raise_and_tests_return_are_warnings_on_ranks_too(pytester):
    result = run(
        pytester,
        """
        import threading

        def raises():
            raise ValueError("in a thread")

        class Left:
            def __del__(self):
                raise ValueError("at the end")

        STRICT = pytest.mark.filterwarnings("error")

        @STRICT
        @pytest.mark.distributed(ranks=2)
        def test_thread(ranks):
            if ranks.rank == 1:
                one = threading.Thread(target=raises)
                one.start()
                one.join()

        @STRICT
        @pytest.mark.distributed(ranks=2)
        def test_finalizer(ranks):
            Left()

        @STRICT
        @pytest.mark.distributed(ranks=2)
        def test_returns(ranks):
            return ranks.rank == 0

        @pytest.mark.distributed(ranks=2)
        def test_only_a_warning(ranks):
            one = threading.Thread(target=raises)
            one.start()
            one.join()
        """,
    )
    result.assert_outcomes(passed=1, failed=3)


def test_ranks_have_to_end_alike(pytester):
    result = run(
        pytester,
        """
        import time

        @pytest.mark.distributed(ranks=2)
        def test_one_xfails(ranks):
            if ranks.rank == 1:
                pytest.xfail("only here")

        @pytest.mark.distributed(ranks=2)
        @pytest.mark.xfail(raises=ValueError)
        def test_another_error_comes_later(ranks):
            if ranks.rank == 0:
                raise ValueError("expected")
            time.sleep(0.3)
            raise TypeError("not expected")

        @pytest.mark.distributed(ranks=2)
        @pytest.mark.xfail(raises=(ValueError, KeyError))
        def test_both_are_expected(ranks):
            raise (ValueError if ranks.rank else KeyError)("expected")

        @pytest.mark.distributed(ranks=2)
        @pytest.mark.xfail(raises=ValueError)
        def test_the_other_waits_for_it(ranks):
            import torch
            if ranks.rank == 0:
                raise ValueError("expected")
            torch.distributed.barrier()
        """,
    )
    result.assert_outcomes(failed=2, xfailed=2)
