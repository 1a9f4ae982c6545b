"""The main job: every shipped topology passes, every planted fault is named, all roads agree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import MY_STEP, ROOT, RUNNABLE, shipped
from sumgrad.base.tolerances import FLOOR_FACTOR
from sumgrad.diagnose.verdict import judge
from sumgrad.faults.plan import plan_faults
from sumgrad.judge.knowledge import known_plan
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import Run, finish, run_check
from sumgrad.launch.judging import judge_directory
from sumgrad.launch.local.ports import held_port
from sumgrad.launch.matrix.run import Ran, cell_of, run_matrix
from sumgrad.launch.torchrun.agent import keeps_its_agent
from sumgrad.plan.schedule import compare_ledger
from sumgrad.record.directory import load_record

pytestmark = pytest.mark.distributed
FAST = ["three_pool", "three_pool_ones", "three_pool_empty"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_shipped_topology_passes(run_once, name):
    verdict, directory = run_once(name)
    assert verdict.status == "pass", (verdict.findings, verdict.reasons)
    assert verdict.exit_code == 0
    structure = next(t for t in verdict.tiers if t.name == "structure")
    assert structure.worst_rel <= 1e-12
    world = verdict.data["topology"]["world_size"]
    assert {o["status"] for o in verdict.data["outcomes"]} == {"ok"}
    assert {t["rank"] for t in verdict.data["tensors"]} == set(range(world))
    for tensor in verdict.data["tensors"]:
        if tensor["tier"] == "structure":
            assert f"{tensor['ratio']:.6f}" == "1.000000"
            assert tensor["smallest_scale_error_caught"] < 1e-9
    record = load_record(directory)
    for rank, held in record.ranks.items():
        for (tier, step), events in held.events.items():
            dtype = record.spec.tiers[tier]
            assert not compare_ledger(
                known_plan(record), rank, dtype, tier, events, alone_too=True
            ), step
            assert events


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(sumgrad_check, dtype):
    verdict = sumgrad_check("three_pool_square.yaml", dtype=dtype, tiers=("precision",))
    wide = dtype == "float64"  # 16-bit noise can hide a factor on a small term: then UNKNOWN
    assert verdict.status in ({"pass"} if wide else {"pass", "unknown"})


def test_state_carries_over_several_steps(run_once):
    verdict, _ = run_once("three_pool_ragged", steps=3)
    assert verdict.status == "pass"
    assert {t["step"] for t in verdict.data["tensors"]} == {0, 1, 2}


@pytest.mark.parametrize("fault", sorted(plan_faults()))
@pytest.mark.parametrize("name", FAST)
def test_every_plan_fault_is_named_or_invisible(run_once, name, fault):
    asked = {"steps": 2, "tiers": ("structure",)}
    _, clean = run_once(name, keep_partials=True, **asked)
    verdict, _ = run_once(name, fault=fault, reuse=clean, **asked)
    ran = Ran(fault=fault, record=None, verdict=verdict)
    cell = cell_of(name, load_record(clean), ran)
    assert cell.ok, cell
    if name == "three_pool":
        assert cell.result in ("killed", "law")
    if name == "three_pool_ones":
        assert cell.result == "killed" if fault in ("drop_message", "stale_buffer") else "invisible"
    assert verdict.data["fault_report"]["prediction"]["worst_of_threshold"] <= 1


def test_every_plan_fault_says_which_cause_names_it():
    assert all(fault.named for fault in plan_faults().values())


def test_avg_on_ci_in_numbers(run_once):
    verdict, _ = run_once("three_pool", fault="avg_on_ci", tiers=("structure",))
    assert {(c.params, c.term, c.producer) for c in verdict.coefficients} == {
        ("ci_fn", "imp", "ci"),
        ("ci_fn", "stoch", "block0"),
        ("ci_fn", "stoch", "block1"),
        ("ci_fn", "ppgd", "ppgd"),
    }
    assert {c.fraction for c in verdict.coefficients} == {"1/4"}
    (diagnosis,) = verdict.diagnoses
    assert diagnosis.symbol == "1/ci.dp"
    assert "AVG" in diagnosis.cause
    assert any("allreduce(AVG)" in text for text in diagnosis.because)


def test_faith_on_all_ranks_in_numbers(run_once):
    verdict, _ = run_once("three_pool", fault="faith_on_all_ranks", tiers=("structure",))
    assert {c.fraction for c in verdict.coefficients if c.term == "faith"} == {"2"}
    assert {c.fraction for c in verdict.coefficients if c.term != "faith"} == {"1"}
    (diagnosis,) = verdict.diagnoses
    assert diagnosis.ranks == (4, 5, 6, 7)
    assert "block0" in diagnosis.cause


def test_a_fault_only_the_precision_tier_sees_is_still_a_failure(run_once):
    verdict, _ = run_once("three_pool", fault="avg_on_ci", tiers=("precision",))
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "avg"


def test_judging_again_gives_the_same_verdict(run_once):
    for flags in ({}, {"fault": "avg_on_ci", "tiers": ("structure",)}):
        verdict, directory = run_once("three_pool", **flags)
        again = judge(load_record(directory))
        assert again.status == verdict.status
        for key in ("tiers", "tensors", "coefficients", "diagnoses", "findings"):
            assert again.data[key] == verdict.data[key], key
        assert json.loads((directory / "verdict.json").read_text()) == verdict.data


@pytest.fixture(scope="module")
def torchrun_record(tmp_path_factory):
    """The smallest shipped topology under torchrun."""
    out = tmp_path_factory.mktemp("torchrun") / "out"
    process = torchrun("three_pool_ones", "--out", str(out))
    return process, out


def torchrun(
    name: str | Path, *flags: str, num_ranks: int = 4, **more
) -> subprocess.CompletedProcess:
    path = shipped(name) if isinstance(name, str) else name
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(num_ranks), str(ROOT / "harness" / "run.py"), "--topology", str(path), *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **more)


def test_torchrun_gives_the_same_verdict(torchrun_record, run_once):
    process, out = torchrun_record
    assert process.returncode == 0, process.stderr[-3000:]
    assert "sumgrad: PASS (exit 0)" in process.stdout.splitlines()[-1]
    theirs = json.loads((out / "verdict.json").read_text())
    ours, _ = run_once("three_pool_ones")
    assert theirs["status"] == ours.status
    for key in ("tiers", "tensors"):
        assert theirs[key] == ours.data[key], key
    assert judge(load_record(out)).status == "pass"


def test_torchrun_with_a_fault(tmp_path):
    process = torchrun("three_pool_ones", "--fault", "drop_message", "--tiers", "structure",
                       "--out", str(tmp_path / "out"))  # fmt: skip
    assert process.returncode == 1
    assert "sumgrad: FAIL (exit 1)" in process.stdout
    assert "no crash: the verdict of sumgrad, printed above: <FAIL: " in process.stderr
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert verdict["diagnoses"][0]["kind"] == "lost_message"


FORWARD = """

