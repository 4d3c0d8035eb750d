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

from judge.source import Problem, last_line, to_dtype
from judge.worker import (
    Answer,
    Rejected,
    Request,
    Worker,
    answers_of,
    random_states,
    same_bits,
    settle,
    shared,
    state_of,
)

SEEDS, MOST_SEEDS = 3, 16  # more where few do not meet gate 2: the largest of a few values is luck, on both sides
ERROR_RATIO = 2.0
MOST_SLOTS, SLOT_BYTES = 8, 1 << 30  # of the calls in a turn, each with inputs of its own
MOST_KEPT, KEPT_BYTES = 8, {"cuda": 8 << 30, "cpu": 1 << 30}  # of the timed answers that are looked at
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 17}  # elements compared at a time

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
    """Of one output or gradient, or of several answers' with `add`.

    `most`: the largest |new - exact|, |eager - exact|, |exact| and |new - eager|. `sums`: the first three's squares;
    how many elements are beyond gate 1; how many are NaN in one only; how many there are.
    """

    most: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(6).double())

    def add(self, other: Errors) -> None:
        self.most, self.sums = torch.maximum(self.most, other.most), self.sums + other.sums

    def rms(self) -> list[float]:
        return (self.sums[:3] / self.sums[5].clamp(1)).sqrt().tolist()

    def over_limit(self, dtype: torch.dtype) -> list[str]:
        """Gate 2. Half an ulp at the output's scale is allowed: where the Model is exact, rounding is no error."""
        complaints = []
        for kind, (new, eager, scale) in (("largest", self.most[:3].tolist()), ("rms", self.rms())):
            limit = max(ERROR_RATIO * eager, torch.finfo(dtype).eps / 2 * scale)
            if not new <= limit:
                said = f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})"
                complaints.append(said)
        return complaints

    def as_dict(self, dtype: torch.dtype) -> dict[str, float | None]:
        """For the record. In float64 nothing is more exact: what is known is the distance to the Model."""
        most, rms, exact = self.most.tolist(), self.rms(), dtype == torch.float64
        eager = {"eager_max": None if exact else most[1], "eager_rms": None if exact else rms[1]}
        return {"new_max": most[0], "new_rms": rms[0], **eager}


def compare(new: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float, scale=1.0) -> Errors:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the sums of gate 2, a chunk at a time.

    Without the exact result the candidate's error is its distance from the Model.
    """
    given = [x.detach() for x in (new, eager, exact) if x is not None]
    flat = [(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1) for x in given]
    total, size = Errors(), CHUNK[new.device.type]
    for start in range(0, flat[0].numel(), size):
        n, e, *exactly = (x[start : start + size].double() for x in flat)
        apart = distance(n, e)
        errors = [apart, torch.zeros_like(apart), torch.zeros_like(apart)]
        for r in exactly:
            of_eager = distance(e, r)
            overflows = of_eager.isinf()  # there the Model's error says nothing of what others may have
            errors = [x.masked_fill(overflows, 0.0) for x in (distance(n, r), of_eager)] + [finite(r.abs())]
        counts = apart > tolerance * (scale + finite(e.abs())), n.isnan() != e.isnan(), torch.ones_like(n)
        sums = [x.double().sum() for x in (*(x.square() for x in errors), *counts)]
        total.add(Errors(torch.stack([x.max() for x in (*errors, apart)]).cpu(), torch.stack(sums).cpu()))
    return total


def finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs_().masked_fill_(same, 0.0).nan_to_num_(float("inf"), float("inf"))


# ---- a candidate and the Model


@dataclass
class Case:
    """One candidate at one shape, dtype and precision, and what was found so far."""

    problem: Problem
    device: str
    by_ipc: bool  # how tensors reach the workers
    dtype: torch.dtype
    precision: str
    batch: int | None
    seed: int
    worker: Worker | None = None
    model: torch.nn.Module | None = None
    errors: dict[str, Errors] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def inputs(self, seed: int, change: Callable | None = None, batch: int | None = None) -> list:
        """The same on every call: they are drawn again rather than kept, which would take memory."""
        drawn = self.problem.inputs(self.batch if batch is None else batch, self.device, self.dtype, self.seed + seed)
        for x in drawn:
            if change and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                change(x)
        return drawn

    def share(self, x):
        return shared(x, self.by_ipc) if isinstance(x, torch.Tensor) else x

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Shared memory for an answer, full of NaN."""
        return self.share(nan_like(torch.empty_like(like, memory_format=torch.contiguous_format)))

    def note(self, text: str) -> None:
        self.notes += [text] if text not in self.notes else []

    def over_limit(self) -> list[str]:
        """Gate 2 over all answers so far."""
        found = {name: errors.over_limit(self.dtype) for name, errors in self.errors.items()}
        return [f"{name}: {said}" for name, all_ in found.items() for said in all_ if self.dtype != torch.float64]


