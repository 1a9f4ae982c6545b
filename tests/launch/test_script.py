"""`sumgrad diff` on scripts that know nothing of it: real processes, real collectives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from sumgrad.cli.main import main

SCRIPTS = Path(__file__).with_name("scripts")
BAD = str(SCRIPTS / "bad.py")
TWICE = ["--variant", "x: A=1", "--variant", "x: A=2"]
pytestmark = pytest.mark.distributed


def diff(cwd, *words, timeout=60):
    """(exit code, verdict.json) of a diff in a folder."""
    command = [sys.executable, "-m", "sumgrad", "diff", "--json", "v.json", "--steps", "2"]
    command += ["--timeout", str(timeout), *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    return done.returncode, json.loads((cwd / "v.json").read_text())


def on_ranks(cwd, ranks, *words, **more):
    return diff(cwd, "--ranks", ranks, "--", SCRIPTS / words[0], *words[1:], **more)


def test_a_right_script_passes_and_leaves_the_users_files_alone(tmp_path):
    (tmp_path / "losses.csv").write_text("last week's\n")
    (tmp_path / "best.pt").write_bytes(b"precious")
    code, verdict = on_ranks(tmp_path, 3, "train.py", "--batch", "{12/ranks}")
    assert code == 0, verdict
    tier = verdict["tiers"]["structure"]
    assert tier["dtype"] == "float64"
    assert tier["worst_rel"] < 1e-14
    assert {t["rank"] for t in verdict["tensors"]} == {0, 1, 2}
    assert {t["step"] for t in verdict["tensors"]} == {0, 1}
    assert all(t["smallest_scale_error_caught"] < 1e-9 for t in verdict["tensors"])
    assert "train.py" in verdict["lifted"][0]["place"]  # its .float()
    assert any("dropout was switched off" in text for text in verdict["warnings"])
    assert (tmp_path / "losses.csv").read_text() == "last week's\n"
    assert (tmp_path / "best.pt").read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".sumgrad", "best.pt", "losses.csv", "v.json",
    ]  # fmt: skip


def test_fsdp2_passes_in_its_own_dtype(tmp_path):
    script = SCRIPTS / "train.py"
    words = ("--batch", "{12/ranks}", "--wrap", "fsdp2")
    code, verdict = diff(tmp_path, "--no-lift", "--ranks", 2, "--", script, *words)
    assert code == 0, verdict
    assert verdict["tiers"]["precision"]["dtype"] == "float32"


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--wrong",), 1)])
def test_a_loss_and_gradients_that_are_dtensors(tmp_path, words, code):
    got, verdict = on_ranks(tmp_path, 2, "dtensors.py", *words)
    assert got == code, verdict
    found = {t["status"] for t in verdict["tensors"]}
    assert found == ({"fail", "pass"} if code else {"pass"})
    assert len(verdict["losses"]["single"]) == 2


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder in which the single run of the right script is kept as `week-46`."""
    place = tmp_path_factory.mktemp("kept")
    words = ("--ranks", 2, "--", SCRIPTS / "train.py", "--batch", "{12/ranks}")
    code, verdict = diff(place, "--save", "week-46", *words)
    assert code == 0, verdict
    return place


def against_kept(place, *words):
    return diff(place, "--against", "week-46", "--ranks", 2, "--", SCRIPTS / "train.py", *words)


def test_a_run_that_was_kept_is_compared_with_later(kept):
    words = ("--against", "week-46", "--ranks", 2, "--html", "r.html", "--junit", "r.xml")
    code, verdict = diff(kept, *words, "--", SCRIPTS / "train.py", "--batch", "{12/ranks}")
    assert code == 0, verdict
    assert "PASS" in (kept / "r.html").read_text()
    assert 'failures="0"' in (kept / "r.xml").read_text()
    assert any("stored run 'week-46'" in text for text in verdict["warnings"])


