"""Is a ModelNew right?

Two gates over several seeds, each with weights and inputs of its own. Gate 1: close to the Model, in the run's dtype.
Gate 2: against the Model in float64, the largest and the root-mean-square error are at most twice the Model's own. A
tolerance alone passes kernels that lost half the digits; an error ratio alone has no meaning in float64. Then what a
careless author forgets: a table of requests, each put to the candidate and to the Model alike.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.utils._pytree import tree_flatten

from judge.source import Problem, last_line, to_dtype
from judge.worker import (
    Arena,
    Place,
    Rejected,
    Worker,
    form_of,
    forward,
    gradients,
    random_states,
    roots_of,
    same_bits,
    settle,
    state_of,
    synchronize,
    wanted_of,
)

SEEDS, MOST_SEEDS = 3, 16  # more where few do not meet gate 2: the largest of a few values is luck, on both sides
ERROR_RATIO = 2.0
MOST_SLOTS, SLOT_BYTES = 8, 1 << 30  # of the calls in a turn, each with inputs of its own
MOST_KEPT, KEPT_BYTES = 8, {"cuda": 24 << 30, "cpu": 1 << 30}  # of the timed answers that are looked at
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 17}  # elements compared at a time
WHOSE = {"forward": "nobody's", "forward_recorded": "parameters", "forward_backward": "all"}  # gradients, by direction

# Gate 1, as both rtol and atol. Under `high` two different roundings to TF32 meet. The half types are loose because the
# Model rounds after each of its operations and the norm behind them enlarges that: 0.15 was seen between a bfloat16
# Model and the exact result. There gate 2 is the sharp one.
TOLERANCE = {
    torch.float64: {"highest": 1e-10, "high": 1e-10},
    torch.float32: {"highest": 1e-4, "high": 5e-3},
    torch.float16: {"highest": 4e-2, "high": 4e-2},
    torch.bfloat16: {"highest": 3e-1, "high": 3e-1},
}


# ---- the two gates


@dataclass
class Errors:
    """Of one output or gradient: the largest |new - exact|, |eager - exact|, |exact| and |new - eager|; the first
    three's sums of squares; how many elements are beyond gate 1, and NaN in one only; of how many."""

    most: list[float] = field(default_factory=lambda: [0.0] * 4)
    squares: list[float] = field(default_factory=lambda: [0.0] * 3)
    wrong: int = 0
    nan_apart: int = 0
    count: int = 0

    def add(self, other: Errors) -> None:
        self.most = [max(both) for both in zip(self.most, other.most)]
        self.squares = [sum(both) for both in zip(self.squares, other.squares)]
        self.count += other.count

    def rms(self) -> list[float]:
        return [(squares / max(1, self.count)) ** 0.5 for squares in self.squares]

    def over_limit(self, dtype: torch.dtype) -> list[str]:
        """Gate 2. Half an ulp at the output's scale is allowed: where the Model is exact, rounding is no error."""
        complaints = []
        for kind, (new, eager, scale) in (("largest", self.most[:3]), ("rms", self.rms())):
            limit = max(ERROR_RATIO * eager, torch.finfo(dtype).eps / 2 * scale)
            if not new <= limit:
                said = f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})"
                complaints.append(said)
        return complaints

    def as_dict(self, dtype: torch.dtype) -> dict[str, float | None]:
        """For the record. In float64 nothing is more exact: what is known is the distance to the Model."""
        known = dtype != torch.float64
        (new_max, eager_max, *_), (new_rms, eager_rms, _) = self.most, self.rms()
        eager = {"eager_max": eager_max if known else None, "eager_rms": eager_rms if known else None}
        return {"new_max": new_max, "new_rms": new_rms, **eager}


