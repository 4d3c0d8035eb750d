"""Is a ModelNew right?

Two gates over several seeds, each with weights and inputs of its own. Gate 1: close to the Model in the run's dtype,
or, where that is far off itself (no NaN), to the Model in float64. Gate 2: against the latter, the largest and the
root-mean-square error are at most twice the Model's own. A tolerance alone passes kernels that lost half the digits; an
error ratio alone has no meaning in float64. Then what a careless author forgets: a table of requests, each put to the
candidate and to the Model alike.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from math import inf, nan
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.source import Problem, cast, last_line, to_dtype
from judge.worker import RANDOM, Answer, Rejected, Request, Worker, answers_of, same_bits, settle, shared, state_of

SEEDS = 3  # gate 2 pools their errors
DRAWS = 4  # attempts at gate 2, each with new inputs; one must meet it, since the largest of a few errors is luck
ERROR_RATIO = 2.0
secret = random.SystemRandom()  # numbers that no candidate foresees
CHUNK = {"cuda": 1 << 24, "cpu": 1 << 17}  # elements compared at a time

# Gate 1, as both rtol and atol. Under `high` two different roundings to TF32 meet. The half types are loose because the
# Model rounds after each of its operations and the norm behind them enlarges that: 0.15 was seen between a bfloat16
# Model and the exact result. There gate 2 is the sharp one.
HIGHEST = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 4e-2, torch.bfloat16: 3e-1}
TOLERANCE = {"highest": HIGHEST, "high": HIGHEST | {torch.float32: 5e-3}}


@dataclass
class Errors:
    """Errors of one output or gradient; `+` pools those of several answers.

    `most`: the largest |new - exact|, |eager - exact|, |exact|, and |new - eager| beyond gate 1. `squares`: their sums
    of squares.
    """

    most: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    count: int = 0  # of elements
    far: int = 0  # beyond gate 1

    def __add__(self, other: Errors) -> Errors:
        most, squares = torch.maximum(self.most, other.most), self.squares + other.squares
        return Errors(most, squares, self.count + other.count, self.far + other.far)

    def figures(self) -> dict[str, list[float]]:
        """Of the candidate, of eager and of the exact result itself."""
        return {"max": self.most[:3].tolist(), "rms": (self.squares[:3] / max(1, self.count)).sqrt().tolist()}

    def over_limit(self, dtype: torch.dtype) -> Iterator[str]:
        """Gate 2. Half an ulp at the output's scale is allowed: where the Model is exact, rounding is no error."""
        for kind, (new, eager, scale) in self.figures().items():
            limit = max(ERROR_RATIO * eager, torch.finfo(dtype).eps / 2 * scale)
            if not new <= limit:
                yield f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})"


def compare(new: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, tolerance: float, scale=1.0) -> Errors:
    """Gate 1, |new - eager| <= tolerance * (scale + |eager|), and the figures of gate 2, a chunk at a time.

    Without the exact result the Model stands in for it.
    """
    given = (x.detach() for x in (new, eager, eager if exact is None else exact))
    flat = [(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1) for x in given]
    total = Errors()
    for chunk in zip(*(x.split(CHUNK[new.device.type]) for x in flat if x.numel())):
        n, e, r = (x.double() for x in chunk)
        apart, of_eager = distance(n, e), distance(e, r)
        overflows = of_eager.isinf()  # there the Model's error says nothing of what others may have
        errors = [x.masked_fill(overflows, 0.0) for x in (distance(n, r), of_eager)]
        far = apart > tolerance * (scale + e.abs().nan_to_num(0.0, 0.0)) if tolerance else chunk[0] != chunk[1]
        figures = torch.stack([*errors, r.abs().nan_to_num(0.0, 0.0), apart.masked_fill(~far, 0.0)])
        total += Errors(figures.amax(1).cpu(), figures.square().sum(1).cpu(), len(n), int(far.sum()))
    return total


