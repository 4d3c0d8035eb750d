"""Is a ModelNew right?

Both gates (judge/gates.py) over several seeds, each with weights and inputs of its own. Then the requests of
judge/requests.py, each put to the candidate and to the Model alike. What is wrong ends the judgement (`Rejected`); what
is right and yet no drop-in is gathered (`Case.no_dropin`).
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf, nan
from pathlib import Path

import torch
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only

from judge import gates, switches
from judge.answers import (
    AFTERWARDS,
    GRAD_MODE,
    GRAPH_KEPT,
    GROWS,
    LEAKS,
    NO_HOOKS,
    NOT_ITSELF,
    OF_A_LEAF,
    OF_ANOTHER,
    OWN_MODE,
    RANDOM,
    REUSED,
    SHARE,
    SHARED,
    WANTS,
    Answer,
    How,
    Own,
    Request,
    answers_of,
    bytes_of,
    norms_and_dropouts_of,
    same_bits,
    set_mode,
    slopes_of,
    tensors_of,
)
from judge.requests import LAYOUTS, MANY, MANY_DRAWS, REQUESTS, Inputs, half, other_truth, perturb, requests_after
from judge.source import OTHER_ARGUMENTS, RAISED, Problem, cast, last_line, reseed, to_dtype
from judge.worker import (
    GARBLED,
    Rejected,
    Worker,
    as_rejected,
    settle,
    share_memory,
    shared,
    state_of,
    takes_of,
)

SEEDS = 3  # gate 2 pools their errors
DRAWS = 4  # attempts at gate 2, each with new inputs; one must meet it, since the largest of a few errors is luck
OTHER_DRAWS = 16  # of inputs, in which the Model may be seen to miss gate 1
LARGE_SHARE = 1 / 32  # of a GPU's memory: a request besides the gates is of no larger inputs and answer
SMALL = 0.01  # of the largest value of an output: by so much, at most, a small one may be off, besides the gates
LEAST_SCALE = 1e-3  # of gradients: what is much smaller than 1 may be what is left of larger numbers
FAR_OFF = 30.0  # times the tolerance: gradients that are seen without float64's, and the Model in another layout
TIE_BREAKS = 64  # other choices among equal values that may explain an answer
LAYOUT = r", torch\.(strided|sparse\w*)"  # in the form of a tensor
OUT_OF_RANGE = re.compile(r"out of (range|bounds)|valid range|Class values")  # in an error, of gather or one_hot, say
EMPTY = re.compile(r"shape \[(\d+, )*0[,\]]")  # in a form: of a tensor without elements
SEQUENCE = re.compile(r"\w+(\([^()]*\))?\[")  # how `kind_of` begins a list, a tuple or a named one
MOST_STEPS = 1e-3  # the share of places where the Model may jump
STEPS_TRIED, MOST_TRIED = 32, 128  # other inputs, to see whether it does; so many where it was not yet seen to
RACES = How.REPEATED | How.THREADS  # what goes wrong now and then counts as often as it is seen
MANY_BYTES = 1 << 27  # of inputs and answer, at most, where the batch is many times as large
NAMED = 4  # parameters at most, in a reason
SOME = 0.05  # the share of elements at most in which a right answer is far off where the Model is, too
Unjudged = partial(Rejected, kind="model")  # the Model's answers are no measure of the candidate's


@contextlib.contextmanager
def of_the_model(level: str | None = None) -> Iterator[None]:
    """An error within is the Model's, and what it switches is put back."""
    try:
        with switches.kept(level) if level else contextlib.nullcontext():
            yield
    except Rejected:
        raise
    except RAISED as error:
        kind = "memory" if isinstance(error, torch.OutOfMemoryError) else "model"
        raise Rejected(f"the Model itself raised {last_line(error)}", kind=kind) from error


