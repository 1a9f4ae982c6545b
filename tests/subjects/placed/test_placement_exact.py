"""Which elements of a parameter a rank holds: by identity, name, value, or its own word."""

from __future__ import annotations

import re

import pytest
import torch
from sumgrad.base.tensors import to_local
from sumgrad.subjects.program.placed.placement import (
    Placed,
    Siblings,
    bare_name,
    layers_of,
    place,
    renamed,
)
from torch import nn

FULL = {
    "0.weight": torch.arange(12.0).view(4, 3),
    "0.bias": torch.tensor([20.0, 21.0, 22.0]),
    "1.weight": torch.arange(30.0, 42.0).view(3, 4),
}


def model_of(frozen: tuple[str, ...] = (), **values: torch.Tensor) -> nn.Module:
    """A module with parameters of these names, `__` for a dot."""
    out = nn.Module()
    for name, value in values.items():
        *path, last = name.split("__")
        at = out
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, nn.Parameter(value.clone(), name not in frozen))
    return out


def placed(**values):
    found = place(model_of(**values), {}, FULL)
    assert found.unknown == ()
    return [(p.name, None if p.index is None else p.index.tolist()) for p in found.placed]


def unknown(**values) -> str:
    found = place(model_of(**values), {}, FULL)
    assert found.placed == ()
    (text,) = found.unknown
    return text


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("0__weight", "0.weight"),
        ("module__0__weight", "0.weight"),
        ("_fsdp_wrapped_module__0__weight", "0.weight"),
        ("_orig_mod__0___checkpoint_wrapped_module__weight", "0.weight"),
        ("any__where__0__weight", "0.weight"),
    ],
)
def test_a_whole_parameter_is_found_by_its_name_under_wrappers(shown, name):
    assert placed(**{shown: FULL[name]}) == [(name, None)]


def test_the_longest_name_that_it_ends_with_is_tried_first():
    full = {"weight": torch.ones(2), "a.weight": torch.ones(2)}
    whole = {"weight": torch.ones(2), "x__a__weight": torch.ones(2)}
    found = place(model_of(**whole), {}, full)
    assert [p.name for p in found.placed] == ["weight", "a.weight"]
    full = {"weight": torch.ones(2), "a.weight": torch.arange(2.0)}
    found = place(model_of(x__a__weight=torch.ones(2)), {}, full)  # the shorter one's values agree
    assert [p.name for p in found.placed] == ["weight"]


ALIKE = {"0.weight": torch.ones(2), "1.weight": torch.ones(2), "1.bias": torch.arange(2.0)}


def test_a_part_of_a_model_with_names_of_its_own_is_not_told_by_constant_values():
    part = model_of(**{"0__weight": torch.ones(2)})  # the second of two stages, numbered anew
    (text,) = place(part, {}, ALIKE).unknown
    assert text.startswith("0.weight (2,): its values are those of 0.weight and of 1.weight, and")
    numbered = {"0.weight": ("1.weight", None)}
    (found,) = place(part, {}, ALIKE, numbered=numbered).placed
    assert found.name == "1.weight"
    (found,) = place(part, {id(getattr(part, "0").weight): "0.weight"}, ALIKE).placed
    assert found.name == "0.weight"
    (found,) = place(part, {}, ALIKE, modules={id(getattr(part, "0")): "1"}).placed
    assert found.name == "1.weight"
    whole = model_of(**{"0__weight": torch.ones(2), "1__weight": torch.ones(2),
                        "1__bias": torch.arange(2.0)})  # fmt: skip
    assert [p.name for p in place(whole, {}, ALIKE).placed] == [*ALIKE]


LAYERS = {
    f"layers.{i}.{name}": value
    for i in range(4)
    for name, value in {
        "ln.weight": torch.ones(3), "ln.bias": torch.zeros(3), "l.bias": torch.zeros(3),
        "l.weight": torch.arange(9.0).view(3, 3) + 10 * i,
    }.items()
}  # fmt: skip


NAMES = ("ln__weight", "ln__bias", "l__bias", "l__weight")


def stage(*which, ln=1.0, start="layers", names=NAMES):
    """A part of the layers, numbered from nought."""
    held = {}
    for here, there in enumerate(which):
        for name in names:
            value = LAYERS[f"layers.{there}.{name.replace('__', '.')}"]
            value = ln * value if name == "ln__weight" else value
            held[f"{start}__{here}__{name}"] = value
    return place(model_of(**held), {}, LAYERS)


