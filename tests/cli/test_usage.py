"""As a stranger uses it: names without paths, files beside files, lines to paste, the README."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, shipped
from rich.console import Console
from sumgrad.base.commands import command_line, sumgrad_command, torchrun_prefix
from sumgrad.base.errors import UserError
from sumgrad.cli.arguments import make_parser
from sumgrad.cli.main import main
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.report.terminal import print_report
from sumgrad.subjects.loading import find_class, import_file
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import find_topology

README = (ROOT / "README.md").read_text()
POOL = "pools: {train: {axes: {dp: 2}}}\n"


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working directory; the path and the modules are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


# ---- help --------------------------------------------------------------------------------------


def test_every_flag_has_a_help_and_every_verb_examples_that_parse():
    parser = make_parser()
    (verbs,) = [a for a in parser._actions if isinstance(a.choices, dict)]
    for name, verb in verbs.choices.items():
        assert all(action.help for action in verb._actions if action.option_strings), name
        examples = re.findall(r"^  (sumgrad .*?)\s+# \S", verb.epilog, flags=re.M)
        assert examples, name
        for example in examples:
            parser.parse_args(shlex.split(example)[1:])


# ---- names of topologies -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["three_pool", "three_pool.yaml", "three_pool.yml"])
def test_shipped_names_need_no_path(name, here, capsys):
    assert find_topology(Path(name)) == shipped("three_pool")
    assert run("plan", name, "--quiet") == 0
    assert "PROVED for 10 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("local", ["three_pool", "three_pool.yaml"])
def test_a_file_here_wins(local, here, capsys):
    shutil.copy(shipped("three_pool_ones"), here / local)
    assert run("plan", "three_pool", "--quiet") == 0
    assert "PROVED for 4 ranks" in capsys.readouterr().out


def test_a_folder_of_a_shipped_name_does_not_hide_it(here):
    (here / "ddp").mkdir()
    assert find_topology(Path("ddp")) == shipped("ddp")


@pytest.mark.parametrize("verb", ["run", "plan", "faults"])
def test_an_unknown_name_says_what_is_near(verb, here, capsys):
    assert run(verb, "three_pol") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sumgrad: three_pol: no such file, and no shipped topology of that name")
    assert "such as three_pool" in line
    assert run(verb, "folder/three_pool.yaml") == 2
    assert "folder/three_pool.yaml: no such file" in capsys.readouterr().err


def test_a_wheel_has_the_topologies(tmp_path):
    """Built and unpacked, the package finds its own; nothing of the checkout is on the path."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
             "--wheel-dir", str(tmp_path), str(ROOT)]  # fmt: skip
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=tmp_path)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    script = (
        "import sumgrad; from pathlib import Path; "
        "from sumgrad.topology.pools import load_topology; "
        "from sumgrad.topology.shipped import find_topology as find; "
        "print(sumgrad.__file__, load_topology(find(Path('three_pool'))).world_size)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.stdout == f"{tmp_path}/site/sumgrad/__init__.py 10\n", process.stderr


# ---- topologies that say less --------------------------------------------------------------------


def test_pools_alone_are_a_topology(here):
    (here / "my-small.topology.yaml").write_text(POOL)
    topology = load_topology(here / "my-small.topology.yaml")
    assert (topology.name, topology.workload) == ("my_small_topology", None)
    (here / "4.yaml").write_text(POOL)
    assert load_topology(here / "4.yaml").name == "t_4"
    (here / "pools.yaml").write_text("pools: {ci: {axes: {dp: 2}}, block0: {role: block, axes: "
                                     "{dp: 1}}, ppgd: {axes: {dp: 1}}}\n")  # fmt: skip
    assert run("plan", "pools.yaml", "--workload", "three_pool", "--quiet") == 0


@pytest.mark.parametrize("verb", ["run", "plan", "faults"])
def test_without_a_workload_the_place_is_named(verb, here, capsys):
    (here / "t.yaml").write_text("# nothing\n" + POOL)
    assert run(verb, "t.yaml") == 2
    message = "sumgrad: t.yaml:2: workload: missing; name one here or with --workload\n"
    assert capsys.readouterr().err == message


PROGRAM = """
import torch
from torch import nn
from helper import scale

class MyStep:
    def build(self):
        torch.manual_seed(0)
        return nn.Linear(2, 1)
    def batch(self):
        return {"x": torch.arange(10.0).reshape(5, 2)}
    def loss_sum(self, model, rows):
        return scale(model(rows["x"])).sum(), len(rows["x"])
    def step(self, model, batch, ctx):
        from late import summed
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / 5).backward()
        summed(model)
"""
LATE = """
import torch.distributed as dist

def summed(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
"""


@pytest.fixture
def beside(here) -> Path:
    """A YAML, its Program and the Program's neighbours in a folder that is not the working one."""
    folder = here / "deep"
    folder.mkdir()
    (folder / "t.yaml").write_text("workload: mine.py:MyStep\n" + POOL)
    (folder / "mine.py").write_text(PROGRAM)
    (folder / "helper.py").write_text("def scale(x):\n    return 2 * x\n")
    (folder / "late.py").write_text(LATE)
    (folder / "random.py").write_text("raise SystemExit('this is not the standard library')\n")
    return folder


@pytest.mark.distributed
def test_a_program_imports_its_neighbours_everywhere(beside, sumgrad_launcher):
    """In this process, on ranks, in the reference; and its folder hides no standard module."""
    options = CheckOptions(topology=Path("deep/t.yaml"), tiers=("structure",), out=Path("out"))
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "pass", (verdict.reasons, verdict.findings)


def test_the_path_hides_neither_python_nor_us(beside):
    find_class(f"{beside}/mine.py:MyStep", "--workload")
    place = sys.path.index(str(beside))
    assert place > sys.path.index(os.path.dirname(os.__file__))
    assert sys.path.count(str(beside)) == 1
    assert str(ROOT / "harness") not in sys.path
    import_file(ROOT / "harness" / "convention.py")
    assert str(ROOT / "harness") not in sys.path


def test_neighbours_of_the_same_name_are_not_mixed_up(here):
    for number in (1, 2):
        folder = here / f"w{number}"
        folder.mkdir()
        (folder / "mine.py").write_text("from helper import VALUE\n")
        (folder / "helper.py").write_text(f"VALUE = {number}\n")
    found = [import_file(here / f"w{number}" / "mine.py").VALUE for number in (1, 2, 1)]
    assert found == [1, 2, 1]


def test_a_workload_is_looked_for_beside_the_yaml_first(beside, here):
    assert load_topology(Path("deep/t.yaml")).workload == "deep/mine.py:MyStep"
    (here / "other.py").write_text("class Here: pass\n")
    (beside / "u.yaml").write_text("workload: other.py:Here\n" + POOL)
    assert load_topology(Path("deep/u.yaml")).workload == "other.py:Here"
    (beside / "other.py").write_text("class Here: pass\n")
    assert load_topology(Path("deep/u.yaml")).workload == "deep/other.py:Here"


# ---- lines that can be pasted --------------------------------------------------------------------


def test_command_lines_name_this_installation(monkeypatch, tmp_path):
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", folder)
    monkeypatch.setattr(sys, "argv", ["/x/sumgrad"])
    assert sumgrad_command() == ["sumgrad"]
    monkeypatch.setattr(sys, "argv", ["/x/sumgrad/__main__.py"])
    assert sumgrad_command() == [Path(sys.executable).name, "-m", "sumgrad"]
    assert torchrun_prefix(3)[:4] == ["torchrun", "--standalone", "--nproc-per-node", "3"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sumgrad_command() == [sys.executable, "-m", "sumgrad"]
    assert torchrun_prefix(3)[0] == f"{folder}/torchrun"
    monkeypatch.setattr(sys, "argv", ["/x/sumgrad"])
    assert sumgrad_command() == [f"{folder}/sumgrad"]
    assert command_line(["a", Path("b c"), "$d"]) == "a 'b c' '$d'"


@pytest.mark.distributed
def test_the_reproduce_line_of_python_m_runs(here, monkeypatch, sumgrad_launcher):
    """No script on the path, a topology in a folder whose name a shell would split."""
    folder = here / "a folder; $HOME"
    folder.mkdir()
    shutil.copy(shipped("three_pool_ones"), folder / "t.yaml")
    monkeypatch.setattr(sys, "argv", ["sumgrad/__main__.py"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = folder.relative_to(here) / "t.yaml"
    options = CheckOptions(topology=path, tiers=("structure",), out=here / "out", timeout_s=240)
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    out = io.StringIO()
    print_report(verdict, Console(file=out, width=40))  # a narrow terminal must not cut it in lines
    (line,) = [x for x in out.getvalue().splitlines() if x.startswith("reproduce  ")]
    line = line.removeprefix("reproduce  ")
    assert line.startswith(f"{sys.executable} -m sumgrad run ")
    again = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"reproduce  {line}" in again.stdout.splitlines()


# ---- standard output -----------------------------------------------------------------------------


def test_json_to_standard_output_stands_alone(here, capsys):
    assert run("plan", "three_pool", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["holds"]
    assert "PROVED" in err
    assert run("list", "--json", "-") == 0
    assert "topologies" in json.loads(capsys.readouterr().out)
    assert list(here.iterdir()) == []


@pytest.mark.distributed
def test_results_of_a_run_to_standard_output(run_once, here, capsys):
    _, directory = run_once("three_pool_ones")
    assert run("judge", directory, "--json", "-") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "pass"
    assert "reproduce" in err
    assert err.splitlines()[-1].startswith("sumgrad: PASS (exit 0)")
    assert run("report", directory, "--junit", "-", "--quiet") == 0
    assert capsys.readouterr().out.startswith("<testsuite ")
    assert run("report", directory, "--junit", "-", "--json", "-") == 2
    assert "only one of" in capsys.readouterr().err


# ---- a directory twice ---------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.distributed
@pytest.mark.parametrize("torchrun", [False, True], ids=["local", "torchrun"])
def test_out_twice_is_refused_and_changes_nothing(torchrun, run_once, here, capfd):
    _, stored = run_once("ddp")
    out = Path(shutil.copytree(stored, here / "out"))
    (here / "two.yaml").write_text("workload: ddp\n" + POOL)
    before = contents(out)
    flags = ["--out", str(out), "--tiers", "structure"]
    if torchrun:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "2", str(ROOT / "harness" / "run.py"), "--topology",
                   "two.yaml", *flags]  # fmt: skip
        assert subprocess.run(command, check=False, timeout=300).returncode == 1
    else:
        assert run("run", "two.yaml", *flags) == 2
    line = f"sumgrad: --out {out}: already holds a stored run; stored runs are not overwritten"
    told = [text for text in capfd.readouterr().err.splitlines() if text.startswith(line)]
    assert len(told) == 1
    assert contents(out) == before


@pytest.mark.distributed
def test_out_with_other_files_names_them(tmp_path, sumgrad_launcher):
    for name in "dcba":
        (tmp_path / name).touch()
    options = CheckOptions(topology=shipped("three_pool_ones"), out=tmp_path)
    with pytest.raises(UserError, match="already holds a, b, c and 1 more"):
        run_check(options, launcher=sumgrad_launcher)
    assert sorted(p.name for p in tmp_path.iterdir()) == list("abcd")


# ---- README --------------------------------------------------------------------------------------


def block(language: str, word: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)
    (text,) = [text for text in found if word in text]
    return text


@pytest.mark.distributed
@pytest.mark.parametrize("hook", [True, False], ids=["as printed", "without the hook"])
def test_the_step_of_the_readme_runs_as_printed(hook, here, sumgrad_launcher):
    source = block("python", "class MyStep")
    if not hook:
        source = re.sub(r"        ddp\.register_comm_hook\(.*\n", "", source)
        assert "register_comm_hook" not in source
    (here / "mine.py").write_text(source)
    (topology,) = re.findall(r"With `dp.yaml`, `(.*)`", README)
    (here / "dp.yaml").write_text(topology)
    options = CheckOptions(topology=Path("dp.yaml"), workload="mine.py:MyStep", out=here / "out")
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == ("pass" if hook else "fail"), verdict.reasons
    if not hook:
        told = "\n".join([verdict.diagnoses[0].cause, *verdict.diagnoses[0].because,
                          *verdict.warnings])  # fmt: skip
        (at,) = set(re.findall(r"at mine\.py:\d+ already", told))
        for words in ("gradients enter the all-reduce over dp (ranks 0-2) at mine.py:",
                      at, "already multiplied by 0.333333, which makes the SUM an average",
                      "the reference's times 1/3 on all ranks",
                      "divides by its 3 ranks what it sums, unless a hook does otherwise: multiply",
                      "on one rank the step agrees with loss_sum"):  # fmt: skip
            assert words in " ".join(told.split())
            assert words in " ".join(README.split())


def test_how_the_cost_grows_is_as_measured():
    page = (ROOT / "docs" / "programs.md").read_text()
    for r in data("benchmark_growth")["rows"]:
        line = (
            f"| {r['parameters'] / 1e6:.1f} M, {r['layout'].upper()} | {r['ranks']} "
            f"| {r['rows']} x {r['length']} | {r['plain_step_s']:.1f} s | {r['check_s']:.0f} s "
            f"| {r['plain_gib']:.1f} and {r['check_gib']:.1f} GiB | {r['disk_gib']:.2f} GiB |"
        )
        assert line in page
        assert r["status"] == "pass"


def data(name: str) -> dict:
    return json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())


def figures() -> dict[str, str]:
    """What the pages say of their data, with the numbers that the data have."""
    launch, triton = data("benchmark_launch"), data("false_alarms_triton")
    clean, matrix = data("false_alarms"), data("kill_matrix")
    ddp, fsdp2 = data("benchmark_cost")["rows"]
    scripts = data("diff_scripts")
    start, check = launch["start_up_10_ranks_s"], launch["whole_check_three_pool_s"]
    rows, counts = clean["rows"], matrix["counts"]
    largest = max(max(r[t]["max_of_threshold"] for t in ("structure", "precision")) for r in rows)
    tensors = sum(r[t]["tensors"] for r in rows for t in ("structure", "precision"))
    unknown = sum(r["unknown"] for r in rows if r["dtype"] == "bfloat16")
    half = sum(r["runs"] for r in rows if r["dtype"] == "bfloat16")
    wide = next(g for g in launch["growing"] if g["ranks"] == 56)
    most = max(triton["rows"][0][t]["max_of_threshold"] for t in ("structure", "precision"))
    name, dtype = "three_pool_published", "float32"
    published = next(r["precision"] for r in rows if (r["topology"], r["dtype"]) == (name, dtype))
    norm, l2 = published["same_dtype_max_norm"], published["same_dtype_l2"]
    kills = counts["killed"] + counts["law"] + counts["misnamed"]
    cells = matrix["cells"]
    cells = cells if isinstance(cells, int) else len(cells)
    own = [r for r in rows if r["dtype"] == "float32"]
    floor = [
        1 / statistics.median(r[tier]["median_of_threshold"] for r in own)
        for tier in ("structure", "precision")
    ]
    return {
        **{f"cost of {row['layout']}":
           f"| {row['plain_step_s']:.1f} s | {row['check_s']:.0f} s | 20 s + "
           f"{row['steps_beyond_20_s']:.0f} steps | {row['plain_gib']:.1f} and "
           f"{row['check_gib']:.1f} GiB | {row['disk_gib']:.2f} GiB |" for row in (ddp, fsdp2)},
        "curves": f"{scripts['bugs_with_the_same_losses']} of the {scripts['bugs']} mistakes",
        "watched": f"A watched step takes {data('benchmark_diff')['ratio']:.2f} times a plain one",
        "ranks": f"| 10 trivial ranks | {start['local_warm_median']:.2f} s | "
                 f"{start['local_cold']:.1f} s | {start['torchrun_again'] + 1e-9:.1f} s |",
        "check": f"| the whole three_pool check | {check['local_warm_median']:.1f} s | "
                 f"{check['local_cold']:.1f} s | {check['torchrun_again']:.1f} s |",
        "wide": f"56 ranks: {wide['wall_s']:.1f} s and {wide['peak_pss_mib'] / 1024:.1f} GiB",
        "runs": f"no false FAIL in {sum(r['runs'] for r in rows)} runs and {tensors:,} tensor",
        "median": f"the median error is 1/{floor[0]:.0f} of its threshold in float64, "
                  f"1/{floor[1]:.0f} in float32, the largest {largest:.2f} of it",
        "unknown": f"In bfloat16 {unknown} of {half} runs are UNKNOWN",
        "triton": f"no alarm, the largest error {most:.2f} of its threshold",
        "published": f"is {norm['median']:.1e} (median) and {norm['max']:.1e} (maximum) in max "
                     f"norm, {l2['median']:.1e} and {l2['max']:.1e} in L2",
        "matrix": f"(20 topologies, {cells - counts['clean']:,} planted faults;",
        "invisible": f"{counts['invisible']} were invisible where they were planted and passed, "
                     f"{counts['died']} ended the ranks, and of {kills:,} kills "
                     f"{matrix['share_named']:.1%} were named right",
        "alone": f"clean run beside them, {matrix['share_named_alone']:.0%} of the Programs'",
    }  # fmt: skip


def test_the_figures_of_the_pages_are_those_of_their_data():
    pages = [
        README,
        *(
            (ROOT / "docs" / f"{name}.md").read_text()
            for name in ("measured", "faults", "programs", "causes", "scripts")
        ),
    ]
    text = " ".join(" ".join(pages).split())

    def plain(words: str) -> str:
        return re.sub(r"(\d)%", r"\1 %", re.sub(r"e-0(\d)", r"e-\1", words))

    missing = [name for name, words in figures().items() if plain(words) not in text]
    assert not missing, [plain(figures()[name]) for name in missing]


def test_the_picture_of_the_readme_is_drawn_from_its_data():
    draw = import_file(ROOT / "scripts" / "picture.py")
    verdict = json.loads(draw.DATA.read_text())
    assert draw.PICTURE.read_text() == draw.drawn(verdict)
    assert verdict["status"] == "fail"
    cause = verdict["diagnoses"][0]["cause"]
    assert "gradients enter the all-reduce over ranks" in cause
    assert "docs/pictures/fail.svg" in README


def test_every_command_of_the_readme_is_one(here):
    from sumgrad.cli.arguments import make_parser

    page = README + (ROOT / "docs" / "commands.md").read_text()
    lines = re.findall(r"^    (sumgrad \w.*?)(?:\s+#.*)?$", page, flags=re.M)
    assert len(lines) >= 16
    for line in lines:
        args = make_parser().parse_args(shlex.split(line)[1:])
        for path in [getattr(args, "topology", None)]:
            if path and path.name != "dp.yaml":
                find_topology(path)


@pytest.mark.parametrize("verb", [["run", "ddp"], ["faults", "ddp"]])
def test_the_ranks_server_starts_before_this_process_imports_torch(verb):
    """Both take seconds for that."""
    script = (
        "import sys\n"
        "from sumgrad.launch.local.launcher import Launcher\n"
        "def start(self):\n"
        "    print('torch' in sys.modules)\n"
        "    raise SystemExit\n"
        "Launcher.start = start\n"
        "from sumgrad.cli.main import main\n"
        f"main({verb})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          check=False, timeout=60)  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "three_pool"], 0),
        (["plan", "three_pool", "--json", "-"], 0),
        (["plan", "nosuch.yaml"], 2),
        (["--bogus"], 2),
    ],
)
@pytest.mark.parametrize("errors", [subprocess.PIPE, subprocess.STDOUT], ids=["out", "both"])
def test_who_reads_no_further_changes_no_exit_code(words, code, errors):
    """As `| head -1` and `| grep -q` do; a PASS must not become another code."""
    command = [sys.executable, "-m", "sumgrad", *words]
    ran = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
    assert ran.stdout is not None
    ran.stdout.close()
    _, said = ran.communicate(timeout=120)
    assert (ran.returncode, b"Traceback" in (said or b"")) == (code, False), said
