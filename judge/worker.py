"""A contender in a process of its own.

The parent (`Worker`) sends a request and waits for the answer; the process (`serve`, `Contender`) is stopped (SIGSTOP) whenever it is not its
turn. It sees inputs and weights, never the Model's answers. Tensors lie in memory that both see (`Arena`). Requests are pickled; answers are
JSON, so that the parent runs nothing that a candidate has written.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import warnings
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from judge.problem import DTYPES, RAISED, Problem, build_failure, last_line, load, make, set_precision

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune"}
WHOSE = {"forward": "nobody's", "forward_recorded": "parameters", "forward_backward": "all"}  # gradients are recorded, by direction
LATE_SECONDS = 2e-3  # how long an answer that was handed over is watched for changes
MANY_BYTES = 1 << 30  # of memory that is kept unused: more goes back to the device
Event, perf_counter = torch.cuda.Event, time.perf_counter


class Rejected(Exception):
    """The candidate is wrong, for the reasons that are the arguments. `kind` tells a build, a call that raised, and one without memory."""

    kind = "wrong"

    def of(self, kind: str) -> Rejected:
        self.kind = kind
        return self


# ---- memory that both sides see


class Place(NamedTuple):
    """Where in the arena a tensor lies: strides in elements, the offset in bytes."""

    dtype: str
    shape: tuple
    strides: tuple
    offset: int


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


class Block:
    """Memory of the host, by a file without a name, or of the GPU, by CUDA IPC. With a handle: another process's block, opened.

    The GPU's is the driver's, not PyTorch's allocator's: a process that is killed while it has a block open does not keep it from being freed.
    """

    def __init__(self, nbytes: int, on_gpu: bool, handle=None):
        self.handle = handle
        if on_gpu:
            torch.cuda.synchronize()  # there is a context from here on
            torch.cuda.empty_cache()
            pointer, ipc = ctypes.c_uint64(), IpcHandle.from_buffer_copy(handle or bytes(64))
            if handle:
                call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), ipc, ctypes.c_uint(1))
            else:
                call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
                call_driver("cuIpcGetMemHandle", ctypes.byref(ipc), pointer)
                self.handle = bytes(ipc)
            self._free = partial(call_driver, "cuIpcCloseMemHandle" if handle else "cuMemFree_v2", pointer)
            place = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3, "strides": None}
            at = type("At", (), {"__cuda_array_interface__": place})()
            self.storage = torch.as_tensor(at, device="cuda").untyped_storage()
        else:
            file = os.memfd_create("arena") if not handle else None
            if not handle:
                os.truncate(file, nbytes)
                self.handle = f"/proc/{os.getpid()}/fd/{file}"
            self._free = partial(os.close, file) if file else list
            self.storage = torch.UntypedStorage.from_file(self.handle, True, nbytes)

    def __del__(self):
        self.storage = None
        with contextlib.suppress(Exception):  # at the end of a process there may be no driver any more
            self._free()


def call_driver(name: str, *arguments) -> None:
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise (torch.OutOfMemoryError if error == 2 else RuntimeError)(f"{name} failed with error {error}")


def view(storage: torch.UntypedStorage, place: Place) -> torch.Tensor:
    empty = torch.empty(0, dtype=getattr(torch, place.dtype), device=storage.device)
    return empty.set_(storage, place.offset // empty.element_size(), place.shape, place.strides)


class Arena:
    """The parent's block, for one request at a time. Without IPC it is the host's, and copied outside the clock."""

    def __init__(self, device: str, ipc: bool):
        self.device, self.on_gpu, self.nbytes = device, ipc, 0
        self.block: Block | None = None
        self.viewers: set[Worker] = set()

    def place(self, requests: list) -> list[Place]:
        """Room for all tensors of a request, each given with its strides (None: dense) and whether it is to be off any alignment."""
        places, end = [], 0
        for like, strides, odd in requests:
            strides = strides or tuple(math.prod(like.shape[i + 1 :]) for i in range(like.dim()))
            start = -(-end // 512) * 512 + odd * like.element_size()
            extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, strides)) if like.numel() else 0
            places.append(Place(str(like.dtype).removeprefix("torch."), tuple(like.shape), strides, start))
            end = start + extent * like.element_size()
        if end > self.nbytes or end < self.nbytes // 2 and self.nbytes > MANY_BYTES:
            for worker in list(self.viewers):  # all who have the old block open close it, before there is a new one
                worker.see(None)
            self.block, self.nbytes = None, 0
            self.block, self.nbytes = Block(end, self.on_gpu), end
        return places

    def view(self, place: Place) -> torch.Tensor:
        return view(self.block.storage, place)

    def read(self, place: Place) -> torch.Tensor:
        return self.view(place).to(self.device)


def has_ipc() -> bool:
    """Whether another process can open this one's GPU memory."""
    worker = Worker("eager", "cuda", 20.0)
    try:
        block = Block(1 << 20, on_gpu=True)
        return worker.ask("share", nbytes=1 << 20, on_gpu=True, handle=block.handle) == {}
    except (Rejected, RuntimeError):
        return False
    finally:
        worker.kill()


