"""Is a ModelNew right?

Two gates over several seeds, each with weights and inputs of its own. Gate 1: close to the Model, in the run's dtype.
Gate 2: against the Model in float64, the largest and the root-mean-square error are at most twice the Model's own. A
tolerance alone passes kernels that lost half the digits; an error ratio alone has no meaning in float64. Then what a
careless author forgets: a table of requests, each put to the candidate and to the Model alike.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from judge.source import Problem, last_line, to_dtype
from judge.worker import Answer, Rejected, Request, Worker, answers_of, same_bits, settle, shared, state_of

SEEDS, MOST_SEEDS = 3, 16  # more where few do not meet gate 2: the largest of a few values is luck, on both sides
ERROR_RATIO = 2.0
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


@dataclass
class Errors:
    """Of one output or gradient, or of several answers' by `+`.

    `most`: the largest |new - exact|, |eager - exact|, |exact| and |new - eager|. `squares`: the sums of their squares.
    """

    most: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(4).double())
    count: int = 0  # of elements
    far: int = 0  # beyond gate 1
    one_nan: int = 0  # NaN in one only

    def __add__(self, other: Errors) -> Errors:
        most, squares = torch.maximum(self.most, other.most), self.squares + other.squares
        return Errors(most, squares, self.count + other.count, self.far + other.far, self.one_nan + other.one_nan)

    def figures(self) -> dict[str, list[float]]:
        """Of the candidate, of eager and of the exact result itself."""
        return {"max": self.most[:3].tolist(), "rms": (self.squares[:3] / max(1, self.count)).sqrt().tolist()}

    def over_limit(self, dtype: torch.dtype) -> list[str]:
        """Gate 2. Half an ulp at the output's scale is allowed: where the Model is exact, rounding is no error."""
        complaints = []
        for kind, (new, eager, scale) in self.figures().items():
            limit = max(ERROR_RATIO * eager, torch.finfo(dtype).eps / 2 * scale)
            if not new <= limit:
                said = f"{kind} error against float64 {new:.2e}, the limit is {limit:.2e} (eager's is {eager:.2e})"
                complaints.append(said)
        return complaints


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
        figures = torch.stack([*errors, finite(r.abs()), apart])
        far, one_nan = apart > tolerance * (scale + finite(e.abs())), n.isnan() != e.isnan()
        most, squares = figures.amax(1).cpu(), figures.square().sum(1).cpu()
        total += Errors(most, squares, n.numel(), int(far.sum()), int(one_nan.sum()))
    return total


def finite(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


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
    errors: dict[str, Errors] = field(default_factory=dict)

    def inputs(self, seed: int, change: Callable | None = None, batch: int | None = None) -> list:
        """The same on every call: they are drawn again rather than kept, which would take memory."""
        drawn = self.problem.inputs(self.batch if batch is None else batch, self.device, self.dtype, self.seed + seed)
        for x in drawn:
            if change and isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                change(x)
        return drawn

    def share(self, tensors):
        return tree_map_only(torch.Tensor, partial(shared, by_ipc=self.by_ipc), tensors)

    def room(self, answer: Answer) -> list[torch.Tensor]:
        """Shared memory for an answer, full of NaN."""
        like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in answer.tensors()]
        return self.share([blank(x) for x in like])

    def note(self, text: str) -> None:
        self.notes += [text] if text not in self.notes else []

    def load(self, worker: Worker, new_path: Path | None, like: dict | None = None) -> None:
        """Has a process import a candidate's file, or None for the Model's. Nobody waits for that here."""
        problem = self.problem
        file = {"path": problem.path, "name": "Model", "constants": problem.constants}
        file = {"path": new_path, "name": "ModelNew", "constants": {}} if new_path else file
        made = {"arguments": problem.arguments(self.seed), "level": self.precision, "dtype": self.dtype}
        worker.send("load", **file, **made, seed=self.seed, like=like)

    def give_weights(self, worker: Worker, model: torch.nn.Module | None = None, instance: int | None = None) -> None:
        """The Model's, or this model's, to one instance of a process's module or to all."""
        state = self.share(dict((model or self.model).state_dict()))
        settle(self.device)
        worker.ask("set_weights", state=state, instance=instance)

    def exact(self, request: Request, inputs: list, model: torch.nn.Module) -> dict | None:
        """The Model's answer in float64, by name, or None where it has none."""
        if self.dtype == torch.float64:
            return None
        try:
            model = copy.deepcopy(model).double().train(request.mode == "train")
            inputs = [to_dtype(x, torch.float64) for x in inputs]
            return answers_of(model, [inputs], replace(request, order=(0,)))[0].leaves
        except Exception as error:  # a Model for one dtype, or too little memory
            self.note(f"gate 2 was not asked of every answer: in float64 the Model raised {last_line(error)}")
            return None

    def over_limit(self) -> list[str]:
        """Gate 2 over all answers so far."""
        found = {} if self.dtype == torch.float64 else self.errors
        return [f"{name}: {said}" for name, errors in found.items() for said in errors.over_limit(self.dtype)]