class Forward(MyStep):
    def step(self, model, batch, ctx):
        lost = lambda _, inputs, out: out * (0.5 if ctx.rank == 1 else 1.0)
        hook = dict(model.named_modules())["module.0"].register_forward_hook(lost)
        super().step(model, batch, ctx)
        hook.remove()
"""


def test_torchrun_looks_into_a_failing_step(tmp_path):
    source, topology = tmp_path / "mine.py", tmp_path / "dp.yaml"
    source.write_text(MY_STEP + FORWARD)
    topology.write_text(f"workload: {source}:Forward\npools: {{train: {{axes: {{dp: 2}}}}}}\n")
    process = torchrun(topology, "--tiers", "structure", "--out", str(tmp_path / "o"), num_ranks=2)
    assert process.returncode == 1, process.stdout + process.stderr
    where = json.loads((tmp_path / "o" / "verdict.json").read_text())["where"]
    assert where["forward"]["ranks"] == [1], where


def test_torchrun_with_the_wrong_number_of_ranks(tmp_path):
    process = torchrun("three_pool_ones", "--out", str(tmp_path / "out"), num_ranks=2)
    assert process.returncode != 0
    assert "got 2 ranks from torchrun, expected 4" in process.stderr
    assert "--nproc-per-node 4" in process.stderr


@pytest.fixture
def port():
    with held_port() as held:
        yield held


def test_a_rank_that_reaches_no_rank_0_says_so(tmp_path, port):
    told = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [
        sys.executable, ROOT / "harness" / "run.py", "--topology", shipped("three_pool_ones"),
        "--timeout", "3",
    ]  # fmt: skip
    process = subprocess.run(
        command, env={**os.environ, **told}, capture_output=True, text=True, check=False,
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert process.returncode == 3
    assert "sumgrad: UNKNOWN: rank 1 on " in process.stderr
    assert f"did not reach 127.0.0.1:{port}, where the ranks meet" in process.stderr
    assert "internal error" not in process.stderr


ANOTHER_HOST = """
import os, sys
from sumgrad.cli.main import torchrun_main
if os.environ["RANK"] == "1":  # as the first rank of another host
    os.environ |= {"GROUP_RANK": "1", "LOCAL_RANK": "0"}