def exact_answer(case: Case, model, inputs: Callable, request: Request, incoming: list) -> dict | None:
    """The Model's answer in float64, or None where it has none."""
    if case.dtype == torch.float64:
        return None
    try:
        exact = copy.deepcopy(model).double().train(request.mode == "train")
        given, inputs = ([to_dtype(x, torch.float64) for x in tensors] for tensors in (incoming, inputs()))
        (answer,) = answers_of(exact, [inputs], replace(request, order=(0,)), lambda number, roots: given)
        return answer.leaves
    except torch.OutOfMemoryError:
        case.note("gate 2 was not asked of every answer: no room for the Model in float64")
    except Exception as error:  # a Model for one dtype
        case.note(f"no gate 2: the Model does not run in float64: {last_line(error)}")
    return None


def random_like(tensors: list[torch.Tensor], seed: int = 0, expanded: bool = False) -> list[torch.Tensor]:
    """Normal numbers that hardly round in any dtype; `expanded`: the same all along the first dimension."""
    drawn = []
    for x in tensors:
        generator = torch.Generator(x.device).manual_seed(seed)
        values = torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype)
        drawn.append(values[:1].expand_as(values) if expanded and x.dim() else values)  # other numbers lie behind it
    return drawn


# ---- weights


def make_asked(case: Case) -> dict:
    """How a worker is asked to make a module."""
    arguments = case.problem.arguments(case.seed)
    return {"arguments": arguments, "level": case.precision, "dtype": case.dtype, "seed": case.seed}


def start(case: Case) -> list[str]:
    """The same seed gives both the same state, in the same order, and the candidate loads the Model's, strictly."""
    case.model = case.problem.model(case.seed).to(case.device, case.dtype)
    state = case.model.state_dict()
    shared_state = {name: case.share(x) for name, x in state.items()}
    mine = case.worker.ask("make", **make_asked(case), like=shared_state, instances=2)["state"]
    theirs = state_of(case.model, {})
    if list(mine) != list(theirs):
        return [f"state_dict: its keys are {list(mine)}, the Model's are {list(theirs)}"]
    reasons = []
    for name, (*form, _) in theirs.items():
        *form_here, same = mine[name]
        for what, is_, should in zip(("shape", "dtype", "requires_grad (None: no parameter)"), form_here, form):
            if is_ != should:
                reasons.append(f"state_dict: {name} has {what} {is_}, the Model's has {should}")
        if form_here == form and not same:
            reasons.append(f"state_dict: the same seed does not give the Model's {name}")
    if not reasons:
        give_weights(case)
    return reasons


def give_weights(case: Case, model=None, instance: int | None = None, worker: Worker | None = None) -> None:
    """The Model's, or this model's, to one instance of the candidate's or to all, or to another worker."""
    state = {name: case.share(x) for name, x in (model or case.model).state_dict().items()}
    settle(case.device)
    (worker or case.worker).ask("set_weights", state=state, instance=instance)


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
def other_weights(case: Case, change: Callable[[torch.nn.Module], None] | None):
    """Both have these weights inside."""
    if change is None:
        yield
        return
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


def spread(x: torch.Tensor) -> None:
    x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3))


def put(value: float, x: torch.Tensor) -> None:
    x.view(-1)[x.numel() // 3] = value


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor) and "Norm" not in type(module).__name__:
            module.bias.data.add_(100.0)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(float("nan") if x.is_floating_point() or x.is_complex() else 1)


# The same values in other memory.
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a slice": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
    "off any alignment": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
}
BOTH = partial(Request, direction="forward_backward")

