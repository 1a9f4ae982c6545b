"""Ranks that were asked for different checks: named before anything runs, and never a PASS."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from dataclasses import replace
from datetime import timedelta

import pytest
from conftest import MY_STEP, shipped
from sumgrad.base.errors import UserError
from sumgrad.launch.ask import CheckOptions, make_spec
from sumgrad.launch.torchrun.agent import NotSaid, Store
from sumgrad.launch.torchrun.agreement import agree, asked_of

ODD_RANK = """
import os, sys
from sumgrad.cli.main import torchrun_main
if os.environ["RANK"] == "2":
    sys.argv += CHANGE
sys.exit(torchrun_main())
"""


def run_agree(asked: list[dict[str, str]]) -> list[list[str]]:
    """Every rank in a thread on one store; the problems that each was told."""
    import torch.distributed as dist

    store, told = dist.HashStore(), [[] for _ in asked]

    def one(rank: int) -> None:
        try:
            agree(store, rank, len(asked), asked[rank])
        except UserError as error:
            told[rank] = list(error.problems)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def spec_of(**flags):
    options = CheckOptions(topology=shipped("three_pool_ones"), **flags)
    return make_spec(options, prefix=["sumgrad"])


def test_equal_ranks_agree():
    assert run_agree([asked_of(spec_of())] * 3) == [[], [], []]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"seed": 7}, "--seed: 7 there, 0 here"),
        ({"steps": 3}, "--steps: 3 there, 1 here"),
        ({"fault": "drop_message"}, "--fault: 'drop_message' there, None here"),
        ({"dtype": "bfloat16"}, "--tiers: {"),
        ({"law": "report"}, "--law: 'report' there, 'enforce' here"),
        ({"timeout_s": 9.0}, "--timeout: 9.0 there, 120.0 here"),
    ],
)
def test_another_flag_is_named_on_every_rank(flags, words):
    told = run_agree([asked_of(spec_of()), asked_of(spec_of()), asked_of(spec_of(**flags))])
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 1
    assert "rank 2 was asked for another check than rank 0" in told[0][0]
    assert words in told[0][0]


def test_a_rank_that_says_nothing_is_named_to_all():
    import torch.distributed as dist

    plain, told = dist.HashStore(), {}
    plain.set_timeout(timedelta(seconds=0.5))
    asked = asked_of(spec_of())

    def one(rank: int) -> None:
        try:
            agree(Store(plain, seconds=0.5), rank, 4, asked)
        except NotSaid as silent:
            told[rank] = str(silent)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == dict.fromkeys((0, 1, 3), "rank 2 did not say in time what it runs")


def test_a_rank_0_that_says_nothing_is_named():
    import torch.distributed as dist

    plain = dist.HashStore()
    plain.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(NotSaid, match="rank 0 did not say in time"):
        agree(Store(plain, seconds=0.3), 1, 2, asked_of(spec_of()))


def test_other_versions_topologies_and_sources_are_named(tmp_path):
    spec = spec_of()
    older = replace(spec, versions={**spec.versions, "torch": "2.11.0"})
    other = make_spec(CheckOptions(topology=shipped("three_pool_square")), prefix=[])
    told = run_agree([asked_of(s) for s in (spec, older, other)])
    assert "version of torch: 2.11.0 there" in told[0][0]
    assert "topology" in told[0][1]
    (tmp_path / "mine.py").write_text(f"from helper import ONE\n{MY_STEP}")
    topology = tmp_path / "dp.yaml"
    topology.write_text(
        f"name: dp\nworkload: {tmp_path / 'mine.py'}:MyStep\npools:\n  train: {{axes: {{dp: 3}}}}\n"
    )
    asked = []
    for text in ("ONE = 1", "ONE = 1  # older"):
        (tmp_path / "helper.py").write_text(text)
        sys.modules.pop("helper", None)
        sys.path.insert(0, str(tmp_path))
        asked.append(asked_of(make_spec(CheckOptions(topology=topology), prefix=[])))
        sys.path.remove(str(tmp_path))
    told = run_agree(asked)
    assert "source file helper.py" in told[1][0]


def test_a_folder_of_another_name_is_no_other_check(tmp_path):
    asked = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(MY_STEP)
        (folder / "dp.yaml").write_text(
            "name: dp\nworkload: mine.py:MyStep\npools: {t: {axes: {dp: 2}}}\n"
        )
        spec = make_spec(CheckOptions(topology=folder / "dp.yaml"), prefix=[])
        asked.append(asked_of(spec))
    assert run_agree(asked) == [[], []]


def test_a_module_whose_file_is_a_bare_name_is_nobodys_neighbour(tmp_path, monkeypatch):
    """torch has such modules; from the folder of one's own file they look like files there."""
    (tmp_path / "mine.py").write_text(MY_STEP)
    topology = "name: dp\nworkload: mine.py:MyStep\npools: {t: {axes: {dp: 2}}}\n"
    (tmp_path / "dp.yaml").write_text(topology)
    odd = types.ModuleType("odd")
    odd.__file__ = "_odd.py"
    monkeypatch.setitem(sys.modules, "odd", odd)
    monkeypatch.chdir(tmp_path)
    asked = asked_of(make_spec(CheckOptions(topology=tmp_path / "dp.yaml"), prefix=[]))
    assert [name for name in asked if name.startswith("source file")] == ["source file mine.py"]


@pytest.mark.distributed
def test_one_rank_with_another_seed_under_torchrun(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(ODD_RANK.replace("CHANGE", repr(["--seed", "7"])))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(script), "--topology", str(shipped("three_pool_ones")), "--timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "PASS" not in done.stdout
    assert "rank 2 was asked for another check than rank 0: --seed: 7 there, 0 here" in done.stderr
    assert not list(tmp_path.glob(".sumgrad/runs/*/ranks/*.safetensors"))
