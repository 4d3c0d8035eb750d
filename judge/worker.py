"""A contender in a process of its own.

The judge (`Worker`) sends a request and waits for the reply. The process (`serve`, `Contender`) is stopped (SIGSTOP)
whenever it is not its turn; it has nothing in flight then, since it synchronises before it replies. It sees inputs and
weights, which it copies, and room for its answers. Requests are pickled, tensors as memory that both have open; replies
are JSON, so that the judge runs nothing that a candidate has written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing.forkserver
import os
import signal
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure

from judge.source import BUILD, RAISED, build_failure, last_line, load, make, set_precision

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune"}
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # written before each timed call, more than twice a GPU's last cache
MANY_BYTES = 1 << 30  # a process that keeps more memory unused gives it back to the device
Event, perf_counter = torch.cuda.Event, time.perf_counter
# Each contender's process is a copy of one that has loaded torch, and never touches the GPU.
multiprocessing.set_forkserver_preload(["torch", "judge.worker"])


class Rejected(Exception):
    """The candidate is wrong, for the reasons given. `kind`: "wrong", BUILD, "raised" or "memory"."""

    def __init__(self, *reasons: str, kind: str = "wrong"):
        super().__init__(*reasons)
        self.kind = kind


def on_storage(x: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the same shape, strides and offset."""
    empty = torch.empty(0, dtype=x.dtype, device=storage.device)
    return empty.set_(storage, x.storage_offset(), x.shape, x.stride())


def shared(x: torch.Tensor, by_ipc: bool) -> torch.Tensor:
    """A copy that another process can open: on the GPU by CUDA IPC, on the host as a file without a name."""
    storage = x.detach().untyped_storage()
    if not storage.nbytes():
        storage = torch.UntypedStorage(1, device=x.device)
    if by_ipc:
        return on_storage(x, storage.clone())
    file = os.memfd_create("judge")  # in a container /dev/shm, which PyTorch takes, may be small
    os.truncate(file, storage.nbytes())
    opened = torch.UntypedStorage.from_file(f"/proc/{os.getpid()}/fd/{file}", True, storage.nbytes())
    copy = on_storage(x, opened.copy_(storage))
    weakref.finalize(copy, os.close, file)
    return copy


def reduced(storage: torch.UntypedStorage) -> tuple:
    """How the host's memory is pickled in a request; a GPU's is by PyTorch."""
    if not storage.filename:
        return reductions.reduce_storage(storage)  # of a constructor's argument
    return torch.UntypedStorage.from_file, (storage.filename, True, storage.nbytes())


ForkingPickler.register(torch.UntypedStorage, reduced)


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
    order: tuple = (0,)  # of the calls: which set of inputs each gets; the answers to set 0 and the last are compared
    instance: int = 0
    mode: str = "eval"  # or "train" or "inference"
    whose: str = ""  # "nobody's", "parameters", "inputs" or "all": gradients are asked of; those of the direction
    # "both"; "one", gate 1 alone (to these the Model must have an answer); "either": close to the Model, or as near to
    # float64 as gate 2 asks where the Model is itself far off; "finite": the same with all that is not finite equal.
    gate: str = "either"
    timed: bool = False  # its answers are those handed over while the clock runs: of a backward pass gradients alone
    finite: bool = False  # not asked where the Model's answer is not finite
    poison: bool = False  # memory is full of NaN
    stream: bool = False  # on another stream, and with inputs that come late
    move: bool = False  # the weights move in memory first
    again: bool = False  # a second backward pass of one graph
    expanded: bool = False  # the incoming gradient is the same along the first dimension, and lies in memory once
    refusable: bool = False  # who refuses it with an error is not wrong


class Answer(NamedTuple):
    """What one call gives: outputs, then gradients, by name, and their forms before anything touched them."""

    leaves: dict[str, object]
    forms: list[dict]
    tree: str
    inputs: int  # which set of them it got
    spoiled: bool  # whether the backward pass wrote the incoming gradients; asked in poisoned memory
    draws: bool  # whether PyTorch's random numbers were drawn meanwhile, in this call or another

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]