# ---- what the parent does with the Model and a worker with its module


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
    """What gradients are asked of, by name; inputs record one if theirs are."""
    floating = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())}
    for x in floating.values():
        x.requires_grad_(whose in ("all", "inputs"))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return (floating if whose in ("all", "inputs") else {}) | (trained if whose in ("all", "parameters") else {})


def step(module, inputs: list, direction: str, wanted: list, incoming: list) -> list:
    """One call as it is timed: the outputs, or the gradients."""
    result = forward(module, inputs, direction)
    if incoming:
        result = gradients(result, wanted, incoming)
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(result)[0]]


def form_of(leaf) -> dict:
    """What is known of a value before anything touches it."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may compute when it is asked for more than its type
        return {"type": type(leaf).__name__, "value": "" if isinstance(leaf, torch.Tensor) else repr(leaf)}
    strides = leaf.stride() if leaf.layout == torch.strided and leaf.numel() else ()
    shown = [stride if size > 1 else 0 for size, stride in zip(leaf.shape, strides)]  # of one element it means nothing
    form = {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type, "layout": str(leaf.layout), "stride": shown}
    return {"type": "Tensor", **form, "requires_grad": leaf.requires_grad}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    same_form = left.shape == right.shape and left.dtype == right.dtype
    return same_form and torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def random_states() -> list:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def give_back(device: str) -> None:
    """Hands memory that is kept unused back to the device, where it is much: the other processes need it."""
    if device == "cuda" and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MANY_BYTES:
        torch.cuda.empty_cache()


def poison_memory(device: str, like: list, on: bool) -> None:
    """Memory is full of NaN from here on: blocks of these sizes are filled and freed, and PyTorch fills what torch.empty hands out."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = on
    blocks = [torch.full_like(x, float("nan"), device=device) for x in like if on and x.is_floating_point()]
    del blocks


# What a candidate must leave as it was, for whoever else runs in its process.
SETTINGS = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the float32 matmul precision": torch._C._get_float32_matmul_precision,
    "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32,
    "cuDNN's switches": lambda: [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the number of threads": torch.get_num_threads,
    "whether gradients are recorded": torch.is_grad_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast": lambda: [torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")],
    "the cores this process may use": lambda: sorted(os.sched_getaffinity(0)),
    "the trace or profile function": lambda: [sys.gettrace(), sys.getprofile()],
    "the torch function modes": torch._C._len_torch_function_stack,
    "the torch dispatch modes": torch._C._len_torch_dispatch_stack,
    "the hooks on all modules": lambda: len(torch.nn.modules.module._global_forward_hooks),
    "the current directory": os.getcwd,
    "the current stream": lambda: torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0,
}


# ---- the process