@pytest.fixture(scope="module")
def projected(tmp_path_factory):
    """A folder in which it is kept as projections."""
    place = tmp_path_factory.mktemp("projected")
    words = ("--ranks", 2, "--", SCRIPTS / "train.py", "--batch", "{12/ranks}")
    code, verdict = diff(place, "--save", "week-46", "--save-as", "projections", *words)
    assert code == 0, verdict
    folder = place / ".sumgrad" / "baselines" / "week-46"
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json"}
    return place


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 0, "gives the gradients of the run kept as 'week-46'"),
        (("--smoothing", 1e-6), 1, "one process alone computes other gradients than the run kept"),
        (("--bug", "mean"), 1, "gives the gradients of the run kept as 'week-46'"),
        (("--seed", 4), 3, "it starts from other weights in"),
    ],
)
def test_a_run_kept_as_projections_tells_what_has_changed(projected, words, code, said):
    ended, verdict = against_kept(projected, "--batch", "{12/ranks}", *words)
    assert ended == code
    assert said in json.dumps(verdict)
    (place,) = projected.glob(".sumgrad/baselines/week-46")
    assert sum(path.stat().st_size for path in place.iterdir()) < 40_000


@pytest.mark.parametrize(
    ("bug", "kind", "failed", "words"),
    [
        ("mean", "1/ranks", {1}, "already multiplied by 0.5"),
        ("start", None, set(), "rank 1 starts from other weights than rank 0"),
        ("rate", None, set(), "the optimizer's own step: its gradients are right; after it"),
        ("decay", None, {1}, "changes weights between two steps, on rank 1"),
    ],
)
def test_a_bug_is_found_where_it_begins(kept, bug, kind, failed, words):
    wrap = "none" if bug == "start" else "ddp"
    code, verdict = against_kept(kept, "--batch", "{12/ranks}", "--bug", bug, "--wrap", wrap)
    assert code == 1
    cause = verdict["diagnoses"][0]
    assert words in cause["cause"], cause
    assert bug != "mean" or "at train.py:" in cause["cause"], "the script's line, not ours"
    assert (cause["standing"], cause["symbol"]) == ("proved", kind)
    assert {t["step"] for t in verdict["tensors"] if t["status"] == "fail"} == failed


@pytest.mark.parametrize(
    ("where", "factor", "code", "words"),
    [
        ("main_grad", 1, 0, "has no .grad when the optimizer steps: compared is what is in its "),
        ("main_grad", 0.5, 1, "every gradient is multiplied by 1/2"),
        ("both", 1, 3, "main_grad on rank 0-1 holds another gradient than its .grad"),
        ("aside", 1, 3, "if its gradient is kept elsewhere, it was not compared"),
    ],
)
def test_gradients_that_are_not_in_grad_are_compared_or_said_not_to_be(
    tmp_path, where, factor, code, words
):
    """The optimizer takes signs: the weights are right, whatever the factor."""
    ended, verdict = on_ranks(tmp_path, 2, "second.py", "{12/ranks}", where, factor)
    assert ended == code, verdict["reasons"]
    assert words in json.dumps(verdict)


def test_a_factor_that_a_clip_hides_is_found(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "clipped.py", "{8/ranks}", "0.1")
    assert code == 1
    cause = verdict["diagnoses"][0]
    # The clip's eps lets a little through: the cause is that of the gradients before it.
    assert "at clipped.py:23 already multiplied by 0.5" in cause["cause"]
    assert (cause["standing"], cause["symbol"]) == ("proved", "1/ranks")
    assert verdict["tiers"]["structure"]["dtype"] == "float64"  # with a GradScaler


def test_a_batch_that_grows_with_the_ranks_is_said_first(kept):
    code, verdict = against_kept(kept, "--batch", "12")
    assert code == 3
    (reason,) = verdict["tiers"]["structure"]["reasons"]
    assert "{N/ranks}" in reason


@pytest.mark.parametrize(
    ("bug", "code"), [("noise", 3), ("same noise", 0), ("mixed", 3), ("mixed alike", 0)]
)
def test_what_a_model_draws_by_rank_is_no_mistake(tmp_path, bug, code):
    ended, verdict = on_ranks(tmp_path, 2, "train.py", "--batch", "{12/ranks}", "--bug", bug)
    assert ended == code
    reasons = verdict["tiers"]["structure"]["reasons"]
    assert all("train.py:" in r and "draws random numbers" in r for r in reasons)
    assert len(reasons) == (1 if code else 0)


