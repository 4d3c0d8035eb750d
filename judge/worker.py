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
from multiprocessing import connection, resource_tracker
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch.multiprocessing import reductions
from torch.utils._pytree import tree_flatten

from judge.source import BUILD, RAISED, build_failure, last_line, load, make, set_precision

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune"}
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}  # written before each timed call, more than twice a GPU's last cache
MANY_BYTES = 1 << 30  # a process that keeps more memory unused gives it back to the device
Event, perf_counter = torch.cuda.Event, time.perf_counter


class Rejected(Exception):
    """The candidate is wrong, for the reasons given. `kind`: "wrong", BUILD, "raised" or "memory"."""

    def __init__(self, *reasons: str, kind: str = "wrong"):
        super().__init__(*reasons)
        self.kind = kind


# ---- memory that both sides see


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
    path = f"/proc/{os.getpid()}/fd/{file}"
    copy = on_storage(x, torch.UntypedStorage.from_file(path, True, storage.nbytes()).copy_(storage))
    copy.path = path
    weakref.finalize(copy, os.close, file)
    return copy


def opened(path: str, nbytes: int, dtype: torch.dtype, *form) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(torch.UntypedStorage.from_file(path, True, nbytes), *form)


def reduced(x: torch.Tensor) -> tuple:
    """How a tensor is pickled in a request."""
    if not hasattr(x, "path"):
        return reductions.reduce_tensor(x)
    return opened, (x.path, x.untyped_storage().nbytes(), x.dtype, x.storage_offset(), x.shape, x.stride())


ForkingPickler.register(torch.Tensor, reduced)


def own(x, device: str):
    """A copy in this process's own memory, as far off any alignment."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    return on_storage(x, storage.clone() if x.device.type == device else storage.to(device=device))


# ---- what the judge does with the Model and a worker with its module


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

    def kept(self) -> list[int]:
        """The calls whose answers are compared."""
        return [i for i, which in enumerate(self.order) if which == 0 or i == len(self.order) - 1]

    def gradients(self) -> str:
        return self.whose or {"forward": "nobody's", "forward_recorded": "parameters"}.get(self.direction, "all")


def forward(module, inputs: list, direction: str):
    with torch.set_grad_enabled(direction != "forward"):
        return module(*inputs)


def roots_of(result) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def gradients(result, wanted: list, incoming: list, again: bool = False) -> tuple:
    """Of all that is wanted; with `again` those that the same graph gives when it is asked a second time."""
    if again:
        torch.autograd.grad(roots_of(result), wanted, incoming, allow_unused=True, retain_graph=True)
    return torch.autograd.grad(roots_of(result), wanted, incoming, allow_unused=True)


def wanted_of(module: torch.nn.Module, inputs: list, whose: str) -> dict[str, torch.Tensor]:
    """What gradients are asked of, by name."""
    tensors = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    floating = {name: x for name, x in tensors.items() if x.is_floating_point() or x.is_complex()}
    for x in floating.values():
        x.requires_grad_(whose in ("all", "inputs"))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return (floating if whose in ("all", "inputs") else {}) | (trained if whose in ("all", "parameters") else {})


def form_of(leaf) -> dict:
    """What is known of a value before anything touches it: a subclass may compute when more than its type is asked."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return {"type": type(leaf).__name__, "value": "" if isinstance(leaf, torch.Tensor) else repr(leaf)}
    strides = leaf.stride() if leaf.layout == torch.strided and leaf.numel() else ()
    form = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type, "layout": str(leaf.layout)}
    form["stride"] = [stride if size > 1 else 0 for size, stride in zip(leaf.shape, strides)]  # of one element: any
    return {"type": "Tensor", **form, "requires_grad": leaf.requires_grad}


@dataclass
class Answer:
    """What one call gives: outputs, then gradients, by name, and their forms before anything touched them."""

    leaves: dict[str, object]
    forms: list[dict]
    tree: str
    incoming: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]


def answers_of(module, sets: list[list], request: Request, incoming: Callable) -> list[Answer]:
    """All forward passes of a request, then all backward passes; the answers that are compared.

    `incoming` gives the incoming gradients of an answer by its number and the outputs that have one.
    """
    wanted, calls, answers = [wanted_of(module, inputs, request.gradients()) for inputs in sets], [], []
    with torch.inference_mode() if request.mode == "inference" else contextlib.nullcontext():
        for position, i in enumerate(request.order):
            result = forward(module, sets[i], request.direction)
            if position in request.kept():
                calls.append((wanted[i], result, [form_of(leaf) for leaf in tree_flatten(result)[0]]))
            del result
    for number, (named, result, forms) in enumerate(calls):
        leaves, tree = tree_flatten(result)
        single = isinstance(result, torch.Tensor)
        found = {"output" if single else f"output {i}": leaf for i, leaf in enumerate(leaves)}
        given = incoming(number, roots_of(result)) if request.direction == "forward_backward" and named else []
        if given:
            backward = gradients(result, list(named.values()), given, request.again)
            found |= {f"gradient of {name}": gradient for name, gradient in zip(named, backward)}
            forms += [form_of(gradient) for gradient in backward]
        found = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in found.items()}
        answers.append(Answer(found, forms, str(tree), given))
    return answers