@pytest.mark.parametrize("start", ["layers", "stage"])
def test_what_begins_equal_in_every_layer_is_told_by_its_siblings(start):
    found = stage(2, 3, start=start)
    assert found.unknown == ()
    assert {p.name for p in found.placed} == {n for n in LAYERS if n[7] in "23"}
    assert {p.name for p in stage(0, 1).placed} == {n for n in LAYERS if n[7] in "01"}
    assert {p.name for p in stage(2, 0).placed} == {n for n in LAYERS if n[7] in "20"}


def test_a_layer_of_which_no_parameter_has_values_of_its_own_is_not_told():
    alone = stage(2, 3, names=("ln__weight", "ln__bias"))
    assert alone.placed == ()
    assert len(alone.unknown) == 4


def test_other_values_under_a_layers_name_are_held_against_that_layer():
    odd = stage(2, 3, ln=2.0)  # that they are others is said where weights are compared
    assert {p.name for p in odd.placed} == {n for n in LAYERS if n[7] in "23"}


def test_siblings_that_say_two_things_say_nothing():
    full = {"a.0.v": torch.arange(2.0), "b.1.w": torch.arange(3.0), "a.0.c": torch.ones(2),
            "b.1.c": torch.ones(2)}  # fmt: skip
    found = {"x.0.v": "a.0.v", "x.0.w": "b.1.w"}
    siblings = Siblings(found, full)
    assert siblings.name_of("x.0.c", torch.ones(2)) is None
    assert Siblings({"x.0.v": "a.0.v"}, full).name_of("x.0.c", torch.ones(2)) == "a.0.c"
    assert Siblings({"x.0.v": "a.0.v"}, full).name_of("x.0.c", torch.zeros(2)) is None
    assert Siblings({"x.0.v": "a.0.v"}, full).name_of("x.1.c", torch.ones(2)) is None
    # Nor does a layer around it, which may number its own anew.
    assert Siblings({"x.0.v": "a.0.v"}, full).name_of("x.0.e.1.c", torch.ones(2)) is None


def test_that_the_model_is_the_model_tells_nothing_of_what_is_in_it():
    layers = layers_of({"head.w": "head.w", "norm.b": "norm.b"})
    assert layers[""] == ""
    assert renamed(["last"], layers) is None
    assert renamed(["head", "inner"], layers) == "head.inner"
    moved = layers_of({"head.w": "Net.head.w"})
    assert renamed(["last"], moved) == "Net.last"
    assert renamed(["last"], moved, least=1) is None
    assert layers_of({"a.w": "b.w", "a.v": "c.v"})["a"] is None
    assert layers_of({"a.x.w": "b.y.w"}) == {"a.x": "b.y"}  # nothing is said of what holds them


def test_what_is_left_on_the_meta_device_is_held_by_others():
    model = model_of(**{"0__weight": FULL["0.weight"]})
    model.add_module("1", nn.Linear(4, 3, device="meta"))
    found = place(model, {}, FULL)
    assert [p.name for p in found.placed] == ["0.weight"]
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 2), (0, 3)), ((1, 4), (0, 3)), ((0, 4), (2, 3)), ((3, 4), (1, 3))]
)
def test_a_block_is_found_by_its_values_under_any_name(rows, columns):
    part = FULL["0.weight"][rows[0] : rows[1], columns[0] : columns[1]]
    index = torch.arange(12).view(4, 3)[rows[0] : rows[1], columns[0] : columns[1]]
    assert placed(cut=part) == [("0.weight", index.tolist())]
    assert placed(**{"0__weight": part}) == [("0.weight", index.tolist())]
    assert placed(cut=FULL["1.weight"]) == [("1.weight", None)]


def test_a_placed_shard_cuts_a_full_tensor():
    index = torch.tensor([[4, 5], [7, 8]])
    param = nn.Parameter(FULL["0.weight"][1:3, 1:])
    one = Placed(name="0.weight", param=param, index=index)
    assert one.slice(FULL["0.weight"] * 10).tolist() == [[40, 50], [70, 80]]
    assert one.local() is param
    assert to_local(param) is param
    whole = Placed(name="0.weight", param=param, index=None)
    assert whole.slice(FULL["0.weight"]) is FULL["0.weight"]