class Contender:
    """Answers the parent's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device, self.buffer = role, device, None
        self.block: Block | None = None

    def load(self, path: Path) -> dict:
        """Imports a candidate's file, the build included."""
        self._note_settings()
        begin = perf_counter()
        self.cls = load(path).ModelNew
        return {"seconds": perf_counter() - begin, "changed": self._changed_settings()}

    def make(self, level: str, dtype: str, seed: int, arguments=None, path=None, constants=None, instances=1) -> dict:
        """Instances of the module, and the form of their state. A `path` is of the Model's own file, `arguments` are for a candidate."""
        self.modules, self.ring, self.kept = [], [], []
        set_precision(level)
        self._note_settings()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if path:
            self.problem = Problem(path, constants)
            self.cls, arguments = self.problem.module.Model, self.problem.arguments(seed)
        self.modules = [make(self.cls, arguments, seed).to(self.device, DTYPES[dtype]) for _ in range(instances)]
        self.module = self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.module, mode=COMPILE_MODES[self.role], dynamic=False)
        trained = {name: p.requires_grad for name, p in self.module.named_parameters()}
        state = {name: [list(x.shape), str(x.dtype), trained.get(name)] for name, x in self.module.state_dict().items()}
        return {"state": state, "changed": self._changed_settings()}

    def prepare(self, batch: int | None, dtype: str, directions: tuple, seed: int) -> dict:
        """One call in each direction, on inputs of its own: here a compiler compiles."""
        for direction in directions:
            inputs = self.problem.inputs(batch, self.device, DTYPES[dtype], seed)
            wanted = list(wanted_of(self.module, inputs, WHOSE[direction]).values())
            roots = roots_of(forward(self.module, inputs, direction)) if direction == "forward_backward" and wanted else []
            step(self.timed, inputs, direction, wanted, [torch.ones_like(x) for x in roots])
        return {}

    def share(self, nbytes: int = 0, on_gpu: bool = False, handle=None) -> dict:
        """Opens the parent's memory; without a handle closes it."""
        self.ring, self.block = [], None
        self.block = Block(nbytes, on_gpu, handle) if handle else None
        return {}

    def set_weights(self, places: dict, instance: int | None) -> dict:
        for module in self.modules if instance is None else [self.modules[instance]]:
            module.load_state_dict({name: self._tensor(place) for name, place in places.items()}, strict=True)
        return {}

    def get_weights(self, places: dict) -> dict:
        for name, tensor in self.module.state_dict().items():
            view(self.block.storage, places[name]).copy_(tensor)
        return {}

    def move_weights(self) -> dict:
        """To other places in memory. As with `.to`, they stay the same objects."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        for tensor, moved in zip(tensors, [tensor.detach().clone() for tensor in tensors]):
            tensor.data = moved
        return {}

    def call(self, sets, answers, incoming, order, keep, direction, mode, instance, whose, poison, stream, again) -> dict:
        """All forward passes of `order`, then all backward passes; copies the answers to `keep` to their places."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls are asked for: none must end in eager mode
        module = self.modules[instance].train(mode == "train")
        sets, incoming = ([[self._tensor(x) for x in each] for each in places] for places in (sets, incoming))
        wanted = [list(wanted_of(module, each, whose).values()) for each in sets]
        watched = {f"input {i}": x for each in sets for i, x in enumerate(each) if isinstance(x, torch.Tensor)}
        watched |= {f"the gradient that comes in for output {i}": x for each in incoming for i, x in enumerate(each)}
        watched |= dict(module.named_parameters())
        versions = {name: x._version for name, x in watched.items()}
        for p in module.parameters() if incoming else ():
            p.grad = torch.full_like(p, 0.5)
        poison_memory(self.device, [view(self.block.storage, place) for place in answers[0]], poison)
        states, results, forms = random_states(), {}, {}
        self._note_settings()
        with contextlib.ExitStack() as stack:
            if stream:
                stack.enter_context(self._late(sets))
            if mode == "inference":
                stack.enter_context(torch.inference_mode())
            for position, i in enumerate(order):
                leaves, tree = tree_flatten(forward(module, sets[i], direction))
                if position in keep:
                    results[position], forms[position] = leaves, [form_of(leaf) for leaf in leaves]
                del leaves
            for position, i in enumerate(order) if incoming else ():
                found = gradients(results[position], wanted[i], incoming[i], again)
                results[position] = [*results[position], *found]
                forms[position] += [form_of(gradient) for gradient in found]
            late = self._hand_over(results.values(), forms.values(), answers)
        changed = self._changed_settings() + [f"writes {name}" for name, x in watched.items() if x._version != versions[name]]
        for name, p in module.named_parameters() if incoming else ():
            if p.grad is None or bool((p.grad != 0.5).any()):
                changed.append(f"writes the .grad of {name}, which torch.autograd.grad leaves alone")
            p.grad = None
        poison_memory(self.device, [], False)
        module.eval()
        draws = random_states() != states
        return {"forms": list(forms.values()), "tree": str(tree), "changed": changed, "late": late, "draws": draws}

    def ready(self, ring: list, incoming: list, direction: str, seconds: float, flush_bytes: int) -> dict:
        """Sets up the calls to be timed and makes them until the seconds are over: handles, clocks and caches come to rest."""
        self.direction, self.places, self.graph, self.buffer = direction, ring, None, None
        poison_memory(self.device, [], False)
        self.ring = [[self._tensor(x) for x in each] for each in ring]
        self.wanted = [list(wanted_of(self.module, each, WHOSE[direction]).values()) for each in self.ring]
        self.incoming = [self._tensor(place) for place in incoming]
        if self.device == "cuda":
            flush_bytes = max(flush_bytes, 256 << 20, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
        self.buffer = torch.empty(flush_bytes, dtype=torch.uint8, device=self.device)
        if self.role == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
            for x in self.ring[0]:
                if isinstance(x, torch.Tensor):
                    torch._dynamo.mark_static_address(x)
        if self.role == "cudagraph":
            self._capture()
        begin, marks = perf_counter(), []
        while len(marks) < 9 or perf_counter() - begin < seconds:
            marks += self._claims(1, 1)
        ms, host_us, flush_ms = (statistics.median(column) for column in zip(*marks))
        reply = {"ms": ms, "host_us": host_us, "flush_ms": flush_ms}
        if self.device == "cuda":
            self.kept = []
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._step(0)
            torch.cuda.synchronize()
            reply["peak"] = torch.cuda.max_memory_allocated() - before
        return reply

    def time(self, count: int, flushes: int) -> dict:
        """Milliseconds of so many calls, by this process's own clock. The parent holds its own against their sum."""
        if self.block.storage.device.type != self.device:  # the inputs, which the parent has drawn anew, come from the host's memory
            for x, place in zip(sum(self.ring, []), sum(self.places, [])):
                if isinstance(place, Place):
                    x.data.copy_(view(self.block.storage, place))
        return {"ms": [ms for ms, _, _ in self._claims(count, flushes)]}

    def answer(self, index: int, places: list) -> dict:
        """Hands one of the answers just timed over."""
        leaves, self.kept = self.kept[index], []
        forms = [form_of(leaf) for leaf in leaves]
        self._hand_over([leaves], [forms], [places], watch=False)
        return {"forms": forms, "changed": self._changed_settings()}

    def release(self) -> dict:
        self.kept = []
        return {}

    def profile(self, path: str, calls: int = 10) -> dict:
        """What a call consists of, by torch.profiler: names, launches and microseconds. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for i in range(calls):
                self._step(i % len(self.ring))
            synchronize(self.device)
        found.export_chrome_trace(path)
        rows: dict[str, list] = {}
        for event in found.events():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu == (self.device == "cuda"):
                row = rows.setdefault(event.name, [0, 0.0])
                row[0] += 1 / calls
                row[1] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / calls
        return {"rows": [[name, *row] for name, row in rows.items()]}

    def _step(self, index: int) -> list:
        if self.graph:
            self.graph[0].replay()
            return self.graph[1]
        index = 0 if self.role == "max-autotune" else index % len(self.ring)
        return step(self.timed, self.ring[index], self.direction, self.wanted[index], self.incoming)

    def _claims(self, count: int, flushes: int) -> list[tuple]:
        """Of each call the milliseconds, the host's microseconds, and the milliseconds of the flush. A GPU has them all in a queue."""
        self.kept, marks, gpu = [], [], self.device == "cuda"
        for i in range(count):
            events = [Event(enable_timing=True) for _ in range(3)] if gpu else []
            gpu and events[0].record()
            self._flush(flushes)
            gpu and events[1].record()
            begin = perf_counter()
            self.kept.append(self._step(i))
            host = perf_counter() - begin
            gpu and events[2].record()
            marks.append((events, host))
        synchronize(self.device)
        if not gpu:
            return [(1e3 * host, 1e6 * host, 0.0) for _, host in marks]
        return [(start.elapsed_time(end), 1e6 * host, begin.elapsed_time(start)) for (begin, start, end), host in marks]

    def _flush(self, times: int) -> None:
        """Overwrites at least twice what the last cache holds. Lines to be evicted last would outlive it: they lose that rank first."""
        if self.device == "cuda":
            call_driver("cuCtxResetPersistingL2Cache")
        for _ in range(times):
            self.buffer.zero_()

    def _capture(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                self._step(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self._step(0)
        self.graph = graph, answer

    @contextlib.contextmanager
    def _late(self, sets: list):
        """Another stream, on which the inputs are NaN until long after the calls were launched."""
        tensors = [x.data for each in sets for x in each if isinstance(x, torch.Tensor) and x.is_floating_point()]
        values = [x.clone() for x in tensors]
        for x in tensors:
            x.fill_(float("nan"))
        busy = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(64):
                busy.zero_()  # milliseconds of work ahead: whoever does not wait for this stream reads the NaN
            for x, value in zip(tensors, values):
                x.copy_(value)
            yield

    def _hand_over(self, results, forms, answers: list, watch: bool = True) -> bool:
        """Copies tensors of the expected form to their places. True if one of them changes after that: work goes on elsewhere."""
        copies = []
        for leaves, known, places in zip(results, forms, answers):
            tensors = [leaf.detach() for leaf, form in zip(leaves, known) if form["type"] == "Tensor"]
            for leaf, place in zip(tensors, places):
                if (tuple(leaf.shape), str(leaf.dtype), leaf.layout) == (place.shape, f"torch.{place.dtype}", torch.strided):
                    copies.append((leaf, view(self.block.storage, place).copy_(leaf)))
        if watch:
            time.sleep(LATE_SECONDS)
        synchronize(self.device)
        return watch and not all(same_bits(leaf.to(copied.device), copied) for leaf, copied in copies)

    def _tensor(self, place):
        if not isinstance(place, Place):
            return place
        shared = view(self.block.storage, place)
        if shared.device.type == self.device:
            return shared
        return torch.empty_strided(place.shape, place.strides, dtype=shared.dtype, device=self.device).copy_(shared)

    def _note_settings(self) -> None:
        self.settings = {name: str(ask()) for name, ask in SETTINGS.items()}

    def _changed_settings(self) -> list[str]:
        return [f"changes {name} from {was} to {now}" for name, was in self.settings.items() if (now := str(SETTINGS[name]())) != was]


def serve(role: str, device: str, requests, replies) -> None:
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays among its descendants
    os.dup2(2, 1)  # stdout is the table's
    for name in os.listdir("/proc/self/fd"):  # pipes of the judge's other processes
        if int(name) > 2 and int(name) not in (requests.fileno(), replies.fileno()):
            with contextlib.suppress(OSError):
                os.close(int(name))
    warnings.filterwarnings("ignore")
    contender = Contender(role, device)
    while True:
        command, arguments = requests.recv()
        try:
            reply = getattr(contender, command)(**arguments)
            if command not in ("time", "answer"):
                synchronize(device if torch.cuda.is_initialized() else "cpu")
                give_back(device)
        except RAISED as error:
            failure = build_failure(error, at_import=command == "load")
            reply = {"raised": last_line(error), "build": failure, "memory": isinstance(error, torch.OutOfMemoryError)}
        replies.send_bytes(json.dumps(reply).encode())


# ---- the parent's side


class Worker:
    """A contender's process, as the parent sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "judge.worker"])
        self.role, self.timeout, self.asked, self.pending = role, timeout, "", False
        self.arena: Arena | None = None
        self.import_seconds: float | None = None
        theirs, self._requests = context.Pipe(duplex=False)
        self._replies, mine = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(role, device, theirs, mine), daemon=True)
        self._process.start()
        theirs.close()
        mine.close()

    def send(self, command: str, **arguments) -> None:
        """Lets the process go on, with this to do."""
        self._signal(signal.SIGCONT)
        self.asked, self.pending = command, True
        try:
            self._requests.send((command, arguments))
        except OSError as error:
            raise Rejected(self._ending()) from error

    def hear(self) -> dict:
        """The answer to what was sent. The process is stopped again."""
        self.pending = False
        patience = self.timeout * (10 if self.asked in ("load", "make", "prepare", "ready") else 1)
        if not connection.wait([self._replies, self._process.sentinel], patience):
            self.kill()
            raise Rejected(f"gave no answer to '{self.asked}' within {patience:g} seconds (--timeout): it hangs")
        try:
            reply = json.loads(self._replies.recv_bytes(1 << 24))
        except EOFError as error:
            raise Rejected(self._ending()) from error
        except (OSError, ValueError):
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers")
        self._signal(signal.SIGSTOP)
        if reply.get("build"):
            raise Rejected(f"build failed: {reply['build']}").of("build failed")
        if "raised" in reply:
            kind = "memory" if reply.get("memory") else "raised"
            raise Rejected(f"raised {reply['raised']}" + " at import" * (self.asked == "load")).of(kind)
        return reply

    def ask(self, command: str, **arguments) -> dict:
        self.send(command, **arguments)
        return self.hear()

    def see(self, arena: Arena | None) -> None:
        """Opens the arena's block, if it has not; with None closes what it has open."""
        if self.arena and arena is None:
            self.arena.viewers.discard(self)
            if self.alive():
                self.ask("share")
        elif arena and self not in arena.viewers:
            self.ask("share", nbytes=arena.nbytes, on_gpu=arena.on_gpu, handle=arena.block.handle)
            arena.viewers.add(self)
        self.arena = arena

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        if self.arena:
            self.arena.viewers.discard(self)
        for pid in [*self.strays(), self._process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
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
        code = self._process.exitcode
        how = "" if code is None else f" by signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return f"ended its process{how}, and gave no answer to '{self.asked}'"
