"""Is a ModelNew right?

Two gates over several seeds, each with weights and inputs of its own. Gate 1: close to the Model, in the run's dtype. Gate 2: against the Model
in float64, the largest and the root-mean-square error are at most twice the Model's own. A loose tolerance alone passes kernels that lost
half the digits; an error ratio alone has no meaning in float64. Then what a careless author forgets, a function each, which returns reasons.
"""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Callable

import torch
from torch.utils._pytree import tree_flatten

from judge.problem import Problem, last_line, to_dtype
from judge.worker import MANY_BYTES, WHOSE, Arena, Place, Rejected, Worker, form_of, forward, give_back, gradients, random_states
from judge.worker import roots_of, same_bits, synchronize, wanted_of

SEEDS, MOST_SEEDS = 3, 16  # more where gate 2 is not met by few: the largest of a few values is luck, on both sides
ERROR_RATIO = 2.0
MOST_SLOTS, SLOT_BYTES = 8, 1 << 30  # of the calls in a turn, each with inputs of its own
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 17}  # elements compared at a time

# Gate 1, as both rtol and atol. Under `high` two different roundings to TF32 meet. The half types are loose because the Model rounds after each of
# its operations and the norm behind them enlarges that: 0.15 was seen between a bfloat16 Model and the exact result. There gate 2 is the sharp one.
TOLERANCE = {
    torch.float64: {"highest": 1e-10, "high": 1e-10},
    torch.float32: {"highest": 1e-4, "high": 5e-3},
    torch.float16: {"highest": 4e-2, "high": 4e-2},
    torch.bfloat16: {"highest": 3e-1, "high": 3e-1},
}


# ---- the two gates


@dataclass
class Errors:
    """Errors of one output or gradient against float64, and how far it is from the Model's, pooled over answers."""

    new_max: float = 0.0
    new_squares: float = 0.0
    eager_max: float = 0.0
    eager_squares: float = 0.0
    reference_max: float = 0.0
    reference_squares: float = 0.0
    apart_max: float = 0.0  # from the Model's
    wrong: int = 0  # elements beyond gate 1
    nan_apart: int = 0
    count: int = 0

    def add(self, other: Errors) -> None:
        for name, value in vars(other).items():
            setattr(self, name, max(getattr(self, name), value) if name.endswith("max") else getattr(self, name) + value)

    def rms(self, whose: str) -> float:
        return (getattr(self, f"{whose}_squares") / max(1, self.count)) ** 0.5

    def as_dict(self, dtype: torch.dtype) -> dict[str, float | None]:
        """For the record. In float64 nothing is higher: what is known is the distance to the Model, and nothing of its own error."""
        known = dtype != torch.float64
        eager = {"eager_max": self.eager_max if known else None, "eager_rms": self.rms("eager") if known else None}
        return {"new_max": self.new_max, "new_rms": self.rms("new"), **eager}

    def over_limit(self, dtype: torch.dtype) -> list[str]:
        """Gate 2. Half an ulp at the output's scale is always allowed: where the Model is exact, rounding the result is not an error."""
        complaints = []
        for kind, new, eager, scale in (
            ("largest", self.new_max, self.eager_max, self.reference_max),
            ("rms", self.rms("new"), self.rms("eager"), self.rms("reference")),
        ):
            limit = max(ERROR_RATIO * eager, torch.finfo(dtype).eps / 2 * scale)
            if not new <= limit:
                complaints.append(f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})")
        return complaints


