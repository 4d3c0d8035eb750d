"""A contender in a process of its own, and the judge's end of it.

    judge (Worker)                                   contender (serve, Contender)
      |-- SIGCONT, "load": text of the file, seed ----->|  imports it, makes its modules
      |<------------------------- its state, by name ---|  SIGSTOP
      |-- SIGCONT, "call": request, weights, inputs --->|  puts switches back, copies the weights, calls
      |<------- forms of the answers, what it did; the answers lie in memory that both have open; SIGSTOP
      |-- "ready", "warm_up": a call on old inputs ---->|
      |   writes new inputs and, on a CPU, flushes the cache, while the contender is stopped
      |-- SIGCONT; the judge's clock starts; "time" --->|  its own clock; one call
      |<------------------------- milliseconds, forms --|  SIGSTOP
      |   spoils the inputs: who computes only now is wrong
      |-- SIGCONT, "hand_over" ------------------------>|  copies the answer to memory that both have open
      |<------------------------------------------------|  the judge's clock stops; SIGSTOP

The contender is stopped (SIGSTOP) from each reply to the next request; it has nothing in flight then, since it
synchronises before it replies. Requests are pickled, tensors as memory that both have open; replies are JSON, so that
the judge runs nothing of a candidate's.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import fcntl
import gc
import hashlib
import importlib
import inspect
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import statistics
import struct
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from judge.answers import (
    APART,
    LAYOUTS,
    LEAKS,
    LEAST_REPEATS,
    NOT_ITSELF,
    OF_ANOTHER,
    REPEAT_SECONDS,
    REUSED,
    SHARE,
    How,
    Own,
    Request,
    alive,
    answers_of,
    apart,
    compared,
    form_of,
    in_order,
    least_like_first,
    memory_of,
    parameters_by_name,
    places_of,
    restore,
    rng_state,
    roots_of,
    same_bits,
    set_mode,
    standing,
    state_by_name,
    state_dict_of,
    tensors_of,
    wanted_of,
    wrong_slopes,
)
from judge.gates import as_numbers
from judge.requests import perturb
from judge.source import BUILD, RAISED, Problem, build_failure, cast, last_line, load, reseed, set_precision
from judge.switches import Switches, replaced

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # written before each timed call, more than twice a GPU's last cache
AWAKE_BYTES = 1 << 20  # on a CPU written by the contender itself, so that the threads of its pool run again
WAKES = "goes on while it is stopped: something resumes it"
GARBLED = "wrote something of its own into the pipe of its answers"
# The form of the reply to a command, a list being of any length: a candidate may write replies of its own.
FORM = ("", [0], "")
TAKES = {"forward": [""], "constructor": [""]}
REPLIES = {
    "failed": {"kind": "", "wrong": [""]},
    "load": {"seconds": 0.0, "state": [("", "", "", "")], "class": "", "lacks": [""], "takes": TAKES},
    "call": {"forms": [[FORM]], "names": [[""]], "tree": "", "given": "", "did": [""], "graphs": True},
    "ready": {"ms": 0.0, "host_us": 0.0, "flush_ms": 0.0, "peak": 0, "plain": False},
    "time": {"ms": 0.0, "forms": [FORM]},
    "aged": {"aged": True},
    "wrong_slopes": {"wrong_slopes": [""]},
    "profile": {"table": ""},
}
IN_A_TURN = ("warm_up", "time", "hand_over")  # behind these memory is kept for the next turn
WHEN = {"load": "at import", "made": "when it was made from another seed", "profile": "while it was profiled"}
Event, perf_counter = torch.cuda.Event, time.perf_counter
# Contenders are forked from a server that never initialises CUDA. It has loaded torch, NumPy's random numbers, and what
# autograd.grad imports when it is first called: sympy, 0.3 s.
PRELOADED = ["torch", "torch.fx.experimental.symbolic_shapes", "numpy.random", "judge.worker"]
multiprocessing.set_forkserver_preload(PRELOADED)


class Rejected(Exception):
    """A contender failed, for the reasons given.

    `kind`: "wrong"; "model", where the Model itself fails or is no measure; "uncertain", where a single answer meets
    neither gate, and other inputs may decide; BUILD; "raised", "crashed" or "memory". `firm`: also where values may
    differ.
    """

    def __init__(self, *reasons: str, kind: str = "wrong", firm: bool = False):
        super().__init__(*reasons)
        self.kind, self.firm = kind, firm


def as_rejected(raised: Rejected | torch.OutOfMemoryError) -> Rejected:
    """Without its traceback: whoever keeps it in a variable would keep gigabytes of its functions' tensors, too."""
    raised = raised.with_traceback(None)
    return raised if isinstance(raised, Rejected) else Rejected(last_line(raised), kind="memory")