@dataclass
class Case:
    """The contenders at one shape, dtype and precision, and what was found so far."""

    problem: Problem
    device: str
    dtype: torch.dtype
    precision: str
    batch: int | None
    seed: int
    workers: dict[str, Worker]  # by role; the candidate's is "new"
    texts: dict[Path, bytes] = field(default_factory=dict)  # of the files, as they were when the judge first read them
    notes: list[str] = field(default_factory=list)
    no_dropin: list[str] = field(default_factory=list)  # why what is right is no drop-in
    tell: Callable[[str], None] = lambda text: None  # of the progress
    model: torch.nn.Module | None = None
    initial: dict[str, torch.Tensor] = field(default_factory=dict)  # its state when it was made
    made_from: int = 0  # the seed of its weights
    own: Own = None  # the candidate's name of each of the Model's tensors; {}: made from the same seed
    fits: bool = False  # the candidate's state_dict has the Model's names and no others, and is made with its values
    graphs: bool = False  # the candidate captures CUDA graphs
    constant: bool = False  # the Model's answer is the same whatever it is given
    shapes: list[list[int]] = field(default_factory=list)  # of the inputs
    small_batch: int | None = None  # the batch of all requests but the gates'
    sample_bytes: float = 0.0  # of a sample's inputs and answer
    eps: float = 0.0  # of the coarsest dtype that the Model's operations give
    aligned: bool = False  # PyTorch's fused attention ends a process that gives it memory off 16 bytes on a GPU
    inputs_are: list[Inputs] = field(default_factory=list)  # what each input is in all draws, of a few samples
    errors: dict[str, gates.Errors] = field(default_factory=dict)
    # At random, by name and whether in training mode: the candidate's, two of the Model's.
    drawn: dict[tuple[str, bool], list] = field(default_factory=dict)
    sloped: set[bool] = field(default_factory=set)  # in which modes, training or not, slopes were looked at
    random: set[bool] = field(default_factory=set)  # in which modes the Model draws random numbers
    reuses: bool = False  # the Model gives the memory of an earlier answer again
    infinite: bool = False  # the Model's answer to ordinary inputs has infinities or NaN, as masked scores have
    keeps: bool = False  # a call changes what the Model keeps beside its state_dict, as a number that counts calls

    @property
    def unmatched(self) -> bool:
        """No tensor of the candidate's could be matched with the Model's: it is judged as made from the same seed."""
        return self.own == {} and bool(self.initial)

    def inputs(self, seed: int, batch: int | None = None) -> list:
        """The same on every call: they are drawn again rather than kept, which would take memory."""
        with of_the_model():
            batch = self.batch if batch is None else batch
            return self.problem.inputs(batch, self.device, self.dtype, self.seed + seed)

    def share(self, tensors):
        return tree_map_only(torch.Tensor, shared, tensors)

    def state(self, model: torch.nn.Module) -> dict:
        return self.share(dict(model.state_dict()))

    def room(self, answer: Answer) -> list[torch.Tensor]:
        """Shared memory for the tensors of an answer."""
        tensors = answer.tensors().values()
        return self.share([blank(torch.empty_like(x, memory_format=torch.contiguous_format)) for x in tensors])

    def make(self, seed: int) -> None:
        with of_the_model(self.precision):
            self.model = cast(self.problem.model(seed), self.dtype, self.device)
        self.made_from = seed

    def load(self, worker: Worker, new_path: Path | None, examine: bool = False) -> dict:
        """Has a process import a candidate's file, or None for the Model's, and make its module."""
        path = new_path or self.problem.path
        if path not in self.texts:
            self.texts[path] = path.read_bytes()
        problem = self.problem.path, self.problem.constants, self.problem.text
        made = {"level": self.precision, "dtype": self.dtype, "seed": self.made_from, "examine": examine}
        return worker.ask("load", path=path, text=self.texts[path], problem=problem, **made)

    def call(self, role: str, request: Request, states: list, sets: list, places: list) -> dict:
        own = self.own if role == "new" else None
        return self.workers[role].ask("call", request=request, own=own, states=states, sets=sets, answers=places)

    def says(self, command: str, **asked) -> bool | list:
        """What the candidate's process finds out about itself; nothing where memory runs out."""
        try:
            return self.workers["new"].ask(command, **asked)[command]
        except Rejected as error:
            if error.kind != "memory" and (error.kind, command) != ("raised", "aged"):
                raise
            return []

    def answers(self, model: torch.nn.Module, sets: list, request: Request, call=None) -> list[Answer]:
        """A Model's; without its weights' gradients and its state, where the candidate's could not be matched."""
        return answers_of(model, sets, request, {} if self.own == {} else None, call)

    def drop(self, name: str, failed: Rejected) -> None:
        """A baseline that fails leaves, with a note. Without eager or the candidate there is nothing to judge."""
        if name == "new":
            raise failed
        if name == "eager":
            kind = failed.kind if failed.kind == "memory" else "model"
            raise Rejected(f"the Model itself {failed}", kind=kind) from failed
        self.notes.append(f"no {name} baseline: {failed}")
        self.workers.pop(name).kill()

    def lacks(self, *whys: str) -> None:
        self.no_dropin += [why for why in dict.fromkeys(whys) if why not in self.no_dropin]

    def listen(self) -> None:
        """What the candidate's process said that it has switched."""
        if "new" in self.workers:
            self.lacks(*self.workers["new"].told)

    def plain(self, model: torch.nn.Module, inputs: list, request: Request, dtype: torch.dtype | None = None) -> dict:
        """What a copy of the Model, in this dtype, answers to a single call, by name."""
        with switches.kept(self.precision):
            model = set_mode(cast(copy.deepcopy(model), dtype or self.dtype), How.TRAIN in request.how, request.how)
            request = replace(request, order=(0,), how=request.how & ~How.POISONED)
            call = partial(gates.in_float64, model) if dtype == torch.float64 else None
            return self.answers(model, [inputs], request, call)[0].leaves

    def exact(self, request: Request, inputs: list, model: torch.nn.Module) -> dict | None:
        """The Model's answer in float64, by name, or None where it has none."""
        if self.dtype == torch.float64:
            return None
        try:
            inputs = tree_map_only(torch.Tensor, partial(to_dtype, dtype=torch.float64), inputs)
            return self.plain(model, inputs, request, torch.float64)
        except Exception as error:  # a Model for one dtype, say
            if isinstance(error, torch.OutOfMemoryError) and self.may_be_smaller():
                raise
            self.notes.append(f"gate 2 was not applied to every answer: in float64 the Model raised {last_line(error)}")
            return None

    def may_be_smaller(self) -> bool:
        return self.device == "cuda" and (self.batch or 0) > 1

    def tolerance(self, x: torch.Tensor) -> float:
        """Of gate 1. What is rounded more coarsely than the run's dtype may differ by a few of its ulps."""
        if not (x.is_floating_point() or x.is_complex()):
            return 0.0
        coarse = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        narrow, usual = max(coarse, self.eps), torch.finfo(self.dtype).eps
        least = gates.TOLERANCE[self.precision][self.dtype]
        if narrow < usual:  # the Model computes in float64 whatever the run's dtype is
            return gates.HIGHEST[torch.float64]
        if narrow == usual:
            return least
        if self.dtype == torch.float64:  # where nothing more exact tells who is right
            least = gates.HIGHEST[torch.float32]
        return max(least, gates.ULPS * narrow)


def scale_of(case: Case, request: Request, name: str, x: torch.Tensor) -> float:
    """Gate 1's. Gate 2 sees that an output of small numbers is right; where it is not asked, gate 1 is to see them."""
    scale, usual, tolerance = gates.scale_of(name, x), case.errors.get(name), case.tolerance(x)
    if request.both_gates or not tolerance:
        return scale
    if usual is not None:
        return scale if usual.cancels() else min(scale, SMALL * float(usual.most[2]) / tolerance)
    if not name.startswith("gradient of") or How.TWICE in request.how or not x.numel():
        return scale
    return min(scale, max(LEAST_SCALE, SMALL * float(gates.size(gates.as_numbers(x)).max()) / tolerance))


def kept_by(module: torch.nn.Module) -> list:
    """What its modules keep beside their state_dict: numbers, tensors and lists of them, buffers that are not saved."""
    own = vars(torch.nn.Module()).keys()
    kept = [{name: x for name, x in vars(each).items() if name not in own} for each in module.modules()]
    kept += [[each._buffers[name] for name in sorted(each._non_persistent_buffers_set)] for each in module.modules()]
    leaves = [x for x in tree_leaves(kept) if isinstance(x, (bool, int, float, torch.Tensor))]
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]


def is_kept(before: list, now: list) -> bool:
    def same(old, new) -> bool:
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
            return same_bits(old, new.to(old.device))  # it may have brought it to where its inputs are
        return type(old) is type(new) and old == new

    return len(before) == len(now) and all(map(same, before, now))


def is_finite(x: torch.Tensor) -> bool:
    return all(bool(each.isfinite().all()) for (each,) in gates.chunks(x))