def compare(new: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor | None, tolerance: float, scale: float = 1.0) -> Errors:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the sums of gate 2, in chunks that stay on the device until the end.

    Without a reference the candidate's error is its distance from the Model.
    """
    real = [torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach() for x in (new, eager, reference) if x is not None]
    flat, size, found = [x.reshape(-1) for x in real], CHUNK[new.device.type], []
    for start in range(0, flat[0].numel(), size):
        n, e, *exact = (x[start : start + size].double() for x in flat)
        apart = distance(n, e)
        far = apart > tolerance * (scale + e.abs().nan_to_num(0.0, 0.0, 0.0))
        errors = [apart, torch.zeros_like(apart), torch.zeros_like(apart)]
        for r in exact:
            of_eager, of_new = distance(e, r), distance(n, r)
            overflows = of_eager.isinf()  # there the Model's error says nothing of what others may have
            errors = [of_new.masked_fill_(overflows, 0.0), of_eager.masked_fill_(overflows, 0.0), r.abs().nan_to_num(0.0, 0.0, 0.0)]
        sums = [far.sum(), (n.isnan() != e.isnan()).sum(), *(x.square().sum() for x in errors)]
        found.append((torch.stack([apart.max(), *(x.max() for x in errors)]), torch.stack([x.double() for x in sums])))
    if not found:
        return Errors()
    apart, *most = torch.stack([largest for largest, _ in found]).amax(0).tolist()
    wrong, nan_apart, *squares = torch.stack([sums for _, sums in found]).sum(0).tolist()
    pooled = [figure for both in zip(most, squares) for figure in both]
    return Errors(*pooled, apart, int(wrong), int(nan_apart), flat[0].numel())


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs_().masked_fill_(same, 0.0).nan_to_num_(float("inf"), float("inf"))


# ---- one request, asked of the candidate and of the Model


@dataclass
class Case:
    """One candidate at one shape, dtype and precision, and what was found so far."""

    problem: Problem
    worker: Worker | None
    arena: Arena
    device: str
    dtype: torch.dtype
    precision: str
    batch: int | None
    seed: int
    model: torch.nn.Module | None = None
    errors: dict[str, Errors] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def draw(self, seed: int, change: Callable | None = None, batch: int | None = None) -> Callable[[], list]:
        """Gives the same inputs on every call: they are drawn again rather than kept, which would take as much memory."""

        def inputs() -> list:
            drawn = self.problem.inputs(self.batch if batch is None else batch, self.device, self.dtype, self.seed + seed)
            for x in drawn:
                if change and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                    change(x)
            return drawn

        return inputs

    def note(self, text: str) -> None:
        self.notes += [text] if text not in self.notes else []


@dataclass
class Answer:
    """What a Model gives: outputs, then gradients, by name."""

    leaves: dict[str, object]
    forms: list[dict]
    tree: str
    incoming: list[torch.Tensor]
    draws: bool  # whether it used random numbers

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]


def answer_of(model, inputs: list, direction: str, incoming: Callable, mode="eval", whose=None, again=False) -> Answer:
    wanted, states = wanted_of(model, inputs, whose or WHOSE[direction]), random_states()
    with torch.inference_mode() if mode == "inference" else contextlib.nullcontext():
        result = forward(model, inputs, direction)
    leaves, tree = tree_flatten(result)
    named = {"output" if isinstance(result, torch.Tensor) else f"output {i}": leaf for i, leaf in enumerate(leaves)}
    given = incoming(roots_of(result)) if direction == "forward_backward" and wanted else []
    forms = [form_of(leaf) for leaf in leaves]
    if given:
        found = gradients(result, list(wanted.values()), given, again)
        named |= {f"gradient of {name}": gradient for name, gradient in zip(wanted, found)}
        forms += [form_of(gradient) for gradient in found]
    named = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in named.items()}
    return Answer(named, forms, str(tree), given, random_states() != states)


def random_like(tensors: list[torch.Tensor], seed: int = 0, expanded: bool = False) -> list[torch.Tensor]:
    """Normal numbers that hardly round in any dtype, the same for the same seed; `expanded`: the same all along the first dimension."""
    drawn = []
    for x in tensors:
        values = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device).bfloat16().to(x.dtype)
        drawn.append(values[:1].expand_as(values).contiguous() if expanded and x.dim() else values)
    return drawn


# The strides of an input of this shape, and whether it lies off any alignment.
LAYOUTS = {
    "transposed": (lambda shape: torch.empty(shape, device="meta").transpose(0, -1).contiguous().transpose(0, -1).stride(), False),
    "a slice": (lambda shape: torch.empty(*shape[:-1], shape[-1] + 3, device="meta").stride(), False),
    "off any alignment": (None, True),
}


def ask(case: Case, when: str, *, seed=0, change=None, batch=None, weights=None, refusable=False, must=False, **how) -> list[str]:
    """`ask_both` about inputs drawn by the seed and changed so, with the weights changed so, where there is room for it.

    With `refusable` who refuses it with an error is not wrong.
    """
    draws = [case.draw(seed, change, batch), case.draw(seed + 100, change, batch)][: max(how.get("order", (0,))) + 1]
    try:
        with other_weights(case, weights) if weights else contextlib.nullcontext():
            return ask_both(case, draws, when, must=must, **how)
    except (Rejected, torch.OutOfMemoryError) as error:
        kind = getattr(error, "kind", "memory")
        if must or kind not in ("memory", "raised") or kind == "raised" and not refusable:
            raise
        case.note(f"not asked for want of memory: {when}" if kind == "memory" else f"refuses {when}: {error}")
    give_back(case.device)
    return []


def ask_both(
    case: Case, draws: list, when: str, *, direction="forward", order=(0,), keep=(0,), layout="dense", expanded=False, gate="either",
    model: torch.nn.Module | None = None, mode="eval", instance=0, whose=None, again=False, poison=False, stream=False, finite=False, carries=True, must=False, command="",
) -> list[str]:  # fmt: skip
    """Asks both for the answers to the inputs that `draws` give, in this order, and says what is wrong with those to `keep`.

    `gate`: "both"; "one", gate 1 alone; "either", where who is as near to float64 as gate 2 asks is not wrong for being far from a Model that is
    itself far off; "finite", the same with all that is not finite taken as equal. Inputs that the Model refuses are not asked for, unless they
    `must`; with `finite` nor are those for which it has NaN or infinities. Without `carries` an output that records no gradient is noted.
    """
    if stream and case.device != "cuda":
        return []
    if command:
        case.worker.ask(command)
    model, incoming = model or case.model, partial(random_like, seed=case.seed, expanded=expanded)
    model.train(mode == "train")
    try:
        expected = [answer_of(model, draws[order[i]](), direction, incoming, mode, whose, again) for i in keep]
    except Exception as error:  # noqa: BLE001 - a Model may refuse what it likes
        if must or isinstance(error, torch.OutOfMemoryError):
            raise
        return []
    finally:
        model.eval()
    if finite and not all(bool(x.isfinite().all()) for x in expected[0].tensors()) or mode == "train" and expected[0].draws:
        return []

    # Inputs, incoming gradients and room for the answers, in the arena.
    sets, (strides, odd) = [draw() for draw in draws], LAYOUTS.get(layout, (None, False))
    given = [expected[keep.index(order.index(i))].incoming if expected[0].incoming else [] for i in range(len(sets))]
    requests = [(x, strides and x.dim() and strides(x.shape) or None, odd) for each in sets for x in each if isinstance(x, torch.Tensor)]
    requests += [(x[:1] if expanded and x.dim() else x, None, False) for each in given for x in each]
    requests += [(x, None, False) for answer in expected for x in answer.tensors()]
    places = iter(case.arena.place(requests))
    set_places, given_places = ([[filled(case.arena, x, places) for x in each] for each in all_] for all_ in (sets, given))
    answers = [[next(places) for _ in answer.tensors()] for answer in expected]
    for place in sum(answers, []):
        fill_with_nan(case.arena.view(place))
    del sets, requests
    give_back(case.device)
    synchronize(case.device)
    case.worker.see(case.arena)
    reply = case.worker.ask(
        "call", sets=set_places, answers=answers, incoming=given_places if expected[0].incoming else [], order=order, keep=keep, mode=mode,
        direction=direction, instance=instance, whose=whose or WHOSE[direction], poison=poison, stream=stream, again=again,
    )  # fmt: skip

    reasons = list(reply["changed"])
    if reply["late"]:
        reasons.append("the answer changes after the call has returned: work goes on elsewhere")
    if reply["draws"] and not expected[0].draws:
        reasons.append("changes PyTorch's random state, which the Model leaves alone")
    for draw, at in zip(draws, set_places):
        reasons += written_inputs(case, draw, at)
    for answer, position, forms, at in zip(expected, keep, reply["forms"], answers, strict=True):
        if not carries and any(known.get("requires_grad") and not form.get("requires_grad") for known, form in zip(answer.forms, forms)):
            case.note("outputs carry no gradient, the Model's do")
            answer.forms, forms = without_gradient(answer.forms), without_gradient(forms)
        wrong = different_forms(answer, forms, reply["tree"], strides=layout == "dense" and not expanded)
        reference = partial(reference_of, case, model, draws[order[position]], direction, answer.incoming, mode, whose)
        reasons += wrong or different_values(case, answer, [case.arena.read(place) for place in at], reference, gate)
    if not reasons and len(keep) > 2 and not all(same_bits(case.arena.view(a), case.arena.view(b)) for a, b in zip(*answers[:2])):
        case.note("gives other bits when it is called again with the same inputs, within the gates")
    return [f"{reason} ({when})" for reason in dict.fromkeys(reasons)]


def filled(arena: Arena, x, places):
    """The place of a tensor, which is copied there. Of an expanded one the first row is, and stands for all."""
    if not isinstance(x, torch.Tensor):
        return x
    place = next(places)
    arena.view(place).copy_(x[: place.shape[0]] if x.dim() else x)
    return place if place.shape == tuple(x.shape) else place._replace(shape=tuple(x.shape), strides=(0, *place.strides[1:]))


def fill_with_nan(x: torch.Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() or x.is_complex() else 1)


def written_inputs(case: Case, draw: Callable, places: list) -> list[str]:
    pairs = [(i, x, place) for i, (x, place) in enumerate(zip(draw(), places)) if isinstance(place, Place)]
    return [f"writes input {i}, which a call must leave alone" for i, x, place in pairs if not same_bits(case.arena.read(place), x)]


def reference_of(case: Case, model, draw, direction, incoming, mode="eval", whose=None) -> list | None:
    """The Model's answer in float64, or None where it has none."""
    if case.dtype == torch.float64:
        return None
    try:
        exact = copy.deepcopy(model).double().train(mode == "train")
        inputs, given = [to_dtype(x, torch.float64) for x in draw()], [to_dtype(x, torch.float64) for x in incoming]
        return list(answer_of(exact, inputs, direction, lambda roots: given, mode, whose).leaves.values())
    except torch.OutOfMemoryError:
        case.note("gate 2 was not asked of every answer: no room for the Model in float64")
    except Exception as error:  # noqa: BLE001 - a Model for one dtype
        case.note(f"no gate 2: the Model does not run in float64: {last_line(error)}")
    return None