sys.exit(torchrun_main())
"""
ENDED = MY_STEP.replace(
    "    def step(self, model, batch, ctx):\n",
    "    def step(self, model, batch, ctx):\n"
    "        if ctx.rank == 1:\n"
    "            import os, signal, time\n"
    "            os.kill(os.getpid(), signal.SIGTERM)\n"
    "            time.sleep(30)\n",
)


def test_a_rank_of_another_host_that_is_told_to_end_does(tmp_path):
    assert "SIGTERM" in ENDED
    (tmp_path / "mine.py").write_text(ENDED)
    (tmp_path / "host.py").write_text(ANOTHER_HOST)
    (tmp_path / "dp.yaml").write_text("workload: mine.py:MyStep\npools: {train: {axes: {dp: 2}}}\n")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "host.py", "--topology", "dp.yaml", "--timeout", "60",
    ]  # fmt: skip
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
    )
    assert "sumgrad: UNKNOWN" in process.stdout
    assert "stopped by SIGTERM" in process.stdout
    assert "launch/guard.py" not in process.stderr
    assert process.returncode == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_torchrun_when_a_rank_is_killed(tmp_path, victim):
    """The ranks that are left write their records, and the lowest of them judges."""
    out, workload = tmp_path / "out", tmp_path / "killer.py"
    workload.write_text(KILLER.format(victim=victim))
    process = torchrun("three_pool_ones", "--out", str(out), "--workload", f"{workload}:Killer",
                       "--timeout", "30")  # fmt: skip
    assert process.returncode != 0
    told = process.stdout[-2000:] + process.stderr[-4000:]
    assert (out / "verdict.json").is_file(), told
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["status"] in ("unknown", "fail")
    status = [o["status"] for o in verdict["outcomes"]]
    assert status[victim] in ("missing", "killed")
    assert all(s != "ok" for s in status)  # all four joined the world's norm reduction


KILLER = """
import os, signal
from sumgrad.workloads.three_pool.workload import ThreePool

class Killer(ThreePool):
    def formulas(self, dtype, device, **more):
        if os.environ.get("RANK") == "{victim}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().formulas(dtype, device, **more)
"""


BLIND = """
import os, sys
import sumgrad.launch.torchrun.ranks
from sumgrad.cli.main import torchrun_main
sumgrad.launch.torchrun.ranks.sees = lambda directory: os.environ["RANK"] in ("0", "2")
sys.exit(torchrun_main())
"""


def test_torchrun_without_a_shared_directory(tmp_path):
    """Ranks 1 and 3 see another disk: their files travel through the store."""
    script, out = tmp_path / "blind.py", tmp_path / "out"
    script.write_text(BLIND)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(script), "--topology", str(shipped("three_pool_ones")), "--out", str(out),
    ]  # fmt: skip
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["status"] == "pass"
    assert [o["status"] for o in verdict["outcomes"]] == ["ok"] * 4


def test_the_agent_of_another_host_ends_with_the_verdict(tmp_path, port):
    """It would wait for minutes, for the agent that a FAIL has ended."""
    started = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", node,
                "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "2",
                str(ROOT / "harness" / "run.py"), "--topology", str(shipped("three_pool_ones")),
                "--fault", "drop_message", "--tiers", "structure", "--out", str(tmp_path / "out"),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for node in ("0", "1")
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [1, 1]
    assert "sumgrad: FAIL (exit 1)" in said[0]
    assert said[1] == ""


@pytest.mark.parametrize(("group", "local", "stays"), [
    ("0", "0", False), ("1", "0", True), ("1", "1", False), (None, "0", False), ("2", None, False),
])  # fmt: skip
def test_one_rank_of_each_other_host_stays(group, local, stays):
    told = {"GROUP_RANK": group, "LOCAL_RANK": local}
    assert keeps_its_agent({k: v for k, v in told.items() if v is not None}) == stays


def test_the_records_of_other_ranks_are_kept(tmp_path, sumgrad_check):
    """A workload that fails on one rank: UNKNOWN, with its traceback, and the others' gradients."""
    workload = tmp_path / "breaks.py"
    workload.write_text(BREAKS)
    verdict = sumgrad_check("three_pool_ones.yaml", workload=f"{workload}:Breaks", timeout_s=20)
    assert verdict.status in ("unknown", "fail")
    bad = [o for o in verdict.data["outcomes"] if o["status"] == "raised"]
    assert any("too few rows" in (o["stack"] or "") for o in bad)
    assert verdict.exit_code in (1, 3)