def blank(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(nan if x.is_floating_point() or x.is_complex() else 1)


def perturb(model: torch.nn.Module, seed: int) -> None:
    """New values for everything floating in the state, of the size it had; what is all zero becomes small numbers."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            generator = torch.Generator(tensor.device).manual_seed(seed + sum(map(ord, name)))
            factors = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)
            tensor.mul_(factors) if tensor.any() else tensor.copy_(factors.sub_(1.0))


def signs(model: torch.nn.Module) -> None:
    """About half of the parameters' values get the other sign; buffers, a variance say, keep theirs."""
    for parameter in model.parameters():
        parameter.mul_(torch.randint_like(parameter, 2) * 2 - 1)


def shift_biases(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor) and "Norm" not in type(module).__name__:
            module.bias.add_(100.0)


# The same values in other memory.
LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a slice": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
    "off any alignment": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
}
FINITE, BOTH = partial(Request, finite=True), partial(Request, direction="forward_backward")

# Asked at the shape and in the layout that is timed; and what a compiler may make anew, after it was timed.
REQUESTS = {
    "forward": [
        Request("kept while it was called again", order=(0, *[1] * 8, 0, *[1] * 8)),
        Request("after the weights moved in memory, as .to moves them", move=True),
        Request("with gradients recorded", direction="forward_recorded"),
        Request("in inference mode", mode="inference"),
        Request("in training mode", mode="train", weights=lambda model: None),  # running means move, in both alike
        FINITE("values of both signs", change=lambda x: x.mul_(6 * torch.randint_like(x, 2) - 3), weights=signs),
        FINITE("biases whose mean is large", weights=shift_biases),
        FINITE("values whose mean is large", change=lambda x: x.add_(100.0)),
        FINITE("small values", change=lambda x: x.mul_(1e-3)),
        FINITE("inputs that are all equal", change=lambda x: x.fill_(0.5)),
        Request("one NaN in each input", change=lambda x: x.view(-1)[x.numel() // 3].fill_(nan)),
        Request("one infinity in each input", change=lambda x: x.view(-1)[x.numel() // 3].fill_(inf), gate="finite"),
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
        *(Request(f"inputs that are {layout}", layout=layout, refusable=True) for layout in list(LAYOUTS)[1:]),
    ],
}


def start(case: Case, new_path: Path) -> float:
    """Makes the Model, and has the candidate made in its process: the seconds of its import.

    The same seed gives both the same state, in the same order; the candidate's loads the Model's, strictly.
    """
    case.model = case.problem.model(case.seed).to(case.device, case.dtype)
    state = case.share(dict(case.model.state_dict()))  # others can open it for as long as it lives
    case.load(case.workers["new"], new_path, state)
    reply, theirs = case.workers["new"].reply(), state_of(case.model)
    if list(reply["state"]) != list(theirs):
        raise Rejected(f"state_dict: its keys are {list(reply['state'])}, the Model's are {list(theirs)}")
    for name, form in theirs.items():
        if reply["state"][name] != form:
            raise Rejected(f"state_dict: {name} has {reply['state'][name]}, the Model's has {form}")
    if reply["other"]:
        raise Rejected(f"state_dict: the same seed does not give the Model's {', '.join(reply['other'])}")
    return reply["seconds"]


def check(case: Case, direction: str) -> None:
    """Both gates, and all that is asked besides. The first answer that is wrong ends it: others would only echo it."""
    if direction != "after":
        seeds(case, direction)
    for seed, request in enumerate(REQUESTS[direction], 20):
        ask(case, replace(request, seed=seed))
    if direction == "forward":
        # Two modules with weights of their own take turns: nothing made from one's weights may serve the other. Weights
        # are given to one as often as to the other: a count of writes does not tell them apart.
        other, request = copy.deepcopy(case.model), Request("two instances with other weights in turns")
        perturb(other, case.seed + 22)
        case.give_weights(case.workers["new"], instance=0)
        case.give_weights(case.workers["new"], other, instance=1)
        ask(case, replace(request, instance=1), other)
        ask(case, request)
    if direction == "after" and case.batch:
        batch, secret = case.batch, random.SystemRandom()
        drawn = {0, 1, batch - batch // 3, batch + 1, secret.randint(1, batch + 1), secret.randint(1, batch + 1)}
        for other in sorted(drawn - {batch}):
            ask(case, Request(f"batch {other}", batch=other))


def seeds(case: Case, direction: str, first: int = 0) -> None:
    """Both gates over several seeds, with weights and inputs drawn anew: as many more as gate 2 needs to be met."""
    for turn in range(first, MOST_SEEDS):
        if turn >= SEEDS and not case.over_limit():
            return
        case.tell(f"checking {direction}, seed {turn + 1} of {max(SEEDS, turn + 1)}")
        perturb(case.model, case.seed + turn)
        case.give_weights(case.workers["new"])
        request = Request(f"seed {turn}", direction, turn, gate="both")
        # In poisoned memory PyTorch is in its deterministic mode, where it may choose other kernels: no gate 2 there.
        ask(case, replace(request, when=f"from memory full of NaN, seed {turn}", gate="one", poison=True))
        ask(case, request)
    raise Rejected(*case.over_limit())


def ask(case: Case, request: Request, model: torch.nn.Module | None = None) -> None:
    """Puts a request to both, where there is room for it; raises Rejected where the candidate's answers are wrong."""
    model = model or case.model
    if request.stream and case.device != "cuda":
        return
    must, reasons = request.gate in ("both", "one"), []
    try:
        if request.weights:
            model = copy.deepcopy(model)
            with torch.no_grad():
                request.weights(model)
            case.give_weights(case.workers["new"], model)
        reasons = ask_both(case, request, model)
    except (Rejected, torch.OutOfMemoryError) as error:
        kind = getattr(error, "kind", "memory")
        if must or kind not in ("memory", "raised") or kind == "raised" and not request.refusable:
            raise
        memory = f"not asked for want of memory: {request.when}"
        case.note(memory if kind == "memory" else f"refuses {request.when}: {error}")
    if reasons:
        raise Rejected(*(f"{reason} ({request.when})" for reason in dict.fromkeys(reasons)))
    settle(case.device)
    if request.weights:
        case.give_weights(case.workers["new"])


def ask_both(case: Case, request: Request, model: torch.nn.Module) -> list[str]:
    """What is wrong with the candidate's answers; nothing where the Model has none to compare them with."""
    draws = [partial(case.inputs, request.seed + 100 * i, request.change, request.batch) for i in set(request.order)]
    drawn, layout = [draw() for draw in draws], LAYOUTS[request.layout]
    sets = case.share(tree_map_only(torch.Tensor, lambda x: layout(x) if x.dim() else x, drawn))
    model.train(request.mode == "train")
    try:
        expected = answers_of(model, drawn, request)
    except Exception as error:  # a Model may refuse what it likes
        if request.gate in ("both", "one") or isinstance(error, torch.OutOfMemoryError):
            raise
        return []
    finally:
        model.eval()
    infinite = request.finite and not all(bool(x.isfinite().all()) for x in expected[0].tensors())
    if infinite or request.mode == "train" and expected[-1].draws:
        return []

    del drawn  # a gigabyte or ten
    answers = [case.room(answer) for answer in expected]
    settle(case.device)
    asked = replace(request, change=None, weights=None)
    reply = case.workers["new"].ask("call", request=asked, sets=sets, answers=answers)
    reasons = reply["wrong"]
    if reply["draws"] and not expected[-1].draws:
        reasons.append("changes PyTorch's random state, which the Model leaves alone")
    for answer, forms, tensors in zip(expected, reply["forms"], answers, strict=True):
        reasons += wrong_forms(case, request, answer, forms, reply["tree"])
        reasons = reasons or list(wrong_values(case, request, answer, tensors, draws[answer.inputs], model))
    if len(request.order) > 2 and not all(same_bits(a, b) for a, b in zip(*answers[:2])):
        case.note("gives other bits when it is called again with the same inputs, within the gates")
    return reasons


def wrong_forms(case: Case, request: Request, answer: Answer, forms: list[dict], tree: str) -> list[str]:
    """Type, dtype, shape, device, layout and stride, as they were before anything touched the answer."""
    if tree != answer.tree or len(forms) != len(answer.forms):
        return [f"gives {len(forms)} values as {tree}, the Model {len(answer.forms)} as {answer.tree}"]
    remark = request.direction == "forward_recorded" and request.gate == "either"  # where it is timed it is wrong
    skipped = {"stride"} if request.layout != "dense" or request.expanded else set()
    skipped |= {"requires_grad"} if request.timed or remark else set()
    for name, mine, theirs in zip(answer.leaves, forms, answer.forms):
        if remark and theirs.get("requires_grad") and not mine.get("requires_grad"):
            case.note("outputs carry no gradient, the Model's do")
        ignored = {"stride", "requires_grad"} if name.startswith("gradient") else skipped
        for what, value in theirs.items():
            if mine.get(what) != value and what not in ignored:
                verb, article = ("is", "a ") if what == "type" else (f"has {what}", "")
                return [f"{name} {verb} {article}{mine.get(what)}, the Model's {verb.split()[0]} {article}{value}"]
    return []


def wrong_values(case: Case, request: Request, answer: Answer, given: list, draw: Callable, model) -> Iterator[str]:
    """Both gates for each tensor of an answer. Numbers and strings were compared with its form."""
    gate, given = request.gate, iter(given)
    exact = case.exact(request, draw(), model) if gate == "both" else None
    for name, eager in answer.leaves.items():
        if not isinstance(eager, torch.Tensor):
            continue
        new, scale, inexact = next(given).to(case.device), 1.0, eager.is_floating_point() or eager.is_complex()
        tolerance = TOLERANCE[case.dtype][case.precision] if inexact else 0.0
        if name.startswith("gradient"):  # a sum over a batch: where it is large, errors count relative to its size
            norm = torch.linalg.vector_norm(finite(eager), dtype=torch.float64).item()
            scale = max(1.0, norm / max(1, eager.numel()) ** 0.5)
        if gate == "finite" and inexact:
            new, eager = (x.masked_fill(~x.isfinite(), nan) for x in (new, eager))
        if gate != "both" and torch.allclose(new, eager, tolerance, tolerance * scale, equal_nan=True):
            continue
        found = compare(new, eager, exact and exact[name], tolerance, scale)
        if gate == "both" and inexact and (exact or case.dtype == torch.float64):
            case.errors[name] = case.errors.get(name, Errors()) + found
        if found.far and gate in ("either", "finite") and inexact and not found.one_nan:
            exact = exact or case.exact(request, draw(), model)
            if exact and not compare(new, eager, exact[name], tolerance, scale).over_limit(case.dtype):
                continue
        if found.one_nan:
            yield f"{name}: {found.one_nan} of {found.count} elements are NaN in one and not in the other"
        elif found.far and (new == new.flatten()[0]).all() and not (eager == eager.flatten()[0]).all():
            yield f"{name} is constant, the Model's is not"
        elif found.far:
            said = f"largest difference {found.most[3]:.2e}, tolerance {tolerance * scale:.1e}"
            yield f"{name}: {found.far} of {found.count} elements are not close to the Model's, {said}"