def different_forms(answer: Answer, forms: list[dict], tree: str, strides: bool) -> list[str]:
    """Type, dtype, shape, device, layout and stride, as they were before anything touched the answer."""
    if tree != answer.tree or len(forms) != len(answer.forms):
        return [f"gives {len(forms)} values as {tree}, the Model {len(answer.forms)} as {answer.tree}"]
    for name, mine, theirs in zip(answer.leaves, forms, answer.forms):
        skipped = {"stride", "requires_grad"} if name.startswith("gradient") else set() if strides else {"stride"}
        for what, value in theirs.items():
            if mine.get(what) != value and what not in skipped:
                verb, article = ("is", "a ") if what == "type" else (f"has {what}", "")
                return [f"{name} {verb} {article}{mine.get(what)}, the Model's {verb.split()[0]} {article}{value}"]
    return []


def without_gradient(forms: list[dict]) -> list[dict]:
    return [{what: value for what, value in form.items() if what != "requires_grad"} for form in forms]


def different_values(case: Case, answer: Answer, given: list, reference: Callable, gate: str) -> list[str]:
    reasons, given = [], iter(given)
    exact = reference() if gate == "both" else None
    for i, (name, eager) in enumerate(answer.leaves.items()):
        if not isinstance(eager, torch.Tensor):
            continue  # a number or a string was compared as part of the form
        new, scale = next(given), scale_of(name, eager)
        inexact = eager.is_floating_point() or eager.is_complex()
        tolerance = TOLERANCE[case.dtype][case.precision] if inexact else 0.0
        if gate == "finite" and inexact:
            new, eager = (x.masked_fill(~x.isfinite(), float("nan")) for x in (new, eager))
        found = compare(new, eager, exact and exact[i], tolerance, scale)
        if gate == "both" and inexact and (exact or case.dtype == torch.float64):
            case.errors.setdefault(name, Errors()).add(found)
        if found.wrong and gate in ("either", "finite") and inexact and not found.nan_apart:
            exact = exact or reference()
            if exact and not compare(new, eager, exact[i], tolerance, scale).over_limit(case.dtype):
                continue
        if found.nan_apart:
            reasons.append(f"{name}: {found.nan_apart} of {eager.numel()} elements are NaN in one and not in the other")
        elif found.wrong and is_constant(new) and not is_constant(eager):
            reasons.append(f"{name} is constant, the Model's is not")
        elif found.wrong:
            far = f"largest difference {found.apart_max:.2e}, tolerance {tolerance * scale:.1e}"
            reasons.append(f"{name}: {found.wrong} of {eager.numel()} elements are not close to the Model's, {far}")
    return reasons