def copied(x: torch.Tensor, new: Callable[[int], torch.UntypedStorage]) -> torch.Tensor:
    """A copy in a storage that new(nbytes) makes, with the same shape, strides and storage offset."""
    nbytes = x.untyped_storage().nbytes()
    storage = new(max(1, nbytes))
    if nbytes:
        storage.copy_(x.untyped_storage())
    return torch.empty(0, dtype=x.dtype, device=storage.device).set_(storage, x.storage_offset(), x.shape, x.stride())


@cache
def has_ipc() -> bool:
    """Whether another process can open this one's memory of the GPU, which some containers forbid."""
    worker = Worker("eager", "cuda", 60.0)
    try:
        given = copied(torch.zeros(1, device="cuda"), partial(torch.UntypedStorage, device="cuda"))
        worker.ask("rest", given=given)
    except (Rejected, RuntimeError):
        return False
    finally:
        worker.kill()
    return True


def shared(x: torch.Tensor) -> torch.Tensor:
    """A copy that another process can open: on the GPU by CUDA IPC, elsewhere as a file without a name."""
    if x.is_cuda and has_ipc():
        return copied(x, partial(torch.UntypedStorage, device=x.device))
    # In a container /dev/shm, which PyTorch takes, may be small. Sealed: a shorter file would end who writes to it.
    file = os.memfd_create("judge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    copy = copied(x, partial(torch.UntypedStorage.from_file, f"/proc/{os.getpid()}/fd/{file}", True))
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    weakref.finalize(copy, os.close, file)
    return copy


def reduced(storage: torch.UntypedStorage) -> tuple:
    """Pickles memory made by `shared` as a path; any other, of a constructor's arguments, as PyTorch does."""
    if not storage.filename:
        return reductions.reduce_storage(storage)
    return torch.UntypedStorage.from_file, (storage.filename, True, storage.nbytes())


def state_of(module: torch.nn.Module) -> Iterator[list[str]]:
    """Of each tensor in the state_dict its name, its dtype and shape, a hash of its bits, and what else is told."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, x in state_dict_of(module).items():
        if isinstance(x, torch.Tensor):
            host = compared(x).cpu().contiguous()
            bits = hashlib.sha256(ctypes.string_at(host.data_ptr(), host.nbytes)).hexdigest()[:16]
            kind = "parameter" if name in parameters else "buffer"
            kind += " without a gradient" * (kind == "parameter" and not parameters[name].requires_grad)
            kind = OF_ANOTHER if kind == "buffer" and x.grad_fn is not None else kind
            yield [name, f"{x.dtype}, shape {list(x.shape)}", bits, kind]


def share_memory(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    of_first, of_second = (memory_of([*each.parameters(), *each.buffers()]) for each in (first, second))
    return bool(of_first & of_second)


def is_compiled(module: torch.nn.Module) -> bool:
    """It, or a module within it, keeps a function of torch.compile."""
    kept = (x for each in module.modules() for x in tree_leaves([*vars(each).values()]))
    return any(hasattr(x, "_torchdynamo_orig_callable") for x in kept)


def takes_of(function: Callable) -> list[str]:
    """The names of what a forward or a class takes; "*" where it takes any."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters.values()
        return ["*" if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) else each.name for each in parameters]
    return ["*"]