def test_a_whole_graph_is_not_broken_by_the_watch(tmp_path):
    words = ("train.py", "--batch", "{12/ranks}", "--wrap", "fullgraph")
    code, verdict = on_ranks(tmp_path, 2, *words)
    assert code == 0, verdict["not_compared"]


def test_rows_that_are_not_divided_are_said_first(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "train.py", "--batch", "{12/ranks}", "--bug", "sampler")
    assert code == 1
    assert "rank 0-1 all read rows 0-5" in verdict["diagnoses"][0]["cause"]


def test_ranks_that_are_never_synchronised_are_told_by_their_own_gradients(kept):
    code, verdict = against_kept(kept, "--batch", "{12/ranks}", "--wrap", "none")
    assert code == 1
    cause = verdict["diagnoses"][0]
    assert (cause["kind"], cause["standing"]) == ("not_reduced", "proved")
    assert "every gradient: it is not reduced, no gradient of another rank" in cause["cause"]


@pytest.mark.parametrize(("kind", "code"), [("right", 0), ("unsent", 1), ("raises", 0)])
def test_a_step_that_calls_that_of_its_base_ends_with_the_outer_one(tmp_path, kind, code):
    """What it does after its base has stepped belongs to it."""
    got, verdict = on_ranks(tmp_path, 2, "based.py", kind)
    assert got == code, verdict
    assert code == 0 or "optimizer's own step" in verdict["diagnoses"][0]["cause"]


