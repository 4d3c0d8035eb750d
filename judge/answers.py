"""What is asked of a module, by `Request`, and what it answers, by `Answer`: the same for the Model and a candidate."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from judge.gates import chunks, distance
from judge.source import reseed

RANDOM = "changes a random state"
OF_A_LEAF = " of a leaf"
AFTERWARDS = " afterwards"  # of a tensor of the module's state
GRAD_MODE = "leaves it switched whether gradients are recorded"
OWN_MODE = "leaves itself in another mode than it was called in"
GRAPH_KEPT = "leaves a buffer that keeps the graph of its call"
NO_HOOKS = "runs no forward hook"
GROWS = "gets other names in its state_dict when it is called"
OF_AN_INPUT = "returns an input's own memory as an output"
REUSED = "gives the memory of an earlier answer again"
OF_ANOTHER = "made of a parameter of another name"  # by a hook on the state_dict
NOT_ITSELF = "its train(), eval() or _apply() does not return the module"
LEAKS = "keeps tensors of each call, more and more"
WANTS = "changes whether a gradient is wanted of"
SHARED = "gives outputs that share memory"
SHARE = "two instances share the memory of their weights or buffers"
APART = (1 << 62) + (1 << 31)  # from the seeds of inputs: else what a call draws would be the numbers that they are
# Of calls, and of one graph's backward passes, that may race: where so many seconds are over, at least so many calls.
LEAST_REPEATS, MOST_REPEATS, REPEAT_SECONDS, BACKWARD_SECONDS = 50, 200, 0.4, 0.1
# Of a slope: how often it is taken, and of how many tensors; the step in units of their size.
SLOPES, MOST_SLOPES, SLOPE_STEP, SLOPE_SECONDS = 10, 16, 1e-2, 2.0
# Of a name that the Model has for a tensor the candidate's; None where they are the same, {} where none was matched.
Own = dict[str, str] | None


# How a tensor that is not a number lies in memory.
LAYOUTS = {
    "dense": lambda x: x,
    "expanded": lambda x: x[:1].expand_as(x),  # with other values: asked of gradients alone
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "a slice": lambda x: torch.cat([x, x[..., :3]], -1)[..., : x.shape[-1]],
    # Each sample dense, with a gap behind it: what chunk() gives, and the backward pass of a torch.cat.
    "some of the channels": lambda x: torch.cat([x, x[:, :1]], 1)[:, : x.shape[1]] if x.dim() > 2 else x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x,
    "split into heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 3 else x,
    "off any alignment": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape),
}


class How(Flag):
    """How a module is called."""

    PLAINLY = 0
    TRAIN = auto()  # in training mode
    THEN_EVAL = auto()  # but for the last call
    FROZEN_NORMS = auto()  # but for its batch norms and dropouts, as who fine-tunes a network leaves them
    INFERENCE = auto()  # in inference mode
    POISONED = auto()  # new memory is full of NaN
    RESTORED = auto()  # the Model writes its buffers: each timed call begins with those that were given
    REPEATED = auto()  # of many calls, or backward passes of one graph, the one that is the least like the first
    IN_PART = auto()  # the first, third, ... parameter is frozen, and only the last output has a gradient
    OTHER_PART = auto()  # the second, fourth, ... parameter is frozen, and only the first output has a gradient
    TWICE = auto()  # gradients of the gradients, too
    WRITTEN = auto()  # outputs are written in place between the forward and the backward pass, as relu_ does
    OVERWRITTEN = auto()  # and so are the inputs
    # What a candidate alone is put through.
    LOADED = auto()  # the weights come by load_state_dict, not in place as an optimizer writes them
    SPARING = auto()  # only those weights are written whose values change
    TWIN = auto()  # another instance, with other weights, is called first
    SECOND = auto()  # the instance that is asked is not the one that was called first of all
    MOVED = auto()  # the weights have moved in memory, to where nothing is aligned
    ASSIGNED = auto()  # the weights are other parameters, as load_state_dict(..., assign=True) makes them
    COPIED = auto()  # a deepcopy is asked, made when the module had been called, as who averages weights makes one
    INFERRED = auto()  # a new module is asked, called in inference mode before
    EXCHANGED = auto()  # the weights come by p.data = ..., as averaged ones do: neither p nor its version changes
    UNSEEN = auto()  # the weights come by p.data.copy_(...), which not even p's place in memory tells
    CHANNELS_LAST = auto()  # weights of four dimensions lie in channels-last layout
    ROWS_APART = auto()  # weights of two dimensions are slices of larger ones
    IGNORED = auto()  # module.train() was called, and the answer is to be that of eval()
    CLONED = auto()  # each output is copied before the next call
    THREADS = auto()  # as REPEATED, each set of inputs in a thread of its own
    LATE = auto()  # on another stream, on which the inputs come late
    CAPTURED = auto()  # replayed from a CUDA graph


CLOSELY = How.POISONED | How.TRAIN | How.IGNORED  # here the bits of large tensors and of incoming gradients count


@dataclass(frozen=True)
class Request:
    """A question for the candidate and the Model alike."""

    when: str
    # The process of the Model or the candidate reads how it is called.
    direction: str = "forward"
    seed: int = 0
    how: How = How.PLAINLY
    order: tuple = (0,)  # of the calls: which set of inputs each gets; the answers to set 0 and the last are compared
    incoming: str = "dense"  # in which of LAYOUTS the gradients come in
    whose: str = ""  # gradients: nobody's, parameters, inputs, the last input's or all; "": as the direction has it
    frozen: tuple = ()  # the Model's names of parameters that want no gradient
    # The judge reads how inputs and weights are made.
    change: Callable | None = None  # of each floating input
    weights: Callable | None = None  # of the Model's weights
    alike: bool = False  # all sets of inputs are the first, which alone is not changed
    batch: int | None = None
    layout: str = "dense"  # in which of LAYOUTS the inputs lie
    laid: int | None = None  # it, or the change, is of every second input, from this one on; None: of all
    # The judge reads what the answer has to be.
    both_gates: bool = False  # the Model must have an answer; an error against float64 counts
    finite: bool = False  # not asked where the Model's answer is not finite
    any_infinite: bool = False  # where the order of operations decides between NaN and an infinity, both are right
    may_differ: bool = False  # other values make the candidate no drop-in, not wrong
    # But only where the Model's, or the errors, are a hundredth of what values usually are, and none is NaN.
    if_vanishing: bool = False
    may_refuse: bool = False  # and so does an error
    random: bool = False  # asked where the Model draws random numbers

    @contextlib.contextmanager
    def memory(self, device: str, like: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """If POISONED, blocks of these sizes are filled with NaN and freed, and PyTorch fills what torch.empty gives.

        It does so in its deterministic mode, where it may choose other kernels: the Model is to do so, too.
        """
        if How.POISONED not in self.how:
            yield
            return
        deterministic = torch._C._set_deterministic_algorithms  # torch's own function imports a compiler: seconds
        deterministic(True, warn_only=True)
        blocks = [torch.full_like(x, math.nan, device=device) for x in like if x.is_floating_point()]
        del blocks
        try:
            yield
        finally:
            deterministic(False, warn_only=False)


class Answer(NamedTuple):
    """What one call gives: outputs, then gradients, by name, and their forms before anything touched them."""

    leaves: dict[str, object]
    forms: list[list]
    tree: str  # with dictionaries' keys in order
    given: str  # the same as it was given
    inputs: int  # which set of them it got
    did: list[str]  # side effects of all calls, as "writes input 0"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}


def norms_and_dropouts_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    of = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd
    return [each for each in module.modules() if isinstance(each, of) and each is not module]


def set_mode(module: torch.nn.Module, training: bool, how: How) -> torch.nn.Module:
    """Training mode or eval mode; batch norms stay in eval mode if `how` says so."""
    module.train(training)
    for each in norms_and_dropouts_of(module) if How.FROZEN_NORMS in how else ():
        each.eval()
    return module


def state_dict_of(module: torch.nn.Module) -> dict:
    """With the parameters themselves; a state_dict of its own may not take this argument."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:
        return module.state_dict()