def test_what_occurs_twice_or_nowhere_is_not_guessed():
    twice = {"w": torch.tensor([1.0, 2.0, 1.0, 2.0, 5.0]), "v": torch.tensor([7.0, 8.0])}
    (text,) = place(model_of(x=torch.tensor([1.0, 2.0])), {}, twice).unknown
    assert text == (
        "x (2,): its values occur 2 times in w: which part it is can be said by shard_of"
    )
    (text,) = place(model_of(w=torch.tensor([1.0, 2.0])), {}, twice).unknown
    assert text.startswith(
        "w (2,): has shape (2,), and its values occur 2 times in the full weight: which part"
    )
    assert unknown(x=torch.tensor([1.0, 9.0])).startswith("x (2,): is none of build()'s")
    assert "occur nowhere" in unknown(**{"0__bias": torch.tensor([20.0, 22.0])})
    both = {"w": torch.tensor([1.0, 2.0, 3.0]), "v": torch.tensor([1.0, 2.0])}
    (text,) = place(model_of(x=torch.tensor([1.0, 2.0])), {}, both).unknown
    assert text.startswith("x (2,): its values are those of several of build()'s parameters")
    assert "has shape (1, 3); build() has (3,)" in unknown(**{"0__bias": FULL["0.bias"][None]})
    assert "is none of" in unknown(x=FULL["0.bias"].double()[:2])  # another dtype
    assert "is none of" in unknown(x=torch.empty(0))
    assert "occur nowhere" in unknown(**{"0__bias": torch.arange(20.0, 24)})  # more than there is


def test_the_last_block_of_a_parameter_is_found_and_nothing_past_its_end():
    assert placed(x=torch.tensor([22.0])) == [("0.bias", [2])]
    full = {"w": torch.tensor([1.0, 2.0, 1.0])}
    found = place(model_of(x=torch.tensor([1.0, 2.0])), {}, full)
    assert [p.index.tolist() for p in found.placed] == [[0, 1]]


def test_a_block_that_would_leave_the_parameter_on_one_side_is_none():
    full = {"w": torch.tensor([[1.0, 2.0, 1.0], [3.0, 4.0, 9.0]])}
    found = place(model_of(x=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), {}, full)
    assert [p.index.tolist() for p in found.placed] == [[[0, 1], [3, 4]]]


def test_a_wrapper_inside_a_name_is_taken_out():
    """The values are no help: both parameters are ones."""
    full = {"0.weight": torch.ones(2), "1.weight": torch.ones(2)}
    for inner in ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"):
        names = (f"0__{inner}__weight", f"1__{inner}__weight")
        found = place(model_of(**dict.fromkeys(names, torch.ones(2))), {}, full)
        assert [p.name for p in found.placed] == ["0.weight", "1.weight"]


def test_a_shard_without_elements_holds_none():
    assert placed(**{"0__weight": torch.empty(0, 3)}) == [("0.weight", [])]


def test_identity_comes_before_names_and_values():
    model = model_of(x=FULL["0.weight"], other=torch.ones(3, 3))
    known = {id(model.x): "0.weight", id(model.other): "0.weight"}
    found = place(model, {id(model.x): "0.weight"}, FULL)
    assert [(p.name, p.index) for p in found.placed] == [("0.weight", None)]
    assert found.placed[0].param is model.x
    found = place(model, known, FULL)
    assert [p.name for p in found.placed] == ["0.weight"]
    assert found.unknown[0].startswith("other (3, 3): has shape (3, 3), and its values occur")
    moved = model_of(x=FULL["0.weight"] + 1)  # its values changed, it is the same parameter
    found = place(moved, {id(moved.x): "0.weight"}, FULL)
    assert [(p.name, p.index) for p in found.placed] == [("0.weight", None)]


def test_of_two_parameters_for_one_what_is_known_by_its_name_has_the_place():
    """One gradient is read for each name; of two that values alone tell, none is."""
    w = FULL["0.weight"]
    for first, second in ((w[:2], w[2:]), (w, w), (w, w[:2]), (w[:2], w)):
        found = place(model_of(a=first, b=second), {}, FULL)
        assert found.placed == ()
        assert found.unknown == tuple(
            f"{name}: another parameter of this rank is 0.weight too" for name in "ab"
        )
    for order in (("a", "0__weight"), ("0__weight", "a")):
        found = place(model_of(**dict.fromkeys(order, w)), {}, FULL)
        assert [p.name for p in found.placed] == ["0.weight"]
        assert found.unknown == ("a: another parameter of this rank is 0.weight too",)
    model = model_of(a=w, b=w)
    found = place(model, {id(model.b): "0.weight"}, FULL)
    assert [p.param for p in found.placed] == [model.b]