def settle(device: str) -> None:
    """Waits for the GPU, and gives unused memory back to it: the other processes need it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def alike(x: torch.Tensor, behind: int = 0) -> torch.Tensor:
    """A copy with the same strides, which a clone of a slice has not, so many elements behind where memory begins."""
    if x.layout != torch.strided:
        return x.clone()
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1 if x.numel() else 0
    memory = x.as_strided((reach,), (1,))
    return torch.cat([memory[:1].repeat(behind), memory]).as_strided(x.shape, x.stride(), behind)


class Called(TorchDispatchMode):
    """The namespaces of the operators that are called within."""

    def __init__(self):
        super().__init__()
        self.namespaces = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


class Contender:
    """Answers the judge's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device, self.gpu, self.switches = role, device, device == "cuda", Switches()
        self.wait = torch.cuda.synchronize if self.gpu else lambda: None
        self.cls, self.said, self.namespace = None, [], ""
        self.cycles_of_ms = 0.0  # of torch.cuda._sleep, once measured
        self.graphs = False  # whether a CUDA graph was captured, by whatever function of PyTorch's
        self.rest()
        begin = torch.cuda.CUDAGraph.capture_begin

        def capture_begin(*arguments, **options):
            self.graphs = True
            return begin(*arguments, **options)

        torch.cuda.CUDAGraph.capture_begin = capture_begin
        if role == "compile":
            importlib.import_module("torch._inductor.compile_fx")  # while the judge does other things

    def load(self, path: Path, text: bytes, problem: tuple, level: str, dtype, seed: int, examine: bool) -> dict:
        """Imports a contender's file, which builds it if need be; makes two instances of its module."""
        self.rest()
        set_precision(level)
        self.switches = Switches()
        before = rng_state()
        self.problem, self.replaced, begin = Problem(*problem), replaced(), perf_counter()
        states = rng_state()
        seeds = states != before or b"seed" in self.problem.text  # the Model's file does, or may
        module = load(path, text) if self.role == "new" else self.problem.module
        seconds = perf_counter() - begin
        if any(now != then for now, then in zip(rng_state(), states)) and not seeds:
            self.said.append("changes a random state when it is imported")
        vars(module).update(self.problem.constants)
        self.namespace = vars(module).get("NAMESPACE") or ""
        self.put_back()
        name = "ModelNew" if self.role == "new" else "Model"
        if not hasattr(module, name) and isinstance(getattr(module, "Model", None), type):
            name = "Model"
        if not hasattr(module, name):
            raise Rejected(f"the file has no class {name}")
        self.cls, self.dtype = getattr(module, name), dtype
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        lacks = self.remake(seed, examine)
        self.timed = self.modules[0]
        if self.role == "compile":
            self.timed = torch.compile(self.timed, dynamic=False)
        state = [*state_of(self.modules[0])]
        takes = {"forward": takes_of(self.modules[0].forward), "constructor": takes_of(self.cls)}
        return {"seconds": seconds, "state": state, "class": name, "lacks": lacks, "takes": takes}

    def put_back(self) -> None:
        """What is switched is put back, and told with the next reply."""
        self.said += self.switches.put_back()

    def remake(self, seed: int, examine: bool = False, other: int | None = None) -> list[str]:
        """Two instances; the one that is asked is a copy of the second, where it can be copied. What it lacks is told.

        With `other` the second is made from another seed.
        """
        lacks, copies, self.seed = [], [], seed
        make = lambda seed: cast(self.problem.make(self.cls, seed), self.dtype, self.device)  # noqa: E731
        made = make(seed if other is None else other)
        if examine:
            twin = make(seed)
            if {*map(id, made.parameters())} & {*map(id, twin.parameters())}:
                raise Rejected("two instances share their parameters")
            if share_memory(made, twin):
                lacks.append(SHARE)
            if [*map(id, made.parameters())] != [id(p) for _, p in made.named_parameters()]:
                lacks.append("gives an optimizer others than its parameters")
            if twin.eval() is not twin or twin._apply(lambda x: x) is not twin:
                lacks.append(NOT_ITSELF)
            try:
                twin.state_dict(prefix="", keep_vars=False)
            except TypeError:
                lacks.append("its state_dict takes no prefix or keep_vars: no module around it has one")
            del twin
            try:
                loaded = pickle.loads(pickle.dumps(made)).state_dict()
                plain = {
                    name: x for name, x in made.state_dict().items() if type(x) is torch.Tensor and not x.is_quantized
                }
                if not all(same_bits(x, loaded[name]) for name, x in plain.items()):
                    lacks.append("has other weights once it is pickled and loaded")
            except Exception as error:
                lacks.append(f"cannot be pickled: {last_line(error)}")
        if is_compiled(made):
            lacks.append("keeps a function of torch.compile: a deepcopy of it computes with the original's weights")
        elif other is None:
            try:
                with torch.no_grad():
                    copies = [copy.deepcopy(made), copy.deepcopy(made)]
                for mine, theirs in zip(made.parameters(), zip(*(each.parameters() for each in copies))):
                    for each in theirs:  # a scripted module's copy wants none
                        each.requires_grad_(mine.requires_grad)
            except Exception as error:
                lacks.append(f"copy.deepcopy does not copy it: {last_line(error)}")
        first, *last = copies or [make(seed)]
        self.modules = [first, made, *last]
        return lacks

    def aged(self, sets: list, seed: int, tolerance: float) -> dict:
        """Whether a module that was called, and whose weights then changed, answers as a new one with these weights."""
        module, (inputs,) = self.modules[0], self._own(sets)
        new = cast(self.problem.make(self.cls, seed), self.dtype, self.device)
        before = standing(module, parameters=True)
        with torch.no_grad():
            module(*inputs)
            for each in (module, new):
                perturb(each, seed)
            reseed(seed)
            try:
                found = tree_map_only(torch.Tensor, torch.clone, module(*inputs))  # of memory that may be a buffer's
            finally:
                restore(before)
            reseed(seed)
            right = new(*inputs)
            size = max(
                (float(as_numbers(x).to(torch.complex128).abs().max()) for x in tensors_of(right) if x.numel()),
                default=0.0,
            )
        self.put_back()
        return {"aged": not apart(found, right) <= tolerance * (1 + size)}

    def wrong_slopes(self, sets: list, training: bool, seed: int) -> dict:
        found = wrong_slopes(self.modules[0], self._own(sets)[0], training, seed)
        self.put_back()
        return {"wrong_slopes": found}

    def made(self, seed: int, other: str | None = None) -> None:
        """Other weights, where they can only be made; or what a module counts in Python's numbers, anew. Or other
        arguments of its constructor."""
        self.problem.other = other
        self.remake(seed, other=seed + 1)
        self.timed = self.modules[0]

    def rest(self, given=None) -> None:
        """Forgets what was timed; unused memory then goes back to the device."""
        self.given, self.inputs, self.answers, self.incoming, self.wanted, self.leaves = None, None, [], [], [], []
        self.buffer = None

    def take(self, module: torch.nn.Module, state: dict, own: Own, how: How = How.PLAINLY) -> None:
        """Gives a module weights."""
        if How.LOADED in how and own:
            extra = {name: x for name, x in state.items() if not isinstance(x, torch.Tensor)}
            module.load_state_dict({own[name]: x for name, x in state.items() if name in own} | extra, strict=False)
        else:
            with torch.no_grad():
                for name, x in state_by_name(module, own).items():
                    if How.EXCHANGED in how and isinstance(x, torch.nn.Parameter):
                        x.data = torch.empty_like(x.data).copy_(state[name])  # in x's strides
                    elif How.UNSEEN in how:
                        x.data.copy_(state[name])
                    elif How.SPARING not in how or not same_bits(x, state[name].to(x.device)):
                        x.copy_(state[name])

    def call(self, request: Request, own: Own, states: list, sets: list, answers: list) -> dict:
        """Puts a request to the module; copies the answers to where they belong."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls: none must end in eager mode
        module, *others = self.modules[::-1] if How.SECOND in request.how else self.modules
        if inferred := How.INFERRED in request.how and not is_compiled(module):  # that would take a minute
            module = cast(self.problem.make(self.cls, self.seed), self.dtype, self.device)
        training = bool(request.how & (How.TRAIN | How.IGNORED))
        if module.training != training:  # else not: what is made from weights at each eval() would never grow old
            set_mode(module, training, request.how)

        def call_once(instance: torch.nn.Module) -> None:
            """What is kept of this call must not serve the one that counts."""
            before = standing(instance)
            answers_of(instance, self._own(sets), request, own)
            restore(before)
            self.put_back()

        if request.how & (How.EXCHANGED | How.UNSEEN | How.COPIED):
            call_once(module)
        if How.COPIED in request.how:
            module = copy.deepcopy(module)
        # Nothing made from the weights of one may serve the other. Both are given weights equally often: a count of
        # writes does not tell them apart.
        for instance, state in zip((module, *others), (states[0], states[1], states[1])):
            self.take(instance, state, own, request.how)
        if inferred:
            first = self._own(sets)[0]
            with torch.inference_mode():
                module(*first)
        before_assigned = {}
        if How.ASSIGNED in request.how:
            before_assigned = {name: (p, p.data) for name, p in module.named_parameters(remove_duplicate=False)}
            module.load_state_dict(tree_map_only(torch.Tensor, torch.clone, dict(module.state_dict())), assign=True)
            for p, _ in before_assigned.values():
                p.data = torch.full_like(p, float("nan") if p.is_floating_point() or p.is_complex() else 0)
        if request.how & (How.TWIN | How.MOVED):
            for instance in others if How.TWIN in request.how else [module]:
                call_once(instance)
        if How.MOVED in request.how:  # as `.to` moves weights: parameters stay the same objects
            old = [p.data for p in module.parameters() if p.is_floating_point()]
            behind = 0 if is_compiled(module) else 2  # torch.compile takes aligned ones, view_as_complex even places
            module._apply(partial(alike, behind=behind))
            for memory in old:
                memory.fill_(float("nan"))
        laid = []  # weights that lie elsewhere in this request, and where they lay
        for how, dims, layout in ((How.CHANNELS_LAST, 4, "channels last"), (How.ROWS_APART, 2, "a slice")):
            # What torch.compile makes for other strides it may run later, when they are the old ones, and raises.
            asked = how in request.how and not is_compiled(module)
            for x in (*module.parameters(), *module.buffers()) if asked else ():
                if x.dim() == dims and x.layout == torch.strided and not x.is_quantized:
                    laid.append((x, x.data))
                    x.data = LAYOUTS[layout](x.data)
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.5) if request.direction == "forward_backward" and p.requires_grad else None
        # Running statistics that have no name of the Model's are given back; others come with the next request.
        stand = standing(module) if training else []
        inputs, self.reuses, self.leaks = self._own(sets), False, False
        late = self._late(inputs) if How.LATE in request.how else contextlib.nullcontext()
        try:
            with request.memory(self.device, answers[0]), late:
                found = answers_of(module, inputs, request, own, self._caller(module, inputs, request))
                for answer, places in zip(found, answers):
                    self._copy(answer.leaves.values(), places)
        finally:  # the next request is not to suffer for an error in this one
            if module.training:
                module.eval()
            restore(stand)
            if How.THEN_EVAL in request.how:  # what eval mode folded is of statistics that are no more
                module.train()
                module.eval()
            if How.INFERENCE in request.how:  # a buffer that was made then could not be written any more
                for buffers, name, x, values in standing(module):
                    buffers[name] = values if x.is_inference() else x
            if How.MOVED in request.how:
                module._apply(torch.clone)
            for name, (p, data) in before_assigned.items():
                p.data = data
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, p)
            for x, data in laid:
                x.data = data
        if request.direction == "forward_recorded":
            self.said += [f"replaces {name} for all modules" for name in replaced() if name not in self.replaced]
        forms, names = [each.forms for each in found], [[*each.leaves] for each in found]
        told = {name: getattr(found[0], name) for name in ("tree", "given", "did")}
        told["did"] += [REUSED] * self.reuses + [LEAKS] * self.leaks
        return {"forms": forms, "names": names, "graphs": self.graphs, **told}

    def _caller(self, module, sets: list, request: Request) -> Callable:
        if How.CAPTURED in request.how:
            return partial(captured, module)
        if request.how & (How.THREADS | How.REPEATED) and request.direction == "forward":
            found = iter(self._least_like_first(module, sets))
            return lambda *inputs: next(found)

        stand = []  # as they are within the request, when the first call begins

        def call(*inputs):
            if stand:
                self.said += stand[0].put_back()
            else:
                stand.append(Switches())
            return module(*inputs)

        return call

    def _least_like_first(self, module: torch.nn.Module, sets: list) -> Sequence:
        """The answers to all sets of inputs. Several are asked for at the same time, each by a thread of its own; one
        in this thread, since torch.compile replays its CUDA graphs in no other. The first, by which a race is seen, are
        asked for one after the other."""
        start, held, kept = threading.Barrier(len(sets)), set(), []  # kept: first answers, whose memory is not free

        def answer(inputs: list, wait: Callable = start.wait):
            self.switches.put_back()  # some are a thread's own; other requests tell them
            with torch.no_grad():
                given = tree_map_only(torch.Tensor, torch.clone, inputs)
                wait()
                result = module(*given)
                self.reuses |= bool(memory_of(result) & held)
                kept.extend([result] * (len(kept) < len(sets)))
                return tree_map_only(torch.Tensor, lambda x: alike(x).requires_grad_(x.requires_grad), result)

        first = [answer(inputs, wait=lambda: None) for inputs in sets]
        held |= memory_of(kept)
        least = alive() + LEAST_REPEATS + 2 * len(tree_leaves(first))  # two answers more are found
        with ThreadPoolExecutor(len(sets)) as pool:
            answers = pool.map if len(sets) > 1 else map
            found = least_like_first(lambda: [*answers(answer, sets)], REPEAT_SECONDS, first)
        # Of two threads that put a switch back each, one may leave what the other had switched. Other requests tell.
        self.switches.put_back()
        self.leaks = alive() >= least and gc.collect() >= 0 and alive() >= least
        return found

    def ready(self, request: Request, own: Own, state: dict, given: tuple, answers: list, seconds: float) -> dict:
        """Sets the calls to be timed up and makes them for so many seconds: compilers compile, clocks settle.

        `given`: the inputs, and the gradients that come in.
        """
        self.rest()
        self.take(self.modules[0], state, own)
        self.request, self.answers, self.given = request, answers, given
        written = How.RESTORED in request.how
        self.stand = standing(self.modules[0]) if written else []
        # The judge's memory itself; where a GPU's cannot be shared, a copy that is renewed before each call.
        self.inputs, self.incoming = tree_map_only(torch.Tensor, lambda x: x.to(self.device), given)
        self.wanted = list(wanted_of(parameters_by_name(self.modules[0], own), self.inputs, request).values())
        if not self.wanted:
            self.incoming = []
        nbytes = FLUSH_BYTES["cuda"] if self.gpu else AWAKE_BYTES
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._clocked(1)
        plain = self._is_plain()
        self.put_back()
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        before, begin, marks = torch.cuda.memory_allocated(), perf_counter(), []
        while len(marks) < 9 or perf_counter() - begin < seconds:
            marks.append(self._clocked(1)[:3])
            self.put_back()
        reply = dict(zip(("ms", "host_us", "flush_ms"), (statistics.median(column) for column in zip(*marks))))
        return reply | {"peak": torch.cuda.max_memory_allocated() - before, "plain": plain}

    def _is_plain(self) -> bool:
        """Whether the call to be timed runs PyTorch's operators alone: none of the file's NAMESPACE, if it has one."""
        if not isinstance(self.namespace, str) or not self.namespace:
            return False
        called = Called()
        with torch.set_grad_enabled(self.request.direction != "forward"), called:
            self.timed(*self.inputs)
        return self.namespace not in called.namespaces

    def warm_up(self) -> None:
        """One call on old inputs, so that no timed call waits for memory, nor for addresses that the GPU forgot while
        others had their turn."""
        self._timed_call()
        self.wait()

    def time(self, flushes: int, seed: int, waits: float | None = None) -> dict:
        """Milliseconds of a call by this process's own clock, whose sum the judge holds its own against.

        `seed`: of the random numbers that it may draw. With `waits` the GPU waits for so many milliseconds in
        place of the call.
        """
        ms, _, _, leaves = self._clocked(flushes, waits, seed)
        outputs = len(leaves) - len(self.wanted) * bool(self.incoming)
        forms = [form_of(leaf, self.request if i < outputs else None) for i, leaf in enumerate(leaves)]
        self.leaves = [*map(compared, leaves)]  # a sparse gradient may have indices in the inputs' memory
        self.places = places_of(forms, self.answers)
        self.wait()
        return {"ms": ms, "forms": forms}

    def hand_over(self) -> None:
        """The answer of the call that was timed last."""
        self._copy(self.leaves, self.places)
        self.leaves = []

    def profile(self, path: str) -> dict:
        """What ten calls consist of, by torch.profiler, as a table. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for _ in range(10):
                self._timed_call()
            self.wait()
        found.export_chrome_trace(path)
        by = "self_device_time_total" if self.gpu else "self_cpu_time_total"
        return {"table": found.key_averages().table(sort_by=by, row_limit=20)}

    def _timed_call(self) -> list:
        """The outputs, and the gradients of a backward pass."""
        with torch.set_grad_enabled(self.request.direction != "forward"):
            result = in_order(self.timed(*self.inputs))
        leaves = tree_leaves(result)
        if self.incoming:
            leaves += torch.autograd.grad(
                roots_of(result), self.wanted, self.incoming, allow_unused=True, materialize_grads=True
            )
        return leaves

    def _wait_on_gpu(self, ms: float) -> list:
        """In place of a call; gives tensors like the answers."""
        if not self.cycles_of_ms:
            begin, end = (Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.cuda._sleep(10**7)
            end.record()
            torch.cuda.synchronize()
            self.cycles_of_ms = 1e7 / begin.elapsed_time(end)
        torch.cuda._sleep(int(ms * self.cycles_of_ms))
        return [torch.empty_like(x) for x in self.answers]

    def _clocked(self, flushes: int, waits: float | None = None, seed: int = 0) -> tuple:
        """Of a call its milliseconds, the host's microseconds, the flush's milliseconds, and what it gave.

        On a GPU all is queued behind the flush. On a CPU the judge has flushed the cache.
        """
        for mine, x in zip(tensors_of([self.inputs, self.incoming]), tensors_of(self.given)):
            if mine is not x:
                mine.data.copy_(x)
        reseed(seed + APART)
        restore(self.stand)
        if not self.gpu:
            self.buffer.zero_()
            begin = perf_counter()
            leaves = self._timed_call()
            host = perf_counter() - begin
            return 1e3 * host, 1e6 * host, 0.0, leaves
        events = [Event(enable_timing=True) for _ in range(3)]
        # Lines that a kernel marked to be evicted last would outlive the flush.
        ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
        events[0].record()
        for _ in range(flushes):  # overwrites at least twice what the last cache holds
            self.buffer.zero_()
        events[1].record()
        begin = perf_counter()
        leaves = self._timed_call() if waits is None else self._wait_on_gpu(waits)
        host = perf_counter() - begin
        events[2].record()
        self.wait()
        return events[1].elapsed_time(events[2]), 1e6 * host, events[0].elapsed_time(events[1]), leaves

    @contextlib.contextmanager
    def _late(self, sets: list):
        """Another stream, on which the inputs are NaN until long after the calls were launched."""
        tensors = [x.data for x in tensors_of(sets) if x.is_floating_point()]
        values = [x.clone() for x in tensors]
        for x in tensors:
            x.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)  # some 0.1 s: whoever does not wait for this stream reads the NaN
            for x, value in zip(tensors, values):
                x.copy_(value)
            yield

    def _own(self, given):
        """Copies in this process's own memory."""
        own = partial(copied, new=partial(torch.UntypedStorage, device=self.device))
        return tree_map_only(torch.Tensor, own, given)

    def _copy(self, leaves: Iterable, answers: list) -> None:
        """Copies tensors of the expected form to the judge's."""
        tensors = [x for x in leaves if type(x) is torch.Tensor]
        for leaf, answer in zip(tensors, answers):
            if (leaf.shape, leaf.dtype, leaf.layout) == (answer.shape, answer.dtype, torch.strided):
                answer.copy_(leaf)
        self.wait()