def scale_of(name: str, tensor: torch.Tensor) -> float:
    """A gradient sums over a batch: where it is large, an error counts relative to the size of them all."""
    if not name.startswith("gradient") or not tensor.numel():
        return 1.0
    return max(1.0, torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64).item() / tensor.numel() ** 0.5)


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


# ---- weights


def start(case: Case) -> list[str]:
    """The same seed gives both the same state, in the same order, and each loads the other's, strictly."""
    dtype, arguments = str(case.dtype).removeprefix("torch."), case.problem.arguments(case.seed)
    case.model = case.problem.model(case.seed).to(case.device, case.dtype)
    reply = case.worker.ask("make", level=case.precision, dtype=dtype, seed=case.seed, arguments=arguments, instances=2)
    reasons, mine, theirs = reply["changed"], reply["state"], case.model.state_dict()
    trained = {name: p.requires_grad for name, p in case.model.named_parameters()}
    if list(mine) != list(theirs):
        return [*reasons, f"state_dict: its keys are {list(mine)}, the Model's are {list(theirs)}"]
    for name, tensor in theirs.items():
        known = [list(tensor.shape), str(tensor.dtype), trained.get(name)]
        for what, is_, should in zip(("shape", "dtype", "requires_grad (null: no parameter)"), mine[name], known):
            if is_ != should:
                reasons.append(f"state_dict: {name} has {what} {is_}, the Model's has {should}")
    if not reasons and theirs:
        drawn = weights_of(case).items()
        reasons = [f"state_dict: the same seed does not give the Model's {name}" for name, x in drawn if not same_bits(x, theirs[name])]
        give_weights(case)
    return reasons


