"""What observes a script, piece by piece, in this process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import reduce

import pytest
import torch
from sumgrad.base.errors import UserError
from sumgrad.launch.script import options
from sumgrad.launch.script.options import DiffOptions, fill_in, script_of, without_python
from sumgrad.launch.script.watched.user_files import FileKeeper, put_back
from sumgrad.subjects.script.doubled import NoDropout, double_inputs
from sumgrad.subjects.script.models import Models, label_of, outermost
from sumgrad.subjects.script.reference import LOUD, Single, louder, noise_of, reference_of, twins_of
from sumgrad.subjects.script.roundings import OtherRoundings
from sumgrad.subjects.script.rows import rows_of
from sumgrad.subjects.script.start import take_over
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def padded(rows, length, value=0):
    out = torch.full((len(rows), length), value)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out


def test_a_row_is_the_same_however_it_is_padded_or_cast():
    texts = [[5, 3], [5, 9, 2], [4]]
    short, long = rows_of(padded(texts, 3)), rows_of({"ids": padded(texts, 7)})
    assert [a[0] for a in short[:1]] == [b[0] for b in long[:1]]
    assert short[1][1] == long[1][2]  # whole there, padded here
    numbers = torch.randn(4, 5)
    assert rows_of(numbers) == rows_of(numbers.double())


def test_rows_that_differ_in_their_last_element_are_others():
    first, second = rows_of(torch.tensor([[5, 3], [5, 9]]))
    assert first[0] != second[0]
    assert first[1] != second[2]


def test_only_what_has_as_many_rows_and_no_gradient_is_read():
    ids, shared = torch.arange(6).reshape(3, 2), torch.arange(2)[None]
    made = torch.randn(3, 4, requires_grad=True) * 2
    assert rows_of((ids, shared, made)) == rows_of(ids)
    assert rows_of(made) == []
    assert rows_of(torch.tensor(3)) == []


@pytest.mark.parametrize("call", [
    lambda x: F.dropout(x, 0.5), lambda x: F.dropout2d(x[None], p=0.5)[0],
    nn.Dropout(0.3), lambda x: torch.dropout(x, 0.5, True),
    lambda x: F.alpha_dropout(x, 0.5, training=True),
])  # fmt: skip
def test_dropout_gives_its_input_and_is_counted(call):
    x = torch.randn(3, 4, 5)
    with NoDropout() as mode:
        assert torch.equal(call(x), x)
    assert mode.count == 1


BACKWARDS = {
    "method": lambda loss, params: loss.backward(),
    "function": lambda loss, params: torch.autograd.backward(loss),
    "grad": lambda loss, params: [
        setattr(p, "grad", g) for p, g in zip(params, torch.autograd.grad(loss, params),
                                              strict=True)],
}  # fmt: skip


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_drops_nothing_either(how, reentrant):
    if reentrant and how == "grad":
        return  # torch has none
    torch.manual_seed(3)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x, params = torch.randn(5, 4, requires_grad=True), [*block.parameters()]
    held = F.dropout, F.scaled_dot_product_attention, torch.dropout
    found = []
    for dropped in (False, True):
        block.train(dropped)
        block.zero_grad()
        with NoDropout() as mode:
            loss = checkpoint(block, x, use_reentrant=reentrant).square().sum()
            BACKWARDS[how](loss, params)
        assert mode.count == (2 if dropped else 0)
        found.append([p.grad.clone() for p in params])
    assert all(map(torch.equal, *found))
    assert held == (F.dropout, F.scaled_dot_product_attention, torch.dropout)


def test_names_stand_again_after_a_backward_that_raises():
    held = F.dropout

    def raises(grad):
        assert F.dropout is not held
        raise ZeroDivisionError

    x = torch.ones(2, requires_grad=True)
    (y := x * 2).register_hook(raises)
    with NoDropout(), pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert F.dropout is held


@pytest.mark.parametrize("weights", [True, False])
def test_a_whole_layer_of_attention_drops_nothing(weights):
    torch.manual_seed(4)
    layer, x = nn.MultiheadAttention(4, 2, dropout=0.9), torch.randn(3, 2, 4)
    plain = layer.eval()(x, x, x, need_weights=weights)[0]
    with NoDropout() as mode:
        torch.testing.assert_close(layer.train()(x, x, x, need_weights=weights)[0], plain)
    assert mode.count == 1


def test_attention_drops_nothing_and_what_is_off_is_not_counted():
    q = torch.randn(2, 3, 4)
    plain = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with NoDropout() as mode:
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, None, 0.9, True), plain)
        assert mode.count == 1
        assert torch.equal(
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.9, is_causal=True), plain
        )
        F.dropout(q, 0.5, training=False)
        nn.Dropout(0.0)(q)
    assert mode.count == 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_drop_nothing(kind, packed):
    layer, plain = (kind(4, 5, 2, dropout=rate) for rate in (0.9, 0.0))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(6, 3, 4)
    given = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 2]) if packed else x
    with NoDropout() as mode:
        got, wanted = layer(given)[0], plain(given)[0]
        assert mode.count == 1
        layer.eval()(given)
    assert mode.count == 1
    assert torch.equal(got.data, wanted.data)


def test_data_is_doubled_and_what_has_a_gradient_is_not():
    made = torch.randn(2, requires_grad=True)
    kwargs = {"x": [torch.ones(2)], "n": 3}
    ids, data, kept = double_inputs((torch.arange(2), torch.ones(2), made), kwargs)
    assert (ids.dtype, data.dtype, kept.dtype) == (torch.int64, torch.float64, torch.float32)
    assert kwargs["x"][0].dtype == torch.float64


def test_other_roundings_are_as_large_as_another_order_makes_them():
    """Where terms cancel the error is that of the terms, not of the result."""
    torch.manual_seed(0)
    x, w = torch.randn(7, 400, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    w[-1] -= (x @ w)[0] / x[0, -1]  # the first row's products add up to nothing
    exact, size = x @ w, x.abs() @ w.abs()
    eps = torch.finfo(torch.float64).eps
    with OtherRoundings(1):
        first, total, norm = x @ w, x.sum(), F.layer_norm(x, (400,))
    with OtherRoundings(2):
        second = x @ w
    assert not torch.equal(first, second)
    off = (first - exact).abs() / (eps * size)
    assert 0.05 < float(off[0].max()) <= 1.1
    assert float(off.max()) <= 1.1
    assert 0 < abs(float(total - x.sum())) <= 1.1 * eps * float(x.abs().sum())
    assert torch.equal(norm, F.layer_norm(x, (400,)))


def test_a_layer_norms_weight_has_other_roundings_too():
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(50, 6, dtype=torch.float64)
    found = []
    for seed in (1, 2):
        with OtherRoundings(seed):
            found += torch.autograd.grad(F.layer_norm(x, (6,), weight).sum(), weight)
    assert not torch.equal(*found)
    assert float((found[0] - found[1]).abs().max()) < 1e-12


def none():
    return None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3))


def test_a_model_is_met_whole_by_whichever_part_is_called_first():
    model = Part()
    assert outermost(model.inner[0]) is model
    models = Models()
    assert [h.name for h in models.meet(model.inner[0], none)] == [
        "inner.0.weight", "inner.0.bias",
    ]  # fmt: skip
    assert models.meet(model, none) == []
    wrapped = nn.Module()
    wrapped.add_module("module", model)
    assert label_of(wrapped) == "Part"
    assert models.meet(wrapped, none) == []


def test_a_lazy_model_is_met_when_it_knows_its_shapes():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    models = Models()
    assert models.meet(model, none) == []
    model(torch.ones(1, 4))
    assert len(models.meet(model, none)) == 4


def test_a_second_models_names_begin_with_its_class():
    first, second, third = Part(), Part(), nn.Linear(2, 2)
    models = Models()
    for module in (first, second, third):
        models.meet(module, none)
    assert list(models.held) == [
        "inner.0.weight", "inner.0.bias", "Part.inner.0.weight", "Part.inner.0.bias",
        "weight", "bias",
    ]  # fmt: skip


def test_a_hand_cut_part_is_placed_by_value_and_given_the_other_weights():
    whole = {"weight": torch.randn(6, 4), "bias": torch.randn(6)}
    cut = nn.Linear(4, 2)
    with torch.no_grad():
        cut.weight.copy_(whole["weight"][2:4])
        cut.bias.copy_(whole["bias"][2:4])
    models = Models()
    held = models.meet(cut, lambda: whole)
    assert [h.name for h in held] == ["weight", "bias"]
    assert models.unknown == []
    other = {name: value + 1 for name, value in whole.items()}
    assert take_over(held, other) == ["weight", "bias"]
    assert torch.equal(cut.weight, other["weight"][2:4])
    made_before = F.linear(torch.ones(2, 4, requires_grad=True), cut.weight).square().sum()
    assert take_over(held, other) == []
    assert take_over(held, other, jitter=3) == []
    made_before.backward()  # what is equal is not written, and a rounding counts for nothing
    off = ((cut.weight.detach() - other["weight"][2:4]) / other["weight"][2:4]).abs()
    assert 0 < float(off.max()) < 3 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("words", "python", "run", "script"),
    [
        (("train.py", "3"), sys.executable, ("train.py", "3"), "train.py"),
        (("python", "train.py"), sys.executable, ("train.py",), "train.py"),
        (("python3.11", "-u", "a/train.py"), sys.executable, ("-u", "a/train.py"), "a/train.py"),
        (("/opt/bin/python3", "train.py"), "/opt/bin/python3", ("train.py",), "train.py"),
        (("-m", "pkg.train", "--x"), sys.executable, ("-m", "pkg.train", "--x"), "pkg.train"),
        (("-m", "pkg.train", "--at", "b.py"), sys.executable,
         ("-m", "pkg.train", "--at", "b.py"), "pkg.train"),
        (("python_train.py", "1"), sys.executable, ("python_train.py", "1"), "python_train.py"),
        (("python",), sys.executable, ("python",), "python"),
        (("./train", "-m"), sys.executable, ("./train", "-m"), "./train"),
        ((sys.executable, "train.py"), sys.executable, ("train.py",), "train.py"),
    ],
)  # fmt: skip
def test_what_is_run_by_which_python(words, python, run, script):
    options = DiffOptions(script=words, ranks=2)
    assert options.command("many").words == (python, *run)
    assert script_of(options) == script


def test_this_very_interpreter_is_known_whatever_its_name(monkeypatch):
    monkeypatch.setattr(options, "interpreter", lambda: "/opt/pypy")
    assert without_python(("/opt/pypy", "train.py")) == ("/opt/pypy", ("train.py",))
    assert without_python(("/opt/other", "train.py")) == ("/opt/pypy", ("/opt/other", "train.py"))


class Stage(nn.Module):
    """Blocks of a pipeline, numbered from nought, or all of them."""

    def __init__(self, which):
        super().__init__()
        self.layers = nn.ModuleList()
        for i in which:
            torch.manual_seed(i)
            block = nn.ModuleDict({"ln": nn.LayerNorm(3), "l": nn.Linear(3, 3),
                                   "drop": nn.Dropout(0.1)})  # fmt: skip
            self.layers.append(block)


def test_a_stages_own_numbers_are_not_the_models():
    whole = {n: p.detach().clone() for n, p in Stage(range(4)).named_parameters()}
    models, part = Models(), Stage([2, 3])
    held = models.meet(part, lambda: whole)
    assert models.unknown == []
    assert {h.name for h in held} == {n for n in whole if n[7] in "23"}
    names = models.renumbered(part)
    assert {names[id(m)] for m in part.layers} == {"layers.2", "layers.3"}
    assert names[id(part.layers[1]["drop"])] == "layers.3.drop"  # it has no parameters
    for cut in ([0, 1], range(4)):
        models, part = Models(), Stage(cut)
        assert {h.name for h in models.meet(part, lambda: whole)} <= whole.keys()
        assert (models.renumbered(part), models.unknown) == ({}, [])


def test_norms_apart_from_the_layers_that_are_numbered_anew_are_told_by_their_names_alone():
    class Apart(nn.Module):
        def __init__(self, which):
            super().__init__()
            torch.manual_seed(7)
            linears = [nn.Linear(3, 3) for _ in range(3)]
            self.linears = nn.ModuleList(linears[i] for i in which)
            self.norms = nn.ModuleList(nn.LayerNorm(3) for _ in which)

    whole = {n: p.detach().clone() for n, p in Apart([0, 1, 2]).named_parameters()}
    models = Models()
    held = models.meet(Apart([1, 2]), lambda: whole)
    assert {h.name for h in held if "linears" in h.name} == {n for n in whole if n[8] in "12"}
    assert models.by_name == {n for n in whole if n[:8] in ("norms.0.", "norms.1.")}
    # A weight that nothing else is like is told by its values, whatever stands beside it.
    assert not {n for n in models.by_name if "linears" in n}
    models = Models()
    models.meet(Apart([0, 1, 2]), lambda: whole)
    assert models.by_name == set()


def test_a_second_model_that_is_called_first_is_known_by_its_weights():
    torch.manual_seed(0)
    first, second = Part(), Part()
    names = [n for n, _ in first.named_parameters()]
    whole = {n: p.detach().clone() for n, p in first.named_parameters()}
    whole |= {f"Part.{n}": p.detach().clone() for n, p in second.named_parameters()}
    models = Models()
    assert [h.name for h in models.meet(second, lambda: whole)] == [f"Part.{n}" for n in names]


def test_what_began_alike_in_the_single_run():
    names = {"a.w": ":1", "b.w": ":1", "c.w": ":2", "d.w": ":1", "buffer x": ":1"}
    single = Single(
        params={"a.w": (3,), "b.w": (3,), "c.w": (3,), "d.w": (4,)}, dtype="float64", grads=(),
        after=(), buffers=(), steps=({"started_with": names},), unknown=(),
    )  # fmt: skip
    assert twins_of(single) == (("a.w", "b.w"),)
    assert twins_of(replace(single, steps=())) == ()


def test_what_has_no_place_is_said():
    models = Models()
    models.meet(nn.Linear(5, 5), lambda: {"weight": torch.randn(4, 4), "bias": torch.randn(4)})
    assert len(models.unknown) == 2
    assert models.unknown[0].startswith("weight (5, 5): has shape (5, 5), and its values occur")


def run_of(*values, dtype="float64"):
    grads = {"a": torch.tensor(values, dtype=torch.float64), "b": torch.zeros(2)}
    return Single(
        params={"a": (len(values),), "b": (2,)}, dtype=dtype, grads=(grads,),
        after=({"a": grads["a"] * 2},), buffers=(({}, ()),), steps=({},), unknown=(),
    )  # fmt: skip


def first_step_of(single, *noise):
    """Its reference, when the noise of each run came by itself."""
    return reference_of(single, reduce(louder, [noise_of(single, [n], 0) for n in noise]), 0)


def test_the_reference_has_the_noise_of_all_runs():
    single, others = run_of(1.0, -4.0), [run_of(1.0, -4.0 + 2e-12), run_of(1 + 1e-12, -4)]
    reference = first_step_of(single, *others)
    assert noise_of(single, others, 0) == reduce(
        louder, [noise_of(single, [other], 0) for other in reversed(others)]
    )
    assert reference.norm_floor == pytest.approx(2e-12 * 4 / 17**0.5, rel=1e-2, abs=0)
    assert reference.grads["a"].tolist() == [1.0, -4.0]
    assert reference.floor["a"] == pytest.approx(2e-12, rel=1e-3, abs=0)
    assert reference.scale["a"] == pytest.approx(4.04)
    assert reference.scale["b"] == 0.0
    assert reference.after_floor["a"] == pytest.approx(4e-12, rel=1e-3, abs=0)
    assert reference.problems == ()
    assert reference.reached == ("a", "b")  # it has a gradient, which is zero: it is not unused


def test_a_parameter_that_no_gradient_reaches_is_not_used():
    single = run_of(1.0, -4.0)
    (grads,) = single.grads
    unused = replace(single, grads=({"a": grads["a"]},))
    assert first_step_of(unused, unused).reached == ("a",)


def test_a_gradient_that_is_not_finite_is_no_reference():
    broken = run_of(1.0, float("nan"))
    (problem,) = first_step_of(broken, run_of(1.0, -4.0)).problems[-1:]
    assert problem == "the single run's gradient of a is not finite"


def test_the_noise_of_an_update_is_that_of_what_its_gradient_tells():
    """Adam makes a whole step of a gradient that is noise, in either direction."""
    single, other = run_of(1.0, 1e-17), run_of(1.0, -1e-17)
    other = replace(other, after=({"a": torch.tensor([2.0 + 1e-14, 5.0]).double()},))
    assert noise_of(single, [other], 0).after["a"] == pytest.approx(1e-14, rel=0.1)
    told = replace(other, grads=({"a": torch.tensor([1.0, 1e-17]).double(), "b": torch.zeros(2)},))
    assert noise_of(single, [told], 0).after["a"] == pytest.approx(5.0)


def test_complex_parameters_are_not_taken_for_real_ones():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.b = nn.Parameter(torch.ones(3))

    models = Models()
    assert [h.name for h in models.meet(Spectral(), lambda: None)] == ["b"]
    assert models.unknown == ["w is complex: such gradients are not compared"]


@pytest.mark.parametrize("data", [torch.zeros(0, 3, 2), torch.ones(2, 3, dtype=torch.complex64)])
def test_rows_of_nothing_and_of_complex_numbers(data):
    assert len(rows_of((data,))) == len(data)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_script_that_is_moved_by_one_rounding_has_no_reference(dtype):
    limit = LOUD[dtype] * 4.04
    for factor, problems in ((0.9, 0), (1.1, 1)):
        noise = run_of(1.0, -4.0 + factor * limit, dtype=dtype)
        assert len(first_step_of(run_of(1.0, -4.0, dtype=dtype), noise).problems) == problems


def test_arguments_are_filled_in_for_each_side():
    assert [fill_in("--n={24/ranks}x{ranks}", n) for n in (1, 4)] == ["--n=24x1", "--n=6x4"]
    with pytest.raises(UserError, match="24 is no multiple of 5"):
        fill_in("{24/ranks}", 5)


WRITES = """
    import os, sys, torch
    from pathlib import Path
    from sumgrad.launch.script.watched.user_files import FileKeeper
    keeper = FileKeeper(Path(sys.argv[1]), Path.cwd(), float(sys.argv[2]))
    keeper.install()
    torch.save = keeper.in_front(torch.save, 1, "f")
    open("log", "a").write("more")
    open("fresh", "w").write("new")
    torch.save({}, "best.pt")
    os.replace("old", "moved")
    os.remove("gone")
    open("read").read()
    os.makedirs("sub", exist_ok=True)
    Path("sub/deep").write_text("x")
    os.makedirs("runs/today/empty")
    os.rmdir("empty")
    os.symlink("fresh", "latest")
    os.symlink("fresh", "tmp.lnk")
    os.replace("tmp.lnk", "best")
    os.remove("kept")
    os.symlink("log", "kept")
    Path(sys.argv[3], "elsewhere").write_text("x")
