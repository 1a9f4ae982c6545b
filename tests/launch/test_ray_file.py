"""examples/clusters/ray_train.py with a stand-in for Ray: real ranks, the check's exit code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import MY_STEP, ROOT

pytestmark = pytest.mark.distributed

RAY = """
import sys, threading, types

told, first, met = threading.local(), [], threading.Event()
ray = sys.modules["ray"] = types.ModuleType("ray")


class Handle:
    def __init__(self, held):
        self.held = held
    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda *words: getattr(self.held, name)(*words))


def remote(**_):
    return lambda kind: types.SimpleNamespace(remote=lambda: Handle(kind()))


def broadcast_from_rank_zero(value):
    if told.rank == 0:
        first.append(value)
        met.set()
    met.wait()
    return first[0]


class Context:
    get_world_rank = get_local_rank = lambda self: told.rank
    get_world_size = get_local_world_size = lambda self: told.size
    get_node_rank = lambda self: 0


class TorchTrainer:
    def __init__(self, loop, *, train_loop_config, scaling_config, torch_config):
        assert torch_config == {"backend": "gloo"}
        self.loop, self.config, self.size = loop, train_loop_config, scaling_config["num_workers"]

    def fit(self):
        def worker(rank):
            told.rank, told.size = rank, self.size
            self.loop(self.config)
        threads = [threading.Thread(target=worker, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def module(name, **held):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(held)
    return sys.modules[name]


ray.remote, ray.get = remote, lambda answer: answer
ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
ray.train = module("ray.train", ScalingConfig=dict, get_context=Context)
module("ray.train.collective", broadcast_from_rank_zero=broadcast_from_rank_zero)
module("ray.train.torch", TorchConfig=dict, TorchTrainer=TorchTrainer)
"""


@pytest.mark.parametrize(("flags", "code", "words"), [
    ((), 0, "sumgrad: PASS (exit 0)"),
    (("--fault", "divide_by_world"), 1, "sumgrad: FAIL (exit 1)"),
])  # fmt: skip
def test_it_ends_as_the_check_does(flags, code, words, tmp_path):
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "mine.py").write_text(MY_STEP)
    (tmp_path / "dp.yaml").write_text("workload: mine.py:MyStep\npools: {train: {axes: {dp: 3}}}\n")
    process = subprocess.run(
        [sys.executable, ROOT / "examples" / "clusters" / "ray_train.py", "dp.yaml", *flags],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=200, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == code, process.stderr[-2000:]
    assert words in process.stdout