@pytest.mark.parametrize(("kind", "code"), [("right", 0), ("mean", 1), ("inner", 0), ("first", 1)])
def test_a_model_that_is_only_called_through_torch_func_is_known(tmp_path, kind, code):
    """In its transforms nothing has values that could be looked at; its parameters do."""
    got, verdict = on_ranks(tmp_path, 2, "by_functions.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert verdict["tiers"]["structure"]["dtype"] == "float64"


@pytest.mark.parametrize(
    ("kind", "code", "said", "unsaid"),
    [
        ("jagged", 0, "", "same rows"),
        ("jagged twice", 1, "multiplied by 2", "same rows"),
        ("bags", 0, "", "same rows"),
        ("bags twice", 1, "multiplied by 2", "same rows"),
        ("votes", 1, "open:", "not reduced"),
        ("clip", 1, "the clip: gradients are right before it", "1.5"),
    ],
)
def test_what_a_rank_counts_from_zero_and_what_is_no_sum(tmp_path, kind, code, said, unsaid):
    got, verdict = on_ranks(tmp_path, 2, "uncommon.py", "{8/ranks}", kind)
    assert got == code, verdict
    cause = verdict["diagnoses"][0]["cause"] if code else ""
    assert said in cause
    assert unsaid not in cause
    assert not any("same rows" in text for text in verdict["warnings"])


def test_a_rank_that_evaluates_what_others_train_is_told(tmp_path):
    """Without dropout, which is switched off, it gives the same gradients."""
    code, verdict = on_ranks(tmp_path, 2, "uncommon.py", "{8/ranks}", "evaluated")
    assert code == 0, verdict
    (said,) = [text for text in verdict["warnings"] if "in evaluation on rank 0" in text]
    assert "at step 1" in said


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("later", 3, "no wrapper of torch's would reduce one"),
        ("thawed", 0, "is frozen in all steps that were looked at, and an optimizer has it"),
        ("by_value", 3, "cuts off up to 100 % of the numbers by value"),
        ("twice_by_value", 3, "cuts off up to 100 % of the numbers by value"),
        ("hand_by_value", 3, "and 1 more the script cuts off up to 100 % of the numbers by"),
        ("copied", 0, ""),
        ("dry", 0, "broadcasts before the first backward makes them equal"),
        ("apart", 1, "nothing made the replicas equal"),
        ("hook", 0, ""),
        ("twice_hook", 1, "it is counted 2 times"),
        ("workers", 3, "as a DataLoader's workers are, draws random numbers"),
        ("noise", 1, "is wrong and no cause of it is proved"),
    ],
)
def test_what_is_done_seldom(tmp_path, kind, code, said):
    got, verdict = on_ranks(tmp_path, 2, "seldom.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert said in json.dumps(verdict)


def test_an_optimizer_that_steps_late_is_in_the_window(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "owners.py", "bug")
    assert code == 1, verdict
    wrong = {t["name"] for t in verdict["tensors"] if t["status"] == "fail"}
    assert wrong == {"Linear.weight", "Linear.bias"}  # of the second model
    assert verdict["steps"] == 6


def test_the_first_wrong_module_is_named_and_the_sum_that_is_missing_there(tmp_path):
    script = ROOT / "examples" / "scripts" / "megatron_by_hand.py"
    words = ("--ranks", 2, "--", script, "--bug", "gradient not reduced")
    code, verdict = diff(tmp_path, *words)
    assert code == 1
    cause = verdict["diagnoses"][0]
    assert (cause["kind"], cause["ranks"]) == ("skipped_collective", [0, 1]), cause
    assert "the backward is right down to mlps.1.up (Linear), head (Linear); " in cause["cause"]
    assert "the output of mlps.0 (MLP at " in cause["cause"]
    assert "megatron_by_hand.py:" in cause["cause"]
    assert ": a sum over ranks is missing on the way " in cause["cause"]
    assert any("is a part on each rank, whole only when summed" in b for b in cause["because"])
    assert any("look at what takes what norms.1 gives: a sum" in b for b in cause["because"])
    assert verdict["where"]["backward"]["module"] == "mlps.0"


def test_variants_are_rows_of_a_matrix(tmp_path):
    words = ["--variant", "bare: PYTHONHASHSEED=7 --wrap none", "--markdown", "m.md"]
    words += ["--ranks", "2", "--", SCRIPTS / "train.py"]
    code, matrix = diff(tmp_path, *words, "--batch", "{12/ranks}")
    assert code == 1
    cells = {(c["variant"], c["ranks"]): c for c in matrix["cells"]}
    assert {at: c["status"] for at, c in cells.items()} == {
        ("as given", 2): "pass",
        ("bare", 1): "pass",
        ("bare", 2): "fail",
    }
    assert "each keep what their own backward gave" in cells["bare", 2]["text"]
    assert cells["bare", 1]["differing_tensors"] == 0 < cells["as given", 2]["differing_tensors"]
    assert cells["bare", 1]["tensors"] == 24  # gradients and weights of 6 parameters, 2 steps
    table = (tmp_path / "m.md").read_text()
    assert "| bare | PASS" in table
    assert "bare, 2 ranks: every gradient" in table.replace("\\", "")


def test_a_script_may_ask_to_be_watched_itself(tmp_path):
    """`python -I` looks at no sitecustomize of ours."""
    script = tmp_path / "own.py"
    line = "import sumgrad\nsumgrad.watch()\nsumgrad.watch()\n"
    script.write_text(line + "import torch\nnet = torch.nn.Linear(3, 2)\n"
                      "o = torch.optim.SGD(net.parameters(), 0.1)\n"
                      "for _ in range(2):\n    net(torch.ones(4, 3)).square().mean().backward()\n"
                      "    o.step()\n    o.zero_grad()\n")  # fmt: skip
    command = f"{sys.executable} -I {script}"
    code, verdict = diff(tmp_path, "--a", command, "--b", command)
    assert code == 0, verdict
    assert len(verdict["tensors"]) == 4
    script.write_text(script.read_text().removeprefix(line))
    code, verdict = diff(tmp_path, "--a", command, "--b", command)
    assert code == 3
    assert "no process of it called a model" in str(verdict)


def test_a_command_that_starts_its_own_ranks(tmp_path):
    def side(ranks):
        words = [
            sys.executable,
            ROOT / "examples" / "scripts" / "gan.py",
            ranks,
            tmp_path / "meet",
            "bug",
        ]
        return " ".join(map(str, words))

    code, verdict = diff(tmp_path, "--a", side(3), "--b", side(1))
    assert code == 1, verdict
    assert {t["rank"] for t in verdict["tensors"]} == {0, 1, 2}
    wrong = {(t["name"], t["step"]) for t in verdict["tensors"] if t["status"] == "fail"}
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}  # the first model that is called
    assert wrong == {(name, step) for name in names for step in (1, 3)}  # each optimizer twice