def compare(new: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float, scale=1.0) -> Errors:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the sums of gate 2, a chunk at a time.

    Without the exact result the candidate's error is its distance from the Model.
    """
    given = [x for x in (new, eager, exact) if x is not None]
    real = [torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach() for x in given]
    flat, size, found = [x.reshape(-1) for x in real], CHUNK[new.device.type], []
    for start in range(0, flat[0].numel(), size):
        n, e, *exactly = (x[start : start + size].double() for x in flat)
        apart = distance(n, e)
        far = apart > tolerance * (scale + e.abs().nan_to_num(0.0, 0.0, 0.0))
        errors = [apart, torch.zeros_like(apart), torch.zeros_like(apart)]
        for r in exactly:
            of_eager, of_new = distance(e, r), distance(n, r)
            overflows = of_eager.isinf()  # there the Model's error says nothing of what others may have
            of_new, of_eager = of_new.masked_fill_(overflows, 0.0), of_eager.masked_fill_(overflows, 0.0)
            errors = [of_new, of_eager, r.abs().nan_to_num(0.0, 0.0, 0.0)]
        largest = torch.stack([x.max() for x in (*errors, apart)])
        counts = [far.sum(), (n.isnan() != e.isnan()).sum()]
        found.append((largest, torch.stack([x.double() for x in [*(x.square().sum() for x in errors), *counts]])))
    if not found:
        return Errors()
    most = torch.stack([largest for largest, _ in found]).amax(0).tolist()
    *squares, wrong, nan_apart = torch.stack([sums for _, sums in found]).sum(0).tolist()
    return Errors(most, squares, int(wrong), int(nan_apart), flat[0].numel())


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs_().masked_fill_(same, 0.0).nan_to_num_(float("inf"), float("inf"))


# ---- a candidate and the Model


@dataclass
class Case:
    """One candidate at one shape, dtype and precision, and what was found so far."""

    problem: Problem
    worker: Worker | None
    arena: Arena
    dtype: torch.dtype
    precision: str
    batch: int | None
    seed: int
    model: torch.nn.Module | None = None
    errors: dict[str, Errors] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return self.arena.device

    def draw(self, seed: int, change: Callable | None = None, batch: int | None = None) -> Callable[[], list]:
        """Gives the same inputs on every call: they are drawn again rather than kept, which would take memory."""

        def inputs() -> list:
            batch_size = self.batch if batch is None else batch
            drawn = self.problem.inputs(batch_size, self.device, self.dtype, self.seed + seed)
            for x in drawn:
                if change and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                    change(x)
            return drawn

        return inputs

    def note(self, text: str) -> None:
        self.notes += [text] if text not in self.notes else []

    def over_limit(self) -> list[str]:
        """Gate 2 over all answers so far."""
        found = {name: errors.over_limit(self.dtype) for name, errors in self.errors.items()}
        return [f"{name}: {said}" for name, all_ in found.items() for said in all_ if self.dtype != torch.float64]


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


def answer_of(model, inputs: list, request: Request, incoming: Callable) -> Answer:
    wanted, states = wanted_of(model, inputs, request.gradients()), random_states()
    with torch.inference_mode() if request.mode == "inference" else contextlib.nullcontext():
        result = forward(model, inputs, request.direction)
    leaves, tree = tree_flatten(result)
    single = isinstance(result, torch.Tensor)
    named = {"output" if single else f"output {i}": leaf for i, leaf in enumerate(leaves)}
    given = incoming(roots_of(result)) if request.direction == "forward_backward" and wanted else []
    forms = [form_of(leaf) for leaf in leaves]
    if given:
        found = gradients(result, list(wanted.values()), given, request.again)
        named |= {f"gradient of {name}": gradient for name, gradient in zip(wanted, found)}
        forms += [form_of(gradient) for gradient in found]
    named = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in named.items()}
    return Answer(named, forms, str(tree), given, random_states() != states)


def exact_answer(case: Case, model, draw: Callable, request: Request, incoming: list) -> list | None:
    """The Model's answer in float64, or None where it has none."""
    if case.dtype == torch.float64:
        return None
    try:
        exact = copy.deepcopy(model).double().train(request.mode == "train")
        inputs, given = ([to_dtype(x, torch.float64) for x in tensors] for tensors in (draw(), incoming))
        return list(answer_of(exact, inputs, request, lambda roots: given).leaves.values())
    except torch.OutOfMemoryError:
        case.note("gate 2 was not asked of every answer: no room for the Model in float64")
    except Exception as error:
        case.note(f"no gate 2: the Model does not run in float64: {last_line(error)}")
    return None