def give_weights(case: Case, model: torch.nn.Module | None = None, instance: int | None = None, worker: Worker | None = None) -> None:
    """The Model's, or this model's, to one instance or to all."""
    state, worker = (model or case.model).state_dict(), worker or case.worker
    places = dict(zip(state, case.arena.place([(x, None, False) for x in state.values()])))
    for name, tensor in state.items():
        case.arena.view(places[name]).copy_(tensor)
    synchronize(case.device)
    worker.see(case.arena)
    worker.ask("set_weights", places=places, instance=instance)


def weights_of(case: Case) -> dict[str, torch.Tensor]:
    """The candidate's state."""
    state = case.model.state_dict()
    places = dict(zip(state, case.arena.place([(x, None, False) for x in state.values()])))
    case.worker.see(case.arena)
    case.worker.ask("get_weights", places=places)
    return {name: case.arena.read(place) for name, place in places.items()}


def perturb(model: torch.nn.Module, seed: int, signs: bool = False) -> None:
    """New values for everything floating in the state, of the size and sign it had; what is all zero becomes small numbers.

    With `signs`, about half of the parameters' values get the other sign; buffers, a variance say, keep theirs.
    """
    parameters = dict(model.named_parameters()) if signs else {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            generator = torch.Generator(tensor.device).manual_seed(seed + sum(map(ord, name)))
            factors = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)
            if name in parameters:
                factors *= torch.empty_like(tensor).uniform_(-1, 1, generator=generator).sign()
            tensor.mul_(factors) if tensor.any() else tensor.copy_(factors.sub_(1.0))