def captured(module, *inputs):
    """Captures the module with other values in the inputs' memory, and replays that with the right ones."""
    tensors = [x.data for x in tensors_of(inputs) if x.is_floating_point()]
    values = [x.clone() for x in tensors]
    for x in tensors:
        x.mul_(0.5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(*inputs)
    for x, value in zip(tensors, values):
        x.copy_(value)
    graph.replay()
    return tree_map_only(torch.Tensor, torch.clone, result)


def serve(role: str, device: str, pipe) -> None:
    """The life of a contender's process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets a Ctrl-C that came before setsid
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the server blocks it, so that Ctrl-C is told once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays among its descendants
    os.dup2(2, 1)  # stdout is the table's
    sys.stdout = sys.stderr  # which loses no line when the process is killed
    multiprocessing.current_process()._config["daemon"] = False  # a candidate may start processes, to build say
    warnings.filterwarnings("ignore")
    server, tracker = multiprocessing.forkserver._forkserver, resource_tracker._resource_tracker
    os.close(server._forkserver_alive_fd)  # pipes of the judge's: who needs a server here starts one of its own
    os.close(tracker._fd)
    server._forkserver_alive_fd = tracker._fd = None
    gc.freeze()  # `alive` and gc.collect are to look through what comes later, not all that torch consists of
    contender = Contender(role, device)
    with contextlib.suppress(EOFError, ConnectionError):  # the judge has ended
        while True:
            command, arguments = pipe.recv()
            try:
                reply = getattr(contender, command)(**arguments) or {}
                if command not in IN_A_TURN:
                    settle(device)
            except RAISED as error:
                failure, place = build_failure(error), " at import" * (contender.cls is None)
                said = f"build failed{place}: {failure}" if failure else f"raised {last_line(error)}{place}"
                said = str(error) if isinstance(error, Rejected) else said
                scarce = device == "cuda" and isinstance(error, torch.OutOfMemoryError)  # a CPU's raises another
                kind = BUILD if failure else "memory" if scarce else "raised"
                reply = {"kind": kind, "wrong": [said]}
            if "kind" in reply:  # what it held when it raised is free: others need it
                try:
                    settle(device)
                except RuntimeError:  # the GPU refuses all further work: to free the judge's memory would abort
                    reply["kind"] = "crashed"
                    pipe.send_bytes(json.dumps(reply | {"switched": []}).encode())
                    os._exit(1)
            contender.put_back()  # before the next answer and the next timing
            reply["switched"], contender.said = [*dict.fromkeys(contender.said)], []
            arguments = None  # PyTorch keeps the judge's memory for as long as this process has it open
            pipe.send_bytes(json.dumps(reply).encode())


def has_form(reply: object, form: object) -> bool:
    if isinstance(form, dict):
        return isinstance(reply, dict) and all(has_form(reply.get(name), each) for name, each in form.items())
    if isinstance(form, list):
        return isinstance(reply, list) and all(has_form(each, form[0]) for each in reply)
    if isinstance(form, tuple):
        return isinstance(reply, list) and len(reply) == len(form) and all(map(has_form, reply, form))
    return type(reply) is type(form)


def processes() -> dict[int, tuple[int, int]]:
    """Of each that has not ended its parent and its group."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, group, *_ = path.read_bytes().rpartition(b")")[2].split()
            if state != b"Z":  # Z: it has ended
                found[int(path.parent.name)] = int(parent), int(group)
    return found