def answers_of(module, sets: list[list], request: Request) -> list[Answer]:
    """All forward passes of a request, then all backward passes; the answers that are compared."""
    wanted, calls, answers = [wanted_of(module, inputs, request) for inputs in sets], [], []
    states = rng_state()
    with torch.inference_mode() if request.mode == "inference" else contextlib.nullcontext():
        for position, i in enumerate(request.order):
            with torch.set_grad_enabled(request.direction != "forward"):
                result = module(*sets[i])
            if i == 0 or position == len(request.order) - 1:
                calls.append((i, result, [form_of(leaf) for leaf in tree_leaves(result)]))
            del result
    for i, result, forms in calls:
        named = wanted[i]
        leaves, roots, spoiled = tree_leaves(result), roots_of(result), False
        found = {f"output {i}" if len(leaves) > 1 else "output": leaf for i, leaf in enumerate(leaves)}
        incoming = [normal_like(x, request) for x in roots] if request.direction == "forward_backward" and named else []
        if incoming:
            for _ in range(request.again):
                torch.autograd.grad(roots, list(named.values()), incoming, allow_unused=True, retain_graph=True)
            gradients = torch.autograd.grad(roots, list(named.values()), incoming, allow_unused=True)
            spoiled = request.poison and any(not same_bits(x, normal_like(x, request)) for x in incoming)
            found, forms = ({}, []) if request.timed else (found, forms)
            found |= {f"gradient of {name}": gradient for name, gradient in zip(named, gradients)}
            forms = forms + [form_of(gradient) for gradient in gradients]
        found = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in found.items()}
        answers.append(Answer(found, forms, str(tree_structure(result)), i, spoiled, rng_state() != states))
    return answers


def wanted_of(module: torch.nn.Module, inputs: list, request: Request) -> dict[str, torch.Tensor]:
    """What gradients are asked of, by name."""
    whose = request.whose or {"forward": "nobody's", "forward_recorded": "parameters"}.get(request.direction, "all")
    tensors = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
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


