"""The three-pool workload on Triton's kernels: the verdicts of torch's, and no place to hide."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from mini import MINI, ONE_POOL
from sumgrad.base import devices
from sumgrad.base.errors import UserError
from sumgrad.base.tolerances import KERNEL_CAP, noise_floor, with_kernels
from sumgrad.cli.main import main
from sumgrad.launch.ask import CheckOptions, make_spec
from sumgrad.workloads.three_pool import model
from sumgrad.workloads.three_pool.kernels import triton_operators

WRONG = '''
from dataclasses import replace
from sumgrad.workloads.three_pool import kernels as three_pool_kernels
from sumgrad.workloads.three_pool.workload import ThreePool
from sumgrad.workloads.three_pool import model

class Mine(ThreePool):
    """Its Triton linear layer is wrong by one part in 10^10; torch's is right."""
    def formulas(self, dtype, device, *, rounded_to=None, kernels="torch"):
        out = super().formulas(dtype, device, rounded_to=rounded_to, kernels=kernels)
        if kernels == "triton":
            right = out.ops.linear
            out.ops = replace(out.ops, linear=lambda x, w: right(x, w) * (1 + 1e-10))
        return out
'''


def shapes(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*s, generator=generator, dtype=torch.float64) for s in sizes]


@pytest.mark.parametrize("copies", [(), (3,)])
def test_the_operators_agree_with_torchs(copies):
    """Values and gradients of valid positions, with leading copies and padding on the right."""
    ours, valid = triton_operators(), torch.arange(5) < torch.tensor([5, 1, 3])[:, None]
    keep = valid[..., None].to(torch.float64)
    x, w, scale, seed = shapes((*copies, 3, 5, 6), (4, 6), (6,), (*copies, 3, 5, 4))
    q, k, v, do = shapes((3, 5, 6), (3, 5, 6), (*copies, 3, 5, 6), (*copies, 3, 5, 6))

    def gradients(ops, call, inputs, seed):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = call(ops, *leaves) * keep
        return [y, *torch.autograd.grad(y, leaves, seed)]

    calls = [
        (lambda ops, x, w: ops.linear(x, w), (x, w), seed),
        (lambda ops, x, w: ops.rms_norm(x, w), (x, scale), x),
        (lambda ops, x: ops.rms_norm(x, None), (x,), x),
        (lambda ops, q, k, v: ops.attention(q, k, v, valid, 2), (q, k, v), do),
    ]
    for call, inputs, wanted in calls:
        for a, b in zip(
            gradients(ours, call, inputs, wanted),
            gradients(model.TORCH, call, inputs, wanted),
            strict=True,
        ):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.distributed
def test_the_published_topology_runs_on_triton_and_passes(tmp_path, capsys):
    path = tmp_path / "verdict.json"
    run = tmp_path / "run"
    code = main(
        ["run", "topologies/three_pool_published.yaml", "--json", str(path), "--out", str(run)]
    )
    assert code == 0, capsys.readouterr().out
    assert json.loads((run / "run.json").read_text())["kernels"] == "triton"
    verdict = json.loads(path.read_text())
    assert set(verdict["tiers"]) == {"structure", "precision"}
    assert {t["status"] for t in verdict["tensors"]} == {"pass"}
    assert max(t["max_abs"] / t["threshold"] for t in verdict["tensors"]) < 0.9
    assert verdict["tiers"]["structure"]["worst_rel"] < 1e-13


@pytest.mark.distributed
def test_a_fault_on_triton_is_named_as_on_torch(sumgrad_check):
    causes = []
    for kernels in ("torch", "triton"):
        verdict = sumgrad_check(
            "three_pool_published.yaml", fault="faith_on_all_ranks", kernels=kernels,
            tiers=("structure",), timeout_s=300,
        )  # fmt: skip
        assert verdict.status == "fail", verdict.reasons
        causes.append([(d.kind, d.cause) for d in verdict.diagnoses])
    assert causes[0] == causes[1]


@pytest.mark.distributed
def test_a_wrong_kernel_cannot_hide_in_its_own_noise_floor(tmp_path, sumgrad_check):
    source = tmp_path / "mine.py"
    source.write_text(WRONG)
    found = {
        kernels: sumgrad_check(
            "three_pool_published.yaml",
            workload=f"{source}:Mine",
            kernels=kernels,
            tiers=("structure",),
            timeout_s=300,
        ).status
        for kernels in ("torch", "triton")
    }
    assert found == {"torch": "pass", "triton": "fail"}


@pytest.mark.parametrize(
    ("flag", "name", "wanted"),
    [
        (None, "three_pool", "torch"),
        ("auto", "three_pool", "torch"),
        ("triton", "three_pool", "triton"),
        (None, "three_pool_published", "triton"),
        ("auto", "three_pool_published", "triton"),
        ("torch", "three_pool_published", "torch"),
    ],
)
def test_flag_and_yaml_choose_the_kernels(flag, name, wanted):
    options = CheckOptions(topology=ROOT / "topologies" / f"{name}.yaml", kernels=flag)
    spec = make_spec(options, prefix=["sumgrad", "run"])
    assert spec.kernels == wanted


def test_on_a_gpu_the_kernels_are_tritons_where_a_workload_has_them(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_lacks", lambda: "")
    options = CheckOptions(topology=ROOT / "topologies" / "three_pool.yaml", device="cuda")
    spec = make_spec(options, prefix=["sumgrad", "run"])
    assert (spec.kernels, spec.device) == ("triton", "cuda")
    assert spec.reproduce.endswith("--device cuda")
    torchs = replace(options, kernels="torch")
    assert make_spec(torchs, prefix=["sumgrad", "run"]).kernels == "torch"
    with pytest.raises(UserError, match=r"--tiers bitwise: .* the ranks are on cuda"):
        make_spec(replace(options, tiers=("bitwise",)), prefix=["sumgrad", "run"])
    source, topology = tmp_path / "mini.py", tmp_path / "mini.yaml"
    source.write_text(MINI)
    topology.write_text(ONE_POOL + "device: auto\n")
    own = CheckOptions(topology=topology, workload=f"{source}:Mini")
    spec = make_spec(own, prefix=["sumgrad", "run"])
    assert (spec.kernels, spec.device) == ("torch", "cuda")


def test_a_kernels_error_raises_a_floor_by_little_only():
    known = noise_floor(1e-15, 1.0, "float64")
    assert with_kernels(1e-15, 0.0, 1.0, "float64") == 1e-15
    assert with_kernels(1e-15, 2e-15, 1.0, "float64") == 2e-15
    assert with_kernels(1e-15, 1e-3, 1.0, "float64") == KERNEL_CAP * known


@pytest.mark.distributed
def test_a_workload_without_kernels_says_so(tmp_path, sumgrad_check):
    source, topology = tmp_path / "mini.py", tmp_path / "mini.yaml"
    source.write_text(MINI)
    topology.write_text(ONE_POOL + "kernels: triton\n")
    with pytest.raises(UserError, match=r"mini.yaml:5.*takes no `kernels`"):
        sumgrad_check(topology, workload=f"{source}:Mini")
    assert sumgrad_check(topology, workload=f"{source}:Mini", kernels="torch").status == "pass"