def state_by_name(module: torch.nn.Module, own: Own = None) -> dict[str, torch.Tensor]:
    found = state_dict_of(module)
    found = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)}
    return found if own is None else {theirs: found[mine] for theirs, mine in own.items()}


def parameters_by_name(module: torch.nn.Module, own: Own) -> dict[str, torch.nn.Parameter]:
    if own is None:
        return dict(module.named_parameters())
    found = dict(module.named_parameters(remove_duplicate=False))
    found = {theirs: found[mine] for theirs, mine in own.items() if mine in found}
    # A tied parameter has the first of the Model's names, whichever the candidate gives it first.
    first = {id(p): name for name, p in reversed(found.items())}
    return {name: p for name, p in found.items() if first[id(p)] == name}


def answers_of(module, sets: list[list], request: Request, own: Own = None, call=None) -> list[Answer]:
    """All forward passes of a request, then all backward passes; the answers that are compared."""
    call, parameters = call or module, parameters_by_name(module, own)
    frozen = [p for name, p in parameters.items() if name in request.frozen and p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    wanted = [wanted_of(parameters, inputs, request) for inputs in sets]
    # A kernel may write without a word to PyTorch, so bits are compared; large tensors' in those requests alone.
    small = math.inf if request.how & CLOSELY else 1 << 16
    before = {}
    for name, x in watched(module, sets, own).items():
        compares = x.layout == torch.strided and x.nbytes < small
        before[name] = x, x._version, x.requires_grad, x.detach().clone() if compares else x
    reseed(request.seed + APART)  # a Model and a candidate that draw random numbers alike draw the same
    states = rng_state()
    recorded, trains, names = request.direction != "forward", module.training, [*module.state_dict()]
    hooked, hook = [], None
    # Not in each request: what is compiled is compiled anew for a hook. Of what is scripted PyTorch allows none.
    if request.direction == "forward_recorded" and not isinstance(module, torch.jit.ScriptModule):
        hook = module.register_forward_hook(lambda *_: hooked.append(1))
    calls, held, given, reused, switches = [], set(), memory_of(sets), False, False
    with torch.inference_mode() if How.INFERENCE in request.how else torch.set_grad_enabled(recorded):
        for position, i in enumerate(request.order):
            if How.THEN_EVAL in request.how and position == len(request.order) - 1:
                module.eval()
            given_as = call(*sets[i])
            switches |= torch.is_grad_enabled() != (recorded and How.INFERENCE not in request.how)
            result = in_order(given_as)
            reused |= bool(memory_of(result) & held)
            if i == 0 or position == len(request.order) - 1:
                forms = [form_of(leaf, request) for leaf in tree_leaves(result)]
                if How.CLONED in request.how:
                    result = tree_map_only(torch.Tensor, torch.clone, result)
                elif not recorded:  # who looks whether anybody holds its tensor does not know of a view of it
                    result = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
                calls.append((i, result, forms, kind_of(given_as)))
                held |= memory_of(result) - given
            del result, given_as
    did = [GROWS] * ([*module.state_dict()] != names)
    if hook:
        hook.remove()
        did += [NO_HOOKS] * (not hooked)
    answers = [answer_of(module, own, call, wanted[call[0]], request, did) for call in calls]
    did += written(before, watched(module, sets, own))
    if any(now != then for now, then in zip(rng_state(), states)):
        did.append(RANDOM)
    if switches:
        did.append(GRAD_MODE)
    if any(x.grad_fn is not None for x in module.buffers()):
        did.append(GRAPH_KEPT)
    if module.training != trains and How.THEN_EVAL not in request.how:
        did.append(OWN_MODE)
    if any(given & memory_of(result) for _, result, *_ in calls):
        did.append(OF_AN_INPUT)
    starts = [[x.data_ptr() for x in dense_of(result)] for _, result, *_ in calls]  # slices of one tensor have others
    if any(len({*each}) < len(each) for each in starts):
        did.append(SHARED)
    memory = [memory_of([x for name, x in each.leaves.items() if not name.endswith(AFTERWARDS)]) for each in answers]
    if reused or any(a & b - given for a, b in itertools.combinations(memory, 2)):
        did.append(REUSED)
    for p in frozen:
        p.requires_grad_(True)
    return answers


def apart(now, first) -> float:
    """The largest distance between tensors of two answers."""
    tensors = [(a, b) for a, b in zip(tree_leaves(now), tree_leaves(first)) if type(a) is type(b) is torch.Tensor]
    dense = [(a, b) for a, b in tensors if a.layout == b.layout == torch.strided and a.shape == b.shape]
    pairs = (pair for a, b in dense if not same_bits(a, b) for pair in chunks(a, b))
    return max((float(distance(a.double(), b.double()).max()) for a, b in pairs), default=0.0)


def alive() -> int:
    """How many tensors there are."""
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def least_like_first(call: Callable[[], Sequence], seconds: float, first: Sequence | None = None) -> Sequence:
    """Of many answers the one that is the least like the first, so that a race shows; the second, if all are alike."""
    first = call() if first is None else first
    found, begin = call(), time.perf_counter()
    most = apart(found, first)
    for repeat in range(MOST_REPEATS):
        elapsed = time.perf_counter() - begin
        if elapsed > seconds and (repeat >= LEAST_REPEATS or elapsed > 5 * seconds):  # a busy machine is slow
            break
        now = call()
        distance = apart(now, first)
        if distance > most:
            found, most = now, distance
    return found


def answer_of(module, own: Own, call: tuple, wanted: dict, request: Request, did: list[str]) -> Answer:
    """The backward pass of one call, if one is asked for."""
    i, result, forms, kind = call
    leaves = tree_leaves(result)
    roots = roots_of(result)
    roots = roots[-1:] if How.IN_PART in request.how else roots[:1] if How.OTHER_PART in request.how else roots
    found = {f"output {k}" if len(leaves) > 1 else "output": leaf for k, leaf in enumerate(leaves)}
    if request.direction == "forward_backward" and wanted and roots:
        incoming = [normal_like(x, request) for x in roots]
        if request.how & (How.WRITTEN | How.OVERWRITTEN):
            with torch.no_grad():
                found = tree_map_only(torch.Tensor, torch.clone, found)  # outputs of the Model's may share memory
                inputs = [x for name, x in wanted.items() if name.startswith("input ")]
                for x in roots if How.WRITTEN in request.how else inputs:
                    x.fill_(0.5)
        of = list(wanted.values())
        # A fused kernel gives zeros where nothing depends on an input: None is zeros.
        ask = {"allow_unused": True, "materialize_grads": True}
        backward = partial(torch.autograd.grad, roots, of, incoming, **ask)
        if How.REPEATED in request.how:
            gradients = least_like_first(partial(backward, retain_graph=True), BACKWARD_SECONDS)
        else:
            gradients = backward(create_graph=How.TWICE in request.how)
        if request.how & CLOSELY and not all(same_bits(x, normal_like(x, request)) for x in incoming):
            did.append("writes the gradient that comes in")
        found |= {f"gradient of {name}": gradient for name, gradient in zip(wanted, gradients)}
        if How.TWICE in request.how:
            seconds = [torch.zeros_like(x) for x in of]  # a gradient without a graph, as where() has it, is constant
            if recorded := roots_of(gradients):
                incoming = [normal_like(x, replace(request, seed=request.seed + 1)) for x in recorded]
                seconds = torch.autograd.grad(recorded, of, incoming, **ask)
            found |= {f"gradient of all gradients by {name}": second for name, second in zip(wanted, seconds)}
            gradients = (*gradients, *seconds)
        forms = forms + [form_of(gradient) for gradient in gradients]
    if request.how & (How.TRAIN | How.IGNORED):  # as running statistics
        state = {name + AFTERWARDS: x for name, x in state_by_name(module, own).items()}
        found |= state
        forms = forms + [form_of(x) for x in state.values()]
    found = {name: compared(leaf) for name, leaf in found.items()}
    return Answer(found, forms, kind_of(result), kind, i, did)


def kind_of(result) -> str:
    """How it is put together: (y, {"a": z}) as tuple[*, dict{'a': *}], and a named tuple as Point(x, y)[*, *]."""
    root = id(result)  # not the answer itself: what recurses with this lambda is a reference cycle, which would hold it
    parts, spec = tree_flatten(result, is_leaf=lambda part: id(part) != root)
    if spec.type is None:
        return "*"
    name, kinds = type(result).__name__, [kind_of(part) for part in parts]
    name = "tuple" if name == "Size" else name  # a mapped tree has tuples for shapes
    if isinstance(result, dict):
        inside = ", ".join(f"{key!r}: {kind}" for key, kind in zip(result, kinds))
        return f"{name}{{{inside}}}"
    if hasattr(result, "_fields"):
        name += f"({', '.join(result._fields)})"
    elif not isinstance(result, (list, tuple)):  # a class that tells PyTorch of its parts, and of what they are not
        name += f"({spec.context})"
    return f"{name}[{', '.join(kinds)}]"


def in_order(result):
    """With the keys of dictionaries, of any kind, in order, so that who gives the same in another order is compared. A
    dataclass becomes a dictionary."""
    if dataclasses.is_dataclass(result) and not isinstance(result, (dict, type)):
        result = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    if isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return {key: in_order(result[key]) for key in sorted(result)}
    return type(result)(map(in_order, result)) if type(result) in (list, tuple) else result


def standing(module: torch.nn.Module, parameters: bool = False) -> list[tuple[dict, str, torch.Tensor, torch.Tensor]]:
    """Its buffers, as `restore` takes them: a forward may write them or put others in their places."""
    owned = [each._buffers for each in module.modules()]
    owned += [each._parameters for each in module.modules()] * parameters
    return [(own, name, x, x.detach().clone()) for own in owned for name, x in own.items() if x is not None]


def restore(before: list[tuple[dict, str, torch.Tensor, torch.Tensor]]) -> None:
    for own, name, x, values in before:
        x.detach().copy_(values)
        own[name] = x


def wrong_slopes(module, inputs: list, training: bool, seed: int) -> list[str]:
    """The parameters and inputs along which a module's gradient is not the slope of its own outputs: where that is seen
    three times, in half of what counts."""
    slopes = slopes_of(module, inputs, training, seed).items()
    return [name for name, differ in slopes if sum(differ) >= max(3, len(differ) / 2)]


def slopes_of(module, inputs: list, training: bool, seed: int) -> dict[str, list[bool]]:
    """Of parameters and inputs, each time that counts: whether a gradient is not the slope of the module's outputs.

    The slope is a central difference, along normal numbers of a tensor's size; the outputs are weighted by normal
    numbers. It counts where it is above rounding and half the step gives the same within 5%. A gradient that is off by
    more than that difference, rounding and 4% is no slope. Each call begins from the same random state.
    """
    tensors = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tensors |= {f"input {i}": x.requires_grad_() for i, x in enumerate(tensors_of(inputs)) if x.is_floating_point()}
    tensors = dict(random.Random(seed).sample(list(tensors.items()), min(len(tensors), MOST_SLOPES)))
    before = standing(module, parameters=True)
    module.train(training)
    differ, begin = {name: [] for name in tensors}, time.perf_counter()

    def weighted(draw: int) -> tuple[torch.Tensor, float]:
        reseed(seed + APART)
        outputs = [x for x in tensors_of(module(*inputs)) if x.is_floating_point()]
        terms = [x.double() * normal_like(x, Request("", seed=seed + draw)).double() for x in outputs]
        return sum(x.sum() for x in terms), sum(float(x.detach().abs().sum()) for x in terms)

    def slope(draw: int, x: torch.Tensor, change: torch.Tensor) -> float:
        """Of the weighted sum, from x - change to x + change."""
        old, ends = x.clone(), []
        for moved in (old + change, old - change):
            x.copy_(moved)
            ends.append(float(weighted(draw)[0]))
        x.copy_(old)
        return (ends[0] - ends[1]) / 2

    def look(draw: int) -> None:
        with torch.enable_grad():
            total, size = weighted(draw)
            gradients = torch.autograd.grad(total, [*tensors.values()], allow_unused=True)
        for (name, x), gradient in zip(tensors.items(), gradients):
            if gradient is None:
                continue
            step = SLOPE_STEP * (x.detach().square().mean().sqrt() or 1.0)
            along = step * normal_like(x, Request("", seed=seed + SLOPES + draw))
            claimed = float((gradient.double() * along.double()).sum())
            with torch.no_grad():
                whole, half = slope(draw, x, along), 2 * slope(draw, x, along / 2)
            most = max(abs(claimed), abs(whole), abs(half))
            noise = torch.finfo(x.dtype).eps * size
            if abs(whole - half) <= 0.05 * most and most > 20 * noise:
                differ[name].append(not abs(claimed - half) <= abs(whole - half) + noise + 0.04 * most)

    try:
        for draw in range(SLOPES):
            if time.perf_counter() - begin < SLOPE_SECONDS:
                look(draw)
    finally:
        module.eval()
        restore(before)
    return differ


def watched(module, sets: list, own: Own) -> dict[str, torch.Tensor]:
    """Inputs, gradients and weights, which no call is to write."""
    found = {}
    for k, inputs in enumerate(sets):
        for i, x in enumerate(tree_leaves(inputs)):
            if isinstance(x, torch.Tensor):
                found[f"input {i}{' of another call' * (k > 0)}"] = x
                if x.is_leaf and x.grad is not None:
                    found[f"the .grad of input {i}{' of another call' * (k > 0)}"] = x.grad
    parameters = parameters_by_name(module, own).items()
    found |= {f"the .grad of {name}": p.grad for name, p in parameters if p.grad is not None}
    return found | state_by_name(module, own)


def written(before: dict[str, tuple], now: dict[str, torch.Tensor]) -> list[str]:
    said = [f"writes {name}" for name in now if name.startswith("the .grad of") and name not in before]
    for name, (x, version, wants, bits) in before.items():
        found = now.get(name)
        new_view = found is not None and found is not x and found.data_ptr() == x.data_ptr()  # by a state_dict hook
        if found is not x and not new_view or x._version != version or not (bits is x or same_bits(found, bits)):
            said.append(f"writes {name}")
        elif x.requires_grad != wants:
            said.append(f"{WANTS} {name}")
    return said


def wanted_of(parameters: dict, inputs: list, request: Request) -> dict[str, torch.Tensor]:
    """What gradients are asked of, by name."""
    whose = request.whose or {"forward": "nobody's", "forward_recorded": "parameters"}.get(request.direction, "all")
    given = ((f"input {i}", x) for i, x in enumerate(tree_leaves(inputs)) if isinstance(x, torch.Tensor))
    floating = {name: x for name, x in given if x.is_floating_point() or x.is_complex()}
    for name, x in floating.items():
        x.requires_grad_(whose in ("all", "inputs") or whose == "the last input's" and name == [*floating][-1])
    parameters = parameters if whose in ("all", "parameters") else {}
    return {name: x for name, x in (floating | parameters).items() if x.requires_grad}


def normal_like(x: torch.Tensor, request: Request) -> torch.Tensor:
    """An incoming gradient, the same in all processes: normal numbers that hardly round in any dtype."""
    generator = torch.Generator(x.device).manual_seed(request.seed + APART)
    values = torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype)
    return LAYOUTS[request.incoming](values) if x.dim() else values