def random_like(tensors: list[torch.Tensor], seed: int = 0, expanded: bool = False) -> list[torch.Tensor]:
    """Normal numbers that hardly round in any dtype; `expanded`: the same all along the first dimension."""
    drawn = []
    for x in tensors:
        generator = torch.Generator(x.device).manual_seed(seed)
        values = torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype)
        drawn.append(values[:1].expand_as(values).contiguous() if expanded and x.dim() else values)
    return drawn


# ---- weights


def start(case: Case) -> list[str]:
    """The same seed gives both the same state, in the same order, and the candidate loads the Model's, strictly."""
    arguments, dtype = case.problem.arguments(case.seed), str(case.dtype).removeprefix("torch.")
    case.model = case.problem.model(case.seed).to(case.device, case.dtype)
    reply = case.worker.ask("make", arguments=arguments, level=case.precision, dtype=dtype, seed=case.seed, instances=2)
    reasons, mine, theirs = reply["changed"], reply["state"], state_of(case.model)
    if list(mine) != list(theirs):
        return [*reasons, f"state_dict: its keys are {list(mine)}, the Model's are {list(theirs)}"]
    for name, (*form, bits) in theirs.items():
        *form_here, bits_here = mine[name]
        for what, is_, should in zip(("shape", "dtype", "requires_grad (None: no parameter)"), form_here, form):
            if is_ != should:
                reasons.append(f"state_dict: {name} has {what} {is_}, the Model's has {should}")
        if form_here == form and bits != bits_here:
            reasons.append(f"state_dict: the same seed does not give the Model's {name}")
    if not reasons:
        give_weights(case)
    return reasons


def give_weights(case: Case, model=None, instance: int | None = None, worker: Worker | None = None) -> None:
    """The Model's, or this model's, to one instance of the candidate's or to all, or to another worker."""
    state = (model or case.model).state_dict()
    places = dict(zip(state, case.arena.place([(x, None, False) for x in state.values()])))
    for name, tensor in state.items():
        case.arena.view(places[name]).copy_(tensor)
    settle(case.device)
    (worker or case.worker).ask("set_weights", places=places, instance=instance)