@contextlib.contextmanager
def other_weights(case: Case, change: Callable[[torch.nn.Module], None]):
    """Both have these weights inside."""
    kept = copy.deepcopy(case.model.state_dict())
    with torch.no_grad():
        change(case.model)
    give_weights(case)
    try:
        yield
    finally:
        case.model.load_state_dict(kept)
        if case.worker.alive():
            give_weights(case)


# ---- the checks


def spread(x: torch.Tensor) -> None:
    x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3))


def put(value: float, x: torch.Tensor) -> None:
    x.view(-1)[x.numel() // 3] = value


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor) and "Norm" not in type(module).__name__:
            module.bias.data.add_(100.0)


BOTH = {"direction": "forward_backward"}
# What is asked besides the seeds, at the shape and in the layout that is timed, and after it was timed what a compiler may make anew.
REQUESTS = {
    "forward": {
        "kept while it was called again": {"order": (0, *[1] * 8, 0, *[1] * 8), "keep": (0, 9, 17)},
        "after the weights moved in memory, as .to moves them": {"command": "move_weights"},
        "with gradients recorded": {"direction": "forward_recorded", "carries": False},
        "in inference mode": {"mode": "inference"},
        "in training mode": {"mode": "train", "carries": False, "weights": lambda model: None},  # it may move running means, in both alike
        "values of both signs": {"change": spread, "weights": partial(perturb, seed=23, signs=True), "finite": True},
        "biases whose mean is large": {"weights": shift_biases, "finite": True},
        "values whose mean is large": {"change": lambda x: x.add_(100.0), "finite": True},
        "small values": {"change": lambda x: x.mul_(1e-3), "finite": True},
        "inputs that are all equal": {"change": lambda x: x.fill_(0.5), "finite": True},
        "one NaN in each input": {"change": partial(put, float("nan"))},
        "one infinity in each input": {"change": partial(put, float("inf")), "gate": "finite"},
        "on another stream": {"stream": True},
    },
    "forward_recorded": {},
    "forward_backward": {
        "two forward passes before two backward passes": {"order": (0, 1), "keep": (0, 1), **BOTH},
        "a second backward pass of one graph": {"again": True, "refusable": True, **BOTH},
        "only the parameters' gradients wanted": {"whose": "parameters", **BOTH},
        "only the inputs' gradients wanted": {"whose": "inputs", **BOTH},
        "an incoming gradient that is expanded": {"expanded": True, "refusable": True, **BOTH},
    },
    "after": {"after it was timed": {}, **{f"inputs that are {layout}": {"layout": layout, "refusable": True} for layout in LAYOUTS}},
}


def check(case: Case, direction: str, tell: Callable[[str], None]) -> list[str]:
    """Both gates, and all that is asked besides. What follows a reason is not asked: it would only echo it."""
    reasons = seeds(case, direction, tell) if direction != "after" else []
    for seed, (when, how) in enumerate(REQUESTS[direction].items(), 20):
        reasons = reasons or ask(case, when, seed=seed, **how)
    return reasons or (instances(case) if direction == "forward" else batches(case) if direction == "after" else [])


def seeds(case: Case, direction: str, tell: Callable[[str], None]) -> list[str]:
    """Both gates over several seeds, with weights and inputs drawn anew."""
    for turn in range(MOST_SEEDS):
        if turn >= SEEDS and not over_limit(case):
            return []
        tell(f"checking {direction}, seed {turn + 1} of {max(SEEDS, turn + 1)}")
        perturb(case.model, case.seed + turn)
        give_weights(case)
        # In poisoned memory PyTorch is in its deterministic mode, where it may choose other kernels: gate 1 and the NaN alone.
        how = {"seed": turn, "direction": direction, "must": True}
        reasons = ask(case, f"from memory full of NaN, seed {turn}", poison=True, gate="one", **how)
        reasons = reasons or ask(case, f"seed {turn}", gate="both", **how)
        theirs = case.model.state_dict()
        written = [name for name, x in weights_of(case).items() if not same_bits(x, theirs[name])] if not reasons and theirs else []
        reasons += [f"writes {name}, which a forward pass must leave alone" for name in written]
        if reasons:
            return reasons
    return over_limit(case)