def state_of(module: torch.nn.Module, like: dict[str, torch.Tensor]) -> dict[str, list]:
    """Of each tensor in the state_dict: shape, dtype, whether it is trained (None: no parameter), is as in `like`."""
    trained, state = {name: p.requires_grad for name, p in module.named_parameters()}, module.state_dict()
    same = {name: name in like and same_bits(x, like[name].to(x.device)) for name, x in state.items()}
    return {name: [list(x.shape), str(x.dtype), trained.get(name), same[name]] for name, x in state.items()}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def random_states() -> list:
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


def settings() -> dict[str, str]:
    """What a candidate must leave as it was, for whoever else runs in its process."""
    cudnn, gpu = torch.backends.cudnn, torch.cuda.is_initialized()
    found = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
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
        "the torch function modes": torch._C._len_torch_function_stack(),
        "the torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "the hooks on all modules": len(torch.nn.modules.module._global_forward_hooks),
        "the current directory": os.getcwd(),
        "the current stream": torch.cuda.current_stream().cuda_stream if gpu else 0,
    }
    return {name: str(value) for name, value in found.items()}


# ---- the process


class Contender:
    """Answers the judge's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device, self.gpu, self.settings = role, device, device == "cuda", settings()
        self.rest()

    def changed_settings(self) -> list[str]:
        before, self.settings = self.settings, settings()
        changed = [name for name, value in self.settings.items() if before[name] != value]
        return [f"changes {name} from {before[name]} to {self.settings[name]}" for name in changed]

    def load(self, path: Path, name: str, constants: dict, made: dict | None = None) -> dict:
        """Imports a contender's file, the build included, and makes its module if that is asked for too."""
        begin = perf_counter()
        module = load(path)
        vars(module).update(constants)
        self.cls = getattr(module, name)
        seconds = perf_counter() - begin
        made and self.make(**made)
        return {"seconds": seconds}

    def make(self, arguments: list, level: str, dtype: torch.dtype, seed: int, like=None, instances: int = 1) -> dict:
        """Instances of the module, and with `like` how their state compares with it."""
        self.rest()
        set_precision(level)
        self.settings = settings()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self.modules = [make(self.cls, arguments, seed).to(self.device, dtype) for _ in range(instances)]
        self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.timed, mode=COMPILE_MODES[self.role], dynamic=False)
        return {"state": state_of(self.modules[0], like) if like is not None else {}}

    def rest(self, given=None) -> dict:
        """Forgets what was timed; as after every request, much unused memory goes back to the device."""
        self.ring, self.given, self.answers, self.kept, self.incoming = [], [], [], [], []
        self.graph = self.buffer = None
        return {}

    def set_weights(self, state: dict, instance: int | None) -> dict:
        for module in self.modules if instance is None else [self.modules[instance]]:
            module.load_state_dict({name: own(x, self.device) for name, x in state.items()}, strict=True)
        return {}

    def call(self, request: Request, sets: list, incoming: list, answers: list) -> dict:
        """Puts a request to the module; copies the answers to where they belong."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls: none must end in eager mode
        module = self.modules[request.instance].train(request.mode == "train")
        if request.move:  # as `.to` moves weights: they stay the same objects
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = tensor.detach().clone()
        inputs, given = ([[own(x, self.device) for x in each] for each in every] for every in (sets, incoming))
        for p in module.parameters() if given else ():
            p.grad = torch.full_like(p, 0.5)

        def watched() -> dict[str, torch.Tensor | None]:
            found = {f"input {i}": x for each in inputs for i, x in enumerate(each) if isinstance(x, torch.Tensor)}
            found |= {f"the gradient that comes in for output {i}": x for each in given for i, x in enumerate(each)}
            found |= dict(module.named_buffers()) if request.mode == "eval" else {}
            found |= {f"the .grad of {name}": p.grad for name, p in module.named_parameters() if given}
            return found | dict(module.named_parameters())

        bits = {name: x.detach().clone() for name, x in watched().items() if request.poison}
        before = {name: (x, x._version) for name, x in watched().items()}
        poison_memory(self.device, answers[0], request.poison)
        states = random_states()
        with self._late(inputs) if request.stream else contextlib.nullcontext():
            found = answers_of(module, inputs, request, lambda number, roots: given[number] if given else [])
            for answer, places in zip(found, answers):
                self._hand_over(list(answer.leaves.values()), answer.forms, places)
        poison_memory(self.device, [], False)
        now, wrong = watched(), []
        for name, (x, version) in before.items():
            if now.get(name) is not x or x._version != version or name in bits and not same_bits(x, bits[name]):
                wrong.append(f"writes {name}, which a call must leave alone")
        for p in module.parameters() if given else ():
            p.grad = None
        module.eval()
        forms, draws = [answer.forms for answer in found], random_states() != states
        return {"forms": forms, "tree": found[0].tree, "wrong": wrong, "draws": draws}

    def ready(self, request: Request, ring: list, incoming: list, answers: list, seconds: float) -> dict:
        """Sets the calls to be timed up and makes them for so many seconds: compilers compile, clocks settle."""
        self.rest()
        self.direction, self.given, self.answers = request.direction, ring, answers
        self.ring = [[own(x, self.device) for x in each] for each in ring]
        self.wanted = [list(wanted_of(self.modules[0], each, request.gradients()).values()) for each in self.ring]
        self.incoming = [own(x, self.device) for x in incoming]
        self.buffer = torch.empty(FLUSH_BYTES[self.device], dtype=torch.uint8, device=self.device)
        if self.role == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
            for x in self.ring[0]:
                isinstance(x, torch.Tensor) and torch._dynamo.mark_static_address(x)
        if self.role == "cudagraph":
            self._capture()
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

    def profile(self, path: str, calls: int = 10) -> dict:
        """What a call consists of, by torch.profiler: names, launches and microseconds. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for i in range(calls):
                self._timed_call(i)
            settle(self.device)
        found.export_chrome_trace(path)
        rows = []
        for event in found.key_averages():
            if (event.device_type == torch.autograd.DeviceType.CUDA) == self.gpu:
                us = event.self_device_time_total if self.gpu else event.self_cpu_time_total
                rows.append([event.key, event.count / calls, us / calls])
        return {"rows": rows}

    def _timed_call(self, index: int) -> list:
        """The outputs, or of a backward pass the gradients: the outputs beside them would take memory."""
        if self.graph:
            self.graph[0].replay()
            return self.graph[1]
        index = 0 if self.role == "max-autotune" else index % len(self.ring)
        result = forward(self.timed, self.ring[index], self.direction)
        if self.incoming:
            result = gradients(result, self.wanted[index], self.incoming)
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(result)[0]]

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

    def _capture(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                self._timed_call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self._timed_call(0)
        self.graph = graph, answer

    @contextlib.contextmanager
    def _late(self, sets: list):
        """Another stream, on which the inputs are NaN until long after the calls were launched."""
        tensors = [x.data for each in sets for x in each if isinstance(x, torch.Tensor) and x.is_floating_point()]
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
                reply["changed"] = contender.changed_settings() if command not in ("time", "warm_up") else []
                if command not in ("time", "warm_up", "answer"):
                    settle(device)
            except RAISED as error:
                failure = build_failure(error, at_import=command == "load")
                kind = BUILD if failure else "memory" if isinstance(error, torch.OutOfMemoryError) else "raised"
                reply = {"kind": kind, "said": f"build failed: {failure}" if failure else f"raised {last_line(error)}"}
            arguments = None  # PyTorch keeps the judge's memory for as long as this process has it open
            replies.send_bytes(json.dumps(reply).encode())


# ---- the judge's side


def start_server() -> None:
    """Starts the process that the workers are copies of: it has loaded torch, and never touches the GPU."""
    multiprocessing.set_forkserver_preload(["torch", "judge.worker"])
    multiprocessing.forkserver.ensure_running()


class Worker:
    """A contender's process, as the judge sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        start_server()
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
        patience = self.timeout * (10 if command in ("load", "make", "ready") else 1)
        try:
            if not connection.wait([self._replies, self._process.sentinel], patience):
                self.kill()
                raise Rejected(f"gave no answer to '{command}' within {patience:g} seconds (--timeout): it hangs")
            reply = json.loads(self._replies.recv_bytes(1 << 24))
        except EOFError as error:
            raise Rejected(f"ended its process{self._ending()}, and gave no answer to '{command}'") from error
        except (OSError, ValueError):  # longer than a reply may be, not of the pipe's form, no JSON
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers")
        self._signal(signal.SIGSTOP)
        if "kind" in reply:
            raise Rejected(reply["said"] + " at import" * (command == "load"), kind=reply["kind"])
        if (changed := reply.pop("changed")) and self.role == "new":
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

    def _ending(self) -> str:
        self._process.join(2)
        code = self._process.exitcode or 0
        return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