# Asked at the shape and in the layout that is timed; and what a compiler may make anew, after it was timed.
REQUESTS = {
    "forward": [
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8)),
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
        BOTH("two forward passes before two backward passes", order=(0, 1)),
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
    try:
        with other_weights(case, request.weights):
            reasons = ask_both(case, request, model or case.model)
            return [f"{reason} ({request.when})" for reason in dict.fromkeys(reasons)]
    except (Rejected, torch.OutOfMemoryError) as error:
        kind = getattr(error, "kind", "memory")
        if request.must or kind not in ("memory", "raised") or kind == "raised" and not request.refusable:
            raise
        memory = f"not asked for want of memory: {request.when}"
        case.note(memory if kind == "memory" else f"refuses {request.when}: {error}")
    settle(case.device)
    return []


def ask_both(case: Case, request: Request, model: torch.nn.Module) -> list[str]:
    draws = [partial(case.inputs, request.seed + 100 * i, request.change, request.batch) for i in set(request.order)]
    drawn, layout = [draw() for draw in draws], LAYOUTS.get(request.layout, lambda x: x)
    sets = [[case.share(layout(x)) if isinstance(x, torch.Tensor) and x.dim() else x for x in each] for each in drawn]
    model.train(request.mode == "train")
    states = random_states()
    try:
        expected = answers_of(model, drawn, request, lambda _, roots: random_like(roots, case.seed, request.expanded))
    except Exception as error:  # a Model may refuse what it likes
        if request.must or isinstance(error, torch.OutOfMemoryError):
            raise
        return []
    finally:
        model.eval()
    draws_numbers = random_states() != states
    if request.finite and not all(bool(x.isfinite().all()) for x in expected[0].tensors()):
        return []
    if request.mode == "train" and draws_numbers:
        return []

    del drawn  # a gigabyte or ten
    given = [[case.share(x) for x in answer.incoming] for answer in expected if answer.incoming]
    answers = [[case.room(x) for x in answer.tensors()] for answer in expected]
    settle(case.device)
    asked = replace(request, change=None, weights=None)
    reply = case.worker.ask("call", request=asked, sets=sets, incoming=given, answers=answers)
    reasons = reply["wrong"]
    if reply["draws"] and not draws_numbers:
        reasons.append("changes PyTorch's random state, which the Model leaves alone")
    for position, answer, forms, tensors in zip(request.kept(), expected, reply["forms"], answers, strict=True):
        if request.when == "with gradients recorded":  # here no gradient is a remark; where one is timed it is wrong
            if any(a.get("requires_grad") and not b.get("requires_grad") for a, b in zip(answer.forms, forms)):
                case.note("outputs carry no gradient, the Model's do")
            answer.forms, forms = without_gradient(answer.forms), without_gradient(forms)
        exact = partial(exact_answer, case, model, draws[request.order[position]], request, answer.incoming)
        strides = request.layout == "dense" and not request.expanded
        wrong = different_forms(answer, forms, reply["tree"], strides)
        reasons += wrong or different_values(case, answer, tensors, exact, request.gate)
    if len(request.order) > 2 and not all(same_bits(a, b) for a, b in zip(*answers[:2])):
        case.note("gives other bits when it is called again with the same inputs, within the gates")
    return reasons


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
    for name, eager in answer.leaves.items():
        if not isinstance(eager, torch.Tensor):
            continue
        new, scale = next(given).to(case.device), scale_of(name, eager)
        inexact = eager.is_floating_point() or eager.is_complex()
        tolerance = TOLERANCE[case.dtype][case.precision] if inexact else 0.0
        if gate == "finite" and inexact:
            new, eager = (x.masked_fill(~x.isfinite(), float("nan")) for x in (new, eager))
        if gate != "both" and torch.allclose(new, eager, tolerance, tolerance * scale, equal_nan=True):
            continue
        found = compare(new, eager, exact and exact[name], tolerance, scale)
        far, one_nan, count = map(int, found.sums[3:])
        if gate == "both" and inexact and (exact or case.dtype == torch.float64):
            case.errors.setdefault(name, Errors()).add(found)
        if far and gate in ("either", "finite") and inexact and not one_nan:
            exact = exact or reference()
            if exact and not compare(new, eager, exact[name], tolerance, scale).over_limit(case.dtype):
                continue
        if one_nan:
            reasons.append(f"{name}: {one_nan} of {count} elements are NaN in one and not in the other")
        elif far and is_constant(new) and not is_constant(eager):
            reasons.append(f"{name} is constant, the Model's is not")
        elif far:
            said = f"largest difference {found.most[3]:.2e}, tolerance {tolerance * scale:.1e}"
            reasons.append(f"{name}: {far} of {count} elements are not close to the Model's, {said}")
    return reasons