BREAKS = """
import torch.distributed as dist
from sumgrad.workloads.three_pool.workload import ThreePool, ThreePoolFormulas

class Breaks(ThreePool):
    def formulas(self, dtype, device, *, rounded_to=None):
        formulas = BreaksHere(self, dtype=dtype, device=device, rounded_to=rounded_to or dtype)
        return formulas

class BreaksHere(ThreePoolFormulas):
    def initial_state(self, term, rows):
        if term == "ppgd" and dist.is_initialized():
            raise RuntimeError("too few rows")
        return super().initial_state(term, rows)
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ImportError('no such thing')",
            r"cannot be imported: ImportError: no such thing (.*/mine.py:1\)$",
        ),
        ("x = 1", "has no Thing"),
        ("class Thing: pass", "raised TypeError"),
        (
            "class Thing:\n    def __init__(self, options, *, seed, where): pass",
            "is no workload: it lacks declaration, params, formulas",
        ),
    ],
)
def test_workloads_that_are_none(tmp_path, sumgrad_check, source, words):
    from sumgrad.base.errors import UserError

    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(UserError, match=words.replace("(", "\\(")):
        sumgrad_check("three_pool_ones.yaml", workload=f"{path}:Thing")


def test_a_workload_with_wrong_shapes(tmp_path, sumgrad_check):
    from sumgrad.base.errors import UserError

    path = tmp_path / "mine.py"
    path.write_text(
        "from sumgrad.workloads.three_pool.workload import ThreePool\n"
        "class Thing(ThreePool):\n"
        "    def params(self, step):\n"
        "        out = super().params(step)\n"
        "        out['ci.in.bias'] = out['ci.in.bias'][:-1]\n"
        "        return out\n"
    )
    with pytest.raises(UserError, match=r"'ci.in.bias' has shape \(15,\), declared \(16,\)"):
        sumgrad_check("three_pool_ones.yaml", workload=f"{path}:Thing")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gradient_that_is_not_finite(tmp_path, sumgrad_check, value):
    path = tmp_path / "mine.py"
    path.write_text(NOT_FINITE.format(value=value))
    verdict = sumgrad_check("three_pool_ones.yaml", workload=f"{path}:Thing", tiers=("structure",))
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "not_finite"
    assert any("emit:imp" in text for text in verdict.diagnoses[0].because)


NOT_FINITE = """
import torch.distributed as dist
from sumgrad.workloads.three_pool.workload import ThreePool, ThreePoolFormulas

class Thing(ThreePool):
    def formulas(self, dtype, device, *, rounded_to=None):
        return Odd(self, dtype=dtype, device=device, rounded_to=rounded_to or dtype)

class Odd(ThreePoolFormulas):
    def value(self, term, statistics, count):
        value = super().value(term, statistics, count)
        return value * float("{value}") if dist.is_initialized() else value