def are_close(new: torch.Tensor, right: torch.Tensor, tolerance: float, scale: float) -> bool:
    """Gate 1 alone: faster than `compare`, and a chunk at a time, too."""
    chunks = zip(*(x.detach().reshape(-1).split(CHUNK[new.device.type]) for x in (new, right)), strict=True)
    return all(torch.allclose(n.to(r.dtype), r, tolerance, tolerance * scale, equal_nan=True) for n, r in chunks)


def distance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """|left - right|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (left == right) | (left.isnan() & right.isnan())
    return (left - right).abs_().masked_fill_(same, 0.0).nan_to_num_(inf, inf)


@dataclass
class Case:
    """The contenders at one shape, dtype and precision, and what was found so far."""

    problem: Problem
    device: str
    by_ipc: bool  # how tensors reach the workers
    dtype: torch.dtype
    precision: str
    batch: int | None
    seed: int
    workers: dict[str, Worker]  # by role; the candidate's is "new"
    notes: list[str] = field(default_factory=list)
    tell: Callable[[str], None] = lambda text: None  # of the progress
    model: torch.nn.Module | None = None
    initial: dict[str, torch.Tensor] = field(default_factory=dict)  # its state when it was made
    errors: dict[str, Errors] = field(default_factory=dict)

    def inputs(self, seed: int, change: Callable | None = None, batch: int | None = None) -> list:
        """The same on every call: they are drawn again rather than kept, which would take memory."""
        drawn = self.problem.inputs(self.batch if batch is None else batch, self.device, self.dtype, self.seed + seed)
        for x in tree_leaves(drawn):
            if change and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                change(x)
        return drawn

    def share(self, tensors):
        return tree_map_only(torch.Tensor, partial(shared, by_ipc=self.by_ipc), tensors)

    def room(self, answer: Answer) -> list[torch.Tensor]:
        """Shared memory for the tensors of an answer."""
        tensors = answer.tensors().values()
        return self.share([blank(torch.empty_like(x, memory_format=torch.contiguous_format)) for x in tensors])

    def load(self, worker: Worker, new_path: Path | None) -> dict:
        """Has a process import a candidate's file, or None for the Model's, and make its module."""
        path, constants = (new_path, {}) if new_path else (self.problem.path, self.problem.constants)
        made = {"arguments": self.share(self.problem.arguments(self.seed)), "seed": self.seed}
        return worker.ask("load", path=path, constants=constants, **made, level=self.precision, dtype=self.dtype)

    def drop(self, name: str, failed: Rejected) -> None:
        """A baseline that fails leaves, with a note. Without eager or the candidate there is nothing to judge."""
        if name == "new":
            raise failed
        if name == "eager":
            raise Rejected(f"the Model itself {failed}") from failed
        self.notes.append(f"no {name} baseline: {failed}")
        self.workers.pop(name).kill()

    def exact(self, request: Request, inputs: list, model: torch.nn.Module) -> dict | None:
        """The Model's answer in float64, by name, or None where it has none."""
        if self.dtype == torch.float64:
            return None
        try:
            model = cast(copy.deepcopy(model), torch.float64).train(request.mode == "train")
            inputs = tree_map_only(torch.Tensor, partial(to_dtype, dtype=torch.float64), inputs)
            return answers_of(model, [inputs], replace(request, order=(0,)))[0].leaves
        except Exception as error:  # a Model for one dtype, or too little memory
            self.notes.append(f"gate 2 was not applied to every answer: in float64 the Model raised {last_line(error)}")
            return None