def roots_of(result) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def form_of(leaf) -> dict:
    """What is known of a value before anything touches it: a subclass may compute when more than its type is asked."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return {"type": type(leaf).__name__, "value": "" if isinstance(leaf, torch.Tensor) else repr(leaf)}
    strides = leaf.stride() if leaf.layout == torch.strided and leaf.numel() else ()
    form = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type, "layout": str(leaf.layout)}
    form["stride"] = [stride if size > 1 else 0 for size, stride in zip(leaf.shape, strides)]  # of one element: any
    return {"type": "Tensor", **form, "requires_grad": leaf.requires_grad}


def state_of(module: torch.nn.Module) -> dict[str, str]:
    """What the state_dict consists of. A buffer is no parameter and has no requires_grad."""
    trained = {name: p.requires_grad for name, p in module.named_parameters()}
    state = module.state_dict().items()
    return {name: f"requires_grad {trained.get(name)}, shape {list(x.shape)}, {x.dtype}" for name, x in state}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def rng_state() -> list:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []]


def settle(device: str) -> None:
    """Waits for the GPU, and gives much unused memory back to it: the other processes need it."""
    if device == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MANY_BYTES:
            torch.cuda.empty_cache()


def poison_memory(device: str, like: list, on: bool) -> None:
    """Fills blocks of these sizes with NaN and frees them, and has PyTorch fill what torch.empty gives."""
    torch._C._set_deterministic_algorithms(on, warn_only=True)  # torch's own function imports a compiler: seconds
    torch.utils.deterministic.fill_uninitialized_memory = on
    blocks = [torch.full_like(x, float("nan"), device=device) for x in like if on and x.is_floating_point()]
    del blocks


def settings() -> dict[str, object]:
    """What a candidate must leave as it was, for whoever else runs in its process."""
    cudnn, gpu = torch.backends.cudnn, torch.cuda.is_initialized()
    return {
        "the default dtype": torch.get_default_dtype(),
        "the float32 matmul precision": torch._C._get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32(),
        "cuDNN's benchmark mode": [cudnn.enabled, cudnn.benchmark],
        "determinism": [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic],
        "the number of threads": torch.get_num_threads(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": [torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")],
        "the cores this process may use": sorted(os.sched_getaffinity(0)),
        "the trace or profile function": [sys.gettrace(), sys.getprofile()],
        "the torch function modes": torch._C._len_torch_function_stack(),  # a default device is one
        "the torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "the hooks on all modules": len(torch.nn.modules.module._global_forward_hooks),
        "the current directory": os.getcwd(),
        "the current stream": torch.cuda.current_stream().cuda_stream if gpu else 0,
    }


class Contender:
    """Answers the judge's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device, self.gpu, self.settings = role, device, device == "cuda", settings()
        self.loaded = None
        self.rest()

    def load(self, path: Path, name: str, constants: dict, arguments, level, dtype, seed, like: dict | None) -> dict:
        """Imports a contender's file, the build included, if that is not done; makes its module.

        For a candidate two of them, and says what of their state has `other` values than the Model's, `like`.
        """
        self.rest()
        set_precision(level)
        self.settings = settings()
        if self.loaded != (path, constants):
            self.loaded, begin = None, perf_counter()
            module = load(path)
            vars(module).update(constants)
            self.cls = getattr(module, name)
            self.loaded, self.seconds = (path, constants), perf_counter() - begin
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        count = 1 if like is None else 2
        self.modules = [make(self.cls, arguments, seed).to(self.device, dtype) for _ in range(count)]
        self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.timed, mode=COMPILE_MODES[self.role], dynamic=False)
        state = self.modules[0].state_dict()
        other = [name for name, x in (like or {}).items() if name in state and not same_bits(state[name], self._own(x))]
        return {"seconds": self.seconds, "state": state_of(self.modules[0]), "other": other}

    def rest(self, given=None) -> dict:
        """Forgets what was timed; as after every request, much unused memory goes back to the device."""
        self.ring, self.given, self.answers, self.kept, self.incoming = [], [], [], [], []
        self.graph = self.buffer = None
        return {}

    def set_weights(self, state: dict, instance: int | None) -> dict:
        for module in self.modules if instance is None else [self.modules[instance]]:
            module.load_state_dict(self._own(state), strict=True)
        return {}

    def call(self, request: Request, sets: list, answers: list) -> dict:
        """Puts a request to the module; copies the answers to where they belong."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls: none must end in eager mode
        module = self.modules[request.instance].train(request.mode == "train")
        if request.move:  # as `.to` moves weights: they stay the same objects
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = tensor.detach().clone()
        inputs, backward = self._own(sets), request.direction == "forward_backward"
        for p in module.parameters() if backward else ():
            p.grad = torch.full_like(p, 0.5)

        def watched() -> dict[str, torch.Tensor | None]:
            found = {f"input {i}": x for each in inputs for i, x in enumerate(each) if isinstance(x, torch.Tensor)}
            found |= dict(module.named_buffers()) if request.mode == "eval" else {}
            found |= {f"the .grad of {name}": p.grad for name, p in module.named_parameters() if backward}
            return found | dict(module.named_parameters())

        bits = {name: x.detach().clone() for name, x in watched().items() if request.poison}
        before = {name: (x, x._version) for name, x in watched().items()}
        poison_memory(self.device, answers[0], request.poison)
        with self._late(inputs) if request.stream else contextlib.nullcontext():
            found = answers_of(module, inputs, request)
            for answer, places in zip(found, answers):
                self._hand_over(list(answer.leaves.values()), answer.forms, places)
        poison_memory(self.device, [], False)
        now, wrong = watched(), []
        for name, (x, version) in before.items():
            if now.get(name) is not x or x._version != version or name in bits and not same_bits(x, bits[name]):
                wrong.append(f"writes {name}, which a call must leave alone")
        if any(answer.spoiled for answer in found):
            wrong.append("writes the gradient that comes in, which a call must leave alone")
        module.zero_grad()
        module.eval()
        forms = [answer.forms for answer in found]
        return {"forms": forms, "tree": found[0].tree, "wrong": wrong, "draws": found[-1].draws}

    def ready(self, request: Request, ring: list, answers: list, seconds: float) -> dict:
        """Sets the calls to be timed up and makes them for so many seconds: compilers compile, clocks settle."""
        self.rest()
        self.direction, self.given, self.answers = request.direction, ring, answers
        self.ring = self._own(ring)
        self.wanted = [list(wanted_of(self.modules[0], each, request).values()) for each in self.ring]
        if request.direction == "forward_backward" and self.wanted[0]:
            self.incoming = [normal_like(x, request) for x in roots_of(self.modules[0](*self.ring[0]))]
        self.buffer = torch.empty(FLUSH_BYTES[self.device], dtype=torch.uint8, device=self.device)
        if self.role == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
            tree_map_only(torch.Tensor, torch._dynamo.mark_static_address, self.ring[0])
        if self.role == "cudagraph":
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):
                    self._timed_call(0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                answer = self._timed_call(0)
            self.graph = graph, answer
        self._claims(1, 1)
        begin, marks = perf_counter(), []
        while len(marks) < 9 or perf_counter() - begin < seconds:
            marks += self._claims(1, 1)
        reply = dict(zip(("ms", "host_us", "flush_ms"), (statistics.median(column) for column in zip(*marks))))
        if self.gpu:
            self.kept = []
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._timed_call(0)
            torch.cuda.synchronize()
            reply["peak"] = torch.cuda.max_memory_allocated() - before
        return reply

    def warm_up(self) -> dict:
        """One call on the inputs of the turn before; then takes the new ones.

        So no timed call waits for memory, nor for addresses that the GPU forgot while others had their turn.
        """
        self._timed_call(0)
        for mine, given in zip(sum(self.ring, []), sum(self.given, [])):
            if isinstance(mine, torch.Tensor) and mine.numel():
                mine.untyped_storage().copy_(given.untyped_storage())
        self.gpu and torch.cuda.synchronize()
        return {}

    def time(self, count: int, flushes: int) -> dict:
        """Milliseconds of so many calls, by this process's own clock. The judge holds its own against their sum."""
        return {"ms": [ms for ms, _, _ in self._claims(count, flushes)]}

    def answer(self, index: int) -> dict:
        """Hands one of the answers just timed over."""
        leaves, self.kept = self.kept[index], []
        forms = [form_of(leaf) for leaf in leaves]
        self._hand_over(leaves, forms, self.answers)
        return {"forms": forms}

    def profile(self, path: str) -> dict:
        """What ten calls consist of, by torch.profiler, as a table. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for i in range(10):
                self._timed_call(i)
            settle(self.device)
        found.export_chrome_trace(path)
        by = "self_device_time_total" if self.gpu else "self_cpu_time_total"
        return {"table": found.key_averages().table(sort_by=by, row_limit=20)}

    def _timed_call(self, index: int) -> list:
        """The outputs, or of a backward pass the gradients: the outputs beside them would take memory."""
        if self.graph:
            self.graph[0].replay()
            return self.graph[1]
        index = 0 if self.role == "max-autotune" else index % len(self.ring)
        with torch.set_grad_enabled(self.direction != "forward"):
            result = self.timed(*self.ring[index])
        if self.incoming:
            result = torch.autograd.grad(roots_of(result), self.wanted[index], self.incoming, allow_unused=True)
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(result)]

    def _claims(self, count: int, flushes: int) -> list[tuple]:
        """Of each call its milliseconds, the host's microseconds, the flush's milliseconds. On a GPU all are queued."""
        self.kept, marks = [], []
        for i in range(count):
            events = [Event(enable_timing=True) for _ in range(3)] if self.gpu else []
            if self.gpu:
                # Lines that a kernel marked to be evicted last would outlive the flush.
                ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
                events[0].record()
            for _ in range(flushes):  # overwrites at least twice what the last cache holds
                self.buffer.zero_()
            self.gpu and events[1].record()
            begin = perf_counter()
            self.kept.append(self._timed_call(i))
            host = perf_counter() - begin
            self.gpu and events[2].record()
            marks.append((events, host))
        if not self.gpu:
            return [(1e3 * host, 1e6 * host, 0.0) for _, host in marks]
        torch.cuda.synchronize()
        return [(start.elapsed_time(end), 1e6 * host, begin.elapsed_time(start)) for (begin, start, end), host in marks]

    @contextlib.contextmanager
    def _late(self, sets: list):
        """Another stream, on which the inputs are NaN until long after the calls were launched."""
        tensors = [x.data for x in tree_leaves(sets) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        values = [x.clone() for x in tensors]
        for x in tensors:
            x.fill_(float("nan"))
        busy = torch.empty(FLUSH_BYTES["cuda"], dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(64):
                busy.zero_()  # milliseconds of work ahead: whoever does not wait for this stream reads the NaN
            for x, value in zip(tensors, values):
                x.copy_(value)
            yield

    def _own(self, given):
        """Copies in this process's own memory, as far off any alignment."""

        def own(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            return on_storage(x, storage.clone() if x.device.type == self.device else storage.to(device=self.device))

        return tree_map_only(torch.Tensor, own, given)

    def _hand_over(self, leaves: list, forms: list[dict], answers: list) -> None:
        """Copies tensors of the expected form to the judge's."""
        tensors = [leaf.detach() for leaf, form in zip(leaves, forms) if form["type"] == "Tensor"]
        for leaf, answer in zip(tensors, answers):
            if (leaf.shape, leaf.dtype, leaf.layout) == (answer.shape, answer.dtype, torch.strided):
                answer.copy_(leaf)
        self.gpu and torch.cuda.synchronize()


def serve(role: str, device: str, requests, replies) -> None:
    """The life of a contender's process."""
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays among its descendants
    os.dup2(2, 1)  # stdout is the table's
    warnings.filterwarnings("ignore")
    server, tracker = multiprocessing.forkserver._forkserver, resource_tracker._resource_tracker
    os.close(server._forkserver_alive_fd)  # pipes of the judge's: who needs a server here starts one of its own
    os.close(tracker._fd)
    server._forkserver_alive_fd = tracker._fd = None
    contender = Contender(role, device)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the judge has ended
        while True:
            command, arguments = requests.recv()
            try:
                reply = getattr(contender, command)(**arguments)
                if command not in ("time", "warm_up"):
                    now = settings()
                    changed = [(name, was) for name, was in contender.settings.items() if now[name] != was]
                    reply["changed"] = [f"changes {name} from {was} to {now[name]}" for name, was in changed]
                if command not in ("time", "warm_up", "answer"):
                    settle(device)
            except RAISED as error:
                at_import = contender.loaded is None
                failure = build_failure(error)
                kind = BUILD if failure else "memory" if isinstance(error, torch.OutOfMemoryError) else "raised"
                said = f"build failed: {failure}" if failure else f"raised {last_line(error)}"
                reply = {"kind": kind, "said": said + " at import" * at_import}
            arguments = None  # PyTorch keeps the judge's memory for as long as this process has it open
            replies.send_bytes(json.dumps(reply).encode())


class Worker:
    """A contender's process, as the judge sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        context = multiprocessing.get_context("forkserver")
        self.role, self.timeout, self._asked = role, timeout, None
        theirs, self._requests = context.Pipe(duplex=False)
        self._replies, mine = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(role, device, theirs, mine), daemon=True)
        self._process.start()
        theirs.close()
        mine.close()

    def ask(self, command: str, **arguments) -> dict:
        self.send(command, **arguments)
        return self.reply()

    def send(self, command: str, **arguments) -> None:
        """Lets the process go on with this to do, as soon as it has done what it was sent before."""
        with contextlib.suppress(Rejected):
            self._asked and self.reply()
        self._signal(signal.SIGCONT)
        self._asked = command
        with contextlib.suppress(BrokenPipeError):  # the reply says so
            self._requests.send((command, arguments))

    def reply(self) -> dict:
        """Waits for the answer, and stops the process again."""
        command, self._asked = self._asked, None
        patience = self.timeout * (10 if command in ("load", "ready") else 1)
        try:
            if not self._replies.poll(patience):
                self.kill()
                raise Rejected(f"gave no answer to '{command}' within {patience:g} seconds (--timeout): it hangs")
            reply = json.loads(self._replies.recv_bytes(1 << 24))
        except EOFError as error:
            self._process.join(2)
            code = self._process.exitcode or 0
            ending = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise Rejected(f"ended its process {ending}, and gave no answer to '{command}'") from error
        except (OSError, ValueError):  # longer than a reply may be, not of the pipe's form, no JSON
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers")
        self._signal(signal.SIGSTOP)
        if "kind" in reply:
            raise Rejected(reply["said"], kind=reply["kind"])
        if (changed := reply.pop("changed", [])) and self.role == "new":
            self.kill()
            raise Rejected(*changed)
        return reply

    def has_ipc(self) -> bool:
        """Whether it can open this process's memory of the GPU."""
        try:
            return self.ask("rest", given=shared(torch.zeros(1, device="cuda"), by_ipc=True)) == {}
        except (Rejected, RuntimeError):
            self.kill()
            return False

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        for pid in self.strays():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()  # it may have no group of its own yet
        self._signal(signal.SIGKILL)
        self._process.join(5)

    def strays(self) -> list[int]:
        """Descendants outside the process group: they go on while the group is stopped."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _, parent, group, *_ = path.read_text().rpartition(")")[2].split()
                parents[int(path.parent.name)] = int(parent), int(group)
        family = {self._process.pid}
        for _ in range(3):
            family |= {pid for pid, (parent, _) in parents.items() if parent in family}
        return [pid for pid in family if pid in parents and parents[pid][1] != self._process.pid]

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)