WORKERS: set[int] = set()  # the processes of all


def parents() -> tuple[int, int | None]:
    """Whose children contenders and orphans are: by CLONE_PARENT a contender makes a child of the server's, too."""
    return os.getpid(), multiprocessing.forkserver._forkserver._forkserver_pid


class Worker:
    """A contender's process, as the judge sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        ForkingPickler.register(torch.UntypedStorage, reduced)
        context = multiprocessing.get_context("forkserver")
        self.role, self.timeout, self.told = role, timeout, []
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what gives up its parents becomes the judge's child
        multiprocessing.forkserver.ensure_running()
        self._before = {pid for pid, (parent, _) in processes().items() if parent in parents()}
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(role, device, theirs), daemon=True)
        self._process.start()
        self.alive, self.pid, self.stopped = self._process.is_alive, self._process.pid, False
        WORKERS.add(self.pid)
        theirs.close()
        # A message that is not sent to its end, or that nobody takes, raises an error.
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
            for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(timeout), 0))

    def ask(self, command: str, **arguments) -> dict:
        """Stops the process whenever it has replied; what it switched is kept in `told`."""
        patience = min(self.timeout * (10 if command in ("load", "ready") else 1), 2e6)  # poll's limit
        request = arguments.get("request")
        when = request.when if request else WHEN.get(command, "while it was timed")
        if command == "time" and self.stopped and not self._is_stopped():
            self.kill()
            raise Rejected(WAKES)
        self._signal(signal.SIGCONT)
        self.asked = perf_counter()  # not before SIGCONT: with many processes in its group that takes milliseconds
        try:
            self._pipe.send((command, arguments))
            ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], patience)
            if not ready:
                self.kill()
                raise Rejected(f"gave no answer within {patience:g} seconds (--timeout): it hangs ({when})")
            if self._pipe not in ready:  # nor will it close while a process that was forked has it open
                raise EOFError
            reply = json.loads(self._pipe.recv_bytes(1 << 24))
            self.answered = perf_counter()
            failed = isinstance(reply, dict) and "kind" in reply
            if not has_form(reply, {"switched": [""]} | REPLIES.get("failed" if failed else command, {})):
                raise ValueError
            self.told += reply["switched"]
        except (EOFError, ConnectionError) as error:
            self._process.join(10)
            code = self._process.exitcode
            self.kill()  # what it started in its process group
            ending = f"by signal {-code} ({signal.strsignal(-code)})" if code and code < 0 else f"with exit code {code}"
            ending = "closed the pipe of its answers" if code is None else f"ended its process {ending}"
            raise Rejected(f"{ending} and gave no answer ({when})") from error
        except (OSError, ValueError, RecursionError):  # longer than a reply may be, or not of its form
            self.kill()
            raise Rejected(f"{GARBLED} ({when})") from None
        self._signal(signal.SIGSTOP)
        if command in ("warm_up", "hand_over"):  # the judge is about to write inputs
            self.stopped = self._wait_until_stopped()
        if failed:
            raise Rejected(*reply["wrong"], kind=reply["kind"])
        return reply

    def kill(self) -> None:
        for pid in self.strays():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._process.join(5)

    def strays(self) -> list[int]:
        """What goes on while its process group is stopped: its descendants outside the group, and orphans, which the
        judge inherits; itself, while it has no group yet."""
        running = processes()
        family = {self._process.pid}
        family |= {pid for pid, (parent, _) in running.items() if parent in parents()} - self._before - WORKERS
        while more := {pid for pid, (parent, _) in running.items() if parent in family} - family:
            family |= more
        return [pid for pid in family if pid in running and running[pid][1] != self._process.pid]

    def size(self) -> int:
        """How many processes are in its group, which is stopped and resumed as a whole."""
        return sum(group == self._process.pid for _, group in processes().values())

    def _is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"TtZX"
        return True  # it has ended

    def _wait_until_stopped(self) -> bool:
        for _ in range(100):
            if self._is_stopped():
                return True
            time.sleep(1e-4)
        return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)