def perturb(model: torch.nn.Module, seed: int, signs: bool = False) -> None:
    """New values for everything floating in the state, of the size it had; what is all zero becomes small numbers.

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


# ---- what is asked


@dataclass(frozen=True)
class Request:
    """A question for the candidate and the Model: which calls, on which inputs, and what is compared."""

    when: str
    direction: str = "forward"
    seed: int = 0  # of the inputs
    change: Callable | None = None  # of each floating input
    weights: Callable | None = None  # of the Model's weights, which the candidate is given then
    batch: int | None = None
    layout: str = "dense"
    order: tuple = (0,)  # of the calls: which set of inputs each gets
    keep: tuple = (0,)  # the calls whose answers are compared
    instance: int = 0
    mode: str = "eval"  # or "train" or "inference"
    whose: str = ""  # gradients are asked of; those of the direction
    # "both"; "one", gate 1 alone; "either": close to the Model, or as near to float64 as gate 2 asks where the Model is
    # itself far off; "finite": the same with all that is not finite taken as equal.
    gate: str = "either"
    finite: bool = False  # not asked where the Model's answer is not finite
    poison: bool = False  # memory is full of NaN
    stream: bool = False  # on another stream, and with inputs that come late
    move: bool = False  # the weights move in memory first
    again: bool = False  # a second backward pass of one graph
    expanded: bool = False  # the incoming gradient is the same along the first dimension, and lies in memory once
    must: bool = False  # the Model must answer
    refusable: bool = False  # who refuses it with an error is not wrong

    def gradients(self) -> str:
        return self.whose or WHOSE[self.direction]


def spread(x: torch.Tensor) -> None:
    x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3))


def put(value: float, x: torch.Tensor) -> None:
    x.view(-1)[x.numel() // 3] = value


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor) and "Norm" not in type(module).__name__:
            module.bias.data.add_(100.0)


def transposed(shape: tuple) -> tuple:
    return torch.empty(shape, device="meta").transpose(0, -1).contiguous().transpose(0, -1).stride()


# The strides of an input of this shape, and whether it lies off any alignment.
LAYOUTS = {
    "transposed": (transposed, False),
    "a slice": (lambda shape: torch.empty(*shape[:-1], shape[-1] + 3, device="meta").stride(), False),
    "off any alignment": (None, True),
}
BOTH = partial(Request, direction="forward_backward")

# Asked at the shape and in the layout that is timed; and what a compiler may make anew, after it was timed.
REQUESTS = {
    "forward": [
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8), keep=(0, 9, 17)),
        Request("after the weights moved in memory, as .to moves them", move=True),
        Request("with gradients recorded", direction="forward_recorded"),
        Request("in inference mode", mode="inference"),
        Request("in training mode", mode="train", weights=lambda model: None),  # running means move, in both alike
        Request("values of both signs", change=spread, weights=partial(perturb, seed=23, signs=True), finite=True),
        Request("biases whose mean is large", weights=shift_biases, finite=True),
        Request("values whose mean is large", change=lambda x: x.add_(100.0), finite=True),
        Request("small values", change=lambda x: x.mul_(1e-3), finite=True),
        Request("inputs that are all equal", change=lambda x: x.fill_(0.5), finite=True),
        Request("one NaN in each input", change=partial(put, float("nan"))),
        Request("one infinity in each input", change=partial(put, float("inf")), gate="finite"),
        Request("on another stream", stream=True),
    ],
    "forward_recorded": [],
    "forward_backward": [
        BOTH("two forward passes before two backward passes", order=(0, 1), keep=(0, 1)),
        BOTH("a second backward pass of one graph", again=True, refusable=True),
        BOTH("only the parameters' gradients wanted", whose="parameters"),
        BOTH("only the inputs' gradients wanted", whose="inputs"),
        BOTH("an incoming gradient that is expanded", expanded=True, refusable=True),
    ],
    "after": [
        Request("after it was timed"),
        *(Request(f"inputs that are {layout}", layout=layout, refusable=True) for layout in LAYOUTS),
    ],
}


def check(case: Case, direction: str, tell: Callable[[str], None]) -> list[str]:
    """Both gates, and all that is asked besides. What follows a reason is not asked: it would only echo it."""
    reasons = seeds(case, direction, tell) if direction != "after" else []
    for seed, request in enumerate(REQUESTS[direction], 20):
        reasons = reasons or ask(case, replace(request, seed=seed))
    if direction == "forward":
        return reasons or instances(case)
    return reasons or (batches(case) if direction == "after" else [])


def seeds(case: Case, direction: str, tell: Callable[[str], None], first: int = 0) -> list[str]:
    """Both gates over several seeds, with weights and inputs drawn anew: as many more as gate 2 needs to be met."""
    for turn in range(first, MOST_SEEDS):
        if turn >= SEEDS and not case.over_limit():
            return []
        tell(f"checking {direction}, seed {turn + 1} of {max(SEEDS, turn + 1)}")
        perturb(case.model, case.seed + turn)
        give_weights(case)
        request = Request(f"seed {turn}", direction, turn, gate="both", must=True)
        # In poisoned memory PyTorch is in its deterministic mode, where it may choose other kernels: no gate 2 there.
        poisoned = replace(request, when=f"from memory full of NaN, seed {turn}", gate="one", poison=True)
        if reasons := ask(case, poisoned) or ask(case, request):
            return reasons
    return case.over_limit()


def instances(case: Case) -> list[str]:
    """Two modules with weights of their own take turns: nothing made from one's weights may serve the other."""
    other, request = copy.deepcopy(case.model), Request("two instances with other weights in turns")
    perturb(other, case.seed + 22)
    give_weights(case, instance=0)  # as often as to the other: a count of writes does not tell them apart
    give_weights(case, other, instance=1)
    return ask(case, replace(request, instance=1), other) or ask(case, request)


