"""A contender in a process of its own.

The judge (`Worker`) sends a request and waits for the reply. The process (`serve`, `Contender`) is stopped (SIGSTOP)
from a reply to the next request, except between "time" and "answer"; it has nothing in flight then, since it
synchronises before it replies. It sees inputs and weights, which it copies, and room for its answers. Requests are
pickled, tensors as memory that both have open; replies are JSON, so that the judge runs nothing of a candidate's.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import importlib
import json
import math
import multiprocessing.connection
import multiprocessing.forkserver
import os
import re
import signal
import socket
import statistics
import struct
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

from judge.source import BUILD, RAISED, build_failure, cast, last_line, load, make, set_precision

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}  # a graph's inputs must not move
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # written before each timed call, more than twice a GPU's last cache
IN_A_TURN = ("warm_up", "time", "answer")  # behind these no settings are compared, and memory is kept for the next turn
RANDOM = "changes PyTorch's random state"
Event, perf_counter = torch.cuda.Event, time.perf_counter
# Contenders are forked from a server that never initialises CUDA. It has loaded torch, and what autograd.grad imports
# when it is first called: sympy, 0.3 s.
multiprocessing.set_forkserver_preload(["torch", "torch.fx.experimental.symbolic_shapes", "judge.worker"])


class Rejected(Exception):
    """A contender failed, for the reasons given. `kind`: "wrong", "doubt", BUILD, "raised" or "memory"."""

    def __init__(self, *reasons: str, kind: str = "wrong"):
        super().__init__(*reasons)
        self.kind = kind


def copied(x: torch.Tensor, new: Callable[[int], torch.UntypedStorage]) -> torch.Tensor:
    """A copy in a storage that new(nbytes) makes, with the same shape, strides and storage offset."""
    nbytes = x.untyped_storage().nbytes()
    storage = new(max(1, nbytes))
    if nbytes:
        storage.copy_(x.untyped_storage())
    return torch.empty(0, dtype=x.dtype, device=storage.device).set_(storage, x.storage_offset(), x.shape, x.stride())


def shared(x: torch.Tensor, by_ipc: bool) -> torch.Tensor:
    """A copy that another process can open: on the GPU by CUDA IPC, on the host as a file without a name."""
    if by_ipc and x.is_cuda:
        return copied(x, partial(torch.UntypedStorage, device=x.device))
    file = os.memfd_create("judge")  # in a container /dev/shm, which PyTorch takes, may be small
    copy = copied(x, partial(torch.UntypedStorage.from_file, f"/proc/{os.getpid()}/fd/{file}", True))
    weakref.finalize(copy, os.close, file)
    return copy


def reduced(storage: torch.UntypedStorage) -> tuple:
    """Pickles memory made by `shared` as a path; any other, of a constructor's arguments, as PyTorch does."""
    if not storage.filename:
        return reductions.reduce_storage(storage)
    return torch.UntypedStorage.from_file, (storage.filename, True, storage.nbytes())