"""


def test_nothing_stays_behind_a_check_that_is_interrupted(tmp_path):
    """One last line, 128 + n, no verdict; nobody lives when it has ended, nothing is left."""
    number = signal.SIGTERM  # others: test_kills.py
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "sumgrad", "run", str(shipped("three_pool")), "--out",
               str(tmp_path / "out")]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        env={**os.environ, "TMPDIR": str(temporary), "INTERRUPTED": str(tmp_path)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / "ranks").glob("*.log")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, "")
    *progress, last = errors.splitlines()  # how far it is, said where the start takes long
    assert (
        last == f"sumgrad: interrupted by {number.name}; every rank was ended, no verdict was shown"
    )
    assert all(line.startswith("sumgrad: starting 10 ranks (") for line in progress)
    assert not started_with("INTERRUPTED", str(tmp_path))
    assert [n for n in os.listdir(temporary) if not n.startswith("torchinductor_")] == []


def started_with(variable: str, value: str) -> list[str]:
    """Processes that have this in their environment and are not dead."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{variable}={value}".encode() in file.read_bytes().split(b"\0"):
                found.append(file.parent.name)
        except OSError:
            continue
    return found


def test_a_full_disk(run_once, tmp_path, sumgrad_launcher):
    """A rank that cannot write its gradients raises; its verdict is not PASS."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to make a small file system")
    small = tmp_path / "small"
    small.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", small], check=False)
    if made.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        command = [sys.executable, "-m", "sumgrad", "run", str(shipped("three_pool")), "--tiers",
                   "structure", "--out", str(small / "out"), "--timeout", "30"]  # fmt: skip
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
        assert process.returncode in (2, 3), process.stdout + process.stderr
        assert "No space left" in process.stdout + process.stderr
    finally:
        subprocess.run(["umount", small], check=False)


def test_bits_do_not_depend_on_the_launcher(torchrun_record, run_once):
    _, out = torchrun_record
    _, ours = run_once("three_pool_ones")
    theirs, mine = load_record(out), load_record(ours)
    for rank, held in mine.ranks.items():
        for key, grads in held.grads.items():
            for name, grad in grads.items():
                assert torch.equal(grad, theirs.ranks[rank].grads[key][name])


@pytest.mark.distributed
def test_what_is_being_done_is_said_while_it_runs(tmp_path, sumgrad_launcher):
    said: list[str] = []
    path, slow = tmp_path / "dp.yaml", tmp_path / "slow.py"
    slow.write_text(
        f"{MY_STEP}\n\nclass Slow(MyStep):\n    def loss_sum(self, model, rows):\n"
        f"        time.sleep(0.15)\n        return super().loss_sum(model, rows)\n"
    )
    path.write_text(f"name: dp\nworkload: {slow}:Slow\npools:\n  train: {{axes: {{dp: 2}}}}\n")
    options = CheckOptions(topology=path, out=tmp_path / "run", timeout_s=240)
    run_check(options, launcher=sumgrad_launcher, progress=said.append)
    shown = "\n".join(said)
    assert "ranks ended; reference of step 0: the gradient over all rows" in shown
    assert not list((tmp_path / "run").glob("helpers/ranks/*.progress"))
    matrix = run_matrix(
        [path], faults=["avg:allreduce@dp", "skip:allreduce@dp"], seed=0, timeout_s=240,
        launcher=sumgrad_launcher, progress=said.append,
    )  # fmt: skip
    assert len(matrix.cells) > 2
    assert any(f"dp: fault 1 of {len(matrix.cells) - 1}, avg:allreduce@dp#0" in s for s in said)
    said.clear()
    assert judge_directory(tmp_path / "run", progress=said.append).status == "pass"
    assert any(s == "comparing 4 gradients of 2 ranks" for s in said), said


@pytest.mark.distributed
def test_where_memory_or_cores_are_short_the_reference_comes_after_the_ranks(
    tmp_path, sumgrad_launcher, monkeypatch
):
    said: list[str] = []
    for number, (room, cores, large, why) in enumerate([
        (1 << 50, 2, 1 << 30, ""),
        (1 << 20, 2, 1 << 30, "there is no memory for both at once"),
        (None, 2, 1 << 30, ""),
        (1 << 50, 2, 0, "they have all cores, and their memory is needed again"),
        (1 << 50, 8, 0, ""),
    ]):  # fmt: skip
        monkeypatch.setattr("sumgrad.launch.room.available_memory", lambda room=room: room)
        monkeypatch.setattr("sumgrad.launch.room._cores", lambda cores=cores: cores)
        monkeypatch.setattr("sumgrad.launch.room.LARGE", large)
        said.clear()
        options = CheckOptions(
            topology=shipped("data_parallel"), out=tmp_path / str(number), timeout_s=240
        )
        verdict, directory = run_check(options, launcher=sumgrad_launcher, progress=said.append)
        assert verdict.status == "pass"
        late = [text for text in said if "the reference, after the ranks" in text]
        assert late == ([f"the reference, after the ranks: {why}"] if why else [])
        assert len(list((directory / "helpers" / "ranks").glob("*.json"))) == 2
        assert {o["status"] for o in verdict.data["outcomes"]} == {"ok"}


def with_errors(directory: Path, tier: str, of_threshold: float) -> None:
    """A run whose reference was luckier: the worst errors of a tier are so far over its floors."""
    worst: dict[tuple[int, str], float] = {}
    for t in judge(load_record(directory)).data["tensors"]:
        if t["tier"] == tier:
            at = t["step"], t["name"]
            worst[at] = max(worst.get(at, 0.0), t["max_abs"])
    for path in directory.glob(f"reference_{tier}_*.json"):
        held = json.loads(path.read_text())
        step = held["step"]
        held["floor"] = {n: worst[step, n] / FLOOR_FACTOR / of_threshold for n in held["floor"]}
        held["scale"] = dict.fromkeys(held["scale"], 1e-12)
        path.write_text(json.dumps(held))


def test_an_error_near_its_threshold_is_held_against_more_noise(tmp_path, sumgrad_launcher):
    options = CheckOptions(topology=shipped("data_parallel"), out=tmp_path / "run")
    verdict, directory = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "pass"

    def judged_again() -> tuple[str, list[str]]:
        record, said = load_record(directory), list[str]()
        assert judge(record).status == "fail"
        run = Run(directory=directory, spec=record.spec, outcomes=record.outcomes)
        return finish(run, progress=said.append).status, said

    with_errors(directory, "precision", 2)
    assert judged_again()[0] == "pass"
    assert judge(load_record(directory)).status == "pass"
    with_errors(directory, "precision", 20)
    status, said = judged_again()
    assert status == "fail"
    assert not any("noise" in line for line in said)


SHY = """
import torch