def batches(case: Case) -> list[str]:
    """Other numbers of samples, drawn at random, none and one among them."""
    batch, secret, reasons = case.batch or 0, random.SystemRandom(), []
    drawn = {0, 1, batch - batch // 3, batch + 1, secret.randint(1, batch + 1), secret.randint(1, batch + 1)} - {batch}
    for other in sorted(drawn) if case.batch else ():
        reasons = reasons or ask(case, Request(f"batch {other}", batch=other))
    return reasons


def ask(case: Case, request: Request, model: torch.nn.Module | None = None) -> list[str]:
    """Puts a request to both, where there is room for it, and says what is wrong with the candidate's answers."""
    if request.stream and case.device != "cuda":
        return []
    draws = [case.draw(request.seed + 100 * i, request.change, request.batch) for i in range(max(request.order) + 1)]
    try:
        with other_weights(case, request.weights) if request.weights else contextlib.nullcontext():
            reasons = ask_both(case, request, draws, model or case.model)
            return [f"{reason} ({request.when})" for reason in dict.fromkeys(reasons)]
    except (Rejected, torch.OutOfMemoryError) as error:
        kind = getattr(error, "kind", "memory")
        if request.must or kind not in ("memory", "raised") or kind == "raised" and not request.refusable:
            raise
        memory = f"not asked for want of memory: {request.when}"
        case.note(memory if kind == "memory" else f"refuses {request.when}: {error}")
    settle(case.device)
    return []


def ask_both(case: Case, request: Request, draws: list[Callable], model: torch.nn.Module) -> list[str]:
    incoming = partial(random_like, seed=case.seed, expanded=request.expanded)
    model.train(request.mode == "train")
    try:
        expected = [answer_of(model, draws[request.order[i]](), request, incoming) for i in request.keep]
    except Exception as error:
        if request.must or isinstance(error, torch.OutOfMemoryError):
            raise
        return []
    finally:
        model.eval()
    first = expected[0]
    if request.finite and not all(bool(x.isfinite().all()) for x in first.tensors()):
        return []
    if request.mode == "train" and first.draws:
        return []

    sets, given, answers = lay_out(case, request, draws, expected)
    reply = case.worker.ask(
        "call", sets=sets, incoming=given, answers=answers, order=request.order, keep=request.keep, mode=request.mode,
        direction=request.direction, instance=request.instance, whose=request.gradients(), poison=request.poison,
        stream=request.stream, again=request.again, move=request.move,
    )  # fmt: skip
    reasons = list(reply["changed"])
    if reply["late"]:
        reasons.append("the answer changes after the call has returned: work goes on elsewhere")
    if reply["draws"] and not first.draws:
        reasons.append("changes PyTorch's random state, which the Model leaves alone")
    for draw, places in zip(draws, sets):
        reasons += written_inputs(case, draw, places)
    for answer, position, forms, places in zip(expected, request.keep, reply["forms"], answers, strict=True):
        if request.when == "with gradients recorded":  # here no gradient is a remark; where one is timed it is wrong
            if any(a.get("requires_grad") and not b.get("requires_grad") for a, b in zip(answer.forms, forms)):
                case.note("outputs carry no gradient, the Model's do")
            answer.forms, forms = without_gradient(answer.forms), without_gradient(forms)
        strides = request.layout == "dense" and not request.expanded
        exact = partial(exact_answer, case, model, draws[request.order[position]], request, answer.incoming)
        tensors = [case.arena.read(place) for place in places]
        wrong = different_forms(answer, forms, reply["tree"], strides)
        reasons += wrong or different_values(case, answer, tensors, exact, request.gate)
    if not reasons and len(request.keep) > 2:
        if not all(same_bits(case.arena.view(a), case.arena.view(b)) for a, b in zip(*answers[:2])):
            case.note("gives other bits when it is called again with the same inputs, within the gates")
    return reasons


def lay_out(case: Case, request: Request, draws: list[Callable], expected: list[Answer]) -> tuple[list, list, list]:
    """Puts inputs and incoming gradients into the arena, with room for the answers; gives the places of each."""
    sets, (strides, odd) = [draw() for draw in draws], LAYOUTS.get(request.layout, (None, False))
    incoming = [answer.incoming for answer in expected if answer.incoming]  # a set of inputs has one call then
    tensors = [x for each in sets for x in each if isinstance(x, torch.Tensor)]
    requests = [(x, strides(x.shape) if strides and x.dim() else None, odd) for x in tensors]
    requests += [(x[:1] if request.expanded and x.dim() else x, None, False) for each in incoming for x in each]
    requests += [(x, None, False) for answer in expected for x in answer.tensors()]
    places = iter(case.arena.place(requests))
    sets, given = ([[filled(case.arena, x, places) for x in each] for each in every] for every in (sets, incoming))
    answers = [[next(places) for _ in answer.tensors()] for answer in expected]
    for place in sum(answers, []):
        fill_with_nan(case.arena.view(place))
    settle(case.device)
    return sets, given, answers


def filled(arena: Arena, x, places):
    """The place of a tensor, which is copied there. Of an expanded one the first row is, and stands for all."""
    if not isinstance(x, torch.Tensor):
        return x
    place = next(places)
    arena.view(place).copy_(x[: place.shape[0]] if x.dim() else x)
    if place.shape == tuple(x.shape):
        return place
    return place._replace(shape=tuple(x.shape), strides=(0, *place.strides[1:]))


def fill_with_nan(x: torch.Tensor) -> None:
    x.fill_(float("nan") if x.is_floating_point() or x.is_complex() else 1)


def written_inputs(case: Case, draw: Callable, places: list) -> list[str]:
    pairs = [(i, x, place) for i, (x, place) in enumerate(zip(draw(), places)) if isinstance(place, Place)]
    written = [i for i, x, place in pairs if not same_bits(case.arena.read(place), x)]
    return [f"writes input {i}, which a call must leave alone" for i in written]


def without_gradient(forms: list[dict]) -> list[dict]:
    return [{what: value for what, value in form.items() if what != "requires_grad"} for form in forms]


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


def different_values(case: Case, answer: Answer, given: list, reference: Callable, gate: str) -> list[str]:
    """Both gates for each tensor of an answer. Numbers and strings were compared with its form."""
    reasons, given, exact = [], iter(given), reference() if gate == "both" else None
    for i, (name, eager) in enumerate(answer.leaves.items()):
        if not isinstance(eager, torch.Tensor):
            continue
        new, scale, inexact = next(given), scale_of(name, eager), eager.is_floating_point() or eager.is_complex()
        tolerance = TOLERANCE[case.dtype][case.precision] if inexact else 0.0
        if gate == "finite" and inexact:
            new, eager = (x.masked_fill(~x.isfinite(), float("nan")) for x in (new, eager))
        if gate != "both" and torch.allclose(new, eager, tolerance, tolerance * scale, equal_nan=True):
            continue
        found = compare(new, eager, exact and exact[i], tolerance, scale)
        if gate == "both" and inexact and (exact or case.dtype == torch.float64):
            case.errors.setdefault(name, Errors()).add(found)
        if found.wrong and gate in ("either", "finite") and inexact and not found.nan_apart:
            exact = exact or reference()
            if exact and not compare(new, eager, exact[i], tolerance, scale).over_limit(case.dtype):
                continue
        if found.nan_apart:
            said = f"{found.nan_apart} of {eager.numel()} elements are NaN in one and not in the other"
            reasons.append(f"{name}: {said}")
        elif found.wrong and is_constant(new) and not is_constant(eager):
            reasons.append(f"{name} is constant, the Model's is not")
        elif found.wrong:
            far = f"largest difference {found.most[3]:.2e}, tolerance {tolerance * scale:.1e}"
            reasons.append(f"{name}: {found.wrong} of {eager.numel()} elements are not close to the Model's, {far}")
    return reasons


def scale_of(name: str, tensor: torch.Tensor) -> float:
    """A gradient sums over a batch: where it is large, an error counts relative to the size of them all."""
    if not name.startswith("gradient") or not tensor.numel():
        return 1.0
    norm = torch.linalg.vector_norm(tensor.nan_to_num(0.0, 0.0, 0.0), dtype=torch.float64).item()
    return max(1.0, norm / tensor.numel() ** 0.5)


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


# ---- while the clock runs


class Ring:
    """The inputs of one turn, drawn anew for each round, and where the answers go."""

    def __init__(self, case: Case, direction: str):
        self.case, self.request, self.reasons = case, Request("while it was timed", direction), []
        inputs = case.draw(0)()
        expected = answer_of(case.model, inputs, self.request, partial(random_like, seed=case.seed))
        self.incoming = expected.incoming
        self.names = [name for name in expected.leaves if name.startswith("gradient") == bool(self.incoming)]
        answers = [x for name, x in expected.leaves.items() if name in self.names and isinstance(x, torch.Tensor)]
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        slots = max(1, min(MOST_SLOTS, SLOT_BYTES // max(1, sum(x.nbytes for x in tensors + answers))))
        places = iter(case.arena.place([(x, None, False) for x in tensors * slots + self.incoming + answers]))
        self.slots = [[filled(case.arena, x, places) for x in inputs] for _ in range(slots)]
        given = [filled(case.arena, x, places) for x in self.incoming]
        self.ready = {"ring": self.slots, "incoming": given, "direction": direction, "whose": WHOSE[direction]}
        self.answers, self.draws = list(places), [case.draw(0)] * slots
        room = KEPT_BYTES[case.device] // max(1, sum(x.nbytes for x in answers))
        self.kept, self.most_kept = {}, max(1, min(MOST_KEPT, room))

    def renew(self, calls: int) -> None:
        """New inputs for so many calls, by seeds that nobody foresees; scaled, in case a file ignores seeds."""
        secret = random.SystemRandom()
        for i, places in enumerate(self.slots[:calls]):
            factor = secret.uniform(0.9, 1.0)
            self.draws[i] = self.case.draw(secret.getrandbits(31), lambda x, factor=factor: x.mul_(factor))
            for x, place in zip(self.draws[i](), places):
                if isinstance(place, Place):
                    self.case.arena.view(place).copy_(x)
        synchronize(self.case.device)  # and keeps the memory: the driver would clear it while the next is timed

    def blank(self) -> None:
        for place in self.answers:
            fill_with_nan(self.case.arena.view(place))
        synchronize(self.case.device)

    def keep(self, place: int, index: int, reply: dict) -> None:
        """A copy of the answer that was handed over, and how to draw its inputs again."""
        self.kept.pop(place, None)
        tensors = [self.case.arena.view(each).clone() for each in self.answers]
        self.kept[place] = self.draws[index], reply, tensors
        synchronize(self.case.device)

    def inspect(self) -> None:
        """Holds answers that were given while the clock ran against the Model's, by both gates."""
        while self.kept:
            self._inspect(*self.kept.popitem()[1])
            settle(self.case.device)

    def _inspect(self, draw: Callable, reply: dict, given: list) -> None:
        case = self.case
        given = [x.to(case.device) for x in given]
        expected = answer_of(case.model, draw(), self.request, lambda roots: self.incoming)
        kept = [i for i, name in enumerate(expected.leaves) if name in self.names]
        expected.forms = without_gradient([expected.forms[i] for i in kept])
        expected.leaves = {name: expected.leaves[name] for name in self.names}

        def exact() -> list | None:
            leaves = exact_answer(case, case.model, draw, self.request, self.incoming)
            return leaves and [leaves[i] for i in kept]

        wrong = different_forms(expected, reply["forms"], expected.tree, strides=True)
        wrong = wrong or different_values(case, expected, given, exact, "both")
        wrong += reply["changed"]
        self.reasons += [f"{what} (while it was timed)" for what in wrong]