@dataclass(frozen=True)
class Request:
    """A question for the candidate and the Model: which calls, on which inputs, and what is compared."""

    when: str
    direction: str = "forward"
    seed: int = 0  # of the inputs
    change: Callable | None = None  # of each floating input
    weights: Callable | None = None  # of the Model's weights
    batch: int | None = None
    layout: str = "dense"
    order: tuple = (0,)  # of the calls: which set of inputs each gets; the answers to set 0 and the last are compared
    twin: bool = False  # another instance, with other weights, is called first
    mode: str = "eval"  # or "train" or "inference"
    whose: str = ""  # "nobody's", "parameters", "inputs" or "all": gradients are asked of; those of the direction
    strict: bool = False  # both gates, and the Model must have an answer; otherwise one gate, for `poison` the first
    timed: bool = False  # its answers are those handed over while the clock runs: of a backward pass gradients alone
    finite: bool = False  # not asked where the Model's answer is not finite
    infinite: bool = False  # where the order of operations may decide between NaN and an infinity, both are right
    poison: bool = False  # memory is full of NaN
    stream: bool = False  # on another stream, and with inputs that come late
    move: bool = False  # the weights move in memory first
    again: bool = False  # a second backward pass of one graph
    in_part: bool = False  # the first, third, ... parameter is frozen, and only the last output has a gradient
    expanded: bool = False  # the incoming gradient is the same along the first dimension, and lies in memory once
    refusable: bool = False  # who refuses it with an error is not wrong

    @contextlib.contextmanager
    def memory(self, device: str, like: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """If `poison`: blocks of these sizes are filled with NaN and freed, and PyTorch fills what torch.empty gives.

        It does so in its deterministic mode, where it may choose other kernels: the Model is to do so, too.
        """
        deterministic = torch._C._set_deterministic_algorithms  # torch's own function imports a compiler: seconds
        deterministic(self.poison, warn_only=True)
        blocks = [torch.full_like(x, math.nan, device=device) for x in like if self.poison and x.is_floating_point()]
        del blocks
        try:
            yield
        finally:
            deterministic(False, warn_only=True)


class Answer(NamedTuple):
    """What one call gives: outputs, then gradients, by name, and their forms before anything touched them."""

    leaves: dict[str, object]
    forms: list[str]
    tree: str
    inputs: int  # which set of them it got
    did: list[str]  # side effects of all calls, as "writes input 0"

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}


