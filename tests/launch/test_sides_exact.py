"""When the ranks of a script have all ended, and where they meet."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from sumgrad.launch.script.sides import _all_ended_well
from sumgrad.launch.script.watched import in_front
from sumgrad.ledger.process_group import BACKEND
from sumgrad.record.endings import rank_file


def ended(directory, *ranks, claimed=()):
    """ranks: (status, how many there are) of each that has an end record."""
    (directory / "ranks").mkdir(exist_ok=True)
    for rank, (status, size) in enumerate(ranks):
        result = {"world_size": size} if size else None
        record = {"rank": rank, "status": status, "result": result}
        rank_file(directory, rank, ".json").write_text(json.dumps(record))
        rank_file(directory, rank, ".claim").touch()
    for rank in claimed:
        rank_file(directory, rank, ".claim").touch()
    return _all_ended_well(directory)


@pytest.mark.parametrize(("ranks", "claimed", "all_of_them"), [
    ([("ok", 2), ("ok", 2)], (), True),
    ([("ok", 1)], (), True),
    ([("ok", 2)], (), False),
    ([("ok", 2)], (1,), False),
    ([("ok", 1)], (1,), False),
    ([("ok", 2), ("raised", 0)], (), False),
    ([], (), False),
    ([], (0,), False),
])  # fmt: skip
def test_all_ranks_of_a_side_have_ended_well(ranks, claimed, all_of_them, tmp_path):
    assert ended(tmp_path, *ranks, claimed=claimed) is all_of_them


@pytest.mark.parametrize(("args", "kwargs", "backend", "file"), [
    (("gloo",), {}, BACKEND, None),
    (("GLOO",), {}, BACKEND, None),
    ((), {"backend": "cpu:Gloo"}, BACKEND, None),
    (("mpi",), {}, "mpi", None),
    (("gloo", "file:///x/y"), {}, BACKEND, "/x/y"),
    (("gloo",), {"init_method": "file:///x/y?rank=1"}, BACKEND, "/x/y"),
    (("gloo", "tcp://a:1"), {}, BACKEND, None),
])  # fmt: skip
def test_groups_over_gloo_are_recorded_and_their_file_is_known(
    args, kwargs, backend, file, monkeypatch
):
    begun, said = [], []

    def own(backend=None, *args, **kwargs):
        begun.append(backend)

    monkeypatch.setattr(dist, "init_process_group", own)
    monkeypatch.setattr(dist.distributed_c10d, "init_process_group", own)
    in_front.record_groups(lambda: said.append("made"), said.append)
    dist.init_process_group(*args, **kwargs)
    assert begun == [backend]
    assert said == [*filter(None, [file]), "made"]