def test_a_part_of_zeros_is_no_other_parameter_of_that_size():
    """A bias that starts at zero is cut: it is not the one whole bias of zeros beside it."""
    full = {"conv.weight": FULL["0.weight"] + 50, "conv.bias": torch.zeros(9)}
    full["head.bias"] = torch.zeros(3)
    model = model_of(conv__bias=torch.zeros(3), head__bias=torch.zeros(3))
    found = place(model, {}, full)
    assert [p.name for p in found.placed] == ["head.bias"]
    (text,) = found.unknown
    assert text.startswith("conv.bias (3,): has shape (3,), and its values occur 2 times")
    cut = model_of(x=torch.zeros(3), conv__weight=full["conv.weight"][:1])
    (text,) = place(cut, {}, full).unknown
    assert text.startswith("x (3,): its values are those of several of build()'s parameters")
    # Of a stage that cuts nothing the only one of its shape is that, by another name.
    found = place(model_of(x=torch.zeros(3)), {}, full)
    assert [p.name for p in found.placed] == ["head.bias"]


def test_values_in_another_order_are_said_to_be():
    model = model_of(**{"0__weight": FULL["0.weight"].flip(0)})
    (text,) = place(model, {}, FULL).unknown
    assert text == (
        "0.weight (4, 3): holds the values of build()'s in another order, a layout that is not "
        "known"
    )
    other = place(model_of(**{"0__weight": FULL["0.weight"] + 1}), {}, FULL)
    assert [(p.name, p.index) for p in other.placed] == [("0.weight", None)]  # weights are checked


def test_frozen_parameters_are_left_out_and_said_where_build_trains_them():
    model = model_of(frozen=("0__bias", "x"), **{"0__bias": FULL["0.bias"], "x": torch.ones(7)},
                     **{"0__weight": FULL["0.weight"]})  # fmt: skip
    found = place(model, {}, FULL)
    assert [p.name for p in found.placed] == ["0.weight"]
    assert found.unknown == ("0.bias is frozen here, though build() trains it",)


def test_a_frozen_copy_with_the_values_of_what_is_trained_is_no_parameter_of_build():
    """A teacher's normalisation starts from ones, as the student's does."""
    for name in ("teacher__0__weight", "x"):
        model = model_of(frozen=(name,), **{n.replace(".", "__"): t for n, t in FULL.items()},
                         **{name: FULL["0.weight"]})  # fmt: skip
        found = place(model, {}, FULL)
        assert ([p.name for p in found.placed], found.unknown) == (list(FULL), ())


def test_what_a_program_declares_of_a_shard_counts():
    """A constant weight occurs everywhere: only the Program can say which part it is."""
    full = {"w": torch.ones(4, 2), "v": torch.zeros(3)}
    cuts = {"w": (slice(2, 3), slice(None))}
    model = model_of(module__w=torch.ones(1, 2), v=torch.zeros(3))
    found = place(model, {}, full, cuts.get)
    assert [(p.name, None if p.index is None else p.index.tolist()) for p in found.placed] == [
        ("v", None), ("w", [[4, 5]])
    ]  # fmt: skip
    assert found.unknown == ()
    assert len(place(model, {}, full).unknown) == 1