@pytest.mark.parametrize(("kind", "code", "cause"), [
    ("right", 0, None),
    ("rest", 1, "no rank's optimizer has 2.bias at step 0; the single run's does"),
    ("kept", 1, "0.bias, 2.weight on rank 0, which no optimizer of that rank has stepped, is not "
                "brought to what its owner's step made of it before step 1"),
])  # fmt: skip
def test_optimizers_that_have_a_part_of_the_parameters_each(tmp_path, kind, code, cause):
    got, verdict = on_ranks(tmp_path, 3, "zero.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert [d["cause"] for d in verdict["diagnoses"][:1]] == [cause] * (cause is not None)
    if kind == "right":  # each gradient where an optimizer takes it
        assert {(t["name"], t["rank"]) for t in verdict["tensors"]} == {
            ("0.weight", 0), ("0.bias", 1), ("2.weight", 2), ("2.bias", 0),
        }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("mesh", 0, ""),
        ("state", 0, ""),
        ("warm", 0, ""),
        ("never", 3, "AdamW steps 4 parameters of no model that was called"),
        ("leaves", 3, "lost its connection to another rank"),
        ("barrier", 1, "on rank 0 barrier of 0 None over ranks 0-1 [structure/1/step], at begins"),
    ],
)
def test_how_a_script_begins_and_ends(tmp_path, kind, code, words):
    """Groups that a mesh makes; steps before any model is called; a rank that leaves the others,
    which is told in seconds."""
    got, verdict = on_ranks(tmp_path, 2, "begins.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert words in json.dumps(verdict)
    assert words or not verdict["warnings"]


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("waited", 0, ""),
        ("ddp", 0, ""),
        ("weights", 0, ""),
        ("written", 1, "is written before this is waited for"),
        ("read", 1, "came when it was waited for, and no sooner"),
    ],
)
def test_gradients_are_touched_after_they_are_waited_for(tmp_path, kind, code, words):
    """What is touched before is right by chance: it was there already, where nobody looked."""
    got, verdict = on_ranks(tmp_path, 3, "overlapped.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert words in json.dumps(verdict)
    assert words or not verdict["warnings"]


@pytest.mark.parametrize(("kind", "code"), [("right", 0), ("first", 1)])
def test_a_script_in_two_dtypes_is_compared_in_them_too(tmp_path, kind, code):
    """In float64 there is one bucket, and what is done with the second is not seen."""
    got, verdict = on_ranks(tmp_path, 3, "buckets.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert set(verdict["tiers"]) == {"precision"}
    (said,) = [text for text in verdict["warnings"] if "in which what it does by dtype" in text]
    assert "parameters are bfloat16 and float32: in float64" in said
    wrong = {t["name"] for t in verdict["tensors"] if t["status"] == "fail" and t["step"] == 0}
    assert wrong == ({"norm.weight", "norm.bias"} if kind == "first" else set())


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [("right", 0, ""), ("sign", 1, "0.weight is multiplied by -1"), ("rate", 1, "optimizer's own")],
)
def test_few_digits_hide_no_wrong_sign_and_no_wrong_rate(tmp_path, kind, code, words):
    """In bfloat16 the noise is a hundredth of what is right: nothing but noise is zero there."""
    got, verdict = diff(tmp_path, "--ranks", 3, "--no-lift", "--", SCRIPTS / "half.py",
                        "{24/ranks}", kind)  # fmt: skip
    assert got == code, verdict
    assert words in json.dumps(verdict["diagnoses"])
    rounded = [t for t in verdict["warnings"] if "a weight of its dtype is rounded by" in t]
    assert rounded or kind != "right"


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("lstm", 0, "dropout was switched off"),
        ("launched", 0, "structure"),
        ("mask", 1, "structure"),  # what torch.load gave is the file's, and weighs the ranks
        ("probe", 3, "is stepped by nothing that is a torch.optim.Optimizer"),
        ("nan", 1, "nan"),
    ],
)
def test_odd_scripts(tmp_path, kind, code, words):
    got, verdict = on_ranks(tmp_path, 2, "odd.py", "{12/ranks}", kind)
    assert got == code, verdict
    assert words in json.dumps(verdict).lower() or words in json.dumps(verdict)