from sumgrad.workloads.programs.data_parallel import DataParallel


class Shy(DataParallel):
    def step(self, model, batch, ctx):
        if torch.is_anomaly_enabled() and ctx.rank == 1:
            raise RuntimeError("not while somebody looks")
        super().step(model, batch, ctx)
        for p in model.parameters():
            p.grad *= 2
"""


@pytest.mark.distributed
def test_a_second_look_that_fails_is_said(tmp_path, sumgrad_launcher):
    """What the cause could not be told by; and so when the run is judged again."""
    (tmp_path / "shy.py").write_text(SHY)
    options = CheckOptions(
        topology=shipped("data_parallel"), workload=f"{tmp_path / 'shy.py'}:Shy", steps=1,
        tiers=("structure",), out=tmp_path / "run",
    )  # fmt: skip
    verdict, directory = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].factor == "2"
    for one in (verdict, judge_directory(directory)):
        (said,) = [w for w in one.warnings if "looks into its modules" in w]
        assert "rank 1 raised: RuntimeError: not while somebody looks" in said
        assert any("on one rank" in w for w in one.warnings)


def test_the_verdict_is_there_before_it_is_explained(tmp_path, sumgrad_launcher):
    """As where a job's time is over, or somebody has seen enough."""
    (tmp_path / "shy.py").write_text(SHY)
    options = CheckOptions(
        topology=shipped("data_parallel"), workload=f"{tmp_path / 'shy.py'}:Shy", steps=1,
        tiers=("structure",), out=tmp_path / "run",
    )  # fmt: skip

    def stops(step: str, *_: object) -> None:
        if step == "recovering the coefficients":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_check(options, launcher=sumgrad_launcher, progress=stops)
    assert json.loads((tmp_path / "run" / "verdict.json").read_text())["status"] == "fail"
    assert "FAIL" in (tmp_path / "run" / "report.md").read_text()