def scale_of(name: str, tensor: torch.Tensor) -> float:
    """A gradient sums over a batch: where it is large, an error counts relative to the size of them all."""
    if not name.startswith("gradient") or not tensor.numel():
        return 1.0
    norm = torch.linalg.vector_norm(finite(tensor), dtype=torch.float64).item()
    return max(1.0, norm / tensor.numel() ** 0.5)


def is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


# ---- while the clock runs


class Ring:
    """The inputs of one turn, drawn anew for each round, and where the answers go."""

    def __init__(self, case: Case, direction: str):
        self.case, self.request, self.reasons = case, Request("while it was timed", direction, gate="both"), []
        inputs = case.inputs(0)
        (expected,) = answers_of(case.model, [inputs], self.request, lambda _, roots: random_like(roots, case.seed))
        incoming = [case.share(x) for x in expected.incoming]
        self.answers = [case.room(x) for x in self._timed(expected).tensors()]
        nbytes = sum(x.nbytes for x in [*inputs, *self.answers] if isinstance(x, torch.Tensor))
        slots = max(1, min(MOST_SLOTS, SLOT_BYTES // max(1, nbytes)))
        self.slots, self.draws = [[case.share(x) for x in inputs] for _ in range(slots)], [None] * slots
        self.ready = {"request": self.request, "ring": self.slots, "answers": self.answers, "incoming": incoming}
        room = KEPT_BYTES[case.device] // max(1, sum(x.nbytes for x in self.answers))
        self.kept, self.most_kept = [], max(1, min(MOST_KEPT, room))

    def renew(self, calls: int) -> None:
        """New inputs for so many calls, by seeds that nobody foresees; scaled, in case a file ignores seeds."""
        secret = random.SystemRandom()
        for i, slot in enumerate(self.slots[:calls]):
            factor = secret.uniform(0.9, 1.0)
            self.draws[i] = partial(self.case.inputs, secret.getrandbits(31), lambda x, factor=factor: x.mul_(factor))
            for new, x in zip(self.draws[i](), slot):
                if isinstance(x, torch.Tensor) and x.numel():
                    x.untyped_storage().copy_(new.untyped_storage())
        self._synchronize()

    def blank(self) -> None:
        for x in self.answers:
            nan_like(x)
        self._synchronize()

    def keep(self, index: int, reply: dict) -> None:
        """A copy of the answer that was handed over, and how to draw its inputs again; drops one if there are many."""
        if len(self.kept) == self.most_kept:
            self.kept.pop(random.SystemRandom().randrange(self.most_kept))
        self.kept.append((self.draws[index], reply["forms"], [x.clone() for x in self.answers]))
        self._synchronize()

    def inspect(self) -> None:
        """Holds answers that were given while the clock ran against the Model's, by both gates."""
        case = self.case
        while self.kept:
            draw, forms, given = self.kept.pop()
            (expected,) = answers_of(case.model, [draw()], self.request, lambda _, roots: random_like(roots, case.seed))
            exact = partial(exact_answer, case, case.model, draw, self.request, expected.incoming)
            expected = self._timed(expected)
            wrong = different_forms(expected, forms, expected.tree, strides=True)
            wrong = wrong or different_values(case, expected, given, exact, "both")
            self.reasons += [f"{what} (while it was timed)" for what in wrong]
            settle(case.device)

    def _timed(self, answer: Answer) -> Answer:
        """What is handed over of it, and compared: not whether it has a gradient."""
        names = [name for name in answer.leaves if not answer.incoming or name.startswith("gradient")]
        forms = [form for name, form in zip(answer.leaves, without_gradient(answer.forms)) if name in names]
        return replace(answer, leaves={name: answer.leaves[name] for name in names}, forms=forms)

    def _synchronize(self) -> None:  # and keeps the memory: the driver would clear it while the next is timed
        if self.case.device == "cuda":
            torch.cuda.synchronize()
