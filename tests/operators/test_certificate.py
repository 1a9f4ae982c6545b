"""Certificates of every kernel for four targets, in a process without the interpreter, no GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def certify(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sumgrad.kernels.certificate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    path = tmp_path_factory.mktemp("certificate") / "all.json"
    found = certify("--json", str(path))
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(path.read_text())["certificates"]


def kernels_in_source() -> set[str]:
    """Every function that is launched, by module: all of them need a certificate."""
    found = set()
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "launch":
                found.add(f"{path.stem}.{node.args[0].id}")
    return found - {"runtime.kernel"}


def test_every_launched_kernel_is_certified_for_every_dtype_and_target(certificates):
    got = {(c["kernel"], c["dtype"], c["target"]) for c in certificates}
    ours = {name for name in kernels_in_source() if not name.startswith("planted.")}
    assert len(ours) == 21
    for name in ours:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            for target in TARGETS:
                assert (name, dtype, target) in got


def test_no_float_atomics_and_counters_only_by_name(certificates):
    for c in certificates:
        if not c["kernel"].startswith("planted."):
            assert c["problems"] == []
            assert c["float_atomics"] == []
            if c["kernel"] != "rms_norm.rms_norm_bwd_last_block":
                assert c["integer_atomics"] == [], c
    ours = [c for c in certificates if not c["kernel"].startswith("planted.")]
    counted = [c for c in ours if c["integer_atomics"]]
    assert len(counted) == 4 * 4  # fused, by dtype and target


def test_every_plant_is_found_on_every_target(certificates):
    """A float atomic; a lock, behind which blocks add as they arrive; a bulk reduction."""
    planted = [c for c in certificates if c["kernel"].startswith("planted.")]
    found = {(c["kernel"].split(".")[1], c["target"]) for c in planted}
    everywhere = ("column_sum_by_float_atomics", "column_sum_behind_a_lock")
    assert found == {(name, t) for name in everywhere for t in TARGETS} | {
        ("tile_sum_by_bulk_reduce", "sm_90"),
        ("tile_sum_by_bulk_reduce", "sm_100"),
    }
    for c in planted:
        assert c["problems"], c
        assert not any("compile" in problem for problem in c["problems"]), c
    atomics = [c for c in planted if c["kernel"].endswith("float_atomics")]
    assert all(c["float_atomics"] for c in atomics)
    assert all(c["problems"][0].startswith("float atomic: ") for c in atomics)


def test_products_use_one_class_of_matrix_instruction(certificates):
    """16-bit products run on matrix units, and float32 is never rounded to tf32."""
    for c in certificates:
        products = c["kernel"] in ("linear.matmul", "linear.linear_dweight") or (
            c["kernel"].startswith("attention.") and "delta" not in c["kernel"]
        )
        assert bool(c["matrix"]) == products, c
        assert not any("tf32" in name or "xf32" in name for name in c["matrix"])
        if products and c["dtype"] == "bfloat16":
            assert c["matrix"] != ["fma"]


def test_a_kernel_that_does_not_compile_is_a_finding():
    code = (
        "from sumgrad.kernels.certificate import Variant, _certify_one\n"
        "v = Variant(name='swiglu.swiglu_fwd', dtype='float32', arguments={'gate': '*fp32'},"
        " constants={})\n"
        "print(_certify_one((v, 'sm_90')).problems)"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert "does not compile" in found.stdout


def test_an_interpreted_process_is_told_to_use_another():
    env = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "sumgrad.kernels.certificate", "--kernel", "rope"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert found.returncode == 1
    assert "without TRITON_INTERPRET=1" in found.stdout
