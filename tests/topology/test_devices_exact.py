"""Where ranks compute: as asked, as there is. GPUs are played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sumgrad.base import devices
from sumgrad.base.devices import chosen_device, has_gpu_each, take_device
from sumgrad.base.errors import UserError
from sumgrad.topology.pools import load_topology


@pytest.mark.parametrize(
    ("asked", "gpu", "wanted"),
    [("cpu", False, "cpu"), ("cpu", True, "cpu"), ("auto", False, "cpu"), ("auto", True, "cuda"),
     ("cuda", True, "cuda")],
)  # fmt: skip
def test_a_device_is_what_is_asked_for_and_there(asked, gpu, wanted, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: gpu)
    monkeypatch.setattr(devices.metadata, "version", lambda _: "2.13.0+cu130")
    assert chosen_device(asked, "--device") == wanted


def test_a_gpu_that_is_not_there_is_an_error_at_its_place(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    path = tmp_path / "t.yaml"
    path.write_text("workload: ddp\ndevice: cuda\npools:\n  train: {axes: {dp: 2}}\n")
    topology = load_topology(path)
    with pytest.raises(UserError, match=r"t.yaml:2: device: cuda, and this machine has no GPU"):
        topology.chosen_device(None)
    with pytest.raises(UserError, match="--device: cuda, and this machine has no GPU"):
        topology.chosen_device("cuda")
    assert topology.chosen_device("auto") == topology.chosen_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("visible", "torch_version", "why"),
    [("", "2.13.0", "shows none"), ("-1", "2.13.0", "shows none"), ("0", "2.13.0+cpu", "CPUs only"),
     ("1", "2.13.0", "")],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_none(visible, torch_version, why, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices.metadata, "version", lambda _: torch_version)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not why:
        assert chosen_device("auto", "") == chosen_device("cuda", "") == "cuda"
        return
    assert chosen_device("auto", "--device") == chosen_device("cpu", "--device") == "cpu"
    with pytest.raises(UserError, match=why):
        chosen_device("cuda", "--device")


def test_gpus_are_dealt_to_the_ranks_of_a_machine_in_turn(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for rank, wanted in (("0", 0), ("1", 1), ("3", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert take_device("cuda") == torch.device("cuda", wanted) == taken[-1]
    monkeypatch.delenv("LOCAL_RANK")
    assert take_device("cuda") == torch.device("cuda", 0)
    assert take_device("cpu") == torch.device("cpu")
    assert len(taken) == 4
    assert torch.backends.cudnn.allow_tf32 is False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="this torch sees no GPU"):
        take_device("cuda")


def test_nccl_needs_a_gpu_for_every_rank_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for ranks, wanted in (("3", True), ("4", True), ("5", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert has_gpu_each() is wanted
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert has_gpu_each()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not has_gpu_each()
