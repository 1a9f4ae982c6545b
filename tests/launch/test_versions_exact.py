"""With what a run was made, and with what it is judged."""

from __future__ import annotations

from sumgrad.launch import versions as module
from sumgrad.launch.versions import made_with, source_digest, versions


def test_the_versions_of_now_are_said_once():
    told = versions()
    line = made_with(told)
    assert line.count("sumgrad ") == 1
    assert told["source"] in line
    assert told["torch"] in line
    assert "judged with" not in line


def test_others_are_said_with_those_of_now():
    line = made_with({**versions(), "source": "0123456789ab"})
    assert line.startswith("sumgrad ")
    assert "(source 0123456789ab)" in line
    assert f"; judged with sumgrad {versions()['sumgrad']} (source {source_digest()})" in line


def test_a_record_of_before_has_no_source():
    told = {"sumgrad": "0.1.0", "torch": "2.11.0", "python": "3.11.7"}
    assert made_with(told).startswith("sumgrad 0.1.0, torch 2.11.0, Python 3.11.7; judged with")


def test_the_digest_is_of_names_and_contents(tmp_path, monkeypatch):
    class Package:
        __path__ = (str(tmp_path),)

    monkeypatch.setattr(module.importlib, "import_module", lambda name: Package)
    found = set()
    for name, text in (("a.py", "x"), ("b.py", "x"), ("b.py", "y")):
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text(text)
        found.add(source_digest.__wrapped__())
    assert len(found) == 3
