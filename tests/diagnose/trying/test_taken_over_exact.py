"""What the single process computes is tried in place of what ranks alone run."""

from __future__ import annotations

import ast

import pytest
from sumgrad.diagnose.modules.trying.edits import taken_over
from sumgrad.diagnose.modules.trying.edits.order import edits_to_try
from sumgrad.diagnose.modules.trying.edits.taken_over import known_in, told_once
from sumgrad.record.trial import edited_source

MASKED = """def loss_sum(model, rows):
    out, labels = model(rows["ids"]), rows["labels"]
    number = labels.ne(-100).sum(1)
    out = out * number
    return out.sum()
"""
KEPT = """class Decoder:
    def forward(self, ids):
        x, kept = self.words(ids), {}
        for layer in self.layers:
            x, pair = layer(x, kept.get(layer.kind))
        return self.head(x)
"""
HEUN = """def heun(model, u):
    dt = model.log_dt.exp()
    k1 = model.rate(model.rows(u))
    k2 = model.rate(model.rows(u + dt * k1))
    return u + dt / 2 * (k1 + k2)
"""


def tried(single, ranks, kinds=None, two_files=False):
    """The function of the ranks' own, and what each edit alone makes of it."""
    first = single.count("\n") + 1
    files = {"s.py": ranks, "m.py": single} if two_files else {"s.py": single + ranks}
    own = 1 if two_files else first
    own += ranks.startswith("class")
    starts = 2 if single.startswith("class") else 1
    of_single = f"{'m.py' if two_files else 's.py'}:{starts} whole"
    names = {f"s.py:{own} own": kinds or {"rows": "dict", "x": "tensor float64 3x4"}}
    found = edits_to_try(files, names, {of_single}, ("dp",), "", {})
    code = files["s.py"]
    return [ast.unparse(ast.parse(edited_source(code, one))) for one in found]


def with_line(single, ranks):
    return ast.unparse(ast.parse(single + ranks))


@pytest.mark.parametrize(("single", "wrong", "meant"), [
    # another field, and another count, with what stands for a name put in its place
    (MASKED, 'def own(rows):\n    return rows["ids"].ne(0).sum(1)\n',
     "def own(rows):\n    return rows['labels'].ne(-100).sum(1)\n"),
    # what is not there by name is what stands at its place
    (MASKED, "def own(rows, x):\n    return x.ne(0).sum(1)\n",
     "def own(rows, x):\n    return x.ne(-100).sum(1)\n"),
    # of little that is alike, what is given and nothing reads
    (KEPT, "def own(layer, kept):\n    return next(reversed(kept.values()))\n",
     "def own(layer, kept):\n    return kept.get(layer.kind)\n"),
    # the same function of something else
    (HEUN, "def own(model, u, dt, k1, wide):\n    return model.rate(wide)\n",
     "def own(model, u, dt, k1, wide):\n    return model.rate(model.rows(u + dt * k1))\n"),
    # a line that makes anew what is there
    (MASKED, "def own(out, number):\n    out = out + 1\n    return out.sum()\n",
     "def own(out, number):\n    out = out + 1; out = out * number\n    return out.sum()\n"),
])  # fmt: skip
def test_what_the_single_process_computes_is_tried(single, wrong, meant):
    found = tried(single, wrong)
    assert with_line(single, meant) in found, found


@pytest.mark.parametrize(("single", "wrong", "never"), [
    # a name that is not there, and nothing at its place
    (MASKED, "def own(x):\n    return x.ne(0).sum(1)\n", "number"),
    # another class's self; a name that is made later
    (KEPT, "class Step:\n    def own(self, ids):\n        return self.word(ids)\n",
     "        return self.words(ids)"),
    (HEUN, "def own(model, u, dt):\n    a = model.rate(u)\n    k1 = a\n    return a\n",
     "a = model.rate(model.rows(u + dt * k1))"),
    # what reaches out of the process
    ("def whole(rows):\n    return rows.save(rows)\n",
     "def own(rows):\n    return rows.sum(rows)\n", "return rows.save(rows)"),
    # the line is there
    (MASKED, "def own(out, number):\n    out = out + 1\n    out = out * number\n    return out\n",
     "out = out * number\n    out = out * number\n    return"),
])  # fmt: skip
def test_what_may_not_stand_there_is_not(single, wrong, never):
    before = with_line(single, wrong)
    for one in tried(single, wrong):
        assert one.count(never) <= before.count(never), one


def test_of_another_file():
    found = tried(MASKED, "def own(x):\n    return x.ne(0).sum(1)\n", two_files=True)
    assert with_line("", "def own(x):\n    return x.ne(-100).sum(1)\n") in found, found


def test_its_own_self_is_there():
    own = """class Step:
    def own(self, x):
        return self.scale(x).sum(0) + 1

    def other(self, x):
        return x
"""
    single = "class Step:\n    def whole(self, x):\n        return self.scale(x).sum(5) + 1\n"
    kinds = {"x": "tensor float64 3x4"}
    assert any("self.scale(x).sum(5) + 1" in one.rpartition("class Step")[2]
               for one in tried(single, own, kinds))  # fmt: skip
    of_another = single.replace("Step", "Model")
    assert not any("self.scale(x).sum(5) + 1" in one.rpartition("class Step")[2]
                   for one in tried(of_another, own, kinds, two_files=True))  # fmt: skip


def test_those_come_first_that_are_nearly_the_same():
    ranks = 'def own(rows):\n    y = rows["ids"].ne(0).sum(1)\n    return y * 3 + y\n'
    found = tried(MASKED, ranks)
    meant = with_line(MASKED, ranks.replace('rows["ids"].ne(0)', "rows['labels'].ne(-100)"))
    assert found.index(meant) < 6, found.index(meant)


def test_what_is_said_twice_is_looked_at_once_and_no_more_than_there_is_time_for(monkeypatch):
    ranks = 'def own(rows):\n    return rows["ids"].ne(0).sum(1)\n'
    tree = ast.parse("def f(x):\n    return x + 1\n\ndef g(x):\n    return x + 1\n")
    known = [one for function in tree.body for one in known_in(function, "")]
    assert [ast.unparse(one.node) for one in told_once(known)] == ["x + 1"]
    monkeypatch.setattr(taken_over, "MOST_KNOWN", 0)
    assert told_once(known) == []
    assert not any("ne(-100)" in one.rpartition("def own")[2] for one in tried(MASKED, ranks))
    monkeypatch.undo()
    monkeypatch.setattr(taken_over, "MOST_LOOKING_S", -1.0)
    assert not any("ne(-100)" in one.rpartition("def own")[2] for one in tried(MASKED, ranks))