def answers_of(module, sets: list[list], request: Request) -> list[Answer]:
    """All forward passes of a request, then all backward passes; the answers that are compared."""

    def watched() -> dict[str, torch.Tensor]:
        leaves = ((k, i, x) for k, inputs in enumerate(sets) for i, x in enumerate(tree_leaves(inputs)))
        named = ((f"input {i}{' of another call' * k}", x) for k, i, x in leaves)
        found = {name: x for name, x in named if isinstance(x, torch.Tensor)}
        grads = {f"the .grad of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
        return found | grads | module.state_dict(keep_vars=True)

    frozen = [p for p in [*module.parameters()][::2] if request.in_part and p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    wanted, calls, answers, did = [wanted_of(module, inputs, request) for inputs in sets], [], [], []
    before = {}
    for name, x in watched().items():
        # A kernel may write without a word to PyTorch, so bits are compared; large tensors' in poisoned memory alone.
        before[name] = x, x._version, x.detach().clone() if request.poison or x.nbytes < 1 << 16 else x
    states = rng_state()
    recorded = request.direction != "forward"
    with torch.inference_mode() if request.mode == "inference" else torch.set_grad_enabled(recorded):
        for position, i in enumerate(request.order):
            result = module(*sets[i])
            if i == 0 or position == len(request.order) - 1:
                calls.append((i, result, [form_of(leaf, request) for leaf in tree_leaves(result)]))
            del result
    for i, result, forms in calls:
        leaves, roots = tree_leaves(result), roots_of(result)[-1 if request.in_part else 0 :]
        found = {f"output {i}" if len(leaves) > 1 else "output": leaf for i, leaf in enumerate(leaves)}
        if request.direction == "forward_backward" and wanted[i] and roots:
            incoming, of = [normal_like(x, request) for x in roots], list(wanted[i].values())
            for _ in range(request.again):
                torch.autograd.grad(roots, of, incoming, allow_unused=True, retain_graph=True)
            gradients = torch.autograd.grad(roots, of, incoming, allow_unused=True)
            if request.poison and not all(same_bits(x, normal_like(x, request)) for x in incoming):
                did.append("writes the gradient that comes in")
            found, forms = ({}, []) if request.timed else (found, forms)
            found |= {f"gradient of {name}": gradient for name, gradient in zip(wanted[i], gradients)}
            forms = forms + [form_of(gradient) for gradient in gradients]
        if request.mode == "train":  # as running statistics
            state = {f"{name} afterwards": x for name, x in module.state_dict().items()}
            found, forms = found | state, forms + [form_of(x) for x in state.values()]
        found = {name: compared(leaf) for name, leaf in found.items()}
        answers.append(Answer(found, forms, re.sub(r"\bjudged_\d+\.", "", str(tree_structure(result))), i, did))
    now = watched()
    for name, (x, version, bits) in before.items():
        if now.get(name) is not x or x._version != version or not (bits is x or same_bits(x, bits)):
            did.append(f"writes {name}")
    if any(now != then for now, then in zip(rng_state(), states)):
        did.append(RANDOM)
    memory = [{x.untyped_storage().data_ptr() for x in answer.tensors().values() if x.numel()} for answer in answers]
    if len(memory) > 1 and set.intersection(*memory):
        did.append("gives the memory of an earlier answer again")
    for p in frozen:
        p.requires_grad_(True)
    return answers


def wanted_of(module: torch.nn.Module, inputs: list, request: Request) -> dict[str, torch.Tensor]:
    """What gradients are asked of, by name."""
    whose = request.whose or {"forward": "nobody's", "forward_recorded": "parameters"}.get(request.direction, "all")
    tensors = {f"input {i}": x for i, x in enumerate(tree_leaves(inputs)) if isinstance(x, torch.Tensor)}
    floating = {name: x for name, x in tensors.items() if x.is_floating_point() or x.is_complex()}
    for x in floating.values():
        x.requires_grad_(whose in ("all", "inputs"))
    parameters = dict(module.named_parameters()) if whose in ("all", "parameters") else {}
    return {name: x for name, x in (floating | parameters).items() if x.requires_grad}


def normal_like(x: torch.Tensor, request: Request) -> torch.Tensor:
    """An incoming gradient, the same in all processes: normal numbers that hardly round in any dtype."""
    generator = torch.Generator(x.device).manual_seed(request.seed)
    values = torch.randn(x.shape, generator=generator, device=x.device).bfloat16().to(x.dtype)
    return values[:1].expand_as(values) if request.expanded and x.dim() else values  # other numbers lie behind it


def compared(leaf):
    """What is compared of a value: a tensor, a float as one."""
    leaf = torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else leaf
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def roots_of(result) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def form_of(leaf, output_of: Request | None = None) -> str:
    """What is known of a value before anything touches it: a subclass may compute when more than its type is asked."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return type(leaf).__name__ + ("" if isinstance(leaf, (torch.Tensor, float)) else f" {leaf!r}")
    form = f"Tensor of {leaf.dtype}, shape {list(leaf.shape)}, {leaf.layout}, on {leaf.device.type}"
    if output_of and output_of.layout == "dense" and leaf.layout == torch.strided and leaf.numel():
        # In a dimension of size 1 any stride is right.
        form += f", stride {[stride if size > 1 else 0 for size, stride in zip(leaf.shape, leaf.stride())]}"
    recorded = output_of and not output_of.timed
    return form + f", requires_grad {leaf.requires_grad}" * bool(recorded)


def state_of(module: torch.nn.Module) -> Iterator[str]:
    """Of each tensor in the state_dict, whether it is a parameter, its form and a hash of its bits."""
    for name, x in module.state_dict(keep_vars=True).items():
        host = x.detach().cpu().contiguous()
        bits = hashlib.sha256(ctypes.string_at(host.data_ptr(), host.nbytes)).hexdigest()[:16]
        form = f"{type(x).__name__} of {x.dtype}, shape {list(x.shape)}, requires_grad {x.requires_grad}"
        yield f"{name}: a {form}, bits {bits}"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def rng_state() -> list:
    """The CPU's; and the GPU's, once CUDA is in use: a compiler may begin to use it during a call."""
    kinds = [torch, torch.cuda] if torch.cuda.is_initialized() else [torch]
    return [kind.get_rng_state().tolist() for kind in kinds]


def settle(device: str) -> None:
    """Waits for the GPU, and gives unused memory back to it: the other processes need it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def settings() -> dict[str, object]:
    """What a candidate must leave as it was, for whoever else runs in its process."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "the float32 matmul precision": torch._C._get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32(),
        "cuDNN's benchmark mode": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark],
        "determinism": [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic],
        "the filling of new memory": torch._C._get_deterministic_fill_uninitialized_memory(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "the number of threads": torch.get_num_threads(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "the flushing of denormal numbers": sys.float_info.min / 2 == 0,
        "autocast": [torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")],
        "the cores this process may use": sorted(os.sched_getaffinity(0)),
        "the trace or profile function": [sys.gettrace(), sys.getprofile()],
        "the torch function modes": torch._C._len_torch_function_stack(),  # a default device is one
        "the torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "the hooks on all modules": len(torch.nn.modules.module._global_forward_hooks),
        "the current directory": os.getcwd(),
        "the current stream": torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0,
    }


class Contender:
    """Answers the judge's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device, self.gpu, self.settings = role, device, device == "cuda", settings()
        self.wait = torch.cuda.synchronize if self.gpu else lambda: None
        self.cls = None
        self.rest()
        if role in COMPILE_MODES:
            importlib.import_module("torch._inductor.compile_fx")  # while the judge does other things

    def load(self, path: Path, constants: dict, arguments: list, level: str, dtype, seed: int) -> dict:
        """Imports a contender's file, which builds it if need be; makes two instances of its module."""
        self.rest()
        set_precision(level)
        self.settings, self.modules, begin = settings(), [], perf_counter()
        module = load(path)
        seconds = perf_counter() - begin
        vars(module).update(constants)
        self.cls = getattr(module, "ModelNew" if self.role == "new" else "Model")
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self.modules = [cast(make(self.cls, copy.deepcopy(arguments), seed), dtype, self.device) for _ in range(2)]
        self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.timed, mode=COMPILE_MODES[self.role], dynamic=False)
        return {"seconds": seconds, "state": [*state_of(self.modules[0])]}

    def rest(self, given=None) -> None:
        """Forgets what was timed; unused memory then goes back to the device."""
        self.ring, self.given, self.answers, self.kept, self.incoming = [], [], [], [], []
        self.buffer = None

    def call(self, request: Request, states: list, sets: list, answers: list) -> dict:
        """Puts a request to the module; copies the answers to where they belong."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls: none must end in eager mode
        module = self.modules[0].train(request.mode == "train")
        # Nothing made from the weights of one may serve the other. Both are given weights equally often: a count of
        # writes does not tell them apart.
        for instance, state in zip(self.modules, states):
            instance.load_state_dict(state, strict=True)  # which copies
        if request.twin or request.move:  # what is kept of this call must not serve the one that counts
            answers_of(self.modules[int(request.twin)], self._own(sets), request)
        if request.move:  # as `.to` moves weights: parameters stay the same objects
            old = [p.data for p in module.parameters() if p.is_floating_point()]
            module._apply(torch.clone)
            for memory in old:
                memory.fill_(float("nan"))
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.5) if request.direction == "forward_backward" and p.requires_grad else None
        inputs = self._own(sets)
        late = self._late(inputs) if request.stream else contextlib.nullcontext()
        with request.memory(self.device, answers[0]), late:
            found = answers_of(module, inputs, request)
            for answer, places in zip(found, answers):
                self._hand_over(answer.leaves.values(), places)
        module.eval()
        return {"forms": [answer.forms for answer in found], "tree": found[0].tree, "did": found[0].did}

    def ready(self, request: Request, state: dict, ring: list, answers: list, seconds: float) -> dict:
        """Sets the calls to be timed up and makes them for so many seconds: compilers compile, clocks settle."""
        self.rest()
        self.modules[0].load_state_dict(state, strict=True)
        self.request, self.given, self.answers, self.ring = request, ring, answers, self._own(ring)
        self.wanted = [list(wanted_of(self.modules[0], each, request).values()) for each in self.ring]
        if request.direction == "forward_backward" and self.wanted[0]:
            self.incoming = [normal_like(x, request) for x in roots_of(self.modules[0](*self.ring[0]))]
        self.buffer = torch.empty(FLUSH_BYTES[self.device], dtype=torch.uint8, device=self.device)
        self._claims(1, 1)
        self.kept = []
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        before, begin, marks = torch.cuda.memory_allocated(), perf_counter(), []
        while len(marks) < 9 or perf_counter() - begin < seconds:
            marks += self._claims(1, 1)
        self.kept = []
        reply = dict(zip(("ms", "host_us", "flush_ms"), (statistics.median(column) for column in zip(*marks))))
        return reply | {"peak": torch.cuda.max_memory_allocated() - before}

    def warm_up(self) -> None:
        """One call on the inputs of the turn before; then takes the new ones.

        So no timed call waits for memory, nor for addresses that the GPU forgot while others had their turn.
        """
        self._timed_call(0)
        for mine, given in zip(tree_leaves(self.ring), tree_leaves(self.given)):
            if isinstance(mine, torch.Tensor) and mine.numel():
                mine.untyped_storage().copy_(given.untyped_storage())
        self.wait()

    def time(self, count: int, flushes: int) -> dict:
        """Milliseconds of so many calls, by this process's own clock. The judge holds its own against their sum."""
        return {"ms": [ms for ms, _, _ in self._claims(count, flushes)]}

    def answer(self, index: int) -> dict:
        """Hands one of the answers just timed over."""
        leaves, self.kept = self.kept[index], []
        self._hand_over(leaves, self.answers)
        return {"forms": [form_of(leaf, None if self.incoming else self.request) for leaf in leaves]}

    def profile(self, path: str) -> dict:
        """What ten calls consist of, by torch.profiler, as a table. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for i in range(10):
                self._timed_call(i)
            self.wait()
        found.export_chrome_trace(path)
        by = "self_device_time_total" if self.gpu else "self_cpu_time_total"
        return {"table": found.key_averages().table(sort_by=by, row_limit=20)}

    def _timed_call(self, index: int) -> list:
        """The outputs, or of a backward pass the gradients: the outputs beside them would take memory."""
        index %= len(self.ring)
        with torch.set_grad_enabled(self.request.direction != "forward"):
            result = self.timed(*self.ring[index])
        if self.incoming:
            result = torch.autograd.grad(roots_of(result), self.wanted[index], self.incoming, allow_unused=True)
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(result)]

    def _claims(self, count: int, flushes: int) -> list[tuple]:
        """Of each call its milliseconds, the host's microseconds, the flush's milliseconds. On a GPU all are queued."""
        self.kept, marks = [], []
        for i in range(count):
            events = [Event(enable_timing=True) for _ in range(3)] if self.gpu else []
            if self.gpu:  # lines that a kernel marked to be evicted last would outlive the flush
                ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
                events[0].record()
            for _ in range(flushes):  # overwrites on a GPU at least twice what its last cache holds
                self.buffer.zero_()
            if self.gpu:
                events[1].record()
            begin = perf_counter()
            self.kept.append(self._timed_call(i))
            host = perf_counter() - begin
            if self.gpu:
                events[2].record()
            marks.append((events, host))
        self.wait()
        if not self.gpu:
            return [(1e3 * host, 1e6 * host, 0.0) for _, host in marks]
        return [(start.elapsed_time(end), 1e6 * host, begin.elapsed_time(start)) for (begin, start, end), host in marks]

    @contextlib.contextmanager
    def _late(self, sets: list):
        """Another stream, on which the inputs are NaN until long after the calls were launched."""
        tensors = [x.data for x in tree_leaves(sets) if isinstance(x, torch.Tensor) and x.is_floating_point()]
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

    def _hand_over(self, leaves: Iterable, answers: list) -> None:
        """Copies tensors of the expected form to the judge's."""
        tensors = [x for x in map(compared, leaves) if type(x) is torch.Tensor]
        for leaf, answer in zip(tensors, answers):
            if (leaf.shape, leaf.dtype, leaf.layout) == (answer.shape, answer.dtype, torch.strided):
                answer.copy_(leaf)
        self.wait()


def serve(role: str, device: str, pipe) -> None:
    """The life of a contender's process."""
    os.setsid()
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
    contender = Contender(role, device)
    with contextlib.suppress(EOFError, ConnectionError):  # the judge has ended
        while True:
            command, arguments = pipe.recv()
            try:
                reply = getattr(contender, command)(**arguments) or {}
                if command not in IN_A_TURN:
                    was, contender.settings = contender.settings, settings()
                    changed = [(name, now) for name, now in contender.settings.items() if now != was[name]]
                    reply["wrong"] = [f"changes {name} from {was[name]} to {now}" for name, now in changed]
                    settle(device)
            except RAISED as error:
                failure = build_failure(error)
                said = f"build failed: {failure}" if failure else f"raised {last_line(error)}"
                kind = BUILD if failure else "memory" if isinstance(error, torch.OutOfMemoryError) else "raised"
                reply = {"kind": kind, "wrong": [said + " at import" * (contender.cls is None)]}
            if "kind" in reply:  # what it held when it raised is free: others need it
                try:
                    settle(device)
                except RuntimeError:  # the GPU refuses all further work: to free the judge's memory would abort
                    pipe.send_bytes(json.dumps(reply).encode())
                    os._exit(1)
            arguments = None  # PyTorch keeps the judge's memory for as long as this process has it open
            pipe.send_bytes(json.dumps(reply).encode())


class Worker:
    """A contender's process, as the judge sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        ForkingPickler.register(torch.UntypedStorage, reduced)
        context = multiprocessing.get_context("forkserver")
        self.role, self.timeout = role, timeout
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(role, device, theirs), daemon=True)
        self._process.start()
        self.alive = self._process.is_alive
        theirs.close()
        # A message that is not sent to its end, or that nobody takes, raises an error.
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
            for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", math.ceil(timeout), 0))

    def ask(self, command: str, **arguments) -> dict:
        """Resumes the process, sends it a request and waits for the reply; then stops it, except after "time"."""
        patience = min(self.timeout * (10 if command in ("load", "ready") else 1), 2e6)  # poll's limit
        self._signal(signal.SIGCONT)
        self.asked = perf_counter()  # not before SIGCONT: with many processes in its group that takes milliseconds
        try:
            self._pipe.send((command, arguments))
            ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], patience)
            if not ready:
                self.kill()
                raise Rejected(f"gave no answer to '{command}' within {patience:g} seconds (--timeout): it hangs")
            if self._pipe not in ready:  # nor will it close while a process that was forked has it open
                raise EOFError
            reply = {} | json.loads(self._pipe.recv_bytes(1 << 24))
            self.answered = perf_counter()
            "".join(reply.get("wrong", []))  # a TypeError unless all are strings
        except (EOFError, ConnectionError) as error:
            self._process.join(10)
            code = self._process.exitcode
            self.kill()  # what it started in its process group
            ending = f"by signal {-code} ({signal.strsignal(-code)})" if code and code < 0 else f"with exit code {code}"
            ending = "closed the pipe of its answers" if code is None else f"ended its process {ending}"
            raise Rejected(f"{ending}, and gave no answer to '{command}'") from error
        except (OSError, ValueError, TypeError, RecursionError):  # longer than a reply may be, or not of its form
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers") from None
        if command != "time":
            self._signal(signal.SIGSTOP)
        if reply.get("wrong") and (self.role == "new" or "kind" in reply):
            if "kind" not in reply:
                self.kill()  # its settings are not to be those of the next case
            raise Rejected(*reply["wrong"], kind=reply.get("kind", "wrong"))
        return reply

    def has_ipc(self) -> bool:
        """Whether it can open this process's memory of the GPU; then ends the worker."""
        try:
            self.ask("rest", given=shared(torch.zeros(1, device="cuda"), by_ipc=True))
        except (Rejected, RuntimeError):
            return False
        finally:
            self.kill()
        return True

    def kill(self) -> None:
        for pid in self.strays():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._process.join(5)

    def strays(self) -> list[int]:
        """Descendants outside the process group, which go on while it is stopped; itself, while it has no group yet."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent, group, *_ = path.read_bytes().rpartition(b")")[2].split()
                if state != b"Z":  # Z: it has ended
                    parents[int(path.parent.name)] = int(parent), int(group)
        family = {self._process.pid}
        while more := {pid for pid, (parent, _) in parents.items() if parent in family} - family:
            family |= more
        return [pid for pid in family if pid in parents and parents[pid][1] != self._process.pid]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)