def test_tensors_of_no_module_are_not_compared_and_that_is_said(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "tensors.py", "{12/ranks}")
    assert code == 3
    (said,) = verdict["not_compared"]
    assert "SGD steps 1 parameters of no model that was called, the first of shape (3,)" in said


def test_a_buffer_that_is_left_unlike_on_ranks_is_said(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "router.py", "{12/ranks}", "local")
    assert code == 0, verdict  # no gradient has taken anything from it yet
    (said,) = [text for text in verdict["warnings"] if text.startswith("buffers: ")]
    assert "after step 0, structure, bias is not the same on all ranks" in said
    assert "chosen" not in said  # unlike after the optimizer, and equal when it is read again


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("no step", 3, "ended without an optimizer's step"),
        ("raise", 3, "ValueError: out of data, at "),
        ("one rank", 3, "rank 1 takes none of the 2 optimizer steps of the single run"),
    ],
)
def test_a_script_that_ends_otherwise_has_a_plain_verdict(tmp_path, kind, code, words):
    got, verdict = on_ranks(tmp_path, 2, "bad.py", kind)
    assert got == code
    assert any(words in text for text in verdict["not_compared"]), verdict["not_compared"]


def test_a_script_that_hangs_is_ended_and_says_where(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "bad.py", "hang", timeout=15)
    assert code in (1, 3)
    stacks = [o["stack"] or "" for o in verdict["outcomes"]]
    assert any("time.sleep(1000)" in stack for stack in stacks)
    left = subprocess.run(["pgrep", "-f", "bad.py hang"], capture_output=True, check=False)
    assert left.stdout == b""


def test_a_rank_that_was_stopped_is_called_that(tmp_path):
    code, verdict = on_ranks(tmp_path, 2, "bad.py", "stop", timeout=10)
    assert code == 3
    assert "its process was stopped (SIGSTOP" in verdict["outcomes"][1]["detail"]


def test_a_diff_that_is_interrupted_leaves_nobody_and_no_changed_file(tmp_path):
    (tmp_path / "losses.csv").write_text("last week's\n")
    words = ["--ranks", "2", "--", str(SCRIPTS / "train.py"), "--bug", "slow"]
    running = subprocess.Popen(
        [sys.executable, "-m", "sumgrad", "diff", *words], cwd=tmp_path, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while (tmp_path / "losses.csv").read_text() == "last week's\n":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.terminate()
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert b"interrupted by SIGTERM; every rank was ended" in said
    assert (tmp_path / "losses.csv").read_text() == "last week's\n"
    left = subprocess.run(["pgrep", "-f", "train.py --bug slow"], capture_output=True, check=False)
    assert left.stdout == b""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ranks", "2"], "no script"),
        (["--", "train.py"], "--ranks N is missing"),
        (["--ranks", "2", "--", "absent.py"], "absent.py: no such file"),
        (["--a", "python a.py"], "--a and --b belong together"),
        (["--ranks", "2", "--against", "0", "--", "train.py"], "needs a rank"),
        (["--ranks", "2", "--save", "../x", "--", "train.py"], "--save ../x: expected a letter"),
        (["--ranks", "2", "--against", "old", "--", BAD], "no stored run"),
        (["--ranks", "5", "--", str(SCRIPTS / "train.py"), "{12/ranks}"], "no multiple of 5"),
        (["--variant", "x", "--ranks", "2", "--", BAD], "expected `NAME: "),
        (["--variant", "x: @nopython", "--ranks", "2", "--", "t.py"], "nopython is no program"),
        ([*TWICE, "--ranks", "2", "--", BAD], "two are named 'x'"),
        (["--bitwise", "--ranks", "2", "--", BAD], "--bitwise is for"),
    ],
)
def test_what_cannot_be_started_is_refused(tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *words]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("half", 3), ("raises", 0)])
def test_what_a_closure_makes_when_it_is_called_again(tmp_path, fault, code):
    """Its sign hides that it is too small: the weights after the step do not tell."""
    found, verdict = on_ranks(tmp_path, 2, "sharp.py", "--batch", "{12/ranks}", "--fault", fault)
    assert found == code, verdict
    if fault == "half":
        told = json.dumps(verdict)
        assert "calls its closure again, and in call 1 the gradient of " in told
        assert "only the gradients of its first call are compared" in told
