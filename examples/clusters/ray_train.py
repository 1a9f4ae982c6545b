"""The check on a Ray cluster: python ray_train.py my_step.yaml, or by `ray job submit`.

Ray Train places a worker for every rank of the topology and says which rank it is; the rank itself
is a process of its own beside it, as torchrun would start it, and its output is the worker's.
Program and YAML must lie at the same path on every node (a job's working directory does). Ends as
the check does: 0 PASS, 1 FAIL, 3 UNKNOWN.
"""

import os
import socket
import subprocess
import sys

import ray.train
from ray.train import ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from sumgrad.topology.pools import load_topology


def one_rank(config):
    ctx = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        first = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free.getsockname()[1]))
    address, port = first
    ranks = {
        "RANK": ctx.get_world_rank(), "WORLD_SIZE": ctx.get_world_size(),
        "LOCAL_RANK": ctx.get_local_rank(), "LOCAL_WORLD_SIZE": ctx.get_local_world_size(),
        "GROUP_RANK": ctx.get_node_rank(), "MASTER_ADDR": address, "MASTER_PORT": port,
    }  # fmt: skip
    command = [sys.executable, "-m", "sumgrad.run", *config["flags"]]
    env = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
    code = subprocess.run(command, env=env, check=False).returncode
    if ctx.get_world_rank() == 0:
        ray.get(config["answer"].put.remote(code))


@ray.remote(num_cpus=0)
class Answer:
    """The exit code of rank 0, which is the check's."""

    code = 3

    def put(self, code):
        self.code = code

    def get(self):
        return self.code


if __name__ == "__main__":
    path = os.path.abspath(sys.argv[1])
    answer = Answer.remote()
    flags = ["--topology", path, "--timeout", "300", *sys.argv[2:]]
    trainer = TorchTrainer(
        one_rank,
        train_loop_config={"flags": flags, "answer": answer},
        scaling_config=ScalingConfig(num_workers=load_topology(path).world_size),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()
    sys.exit(ray.get(answer.get.remote()))