"""


def test_the_users_files_are_as_they_were(tmp_path):
    work, run = tmp_path / "work", tmp_path / "runs" / "side"
    work.mkdir()
    run.mkdir(parents=True)
    names = ("log", "best.pt", "old", "gone", "read")
    before = {name: str(random.random()) for name in names}
    for name, text in before.items():
        (work / name).write_text(text)
    (work / "empty").mkdir()
    links = {"best": "log", "kept": "nowhere"}
    for name, target in links.items():
        (work / name).symlink_to(target)
    other = tmp_path / "other"
    other.mkdir()
    code = textwrap.dedent(WRITES)
    command = [sys.executable, "-c", code, str(run), "0", str(other)]
    subprocess.run(command, cwd=work, check=True, env={**os.environ, "TMPDIR": str(run)})
    changed, made = put_back(run)
    assert {name: os.readlink(work / name) for name in links} == links
    assert list(other.iterdir()) == []
    assert {name: (work / name).read_text() for name in before} == before
    assert sorted(p.name for p in work.iterdir()) == sorted([*before, *links, "empty"])
    assert sorted(p.rpartition("/")[2] for p in changed) == ["best.pt", "gone", "log", "old"]
    assert sorted(p.rpartition("/")[2] for p in made) == ["deep", "elsewhere", "fresh", "moved"]
    assert (run / "files" / "made" / "fresh").read_text() == "new"
    assert put_back(tmp_path) == ([], [])


def test_a_folder_that_goes_as_a_whole_comes_back(tmp_path):
    work, run = tmp_path / "work", tmp_path / "runs" / "side"
    code = textwrap.dedent("""
        import os, shutil, sys, time
        from pathlib import Path
        from sumgrad.launch.script.watched.user_files import FileKeeper
        FileKeeper(Path(sys.argv[1]), Path("."), time.time()).install()
        shutil.rmtree("out")
        os.makedirs("out")
        Path("new/of/all").mkdir(parents=True)  # the innermost is tried first
        open("out/new.txt", "w").write("new")
        os.rename("old", "older")
    """)
    for folder in (run, work / "out" / "deep", work / "old"):
        folder.mkdir(parents=True)
    for name in ("out/notes.txt", "out/deep/x.txt", "old/y.txt"):
        (work / name).write_text("precious")
    subprocess.run([sys.executable, "-c", code, str(run)], cwd=work, check=True)
    assert not (work / "out" / "notes.txt").exists()
    put_back(run)
    for name in ("out/notes.txt", "out/deep/x.txt", "old/y.txt"):
        assert (work / name).read_text() == "precious"
    assert not (work / "out" / "new.txt").exists()
    assert not (work / "older").exists()
    assert not (work / "new").exists()


def test_what_the_run_itself_made_elsewhere_is_left_alone(tmp_path):
    (tmp_path / "side").mkdir()
    other = tmp_path / "cache"
    other.write_text("made by the run")
    keeper = FileKeeper(tmp_path / "side", tmp_path / "work", other.stat().st_ctime - 1)
    keeper._own = "/nowhere"
    keeper.touch(other)
    later = FileKeeper(tmp_path / "side", tmp_path / "work", other.stat().st_ctime + 1)
    later._own = "/nowhere"
    assert put_back(tmp_path / "side") == ([], [])
    later.touch(other)
    other.write_text("written over")
    assert put_back(tmp_path / "side") == ([str(other)], [])
    assert other.read_text() == "made by the run"


def test_what_the_single_run_did_not_see_is_a_problem_of_the_reference():
    single = replace(run_of(1.0, -4.0), unknown=("w: held in parts",))
    problems = first_step_of(single, run_of(1.0, -4.0)).problems
    assert problems == ("the single run: w: held in parts",)


def test_a_gradient_that_only_other_roundings_have_is_no_error_of_ours():
    """As of a unit that is off by a hair: nothing is divided by its size of zero."""
    other = run_of(1.0, -4.0)
    other.grads[0]["b"] = torch.ones(2)
    reference = first_step_of(run_of(1.0, -4.0), other)
    assert (reference.scale["b"], reference.floor["b"], reference.problems) == (0.0, 1.0, ())


def graphs(x, sizes):
    """Features of nodes, edges within each graph, and which graph each node belongs to."""
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    ring = [
        torch.tensor([[*range(n)], [*range(1, n), 0]]) + a
        for a, n in zip(first, sizes, strict=True)
    ]
    which = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return rows_of((x, torch.cat(ring, 1), which))


def test_nodes_are_the_same_whichever_number_their_graph_has():
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    together = graphs(x, [2, 3, 4])
    assert graphs(x[2:], [3, 4]) == together[2:]
    assert graphs(x[2:] + 1, [3, 4]) != together[2:]


def test_integers_without_edges_belong_to_their_rows():
    x, labels = torch.ones(4, 3), torch.tensor([0, 0, 1, 1])
    rows = rows_of((x, labels))
    assert rows[0] == rows[1] != rows[2]
    tokens = torch.tensor([[0, 1], [1, 2], [0, 3], [3, 3]])
    assert rows_of((x, labels, tokens))[0] != rows_of((x, labels + 1, tokens))[0]


def test_bags_are_the_same_wherever_they_begin():
    dense = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    values, offsets = torch.arange(9) * 7, torch.tensor([0, 2, 5, 6])
    together = rows_of((dense, values, offsets))
    assert rows_of((dense[2:], values[5:], offsets[2:] - 5)) == together[2:]
    assert rows_of((values, offsets)) == rows_of((values,))
    assert rows_of((offsets, values)) == []


def test_rows_without_a_common_shape_are_not_told():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert rows_of(nested) == []