def blank(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(nan if x.is_floating_point() or x.is_complex() else 1)


def perturb(model: torch.nn.Module, seed: int) -> None:
    """New values for everything floating in the state, of the size it had; what is all zero becomes small numbers."""
    torch.manual_seed(-1 - seed)  # inputs have seeds from 0 on
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() or tensor.is_complex():
            factors = torch.rand_like(tensor) + 0.5
            tensor.mul_(factors) if tensor.any() else tensor.copy_(factors - 1.0)


def signs(model: torch.nn.Module) -> None:
    """About half of the parameters' values get the other sign; buffers, a variance say, keep theirs."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.mul_(torch.randint_like(parameter, 2) * 2 - 1)


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        if bias is not None and bias.is_floating_point() and "Norm" not in type(module).__name__:
            bias.data.add_(100.0)


def shiftable(x: torch.Tensor) -> torch.Tensor:
    """The elements that may be changed: not zeros beside other values, which may be those of a triangular matrix."""
    return (x != 0) | ~x.any()


def fill_two(x: torch.Tensor, value: float) -> None:
    for thirds, each in ((1, value), (2, -value)):
        x[tuple(thirds * size // 3 for size in x.shape)].fill_(each)


FINITE, BOTH = partial(Request, finite=True), partial(Request, direction="forward_backward")
SIGNS = FINITE("values of both signs", change=lambda x: x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3)), weights=signs)
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a slice": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
    "off any alignment": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
}

# Asked at the shape and in the layout that is timed.
REQUESTS = {
    "forward": [
        Request("two instances with other weights in turns", twin=True),
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8)),
        Request("after the weights moved in memory, as .to moves them", move=True),
        Request("with gradients recorded", direction="forward_recorded"),
        Request("in inference mode", mode="inference"),
        Request("in training mode", mode="train"),
        SIGNS,
        FINITE("biases whose mean is large", weights=shift_biases),
        FINITE("values whose mean is large", change=lambda x: x.add_(shiftable(x), alpha=100.0)),
        FINITE("values far below 0", change=lambda x: x.add_(shiftable(x), alpha=-100.0)),
        FINITE("small values", change=lambda x: x.mul_(1e-3)),
        FINITE("inputs that are all equal", change=lambda x: x.masked_fill_(shiftable(x), 0.5)),
        Request("NaN in each input", change=partial(fill_two, value=nan)),
        Request("infinities of both signs in each input", change=partial(fill_two, value=inf), infinite=True),
    ],
    "forward_backward": [
        BOTH("two forward passes before two backward passes", order=(0, 1)),
        BOTH("a second backward pass of one graph", again=True, refusable=True),
        BOTH("only the parameters' gradients wanted", whose="parameters"),
        BOTH("only the inputs' gradients wanted", whose="inputs"),
        BOTH("only the last output in the loss, every second parameter frozen", in_part=True),
        BOTH("in training mode", mode="train"),
        replace(SIGNS, direction="forward_backward"),
        BOTH("an incoming gradient that is expanded", expanded=True, refusable=True),
    ],
}


def requests_after(case: Case, direction: str) -> Iterator[Request]:
    """Asked when all is timed, since it may make a compiler compile anew."""
    of = partial(Request, direction=direction)
    yield of("after it was timed")
    if case.device == "cuda":
        yield of("on another stream", stream=True)  # it leaves a pool of streams behind, which may slow short calls
    for layout in list(LAYOUTS)[1:]:
        yield of(f"inputs that are {layout}", layout=layout, refusable=True)
    if batch := case.batch:
        others = [*range(2, batch), *range(batch + 2, batch + 9)]  # two of them: at least one is not asked in every run
        few = {0, 1, batch - batch // 3} if direction == "forward" else set()
        for other in sorted({batch + 1, *few, *secret.sample(others, 2)} - {batch}):
            yield of(f"batch {other}", batch=other)


def start(case: Case, new_path: Path) -> float:
    """Makes the Model, and has the candidate made in its process: the seconds of its import.

    The same seed gives both the same state, in the same order; the candidate's loads the Model's, strictly.
    """
    case.model = cast(case.problem.model(case.seed), case.dtype, case.device)
    case.initial = copy.deepcopy(case.model.state_dict())
    comparable(case)
    reply = case.load(case.workers["new"], new_path)
    for mine, theirs in zip_longest(reply["state"], state_of(case.model), fillvalue="no more"):
        if mine != theirs:
            raise Rejected(f"state_dict: has {mine}; the Model's, made from the same seed, has {theirs}")
    return reply["seconds"]


def comparable(case: Case) -> None:
    """Raises Rejected if the Model's answers are no measure of the candidate's."""
    first, again = (answers_of(case.model, [case.inputs(0)], Request(""))[0] for _ in range(2))
    for name, leaf in first.leaves.items():
        if not isinstance(leaf, (torch.Tensor, int, complex, str, type(None))):
            raise Rejected(f"the Model itself gives {name} as {type(leaf).__name__}, which the judge cannot compare")
        tolerance = TOLERANCE[case.precision][case.dtype]
        if isinstance(leaf, torch.Tensor) and not are_close(again.leaves[name], leaf, tolerance, 1.0):
            raise Rejected("the Model itself gives another answer when it is called again: none can be judged by it")


def check(case: Case, direction: str, after: bool = False) -> None:
    """Both gates, and all that is asked besides. The first answer that is wrong ends it: others would only echo it."""
    if not after:
        seeds(case, direction)
    for seed, request in enumerate(requests_after(case, direction) if after else REQUESTS.get(direction, []), 20):
        ask(case, replace(request, seed=seed))


def over_limit(case: Case) -> list[str]:
    """Where gate 2 is not met by the errors so far."""
    pooled = {} if case.dtype == torch.float64 else case.errors
    return [f"{name}: {said}" for name, errors in pooled.items() for said in errors.over_limit(case.dtype)]


def seeds(case: Case, direction: str) -> None:
    """Both gates over SEEDS seeds, each with new weights and inputs; over other seeds if gate 2 is not met."""
    for draw in range(DRAWS):
        case.errors = {}
        for seed in range(draw * SEEDS, (draw + 1) * SEEDS):
            case.tell(f"checking {direction}, seed {seed + 1} of {(draw + 1) * SEEDS}")
            case.model.load_state_dict(case.initial)
            perturb(case.model, case.seed + seed)
            ask(case, Request(f"from memory full of NaN, seed {seed}", direction, seed, poison=True))
            ask(case, Request(f"seed {seed}", direction, seed, strict=True))
        if not over_limit(case):
            return
    raise Rejected(*over_limit(case))


def ask(case: Case, request: Request, draws: int = DRAWS) -> None:
    """Puts a request to both, again with new inputs if gate 2 is not met where the Model is far off itself.

    Skips an optional request if memory runs out. Raises Rejected for a wrong answer.
    """
    must = request.strict or request.poison
    try:
        put(case, request, must)
    except (torch.OutOfMemoryError, Rejected) as error:
        kind = getattr(error, "kind", "memory")
        if kind == "raised" and request.refusable:
            case.notes.append(f"refuses {request.when}: {error}")
        elif kind == "raised":
            reject(request, [*error.args], kind)
        elif kind == "memory" and not must:
            case.notes.append(f"not asked for want of memory: {request.when}")
        elif kind == "doubt" and draws > 1:
            ask(case, replace(request, seed=request.seed + 1000), draws - 1)
        else:
            raise
    settle(case.device)


def put(case: Case, request: Request, must: bool) -> None:
    """Asks nothing where the Model raises an error, since a candidate may raise one there, too."""
    model, layout = case.model, LAYOUTS[request.layout]
    if request.weights:
        model = copy.deepcopy(model)
        request.weights(model)
    draws = [partial(case.inputs, request.seed + 100 * i, request.change, request.batch) for i in set(request.order)]
    drawn = [tree_map_only(torch.Tensor, lambda x: layout(x) if x.dim() else x, draw()) for draw in draws]
    sets = case.share(drawn)
    try:  # a copy: a call may change what the module holds, as running means
        with request.memory(case.device):
            expected = answers_of(copy.deepcopy(model).train(request.mode == "train"), drawn, request)
    except Exception as error:
        if must or isinstance(error, torch.OutOfMemoryError):
            raise
        return
    if request.finite and not all(bool(x.isfinite().all()) for x in expected[0].tensors().values()):
        return
    del drawn  # a gigabyte or ten
    places = [case.room(answer) for answer in expected]
    states = [case.share(dict(model.state_dict()))] * 2
    if request.twin:
        other = copy.deepcopy(model)
        perturb(other, request.seed + 1)
        states[1] = case.share(dict(other.state_dict()))
    settle(case.device)
    asked = replace(request, change=None, weights=None)
    reply = case.workers["new"].ask("call", request=asked, states=states, sets=sets, answers=places)
    wrong = [f"{what}, which the Model does not" for what in reply["did"] if what not in expected[0].did]
    if request.mode == "train" and RANDOM in expected[0].did and RANDOM not in reply["did"]:
        wrong.append("draws no random numbers, and the Model does")
    if reply["tree"] != expected[0].tree:
        wrong.append(f"gives {reply['tree']}, the Model {expected[0].tree}")
    reject(request, wrong)
    for answer, forms, given in zip(expected, reply["forms"], places, strict=True):
        inspect(case, request, answer, forms, given, draws[answer.inputs], model)
    if len(request.order) > 2 and not expected[0].did and not all(same_bits(a, b) for a, b in zip(*places[:2])):
        case.notes.append("gives other bits when it is called again with the same inputs, within the gates")


def reject(request: Request, wrong: list[str], kind: str = "wrong") -> None:
    if wrong:
        raise Rejected(*(f"{what} ({request.when})" for what in wrong), kind=kind)


def scale_of(name: str, x: torch.Tensor) -> float:
    """A gradient is a sum over a batch: where it is large, errors count relative to its size."""
    if not name.startswith("gradient"):
        return 1.0
    norm = torch.linalg.vector_norm(x.nan_to_num(0.0, 0.0, 0.0).abs(), dtype=torch.float64).item()
    return max(1.0, norm / max(1, x.numel()) ** 0.5)


def inspect(case: Case, request: Request, answer: Answer, forms: list, given: list, draw: Callable, model) -> None:
    """Raises Rejected where an answer is wrong: the form of its values (of a number also the value), or its tensors."""
    if len(forms) != len(answer.forms):
        reject(request, [f"gives {len(forms)} values, the Model {len(answer.forms)}"])
    optional = not (request.strict or request.poison)
    if request.direction == "forward_recorded" and optional:  # where it is timed it is wrong
        bare, theirs = ([form.partition(", requires_grad")[0] for form in each] for each in (forms, answer.forms))
        if bare == theirs and forms != answer.forms:
            case.notes.append("requires_grad of the outputs is not as the Model's")
            forms = answer.forms
    pairs = zip(answer.leaves, forms, answer.forms)
    reject(request, [f"{name} is {mine}, the Model's is {theirs}" for name, mine, theirs in pairs if mine != theirs])
    if request.mode == "train" and RANDOM in answer.did:  # the values are luck
        return
    wrong, doubts, exact = [], 0, case.exact(request, draw(), model) if request.strict else None
    for (name, eager), new in zip(answer.tensors().items(), given):
        new, inexact = new.to(eager.device), eager.is_floating_point() or eager.is_complex()
        tolerance, scale = TOLERANCE[case.precision][case.dtype] if inexact else 0.0, scale_of(name, eager)
        if inexact and request.infinite:
            new, eager = (x.masked_fill(~x.isfinite(), nan) for x in (new, eager))
        if not request.strict and are_close(new, eager, tolerance, scale):
            continue
        if inexact and not request.strict:
            exact = exact or case.exact(request, draw(), model)
        found = compare(new, eager, exact and exact[name], tolerance, scale)
        if inexact and request.strict and (exact or case.dtype == torch.float64):
            case.errors[name] = case.errors.get(name, Errors()) + found
        if found.far and inexact and exact and (new.isnan() == eager.isnan()).all():
            close = are_close(new, exact[name], tolerance, scale_of(name, exact[name]))
            if close or (optional and not [*found.over_limit(case.dtype)]):
                continue  # the Model is far off itself
            doubts += optional
        if found.far:
            said = f"by up to {found.most[3]:.2e}, allowed is {tolerance:.1e} * ({scale:.3g} + |the Model's|)"
            said = "NaN or infinite in one and not in the other" if found.most[3] == inf else said
            wrong.append(f"{name}: {found.far} of {found.count} elements are not close to the Model's, {said}")
    reject(request, wrong, "doubt" if doubts == len(wrong) else "wrong")