def compared(leaf):
    """What is compared of a value: a tensor, dense; a float as a tensor."""
    if isinstance(leaf, (float, complex)):
        leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.complex128)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


def tensors_of(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def bytes_of(tree) -> int:
    return sum(x.nbytes for x in tensors_of(tree) if x.layout == torch.strided)


def dense_of(tree) -> list[torch.Tensor]:
    return [x for x in tensors_of(tree) if x.layout == torch.strided and x.numel()]


def memory_of(tree) -> set[int]:
    """Where the memory of its dense tensors begins."""
    return {x.untyped_storage().data_ptr() for x in dense_of(tree)}


def roots_of(result) -> list[torch.Tensor]:
    return [x for x in tensors_of(result) if x.requires_grad and x.numel()]


def form_of(leaf, output_of: Request | None = None) -> list:
    """What a value is; of an output also the strides, where they matter, and whether it wants a gradient.

    Before anything touches it: a subclass may compute when more than its type is asked.
    """
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        shown = "" if isinstance(leaf, (torch.Tensor, float, complex)) else f" {leaf!r}"
        return [type(leaf).__name__ + shown, [], ""]
    what = f"Tensor of {leaf.dtype}, shape {list(leaf.shape)}, {leaf.layout}, on {leaf.device.type}"
    matter = output_of and output_of.layout == "dense" and leaf.layout == torch.strided and leaf.numel()
    matter = matter and How.ROWS_APART not in output_of.how  # an output may be a weight, and the Model's lie as ever
    strides = [stride if size > 1 else 0 for size, stride in zip(leaf.shape, leaf.stride())] if matter else []
    of_inference = output_of and leaf.is_inference() and How.INFERENCE not in output_of.how
    recorded = f"{leaf.requires_grad}{', is lazily negated' * leaf.is_neg()}{', is lazily conjugated' * leaf.is_conj()}"
    recorded += ", is an inference tensor" * bool(of_inference) + OF_A_LEAF * (leaf.requires_grad and leaf.is_leaf)
    return [what, strides, recorded if output_of else ""]


def places_of(forms: list[list], answers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The memory of answers, each with the strides that its form tells, if these are those of a permuted dense tensor.

    So nobody's answer is handed over by a copy that puts its elements in another order, which takes longer.
    """
    places = []
    for (_, strides, _), answer in zip(
        [form for form in forms if form[0].startswith(("Tensor of", "float", "complex"))], answers
    ):
        reach = 1
        for stride, size in sorted((stride, size) for stride, size in zip(strides, answer.shape) if size > 1):
            reach = reach * size if stride == reach else 0
        dense = len(strides) == answer.dim() and reach == answer.numel() > 0
        places.append(answer.as_strided(answer.shape, strides) if dense else answer)
    return places + answers[len(places) :]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    left, right = (x.int_repr() if x.is_quantized else x for x in map(compared, (left, right)))
    return torch.equal(*(x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def rng_state() -> list:
    """Of Python, NumPy and PyTorch; and the GPU's, once CUDA is in use: a compiler may begin to use it in a call."""
    kinds = [torch, torch.cuda] if torch.cuda.is_initialized() else [torch]
    of_numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()
    of_numpy = [x.tobytes() if hasattr(x, "tobytes") else x for x in of_numpy]
    states = [kind.get_rng_state() for kind in kinds]
    return [random.getstate(), of_numpy, *[ctypes.string_at(each.data_ptr(), each.nbytes) for each in states]]
