"""In a process of a script that knows nothing: what every optimizer step finds, written down.

Global hooks of torch say when a model is called and when an optimizer steps. A process becomes a
rank with its first call of a model under a gradient; what never does is not observed. After the
last step that was asked for the process ends, whatever the script had in mind.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from sumgrad.base.outcome import describe_operation
from sumgrad.base.tensors import in_a_transform, own_arithmetic, to_local
from sumgrad.launch.guard import flush, lost_another
from sumgrad.launch.script.watched.beginnings import Beginnings
from sumgrad.launch.script.watched.buffers import Buffers
from sumgrad.launch.script.watched.gradients import Without, gradient_of
from sumgrad.launch.script.watched.in_front import (
    in_front_of,
    kwargs_of_the_call,
    record_groups,
    see_backward,
    see_functional_calls,
    see_optimizers,
)
from sumgrad.launch.script.watched.look import Look
from sumgrad.launch.script.watched.nested import AfterItsOwn, StepsUnderWay
from sumgrad.launch.script.watched.owned import MOST_STEPS, Owned
from sumgrad.launch.script.watched.rescaled import Rescaled
from sumgrad.launch.script.watched.seat import Seat, is_a_rank, place
from sumgrad.launch.script.watched.troubles import Troubles
from sumgrad.launch.script.watched.user_files import FileKeeper
from sumgrad.launch.script.watched.weights import Weights
from sumgrad.ledger.evidence import GradientWatch
from sumgrad.ledger.late import Late
from sumgrad.ledger.process_group import register_backend, step_aside
from sumgrad.record.ranks import AFTER, BUFFER, OWN, OWN_AT
from sumgrad.subjects.own_gradients import OwnGradients, gathered
from sumgrad.subjects.program.held_gradients import reduced_by_no_wrapper
from sumgrad.subjects.program.placed.parts_by_value import index_by_placement
from sumgrad.subjects.script.asked import FILE, SAME, Asked, read_asked
from sumgrad.subjects.script.doubled import NoDropout, casts, double_inputs, in_float64
from sumgrad.subjects.script.models import Held, Models, label_of, outermost
from sumgrad.subjects.script.other_generators import see_other_generators
from sumgrad.subjects.script.roundings import OtherRoundings
from sumgrad.subjects.script.rows import rows_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_begun: list[Watch] = []


def start(path: str) -> None:
    """Begin, once torch is imported; once in a process. path: of what is asked."""
    if _begun:
        return
    try:
        _begun.append(Watch(read_asked(Path(path))))
        _begun[0].install()
    except Exception:  # the script must not end of it; that nothing was seen is said by who asked
        traceback.print_exc()


class Watch:
    """One process of an observed script."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.directory = asked, Path(asked.directory)
        self.models, self.seat = Models(), Seat(asked)
        self.evidence: GradientWatch | None = None
        compared = asked.start is not None and not asked.jitter
        self.own = OwnGradients() if compared else None
        self.late = self.seat.ledger.late = Late() if compared else None
        looks = asked.look >= 0
        self.look = Look(asked, self.seat.ledger) if looks else None
        since = (self.directory / FILE).stat().st_mtime
        self.keeper = FileKeeper(self.directory, Path.cwd(), since)
        self.lift: Any = None
        self.dropout = NoDropout()
        self.draws = self.dropout.draws
        self.calls, self.roots = 0, 0
        self.under_way, self.last_hook = StepsUnderWay(), AfterItsOwn(self._before)
        self.inside: nn.Module | None = None
        self.is_inside = False  # the same, for Dynamo, which may not see one module twice
        self.ended = False
        self.troubles = Troubles()
        self.too_early: list[str] = []  # those of steps before any model was called
        self.infos: list[dict[str, Any]] = []
        self.rows: dict[str, list[Any]] = {}
        self.modes: dict[str, tuple[int, list[str]]] = {}
        self.losses: list[float] = []
        self.beginnings = Beginnings()
        self.stepping: dict[str, Held] = {}
        self.weights, self.buffers = Weights(asked, self.directory), Buffers(asked, self.directory)
        self.owned = Owned(asked, self.models, self.weights)
        self.rescaled = Rescaled(self.models.held.values)
        self.without = Without()
        self._no_more_hook: Callable[[], object] = lambda: None

    def install(self) -> None:
        """Hooks, and what belongs to every process, rank or not."""
        self.keeper.install()
        torch.save = self.keeper.in_front(torch.save, 1, "f")
        below: Any = safetensors.torch
        below.serialize_file = self.keeper.in_front(below.serialize_file, 1, "filename")
        if self.asked.lift:
            self.lift = in_float64()
        self.dropout.__enter__()
        see_other_generators(self.draws)
        self.draws.file = self.directory / f"draws_of_workers_{os.getpid()}"
        if self.asked.jitter:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it compiles nothing under such a mode
            OtherRoundings(self.asked.jitter).__enter__()
        register_backend(self.seat.ledger)
        # A rank that ends early leaves the file, at which no other run could meet.
        record_groups(lambda: self.troubles.guarded(self.seat.take), self.keeper.touch)
        see_functional_calls(self._called_with_others)
        see_backward(self._before_backward, self._after_backward)
        self.rescaled.install()
        self.owned.optimizers = see_optimizers()
        register_module_forward_pre_hook(self._called)
        register_optimizer_step_pre_hook(self.last_hook.before)
        register_optimizer_step_post_hook(self._after)
        atexit.register(self._left)
        multiprocessing.util.Finalize(None, self._left, exitpriority=0)  # of a process it starts
        in_front_of(sys, "excepthook", self._died)

    # --- losses --------------------------------------------------------------------------------

    def _before_backward(self, tensors: Any) -> None:
        if self.seat.taken and isinstance(tensors, Tensor) and tensors.numel() == 1:
            if self.look is not None:
                self.look.at_loss(tensors)
            loss = to_local(tensors.detach())  # a DTensor is none without torch's dispatch
            with own_arithmetic():
                self.losses.append(float(loss))

    def _after_backward(self) -> None:
        if self.seat.taken and not self.ended:
            with own_arithmetic():
                self.troubles.guarded(self.rescaled.after_backward)

    # --- models --------------------------------------------------------------------------------

    def _called(self, module: nn.Module, args: Any) -> Any:
        """Any module is called. Dynamo traces this, too, and breaks no graph within a model."""
        if self.is_inside:
            return None
        return self._entering(module, args)

    @step_aside
    def _entering(self, module: nn.Module, args: Any) -> Any:
        """A module is called by the script itself, or by one that is not looked at."""
        if self.inside is not None or self.ended:
            return None
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_a_transform():
            return None
        if torch._C._current_graph_task_id() != -1:
            return None  # computed again in a backward, by a checkpoint
        if not self.seat.take():
            return None
        return self.troubles.guarded(lambda: self._look(module, args))

    @step_aside
    def _called_with_others(self, module: nn.Module) -> None:
        """A model is called with other parameters than its own, maybe in one of torch.func's
        transforms, where its gradient is no backward's: its own are met before that."""
        if self.inside is not None or self.ended or torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and self.seat.take():
            with torch._C._DisableFuncTorch(), own_arithmetic():
                self.troubles.guarded(lambda: self._meet(module))

    def _look(self, module: nn.Module, args: Any) -> Any:
        self.inside, self.is_inside = module, True
        # Not for good: who copies the module, or saves it whole, would copy this with it.
        hook = module.register_forward_hook(self._leaving, always_call=True)
        self._no_more_hook = hook.remove
        kwargs = kwargs_of_the_call()
        with own_arithmetic():
            rows = rows_of((args, kwargs))
            if rows:
                self.rows.setdefault(label_of(module), []).extend(rows)
            self._meet(module)
            self.modes.setdefault(label_of(module), _modes(module))
            if self.look is not None:
                self.look.entering(module, self.calls, self.models)
            self.draws.entering()
        if self.lift is not None:
            with own_arithmetic():
                return double_inputs(args, kwargs)
        return None

    def _meet(self, module: nn.Module) -> None:
        self._write_buffers()
        new = self.models.meet(module, self.weights.single)
        if new:
            self._begin_with(new)

    @step_aside
    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is not self.inside:
            return
        self.inside, self.is_inside = None, False
        self._no_more_hook()
        self.troubles.guarded(lambda: self.draws.leaving(label_of(module)))
        if self.own is not None and self.infos == [] and not self.ended:
            self.troubles.guarded(lambda: self._look_at_gathered(outermost(module)))

    def _look_at_gathered(self, root: nn.Module) -> None:
        """Parameters of which a rank keeps a shard, and autograd sees the whole."""
        assert self.own is not None
        held = {id(h.param): h for h in self.models.held.values()}
        for shard, leaf in gathered(root):
            h = held.get(id(shard))
            if h is not None and tuple(leaf.shape) == h.shape:
                index = index_by_placement(leaf) if isinstance(leaf, DTensor) else None
                self.own.look_at(h.name, leaf, index)

    def _begin_with(self, new: list[Held]) -> None:
        """Parameters met for the first time: what they are, and made equal."""
        # A part of one, as of a DTensor, is told by its own placement.
        whole = {n: b for n, b in self.models.buffers.items() if not isinstance(b, DTensor)}
        self.beginnings.met(new, whole)
        self.beginnings.made_equal(self.weights.begin(new, self.models.buffers, self.roots))
        self.buffers.begin(self.models.buffers)
        if not self.roots:
            self._enter_step()
        self.roots += 1
        trained = {
            n: h.param  # FSDP1 gives its flat parameters another size before their first use
            for n, h in self.models.held.items()
            if h.param.requires_grad and h.window is None
        }
        if self.evidence is not None:
            self.evidence.close()
        self.evidence = GradientWatch(trained)  # type: ignore[arg-type]
        observe = self.evidence.observe
        self.seat.ledger.observe = observe if self.look is None else self.look.observing(observe)
        if self.own is not None:
            for h in (h for h in new if h.window is None):
                self.own.look_at(h.name, h.param, h.index)

    # --- steps ---------------------------------------------------------------------------------

    @step_aside
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step: the gradients that it finds, or its closure makes."""
        given_up = self.under_way.begins(optimizer)
        if given_up and self.infos and self.infos[-1]["step"] == self.calls:
            self.infos.pop()
        if len(self.under_way) > 1 or self.ended or not self.seat.take():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.troubles.guarded(lambda: self._write_gradients(optimizer))
            return None
        written = False

        @functools.wraps(closure)
        def seen(*args: Any, **kwargs: Any) -> Any:
            nonlocal written
            value = closure(*args, **kwargs)
            if not written:
                written = True
                self.troubles.guarded(lambda: self._write_gradients(optimizer))
            else:
                self.troubles.guarded(lambda: self._write_norms(optimizer))
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": seen}
        return (args[0], seen, *args[2:]), kwargs

    def _write_gradients(self, optimizer: Optimizer) -> None:
        held = self.owned.held_by(optimizer)
        self.stepping = held
        known = {id(h.param) for h in held.values()}
        lost = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in known]
        if lost:
            text = (
                f"{type(optimizer).__name__} steps {len(lost)} parameters of no model that was "
                f"called, the first of shape {tuple(lost[0].shape)}: its name in the other run is "
                f"not known; let it be one of an nn.Module that is called"
            )
            self.troubles.add(text) if self.evidence is not None else self.too_early.append(text)
        if self.evidence is None:
            return  # no model was called yet
        info: dict[str, Any] = {"partial": [], "read_from": {}, "elsewhere": {}}
        with own_arithmetic():
            every = {n: gradient_of(h, info, self.seat.ledger) for n, h in held.items()}
            grads = {n: g for n, g in every.items() if g is not None}
            self.without.before({n: h for n, h in held.items() if n not in grads})
            self.seat.files.keep(f"{self.asked.tier}/{self.calls}", grads)
            if self.own is not None:
                own, at = self.own.taken(held)
                self.seat.files.keep(f"{OWN}/{self.calls}", own)
                self.seat.files.keep(f"{OWN_AT}/{self.calls}", at)
            info["rescaled"] = self.rescaled.taken(held.values())
            info["saturated"] = self.rescaled.saturated
            info["unseen"] = self.rescaled.unseen
            without = {n: h for n, h in held.items() if every[n] is None}
            trained = {n: h.param for n, h in without.items()
                       if h.param.requires_grad and h.window is None}  # fmt: skip
            info["unreduced"] = reduced_by_no_wrapper(trained, self.models.roots)
            info["still_frozen"] = [n for n, h in without.items() if not h.param.requires_grad]
            info["races"] = self._races()
            info |= self.late.taken() if self.late is not None else {}
            self.seat.ledger.settle()
            info["stepped"] = list(held)
            used = {
                n: h
                for n, h in self.models.held.items()
                if n not in held and not self.owned.was_stepped(h) and h.param.grad is not None
            }
            self.owned.look_at_others()
            info["other_weights"] = self.weights.moved(held, self.calls)
            info["left_behind"] = self.weights.left_behind(used)
            self.infos.append({**self._said(), **info})
            if self.look is not None and self.calls == self.asked.look:
                self.look.write(place()[0])

    def _write_norms(self, optimizer: Optimizer) -> None:
        """Of the gradients that a closure makes when it is called again in one step: as of a line
        search, or of a step that looks at how sharp the loss is."""
        if not self.infos or self.infos[-1]["step"] != self.calls:
            return  # no model was called yet
        with own_arithmetic():
            self.infos[-1].setdefault("again", []).append({
                n: float(h.param.grad.double().norm())
                for n, h in self.owned.held_by(optimizer).items()
                if h.window is None and h.index is None and type(h.param.grad) is torch.Tensor
            })  # fmt: skip

    def _races(self) -> list[str]:
        """Reductions of gradients that nobody has waited for when the optimizer steps, in words."""
        ledger = self.seat.ledger
        left = [ledger.open_ops[n] for n in ledger.nobody_waits_for() if n in ledger.open_ops]
        return [
            text
            for event in left
            if event.get("grads") and "by" not in event and (text := describe_operation(event))
        ]

    def _said(self) -> dict[str, Any]:
        """What the judge asks of every step, and what only a script's says."""
        assert self.evidence is not None
        said = {
            "tier": self.asked.tier,
            "step": self.calls,
            "unwaited": list(self.seat.ledger.open_works),
            "changed_weights": [],
            "feeds": self.evidence.feeds(),
            "backwards": max(self.evidence.backwards.values(), default=0),
            "rows": self.rows,
            "modes": self.modes,
            "draws": self.draws.taken(),
            "losses": self.losses,
            "lifted": dict(casts(self.lift)),
            "dropout": self.dropout.count,
            "alone": not dist.is_initialized(),
            **self.beginnings.said(first=not self.infos),
        }
        self.rows, self.modes, self.losses = {}, {}, []
        return said

    @step_aside
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped: the weights that it made, and those of the single run."""
        self.last_hook.over(optimizer)
        if not self.under_way.ends(optimizer):
            return
        if self.evidence is None:  # it begins with the first call of a model
            if len(self.too_early) > self.asked.steps * MOST_STEPS and not self.ended:
                self._finish_early()
        elif not self.ended and self.seat.taken:
            self.troubles.guarded(self._write_weights)
            self.calls += 1
            self.owned.has_stepped(optimizer)
            self._enter_step()
            assert self.evidence is not None
            self.evidence.begin_step()
            self.troubles.guarded(self._look_at_thawed)
            if self.owned.enough(self.calls):
                self._finish_early()

    def _look_at_thawed(self) -> None:
        """Parameters that were frozen when they were met."""
        for h in self.models.held.values() if self.own is not None else ():
            if h.window is None and self.own is not None and not self.own.knows(h.name):
                self.own.look_at(h.name, h.param, h.index)

    def _write_weights(self) -> None:
        with own_arithmetic():
            held = list(self.stepping.values())
            if self.late is not None:  # weights may be on their way until the next forward
                self.late.let_come([h.local() for h in held])
            if self.infos:
                self.infos[-1]["changed_without"] = self.without.after()
            self.seat.files.keep(f"{AFTER}/{self.calls}", {h.name: h.local() for h in held})
            self.weights.after(held, self.calls)

    def _write_buffers(self) -> None:
        """What the last step left in them, once, where the next forward begins."""
        step = self.calls - 1
        if step < 0 or self.asked.jitter or "changed_buffers" in self.infos[step]:
            return  # nobody reads a noise run's
        left, changed = self.buffers.after(self.models.buffers, step)
        self.infos[step]["changed_buffers"] = changed
        if self.asked.start is None:
            return  # of the single run they are kept already
        at = f"{BUFFER}/{self.asked.tier}/{step}"
        self.seat.files.others |= {f"{at}/{name}": value for name, value in left.items()}

    def _enter_step(self) -> None:
        self.seat.name(f"{self.asked.tier}/{self.calls}/step")

    # --- the end -------------------------------------------------------------------------------

    def _finish_early(self) -> None:
        """Enough was seen. Ranks that have not come so far may still need this one's word."""
        self._write_record()
        self.seat.wait_for_the_others()
        flush()
        os._exit(0)

    def _left(self) -> None:
        """The script came to its own end."""
        if self.seat.taken and not self.ended:
            self._write_record()

    def _died(self, kind: Any, error: BaseException, trace: Any) -> None:
        """The script raised: at the top of a process, or of a rank that it started."""
        if not self.seat.taken and is_a_rank():
            self.troubles.guarded(self.seat.take)
        if not self.seat.taken or self.ended or isinstance(error, SystemExit):
            return
        if lost_another(error) and self.seat.others_saw_enough(self.asked.calls):
            self._write_record()  # they had seen enough, and left
            flush()
            os._exit(0)
        self.ended = True
        self.seat.raised(error.with_traceback(trace))

    def _write_record(self) -> None:
        self.ended = True
        trained = {
            n: h
            for n, h in self.models.held.items()
            if h.param.requires_grad or self.owned.was_stepped(h)
        }
        for text in () if self.infos else self.too_early:
            self.troubles.add(text)
        for text in self.owned.troubles(self.calls):
            self.troubles.add(text)
        if self.infos:
            first, *later = (info["draws"] for info in self.infos)
            for line, drawn in self.draws.before_the_first(later).items():
                first[line] = [*first.get(line, ()), *drawn]
            first |= self.draws.of_workers()
        places = {n: h.index for n, h in self.models.held.items() if h.index is not None}
        self.seat.finish(
            places,
            {
                "steps": self.infos,
                "unknown": [*self.models.unknown, *self.troubles.texts],
                "by_name": sorted(self.models.by_name),
                "unowned": self.owned.unowned(),
                "params": {n: {"sharded": h.index is not None} for n, h in trained.items()},
                "shapes": {n: list(s) for n, s in self.beginnings.shapes.items() if n in trained},
                "built": SAME,
                "batch": SAME,
            },
        )


def _modes(module: nn.Module) -> tuple[int, list[str]]:
    """A number for the modules that it has, and which of them evaluate."""
    modules = dict(module.named_modules())
    number = zlib.crc32("\n".join(modules).encode())
    return number, [name for name, one in modules.items() if not one.training]