@pytest.fixture
def mesh():
    """Rank 1 of four, without processes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def test_a_dtensor_says_itself_what_it_holds(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    index = torch.arange(12).view(4, 3)

    def held(local, *placements, full="0.weight"):
        whole = FULL[full].shape
        tensor = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole,
            stride=FULL[full].stride(),
        )  # fmt: skip
        model = nn.Module()
        model.register_parameter("x", nn.Parameter(tensor))
        return place(model, {id(model.x): full}, FULL)

    # Rank 1 lies at (0, 1): the second part of what axis b cuts, the first of a's.
    found = held(FULL["0.weight"][2:], Replicate(), Shard(0))
    assert [p.index.tolist() for p in found.placed] == [index[2:].tolist()]
    assert found.placed[0].local().tolist() == FULL["0.weight"][2:].tolist()
    found = held(FULL["0.weight"][:2, 2:], Shard(0), Shard(1))
    assert [p.index.tolist() for p in found.placed] == [index[:2, 2:].tolist()]
    found = held(FULL["0.weight"], Replicate(), Replicate())
    assert [p.index for p in found.placed] == [None]
    # It holds another part than its placement says: where its values lie.
    found = held(FULL["0.weight"][:2], Replicate(), Shard(0))
    assert [p.index.tolist() for p in found.placed] == [index[:2].tolist()]
    # Values that moved say nothing: its placement does.
    found = held(FULL["0.weight"][2:] + 100, Replicate(), Shard(0))
    assert [p.index.tolist() for p in found.placed] == [index[2:].tolist()]
    # A shard of another shape than the placement's is found by its values.
    found = held(FULL["0.weight"][1:], Replicate(), Shard(0))
    assert [p.index.tolist() for p in found.placed] == [index[1:].tolist()]


@pytest.mark.parametrize(("of", "rows", "name"), [
    ("layers.0.w", (2, 4), "layers.0.w"),
    ("layers.1.w", (2, 4), "layers.1.w"),  # a stage that numbers its own
    ("layers.1.w", (0, 2), "layers.0.w"),  # where its placements do not say
    ("layers.0.v", (2, 4), "layers.0.w"),  # another weight's numbers, drawn by chance
    ("larger", (2, 4), "layers.0.w"),
    ("", (2, 4), "layers.0.w"),
])  # fmt: skip
def test_what_a_rank_draws_for_its_own_shard_is_no_other_weights(of, rows, name, mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    generator = torch.Generator().manual_seed(0)
    full = {n: torch.randn(4, 3, generator=generator)
            for n in ("layers.0.w", "layers.0.v", "layers.1.w")}  # fmt: skip
    full["larger"] = torch.randn(8, 3, generator=generator)
    local = full[of][slice(*rows)] if of else torch.randn(2, 3, generator=generator)
    tensor = DTensor.from_local(
        local.clone(), mesh, (Replicate(), Shard(0)), run_check=False, shape=torch.Size((4, 3)),
        stride=(3, 1),
    )  # fmt: skip
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].register_parameter("w", nn.Parameter(tensor))
    found = place(model, {}, full)
    assert found.unknown == ()
    (one,) = found.placed
    assert one.name == name
    assert one.index.tolist() == [[6, 7, 8], [9, 10, 11]]


def test_a_dtensor_of_another_shape_is_not_the_parameter(mesh):
    from torch.distributed.tensor import DTensor, Replicate

    tensor = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Replicate()], run_check=False)
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(tensor))
    (text,) = place(model, {id(model.x): "0.weight"}, FULL).unknown
    assert text == "x (2, 2): a DTensor of shape (2, 2); build() has (4, 3)"


def test_a_layer_that_build_made_keeps_its_name_whatever_numbers_it_now():
    """All values alike and an empty shard: neither name nor value could tell."""
    built = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    for layer in (built[0], built[2]):
        layer.weight = nn.Parameter(torch.zeros(2, 2))
        layer.bias = nn.Parameter(torch.zeros(2))
    full = {name: param.detach().clone() for name, param in built.named_parameters()}
    modules = {id(module): name for name, module in built.named_modules()}
    stage = nn.Sequential(built[2])
    stage[0].weight = nn.Parameter(torch.empty(0, 2))
    names = [p.name for p in place(stage, {}, full, modules=modules).placed]
    assert names == ["2.weight", "2.bias"]
    assert next(p.name for p in place(built, {}, full, modules=modules).placed) == "0.weight"
    assert [p.name for p in place(stage, {}, full).placed] != names


def test_a_parameter_of_the_model_itself_has_no_module_before_its_name():
    full = {"first": torch.zeros(2), "second": torch.zeros(2)}  # no value could tell
    built = model_of(**full)
    stage = nn.Module()
    stage.second = built.second
    names = [p.name for p in place(built, {}, full, modules={id(built): ""}).placed]
    assert names == ["first", "second"]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ((slice(0, 2),), None),
        ((slice(0, 3),), "shard_of('w') says 12 elements, and it holds 8"),
        ("rows", "shard_of('w') returned str 'rows', expected None or a tuple of slices"),
        ((slice(0, 2),) * 3, "shard_of('w') returned tuple"),
    ],
)
def test_what_a_program_declares_of_its_cut_is_an_index_of_what_it_holds(cut, words):
    model = model_of(w=torch.zeros(2, 4))
    full = {"w": torch.zeros(5, 4)}
    if words is None or "holds" in words:
        found = place(model, {}, full, lambda name: cut)
        assert (found.unknown == ()) == (words is None)
        assert all(words in text for text in found.unknown)
        return
    with pytest.raises(TypeError, match=re.escape(words)):
        place(model, {}, full, lambda name: cut)


@pytest.mark.parametrize(("shown", "name"), [
    ("module.0.weight", "0.weight"),
    ("_fsdp_wrapped_module.module.a._orig_mod.b", "a.b"),
    ("submodule.weight", "submodule.weight"),  # a name that ends like a wrapper's
    ("module.", ""),
    ("module.a.", "a."),
])  # fmt: skip
def test_a_name_without_wrappers(shown, name):
    assert bare_name(shown) == name