def over_limit(case: Case) -> list[str]:
    """Gate 2 over all answers so far."""
    if case.dtype == torch.float64:
        return []
    return [f"{name}: {complaint}" for name, errors in case.errors.items() for complaint in errors.over_limit(case.dtype)]


def instances(case: Case) -> list[str]:
    """Two modules with weights of their own take turns: nothing made from one's weights may serve the other."""
    other, when = copy.deepcopy(case.model), "two instances with other weights in turns"
    perturb(other, case.seed + 22)
    give_weights(case, instance=0)  # as often as to the other: nor may what is made be told apart by a version
    give_weights(case, other, instance=1)
    return ask(case, when, model=other, instance=1) or ask(case, when)


def batches(case: Case) -> list[str]:
    """Other numbers of samples, drawn at random, none and one among them."""
    batch, secret, reasons = case.batch or 0, random.SystemRandom(), []
    drawn = {0, 1, batch - batch // 3, batch + 1, secret.randint(1, batch + 1), secret.randint(1, batch + 1)} - {batch}
    for other in sorted(drawn) if case.batch else ():
        reasons = reasons or ask(case, f"batch {other}", batch=other)
    return reasons


# ---- while the clock runs


class Ring:
    """The inputs of one turn, drawn anew for each round, and where the answers go."""

    def __init__(self, case: Case, direction: str):
        self.case, self.direction, self.reasons = case, direction, []
        inputs = case.draw(0)()
        expected = answer_of(case.model, inputs, direction, partial(random_like, seed=case.seed))
        self.incoming = expected.incoming
        self.names = [name for name in expected.leaves if name.startswith("gradient") == bool(self.incoming)]
        answers = [x for name, x in expected.leaves.items() if name in self.names and isinstance(x, torch.Tensor)]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        slots = max(1, min(MOST_SLOTS, SLOT_BYTES // max(1, sum(x.nbytes for x in tensors + answers))))
        places = iter(case.arena.place([(x, None, False) for x in tensors * slots + self.incoming + answers]))
        self.slots = [[filled(case.arena, x, places) for x in inputs] for _ in range(slots)]
        self.ready = {"ring": self.slots, "incoming": [filled(case.arena, x, places) for x in self.incoming], "direction": direction}
        self.answers, self.draws, self.large = list(places), [case.draw(0)] * slots, case.arena.nbytes > MANY_BYTES

    def renew(self) -> None:
        """New inputs, by seeds that nobody can foresee, scaled for a file whose inputs are always the same."""
        secret = random.SystemRandom()
        for i, places in enumerate(self.slots):
            factor = secret.uniform(0.9, 1.0)
            self.draws[i] = self.case.draw(secret.getrandbits(31), lambda x, factor=factor: x.mul_(factor))
            for x, place in zip(self.draws[i](), places):
                if isinstance(place, Place):
                    self.case.arena.view(place).copy_(x)
        give_back(self.case.device)

    def blank(self) -> None:
        for place in self.answers:
            fill_with_nan(self.case.arena.view(place))
        synchronize(self.case.device)

    def inspect(self, index: int, reply: dict) -> None:
        """Holds an answer that was given while the clock ran against the Model's, by both gates."""
        case, draw = self.case, self.draws[index]
        expected = answer_of(case.model, draw(), self.direction, lambda roots: self.incoming)
        kept = [i for i, name in enumerate(expected.leaves) if name in self.names]
        exact = reference_of(case, case.model, draw, self.direction, self.incoming)
        expected.forms = without_gradient([expected.forms[i] for i in kept])
        expected.leaves = {name: expected.leaves[name] for name in self.names}
        wrong = different_forms(expected, reply["forms"], expected.tree, strides=True)
        given = [case.arena.read(place) for place in self.answers]
        wrong = wrong or different_values(case, expected, given, lambda: exact and [exact[i] for i in kept], "both") or over_limit(case)
        wrong += reply["changed"] + written_inputs(case, draw, self.slots[index])
        self.reasons += [reason for what in wrong if (reason := f"{what} (while it was timed)") not in self.reasons]
