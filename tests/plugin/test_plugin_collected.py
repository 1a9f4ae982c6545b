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