def without_overflows(new: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """`new`, with the Model's value where that alone is infinite for want of range, and neither is finite."""
    of_new, of_eager, of_exact = map(gates.as_numbers, (new, eager, exact))
    return torch.where(of_eager.isinf() & of_exact.isfinite() & ~of_new.isfinite(), eager, new)


def blank(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(nan if x.is_floating_point() or x.is_complex() else 1)


def start(case: Case, new_path: Path) -> float:
    """Makes the Model, and has the candidate made in its process: the seconds of its import.

    The candidate gets the Model's weights by their names, or, where names differ, by the bits that both were made with
    from the same seed. Where these differ, too, it is judged as it was made, from several seeds (`seeds`).
    """
    case.make(case.seed)
    case.initial = copy.deepcopy(case.model.state_dict())
    comparable(case)
    worker = case.workers["new"]
    reply = case.load(worker, new_path, examine=True)
    theirs, mine = ({name: rest for name, *rest in state} for state in (state_of(case.model), reply["state"]))
    with contextlib.suppress(Exception):  # nobody need be pickled or copied where the Model cannot be
        pickle.dumps(case.model)
        copy.deepcopy(case.model)
        is_itself = case.model.eval() is case.model
        case.lacks(*(why for why in reply["lacks"] if why != SHARE and (is_itself or why != NOT_ITSELF)))
    if SHARE in reply["lacks"]:
        twin = cast(case.problem.model(case.seed), case.dtype, case.device)
        reject(Request("before any call"), [SHARE] * (not share_memory(case.model, twin)))
    for what, of_the_models in (("forward", case.model.forward), ("constructor", case.problem.module.Model)):
        theirs_takes, takes = takes_of(of_the_models), reply["takes"][what]
        if "*" not in theirs_takes + takes and len(takes) < len(theirs_takes):
            case.lacks(f"its {what} takes {some(takes) or 'nothing'}, the Model's {some(theirs_takes)}")
    if reply["class"] != "ModelNew":
        case.notes.append("it has no ModelNew; its class Model was taken")
    case.own = matched(case, theirs, mine)
    return reply["seconds"]


def matched(case: Case, theirs: dict[str, list], mine: dict[str, list]) -> Own:
    """The candidate's names of the Model's tensors. What differs is no drop-in."""
    fit = all(name in mine and mine[name][0] == form for name, (form, _, _) in theirs.items())
    made = [name for name in theirs if fit and mine[name][2] == OF_ANOTHER != theirs[name][2]]
    if made:  # whose gradients have other shapes, too
        case.lacks(f"{some(made)} in its state_dict is {OF_ANOTHER}: it was judged as made from the same seeds")
        return {}
    if fit:
        extra = [name for name in mine if name not in theirs]
        case.fits = not extra and all(mine[name][1] == bits for name, (_, bits, _) in theirs.items())
        if extra:
            case.lacks(f"its state_dict has {some(extra)}, which the Model's has not")
        elif [*mine] != [*theirs]:
            case.lacks("its state_dict has another order")
        for name, (_, bits, kind) in theirs.items():
            if mine[name][2] != kind:
                case.lacks(f"{name} is a {mine[name][2]}, the Model's a {kind}")
            elif mine[name][1] != bits:
                case.lacks(f"{name} is made with other values from the same seed")
        return {name: name for name in theirs}
    own, left = {}, dict(mine)
    for name, (form, bits, kind) in theirs.items():
        alike = [each for each, rest in left.items() if rest[:2] == [form, bits]]
        apart = lambda each: (each != name, each.split(".")[-1] != name.split(".")[-1], mine[each][2] != kind)  # noqa: E731
        if alike:
            own[name] = min(alike, key=apart)
            del left[own[name]]
    none = f"it has none of the Model's {some(theirs)}"
    names = f"its parameters are named {some(mine)}, the Model's {some(theirs)}" if mine else none
    if len(own) == len(theirs):
        case.lacks(names)
        return own
    case.lacks(f"{names}; they cannot be given the Model's values, so it was judged as made from the same seeds")
    return {}


def some(names) -> str:
    names = list(names)
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def smaller(batch: int | None, nbytes: int, most: float) -> int | None:
    """The batch, halved until its share of these bytes, which are those of the whole batch, is no more than `most`."""
    small = batch
    while small and small > 2 and nbytes * small / batch > most:
        small //= 2
    return small


def comparable(case: Case) -> None:
    """Raises Unjudged if the Model's answers are no measure of the candidate's."""
    inputs, coarsest = case.inputs(0), gates.Coarsest()

    def noted(*given):
        with coarsest:
            return called(*given)

    case.shapes = [list(x.shape) for x in tensors_of(inputs)]
    if other := [str(x.layout) for x in tensors_of(inputs) if x.layout != torch.strided]:
        raise Unjudged(f"the Model is given tensors of {other[0]}, which the judge cannot hand out")
    if odd := [x for x in tree_leaves(inputs) if isinstance(x, torch.Generator) or hides_tensors(x)]:
        raise Unjudged(f"the Model is given a {type(odd[0]).__name__}, which the judge cannot hand out")
    if odd := [(name, x) for name, x in case.initial.items() if isinstance(x, torch.Tensor) and x.is_quantized]:
        raise Unjudged(f"the Model keeps {odd[0][0]} as {odd[0][1].dtype}, which the judge cannot hand out")
    nbytes = bytes_of(inputs)
    with of_the_model(case.precision):
        called = copy.deepcopy(case.model)
        (first,) = answers_of(called, [inputs], Request(""))
        del inputs  # gigabytes, maybe
        # In between other inputs: a mean of all calls so far, say, is of the same ones the same.
        called.load_state_dict(case.initial)  # what a call writes there, each request gives anew
        (other,) = answers_of(called, [case.inputs(1)], Request(""))
        called.load_state_dict(case.initial)
        (again,) = answers_of(called, [case.inputs(0)], Request(""), call=noted)
    case.eps = coarsest.eps or torch.finfo(case.dtype).eps
    case.aligned = coarsest.attends and case.device == "cuda"
    shapes = [{name: x.shape for name, x in answer.tensors().items()} for answer in (first, again, other)]
    if shapes != shapes[:1] * 3:
        raise Unjudged("the shape of the Model's answer depends on the values of its inputs: that cannot be compared")
    for name, leaf in first.leaves.items():
        known = isinstance(leaf, (torch.Tensor, int, complex, str, type(None)))
        if not known or isinstance(leaf, torch.Tensor) and (leaf.is_quantized or leaf.is_meta):
            kind = leaf.dtype if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise Unjudged(f"the Model itself gives {name} as {kind}, which the judge cannot compare")
        if isinstance(leaf, torch.Tensor) and not gates.are_close(again.leaves[name], leaf, case.tolerance(leaf), 1.0):
            raise Unjudged("the Model itself gives another answer when it is called again: none can be judged by it")
    case.infinite = not all(map(is_finite, first.tensors().values()))
    case.constant = all(same_bits(x, other.leaves[name]) for name, x in first.tensors().items())
    most = LARGE_SHARE * torch.cuda.mem_get_info()[1] if case.device == "cuda" else inf
    case.small_batch = smaller(case.batch, nbytes + bytes_of(first.leaves), most)
    case.sample_bytes = (nbytes + bytes_of(first.leaves)) / (case.batch or 1)
    if case.small_batch != case.batch:
        why = "a request may need several answers in the GPU's memory"
        case.notes.append(f"batch {case.small_batch} in all but the gates and the timing: {why}")
    least = case.batch and min(case.batch, 4)
    try:
        draws = [tensors_of(case.inputs(700 + i, least)) for i in range(3)]
    except Rejected:  # the Model's file makes no inputs of so few samples
        draws = [tensors_of(case.inputs(700 + i)) for i in range(3)]
    case.inputs_are = [Inputs(each) for each in zip(*draws)]


def hides_tensors(x) -> bool:
    """An object, as a dataclass, of which PyTorch does not know that it has tensors."""
    return not isinstance(x, (torch.Tensor, type)) and bool(tensors_of([*getattr(x, "__dict__", {}).values()]))


def check(case: Case, direction: str, after: bool = False, gradients: bool = False) -> None:
    """Both gates, and all that is asked besides. The first answer that is wrong ends it: others would only echo it.

    After the timing also one question for gradients, if wanted: wrong ones are no drop-in.
    """
    if not after:
        seeds(case, direction)
    many = MANY * (case.small_batch or 0) * case.sample_bytes < MANY_BYTES
    later = requests_after(case.device, case.small_batch, direction, gradients, many)
    asked = later if after else REQUESTS.get(direction, [])
    if case.unmatched and not after and direction == "forward":
        given = case.share([case.inputs(20, case.small_batch)])
        least = gates.TOLERANCE[case.precision][case.dtype]
        if case.says("aged", sets=given, seed=case.made_from, tolerance=least):
            case.lacks("keeps what it made from its weights: once they change, it gives another answer than a new one")
    for seed, request in enumerate(asked, 20):
        case.tell(f"checking {direction}: {request.when}")
        ask(case, replace(request, seed=seed, batch=case.small_batch if request.batch is None else request.batch))
    if after and direction == "forward":
        for other in OTHER_ARGUMENTS:
            other_arguments(case, other)


def other_arguments(case: Case, other: str) -> None:
    """Asks modules that are made with other arguments of the constructor."""
    model, problem = case.model, case.problem
    arguments = str(problem.arguments(case.made_from))
    problem.other = other
    if str(problem.arguments(case.made_from)) == arguments:
        problem.other = None
        return
    when = f"made with {other} that its constructor takes"
    try:
        case.make(case.made_from)
        case.workers["new"].ask("made", seed=case.made_from, other=other)
        ask(case, Request(when, seed=99, batch=case.small_batch, may_differ=True, may_refuse=True))
    except Rejected as error:
        if error.kind == "raised":
            case.lacks(f"refuses other arguments of its constructor: {error}")
        elif error.kind != "model":
            raise
    finally:
        problem.other, case.model = None, model
        if case.workers["new"].alive():
            case.workers["new"].ask("made", seed=case.made_from)


def over_limit(case: Case) -> list[str]:
    """Where gate 2 is not met by the errors so far."""
    pooled = {} if case.dtype == torch.float64 else case.errors
    eps = max(case.eps, torch.finfo(case.dtype).eps)
    return [f"{name}: {said}" for name, errors in pooled.items() for said in errors.over_limit(eps)]


def seeds(case: Case, direction: str) -> None:
    """Both gates over the seeds. A candidate whose tensors are not the Model's (other names, others beside them, other
    values, as a factor folded into them) may compute something else with weights that are loaded, and any may refuse
    them: then it is judged as it was made."""
    before = list(case.no_dropin)
    try:
        both_gates(case, direction)
    except Rejected as error:
        refuses = error.kind == "raised"
        if not case.own or case.fits and not refuses or not case.workers["new"].alive():
            raise
        own, case.own = case.own, {}
        try:
            both_gates(case, direction)
        except Rejected:
            case.own, case.no_dropin = own, before
            raise
        said = "refuses the Model's weights" if refuses else "with the Model's weights loaded it gives other answers"
        case.lacks(f"{said}: it was judged as made from the same seeds")


def both_gates(case: Case, direction: str) -> None:
    """SEEDS seeds, each with new weights and inputs; others if gate 2 is not met."""
    if case.initial and not case.unmatched:  # a parameter that is zero now will not be so later
        case.model.load_state_dict(case.initial)
        ask(case, Request(f"seed {case.seed} of inputs, the weights it is made with", direction))
    for draw in range(DRAWS):
        case.errors = {}
        for seed in range(draw * SEEDS, (draw + 1) * SEEDS):
            case.tell(f"checking {direction}, seed {seed + 1} of {(draw + 1) * SEEDS}")
            if case.unmatched:
                case.make(case.seed + seed)
                case.workers["new"].ask("made", seed=case.made_from)
            else:
                case.model.load_state_dict(case.initial)
                perturb(case.model, case.seed + seed)
            loaded = How.LOADED if seed % 2 else How.PLAINLY  # or in place, as an optimizer writes them
            whose = "inputs" + " and of new weights and buffers" * bool(case.initial and not case.unmatched)
            whose += " and weights" * case.unmatched
            when = f"batch {case.batch}, " * bool(case.batch) + f"seed {case.seed + seed} of {whose}"
            plain = Request(when, direction, seed, loaded, both_gates=True)
            try:
                ask(case, replace(plain, when=f"from memory full of NaN, {when}", how=How.POISONED | loaded))
            except Rejected as poisoned:
                if " is nan, " not in str(poisoned) and case.workers["new"].alive():  # it is not the memory
                    ask(case, plain)
                raise
            ask(case, plain)
        if not over_limit(case):
            return
    raise Rejected(*over_limit(case))


def ask(case: Case, request: Request, draws: int = DRAWS) -> None:
    """Puts a request to both, again with new inputs if gate 2 is not met where the Model is far off itself.

    Skips an optional request if memory runs out. Raises Rejected for a wrong answer.
    """
    training, known = How.TRAIN in request.how, " ".join(case.no_dropin)
    must, is_random = request.both_gates and not training, training and True in case.random
    other_direction = request.direction != "forward"
    refuses = re.search("refuses batch [1-9]", known)  # 0 is refused by many that take all others
    if (
        (request.random and training not in case.random)
        or (How.THEN_EVAL in request.how and True in case.random)  # what a call learns from, it draws
        or (How.THREADS in request.how and REUSED in known)
        or (How.COPIED in request.how and "deepcopy" in known)
        or (request.how & (How.SECOND | How.INFERRED) and case.unmatched)  # only the first has the right weights
        or ((training or other_direction) and request.batch != case.small_batch and refuses)
        or (is_random and (request.change or request.weights or request.layout != "dense"))  # too few values to compare
        or (case.aligned and {request.layout, request.incoming} & {"a slice", "off any alignment"})
    ):
        return
    elsewhere = How.MOVED | How.EXCHANGED | How.ASSIGNED | How.COPIED | How.CHANNELS_LAST | How.ROWS_APART
    if case.graphs and request.how & (elsewhere | How.THREADS):
        case.lacks("keeps a CUDA graph: it reads the weights where they lay when it was captured, one call at a time")
        return
    errors = dict(case.errors)
    if training:
        case.errors = {}
    try:
        put(case, request, must)
        if training and (wrong := over_limit(case)):
            reject(request, wrong, "uncertain")
    except (Rejected, torch.OutOfMemoryError) as raised:
        error = as_rejected(raised)
        if error.kind == "raised" and request.may_refuse:
            allowed = How.OVERWRITTEN in request.how  # PyTorch tells who saves what is written then
            if not allowed and not (request.how & elsewhere and eager_refuses(case, request)):
                case.lacks(f"refuses {request.when}: {error}")
        elif error.kind in ("raised", "crashed"):
            reject(request, [*error.args], error.kind)
        elif error.kind == "memory" and not must:
            case.notes.append(f"not asked for want of memory: {request.when}")
        elif error.kind == "uncertain" and draws > 1 and not is_race(case, request):
            ask(case, replace(request, seed=request.seed + 1000), draws - 1)
        elif error.kind in ("wrong", "uncertain") and training and as_in_eval(case, request):
            case.lacks("has no training mode: it answers as in eval mode")
        elif error.kind in ("wrong", "uncertain") and request.may_differ and not error.firm:
            case.lacks(str(error.args[0]))
        else:
            raise error from raised
    finally:
        if training:
            case.errors = errors
        if case.keeps and case.workers["new"].alive():  # the next request begins where the Model does
            case.workers["new"].ask("made", seed=case.made_from)
    settle(case.device)


def eager_refuses(case: Case, request: Request) -> bool:
    """Whether the Model, too, raises an error with its weights laid as the request says. `put` asks it as they were."""
    if "eager" not in case.workers:  # before the timing, or with --profile
        return False
    alone = replace(request, change=None, weights=None, order=(0,))
    given = case.share([case.inputs(request.seed, request.batch)])
    try:
        case.call("eager", alone, [case.state(case.model)] * 2, given, [[]])
    except Rejected:
        return True
    return False


def is_race(case: Case, request: Request) -> bool:
    """Whether an answer that was wrong in one of many calls is right when it is asked for once. If not, it is no race:
    a value before a ReLU may lie so near to 0 that its sign, and with it a gradient, is luck."""
    if not request.how & RACES:
        return False
    try:
        put(case, replace(request, how=request.how & ~RACES), False)
    except Rejected:
        return False
    return True


def as_in_eval(case: Case, request: Request) -> bool:
    if False in case.random:  # answers that are drawn in both modes do not tell them apart
        return False
    try:
        ignored = request.how & ~How.TRAIN | How.IGNORED
        put(case, replace(request, both_gates=False, random=False, how=ignored), False)
    except Rejected:
        return False
    return True


def depends_on_layout(case: Case, request: Request, model: torch.nn.Module, sets: list, answer: Answer) -> bool:
    """Whether the Model's gradients are others where the same one comes in dense, as PyTorch 2.13's instance norm gives
    them on a CPU."""
    called = copy.deepcopy(model).train(How.TRAIN in request.how)
    with of_the_model(case.precision):
        dense = case.answers(called, sets, replace(request, incoming="dense"))[0].tensors()
    pairs = [(x, dense[name]) for name, x in answer.tensors().items() if x.is_floating_point() and x.numel()]
    most = [float(gates.size(gates.as_numbers(other)).max()) for _, other in pairs]
    return not all(gates.are_close(*pair, 1e-2, scale) for pair, scale in zip(pairs, most))


def is_out_of_range(model: torch.nn.Module, sets: list) -> bool:
    """Whether a CPU says that an index is: on a GPU the assertion that fails would end the judge's process."""
    try:
        on_cpu = copy.deepcopy(model).cpu()
        for inputs in sets:
            on_cpu(*tree_map_only(torch.Tensor, torch.Tensor.cpu, inputs))
    except Exception as error:  # of another kind: no operator for this dtype on a CPU, say
        return bool(OUT_OF_RANGE.search(str(error)))
    return False


def drawn_anew(case: Case, request: Request, changed: list, laid_anew: list, i: int) -> list:
    """Set `i` of a request's inputs. `changed` and `laid_anew` get whether each input was changed, or laid anew."""
    drawn = case.inputs(request.seed + 100 * i * (not request.alike), request.batch)
    if request.change and (i or not request.alike):
        reseed(request.seed + i)
        known = [*zip(tensors_of(drawn), case.inputs_are)]
        known = known if request.laid is None else known[request.laid :: 2]
        changed.extend(each.changed(x, request.change) for x, each in known)
        if request.change is Inputs.other_integers:
            changed.append(tree_any(lambda x: half(x) is not x, drawn))
            drawn = tree_map(half, drawn)
        elif request.change is other_truth:
            changed.append(tree_any(lambda x: other_truth(x) is not x, drawn))
            drawn = tree_map(other_truth, drawn)
    every = tensors_of(drawn) if request.laid is None else tensors_of(drawn)[request.laid :: 2]
    chosen = {id(x) for x in every if x.dim()}
    layout = LAYOUTS[request.layout]
    laid = tree_map_only(torch.Tensor, lambda x: layout(x) if id(x) in chosen else x, drawn)
    laid_anew.extend(mine is not old for mine, old in zip(tensors_of(laid), tensors_of(drawn)))
    return laid


def states_of(case: Case, request: Request, model: torch.nn.Module) -> list[dict]:
    """Of the candidate's two instances."""
    if How.TWIN not in request.how:
        return [case.state(model)] * 2
    other = copy.deepcopy(model)
    perturb(other, request.seed + 1)
    return [case.state(model), case.state(other)]


def put(case: Case, request: Request, must: bool) -> None:
    """Asks nothing where the Model raises an error, since a candidate may raise one there, too."""
    model = case.model
    if request.weights and case.own != {}:
        model = copy.deepcopy(model)
        request.weights(model)
    if request.how & (How.IN_PART | How.OTHER_PART):
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        request = replace(request, frozen=tuple(names[How.OTHER_PART in request.how :: 2]))
    changed, laid_anew = [], []
    draw = partial(drawn_anew, case, request, changed, laid_anew)
    try:
        sets = [draw(i) for i in sorted(set(request.order))]
    except Rejected as error:  # the Model's file makes no inputs of this batch, as random places in a batch of 0
        if must or error.kind == "memory":
            raise
        return
    if request.change and not any(changed) and model is case.model:
        return
    if request.layout != "dense" and not any(laid_anew):  # as channels last, of rows
        return
    if request.laid is not None and (all(laid_anew) or len(case.inputs_are) < 2):  # a single input
        return
    if request.whose == "the last input's" and sum(x.is_floating_point() for x in tensors_of(sets[0])) < 2:
        return
    of_integers = request.change in (Inputs.other_integers, other_truth)
    if case.device == "cuda" and of_integers and is_out_of_range(model, sets):
        return
    given = case.share(sets)
    if How.CAPTURED in request.how:  # what PyTorch cannot capture of the Model is asked of nobody
        try:
            case.call("eager", request, [case.state(model)] * 2, given, [[]])
        except (Rejected, KeyError):  # with --profile there is no eager
            return
    training = How.TRAIN in request.how
    if How.FROZEN_NORMS in request.how and not norms_and_dropouts_of(model):
        return
    # A copy: a call may change what the module holds, as running means.
    called = set_mode(copy.deepcopy(model), training, request.how)
    kept = kept_by(called)
    try:
        with request.memory(case.device), of_the_model(case.precision):
            if How.INFERRED in request.how:
                first = case.inputs(request.seed, request.batch)
                with torch.inference_mode():
                    called(*first)
            expected = case.answers(called, sets, request)
            if How.COPIED in request.how:  # where the Model cannot be copied, as with weight_norm, nobody need be
                copy.deepcopy(called)
    except Rejected as error:
        if must or error.kind == "memory":
            raise
        return
    if RANDOM in expected[0].did:
        case.random.add(training)
    case.reuses |= REUSED in expected[0].did
    if not is_kept(kept, kept_by(called)):
        case.keeps = True
        expected = [each._replace(did=[*each.did, "writes what is not in its state_dict"]) for each in expected]
    writes = any(did.startswith("writes") for did in expected[0].did)
    if request.how & RACES and writes:  # an answer depends on the calls before
        return
    if request.finite and not (case.infinite or all(map(is_finite, expected[0].tensors().values()))):
        return
    gradients = [x for name, x in expected[0].tensors().items() if name.startswith("gradient")]
    if request.whose == "the last input's" and not any(x.any() for x in gradients):  # who gives none gives zeros
        return
    if request.incoming not in ("dense", "expanded") and depends_on_layout(case, request, model, sets, expected[0]):
        return
    del sets  # a gigabyte or ten
    places = [case.room(answer) for answer in expected]
    states = states_of(case, request, model)
    settle(case.device)
    reply = case.call("new", replace(request, change=None, weights=None), states, given, places)
    if not len(reply["forms"]) == len(reply["names"]) == len(places):
        reject(request, [GARBLED])
    look_at_conduct(case, request, expected[0], reply)
    case.graphs |= reply["graphs"]
    if REUSED in reply["did"] and REUSED not in expected[0].did and How.CLONED not in request.how:
        return put(case, replace(request, how=request.how | How.CLONED), must)

    for answer, forms, place, names in zip(expected, reply["forms"], places, reply["names"]):
        reject(request, other_values(answer, forms, names))
        inspect(case, request, answer, forms, place, partial(draw, answer.inputs), model)
    if request.random and len(expected) > 1:
        for k, (name, x) in enumerate(expected[0].tensors().items()):
            if name.startswith("output") and not x.is_complex():
                mine, theirs = [each[k] for each in places], [each.leaves[name] for each in expected]
                reject(request, gates.unlike_repeated(name, mine, theirs))
    if request.direction == "forward_backward" and (case.unmatched or RANDOM in expected[0].did):
        look_at_slopes(case, request, given)
    if (
        len(request.order) > 2
        and len(places) > 1
        and not expected[0].did
        and not all(same_bits(a, b) for a, b in zip(*places[:2]))
    ):
        case.notes.append("gives other bits when it is called again with the same inputs, within the gates")


def look_at_conduct(case: Case, request: Request, expected: Answer, reply: dict) -> None:
    """What the candidate did besides its numbers, and what the Model did not, is wrong or no drop-in."""
    of_the_model_too = {*expected.did, *[REUSED] * case.reuses}
    of_the_model_too |= {*[RANDOM] * ((How.TRAIN in request.how) in case.random)}  # of no samples it draws no numbers
    wrong = [f"{what}, which the Model does not" for what in reply["did"] if what not in of_the_model_too]
    lacks = (REUSED, LEAKS, WANTS, SHARED, GRAD_MODE, GRAPH_KEPT, OWN_MODE, NO_HOOKS, GROWS)
    if How.IGNORED not in request.how:  # it asks whether who draws no random numbers answers as in eval mode
        lacks += (RANDOM,)
    known = [what for what in wrong if what.startswith(lacks)]
    case.lacks(*known)
    wrong = [what for what in wrong if what not in known]
    if How.TRAIN in request.how and RANDOM in expected.did and RANDOM not in reply["did"]:
        case.lacks("draws no random numbers of PyTorch's, which manual_seed sets, and the Model does")
    if reply["given"] != expected.given and reply["tree"] == expected.tree:
        case.lacks(f"gives {reply['given']}, the Model {expected.given}")
    if reply["tree"] != expected.tree:
        said = f"gives {reply['tree']}, the Model {expected.tree}"
        as_lists = (SEQUENCE.sub("list[", tree) for tree in (reply["tree"], expected.tree))
        (wrong.append if len({*as_lists}) > 1 else case.lacks)(said)
    reject(request, wrong)


def look_at_slopes(case: Case, request: Request, given: list) -> None:
    """Where gradients are not compared: those of weights that the judge could not match, or of what is drawn at random.

    Not asked where the Model's own are not its slopes, as those that pass through a rounding. The candidate's process
    computes its slopes itself: the judge cannot see that it does so honestly.
    """
    training = How.TRAIN in request.how
    if training in case.sloped or case.dtype != torch.float32:
        return
    case.sloped.add(training)
    inputs = case.inputs(request.seed, request.batch)
    try:
        with of_the_model(case.precision):
            slopes = slopes_of(copy.deepcopy(case.model), inputs, training, request.seed)
    except Rejected:
        return
    # Behind a step few count, in one run or the other.
    if not any(sum(differ) >= max(1, len(differ) / 2) for differ in slopes.values()):
        unseen = [(case.own or {}).get(name, name) for name, differ in slopes.items() if not differ]
        try:
            found = case.says("wrong_slopes", sets=given[:1], training=training, seed=request.seed)
        except Rejected as error:  # the Model raised none there
            reject(replace(request, when="where the slope of what it gives is looked at"), [*error.args])
        said = "the gradient of {} is not the slope of what it gives"
        reject(request, [said.format(name) for name in found if name not in unseen])


def other_values(answer: Answer, forms: list, names: list[str]) -> list[str]:
    """The gradients, and tensors of the state, that the candidate alone gives or the Model alone, and why."""
    missing, more = ([name for name in a if name not in b] for a, b in ((answer.leaves, names), (names, answer.leaves)))
    said = [f"gives {some(more)}, which the Model does not"] * bool(more)
    if missing:
        outputs = [recorded for name, (_, _, recorded) in zip(names, forms) if name.startswith("output")]
        why = "no such parameter of ModelNew requires a gradient"
        if not any(recorded.startswith("True") for recorded in outputs):
            why = f"its output{'s' * (len(outputs) > 1)} require{'s' * (len(outputs) == 1)} no gradient"
        said.append(f"gives no {some(missing)}, the Model does: {why}")
    return said


def reject(request: Request, wrong: list[str], kind: str = "wrong", firm: bool = False) -> None:
    if wrong:
        raise Rejected(*(f"{what} ({request.when})" for what in wrong), kind=kind, firm=firm)


def inspect(case: Case, request: Request, answer: Answer, forms: list, given: list, draw: Callable, model) -> None:
    """Raises Rejected where an answer is wrong: the form of its values (of a number also the value), or its tensors."""
    if len(forms) != len(answer.forms):
        reject(request, [f"gives {len(forms)} values, the Model {len(answer.forms)}"])
    inspect_forms(case, request, answer, forms)
    given = [new.to(eager.device) for eager, new in zip(answer.tensors().values(), given)]
    pairs = [(name, eager, new) for (name, eager), new in zip(answer.tensors().items(), given)]
    if RANDOM in answer.did:
        found = (unlike(case, request, draw, model, *pair) for pair in pairs)
        when = "in training mode, " * (How.TRAIN in request.how) + "where it draws"
        reject(replace(request, when=when), [why for each in found for why in each])
        reject(request, far_gradients(case, request, draw, model, pairs))
        return
    wrong, uncertain, firm = [], 0, False
    # When it is first wanted. It is that of one call, which tells nothing where the calls before it left their state.
    single = len(request.order) == 1 or not any(did.startswith("writes") for did in answer.did)
    exact = cache(lambda: case.exact(request, draw(), model) if single else None)
    laid_otherwise = cache(lambda: channels_last(case, request, draw(), model))
    softmax_otherwise = cache(lambda: written_out(case, request, draw(), model))
    theirs = [new for new in given if new.dtype == torch.int64]
    for name, eager, new in pairs:
        tolerance, scale = case.tolerance(eager), scale_of(case, request, name, eager)
        inexact = eager.is_floating_point() or eager.is_complex()
        if inexact and request.finite and case.infinite:
            new = torch.where(gates.as_numbers(eager).isfinite(), new, eager)
        if inexact and request.any_infinite:
            new, eager = (x.masked_fill(~x.isfinite(), nan) for x in map(gates.as_numbers, (new, eager)))
        if not gates.are_close(new, eager, tolerance, scale):
            new = explained_by_ties(case, request, draw, model, name, new, eager, theirs)
        elif not request.both_gates:
            continue
        right = exact() if inexact else None
        if right and request.both_gates:  # weights that were changed may make the Model overflow: then any may
            new = new if is_finite(eager) else without_overflows(new, eager, right[name])
        found = gates.compare(new, eager, right and right[name], tolerance, scale)
        for other in (laid_otherwise, softmax_otherwise) if right else ():
            if [*found.over_limit(case.eps)] and (found_there := other().get(name)) is not None:
                # Far off it would be a fault of PyTorch's.
                if gates.are_close(found_there, right[name], FAR_OFF * tolerance, scale):
                    found.or_as_far(gates.compare(found_there, eager, right[name], tolerance, scale))
        if request.both_gates and inexact and (right or case.dtype == torch.float64):
            case.errors[name] = case.errors.get(name, gates.Errors()) + found
        if not found.far:
            continue
        right = right or exact()  # of integers, too
        # Where the Model writes its state in two calls, nothing exact is known: a gradient may be rounding alone.
        of_two = not right and How.TRAIN in request.how and name.startswith("gradient")
        if of_two and gates.are_close(new, eager, FAR_OFF * tolerance, scale):
            continue
        rounding = gates.ODD_RATIO * tolerance, largest_of_gradients(name, answer.leaves)
        if of_two and all(gates.are_close(torch.zeros_like(x), x, *rounding) for x in (new, eager)):
            continue
        if right and (gates.as_numbers(new).isnan() == gates.as_numbers(eager).isnan()).all():
            limits = tolerance, scale_of(case, request, name, right[name])
            if gates.are_close(new, right[name], *limits):
                continue
            # The Model is far off itself: at the task's own inputs in some elements, so that it misses gate 1, too.
            are_few = found.far <= SOME * found.count
            is_far = not request.both_gates or are_few and not gates.are_close(eager, right[name], *limits)
            # Or its terms cancel, and what is left of both is rounding: the gradient of a bias before a norm.
            is_far |= found.cancels() and gates.are_close(eager, right[name], *rounding)
            # Or it misses it with other inputs alone: which of two such sums does so is luck.
            is_far = is_far or are_few and not [*found.over_limit(case.eps)] and misses_too(case, request, name, model)
            if is_far and not [*found.over_limit(case.eps, gates.ODD_RATIO)]:
                continue
            uncertain += not request.both_gates
        place, mine, theirs = gates.values_at(found.worst, new, eager)
        far = tolerance * (scale + abs(theirs))
        allowed = f" (it may differ by {far:.1e} there)" if tolerance and abs(theirs) < inf else ""
        said = f"{found.far} of {found.count} elements are not close to the Model's{allowed}"
        if name.endswith(AFTERWARDS) and not inexact:  # what depends on a count shows in other calls
            case.lacks(f"{name} is another than the Model's")
            continue
        where = f"{name}{' at ' * name[-1].isdigit()}{place}" if place else name
        wrong.append(f"{where} is {mine:.6g}, the Model's is {theirs:.6g}; {said}")
        usual = float(case.errors[name].most[2]) if name in case.errors else 0.0
        least = float(found.most[0])
        firm |= request.if_vanishing and not (bool(new.isfinite().all()) and least <= SMALL * usual)
    reject(request, wrong, "uncertain" if uncertain == len(wrong) else "wrong", firm)


def largest_of_gradients(name: str, right: dict) -> float:
    """Of a gradient: the scale of the largest beside it, which what is left of cancelled terms is a rounding of."""
    found = [gates.scale_of(each, x) for each, x in right.items() if each.startswith("gradient") and x is not None]
    return max(found, default=1.0) if name.startswith("gradient") else 1.0


def misses_too(case: Case, request: Request, name: str, model: torch.nn.Module) -> bool:
    """Whether the Model itself misses gate 1 with other inputs, as where what is left of large terms may be small."""
    for seed in range(request.seed + 2000, request.seed + 2000 + OTHER_DRAWS):
        right = case.exact(request, case.inputs(seed, request.batch), model)
        eager = case.plain(model, case.inputs(seed, request.batch), request)[name]
        if right and not gates.are_close(eager, right[name], case.tolerance(eager), gates.scale_of(name, right[name])):
            return True
    return False


def channels_last(case: Case, request: Request, inputs: list, model: torch.nn.Module) -> dict:
    """What the Model answers where its inputs and weights lie channels last, as many candidates lay them. Its kernels
    are others then, and a batch norm that trains errs several times as much on a CPU: that is PyTorch's error, too."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    lay = lambda x: x.contiguous(memory_format=formats.get(x.dim(), torch.preserve_format))  # noqa: E731
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = lay(parameter.data)
    with contextlib.suppress(Exception):  # a view that does not fit, say
        return case.plain(model, tree_map_only(torch.Tensor, lay, inputs), request)
    return {}


def written_out(case: Case, request: Request, inputs: list, model: torch.nn.Module) -> dict:
    """What the Model answers where its softmax is written out, as many candidates write it: in the gradient the sum of
    a row, zero but for rounding, flows back through its largest value."""
    with contextlib.suppress(Exception), gates.WrittenOut():
        return case.plain(model, inputs, request)
    return {}


def far_gradients(case: Case, request: Request, draw: Callable, model, pairs: list[tuple]) -> list[str]:
    """Where the outputs drew the same random numbers as the Model's, the gradients are the Model's, too. Where outputs
    do not depend on the numbers, nothing tells whether they are the same."""
    far = []
    for name, eager, new in pairs:
        tolerance = case.tolerance(eager)
        if name.startswith("gradient"):
            is_close = gates.are_close(new, eager, FAR_OFF * tolerance, gates.scale_of(name, eager))
            far += [f"{name} is not the Model's, though all outputs are"] * (not is_close)
        elif not gates.are_close(new, eager, tolerance, 1.0):
            return []
    if far and How.WRITTEN not in request.how:
        other = case.plain(model, draw(), replace(request, seed=request.seed + 1))
        outputs = [(name, eager) for name, eager, _ in pairs if name.startswith("output")]
        return far * any(not gates.are_close(other[name], eager, case.tolerance(eager), 1.0) for name, eager in outputs)
    return []


def unlike(case: Case, request: Request, draw: Callable, model, name: str, eager, new) -> list[str]:
    """Why an output cannot be drawn as the Model's is. Values of small outputs are gathered until they are enough."""
    if not name.startswith("output") or eager.is_complex() or not eager.numel():
        return []
    if How.THREADS in request.how:  # they draw from one generator, in any order
        return []
    if gates.are_close(new, eager, case.tolerance(eager), 1.0):
        return []
    # Not of the request's seed: a candidate may use the same random numbers the other way round.
    others = [case.plain(model, draw(), replace(request, seed=request.seed + more))[name] for more in (1, 2)]
    drawn = case.drawn.setdefault((name, How.TRAIN in request.how), [])
    drawn.append([x.double().reshape(x.shape or (1,)) for x in (new, *others)])
    values = sum(each.numel() for each, *_ in drawn)
    is_enough = len(drawn) >= MANY_DRAWS or values >= gates.ENOUGH_VALUES
    said = gates.unlike(name, drawn) if is_enough or len(drawn) % gates.FEW_ROWS == 0 else []
    if is_enough:
        drawn.clear()
    return said


def inspect_forms(case: Case, request: Request, answer: Answer, forms: list) -> None:
    """Other strides are no drop-in; so are outputs that want no gradient, where gradients are not what is judged."""
    wrong = []
    for name, (mine, my_strides, my_grad), (theirs, strides, grad) in zip(answer.leaves, forms, answer.forms):
        # Who gives a copy where the Model gives an input itself has recorded that.
        if my_grad not in (grad, grad.removesuffix(OF_A_LEAF)) and not EMPTY.search(mine):
            is_wrong = request.both_gates and request.direction != "forward" or RANDOM in answer.did
            is_wrong &= grad.startswith("True")
            said = f"{name} has requires_grad {my_grad}; the Model's has requires_grad {grad}"
            (wrong.append if is_wrong else case.lacks)(said)
        if mine != theirs:
            of_layout = name.startswith("gradient") and re.sub(LAYOUT, "", mine) == re.sub(LAYOUT, "", theirs)
            said = f"{name} is {apart(mine, theirs)}, the Model's {apart(theirs, mine)}"
            (case.lacks if of_layout else wrong.append)(said)
        elif my_strides != strides and not any(why.startswith(f"{name} has the strides") for why in case.no_dropin):
            case.lacks(f"{name} has the strides {my_strides}, the Model's {strides}")
    reject(request, wrong)


def apart(form: str, other: str) -> str:
    """Of two tensors' forms what differs in the first, otherwise the whole form."""
    parts = [re.fullmatch(r"Tensor (of \S+), (shape \[.*?\]), (\S+), (on \w+)", each) for each in (form, other)]
    differ = [mine for mine, theirs in zip(*(each.groups() for each in parts)) if mine != theirs] if all(parts) else []
    return ", ".join(differ).replace("shape", "of shape") or form


def explained_by_ties(case: Case, request: Request, draw: Callable, model, name: str, new, eager, theirs: list):
    """The tensor, with the Model's values where it has what the Model gives when that chooses otherwise among equals.

    Of integers all of it or nothing, so that no place is named twice; of other numbers each by itself.
    """
    tolerance = case.tolerance(eager)
    varies = torch.zeros_like(eager, dtype=torch.bool)  # where the Model's answer depends on what is chosen
    for attempt in range(TIE_BREAKS):
        other, ties = None, gates.OtherTies(attempt, theirs)
        with contextlib.suppress(Exception), ties:
            other = gates.as_numbers(case.plain(model, draw(), request)[name])
        if other is None or not ties.found:
            break
        agrees = torch.isclose(gates.as_numbers(new), other, tolerance, tolerance, equal_nan=True)
        varies |= ~torch.isclose(gates.as_numbers(eager), other, tolerance, tolerance, equal_nan=True)
        new = torch.where(agrees if tolerance else agrees.all(), eager, new)
        if gates.are_close(new, eager, tolerance, 1.0):
            case.notes.append("of equal values it chooses others than the Model (which is first is not asked for)")
            return new
    varies &= gates.as_numbers(new).isfinite()
    if request.change and varies.any():  # of equal values that the judge made nobody is to choose certain ones
        new = torch.where(varies, eager, new)
        if gates.are_close(new, eager, tolerance, 1.0):
            return new
    return explained_by_steps(case, request, draw, model, name, new, eager)


def explained_by_steps(case: Case, request: Request, draw: Callable, model, name: str, new, eager):
    """The tensor, with the Model's values in those few places where the Model itself jumps from one to the other, if
    inputs and weights differ in their last bits: a product is compared with a threshold, or rounded to a step.

    What the Model gives there is one of the two each time, never something between: that would be a large error.
    """
    tolerance = case.tolerance(eager)
    eager, new = gates.as_numbers(eager), gates.as_numbers(new).to(gates.as_numbers(eager).dtype)
    alike = partial(torch.isclose, rtol=tolerance, atol=tolerance, equal_nan=True)
    far = ~alike(new, eager)
    if not 0 < far.sum() <= max(1, MOST_STEPS * far.numel()) or case.dtype.itemsize < 4:
        return new
    jumps = ~torch.isclose(new, eager, rtol=4 * tolerance, atol=4 * tolerance, equal_nan=True)
    seen = torch.zeros_like(far)
    for attempt in range(MOST_TRIED):
        if attempt >= STEPS_TRIED and not (jumps & ~seen).any():
            break
        inputs, other = draw(), copy.deepcopy(model)
        reseed(attempt)
        for x in [*tensors_of(inputs), *other.parameters()]:
            if x.is_floating_point() and x.layout == torch.strided:
                x.data.mul_(1 + (torch.rand_like(x) * 2 - 1) * gates.ULPS * torch.finfo(x.dtype).eps)
        with contextlib.suppress(Exception):
            given = gates.as_numbers(case.plain(other, inputs, request)[name])
            here = alike(given, new)
            seen, jumps = seen | here, jumps & (here | alike(given, eager))
    return torch.where(jumps & seen, eager, new)
