"""A contender in a process of its own.

The parent (`Worker`) sends a request and waits for the answer. The process (`serve`, `Contender`) is stopped (SIGSTOP)
whenever it is not its turn; it has nothing in flight then, since it synchronises before it answers. It sees inputs and
weights, never the Model's answers. Tensors lie in memory that both see (`Arena`). Requests are pickled; answers are
JSON, so that the parent runs nothing that a candidate has written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import math
import multiprocessing.forkserver
import os
import signal
import statistics
import sys
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from judge.source import DTYPES, RAISED, build_failure, last_line, load, make, set_precision

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
COMPILE_MODES = {"compile": None, "max-autotune": "max-autotune"}
LATE_SECONDS = 2e-3  # how long an answer that was handed over is watched for changes
CPU_FLUSH_BYTES = 64 << 20  # written before each timed call
MANY_BYTES = 1 << 30  # a process that keeps more memory unused gives it back to the device
Event, perf_counter = torch.cuda.Event, time.perf_counter


class Rejected(Exception):
    """The candidate is wrong, for the reasons given. `kind`: "wrong", "build failed", "raised" or "memory"."""

    def __init__(self, *reasons: str, kind: str = "wrong"):
        super().__init__(*reasons)
        self.kind = kind


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
    """The host's memory, by a nameless file, or of the GPU, by CUDA IPC. With a handle another process's, opened.

    The GPU's comes from the driver: PyTorch's allocator would keep it while a process that was killed had it open.
    """

    def __init__(self, nbytes: int, on_gpu: bool, handle=None):
        self.nbytes, self.on_gpu, self.handle = nbytes, on_gpu, handle
        if on_gpu:
            torch.cuda.synchronize()  # this process has a context from here on
            torch.cuda.empty_cache()
            pointer, ipc = ctypes.c_uint64(), IpcHandle.from_buffer_copy(handle or bytes(64))
            if handle:
                call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), ipc, ctypes.c_uint(1))
            else:
                call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
                call_driver("cuIpcGetMemHandle", ctypes.byref(ipc), pointer)
                self.handle = bytes(ipc)
            self._free = functools.partial(call_driver, "cuIpcCloseMemHandle" if handle else "cuMemFree_v2", pointer)
            data = {"data": (pointer.value, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3}
            array = type("Array", (), {"__cuda_array_interface__": data})()
            self.storage = torch.as_tensor(array, device="cuda").untyped_storage()
        else:
            file = None if handle else os.memfd_create("arena")
            if not handle:
                os.truncate(file, nbytes)
                self.handle = f"/proc/{os.getpid()}/fd/{file}"
            self._free = list if handle else functools.partial(os.close, file)
            self.storage = torch.UntypedStorage.from_file(self.handle, True, nbytes)

    def view(self, place: Place) -> torch.Tensor:
        empty = torch.empty(0, dtype=getattr(torch, place.dtype), device=self.storage.device)
        return empty.set_(self.storage, place.offset // empty.element_size(), place.shape, place.strides)

    def __del__(self):
        self.storage = None
        with contextlib.suppress(Exception):  # at the end of a process the driver may be gone
            self._free()


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *arguments) -> None:
    if error := getattr(driver(), name)(*arguments):
        raise (torch.OutOfMemoryError if error == 2 else RuntimeError)(f"{name} failed with error {error}")


class Arena:
    """The parent's block, for one request at a time. Without CUDA IPC it is the host's, copied outside the clock."""

    def __init__(self, device: str):
        self.device, self.on_gpu = device, False
        self.block: Block | None = None
        self.viewers: set[Worker] = set()  # who have the block open
        if device == "cuda":
            self.on_gpu = self._has_ipc()

    def place(self, requests: list) -> list[Place]:
        """Room for tensors, each given with its strides (None: dense) and whether it is to lie off any alignment."""
        places, end = [], 1
        for like, strides, odd in requests:
            strides = strides or tuple(math.prod(like.shape[i + 1 :]) for i in range(like.dim()))
            start = -(-end // 512) * 512 + odd * like.element_size()
            extent = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, strides)) if like.numel() else 0
            places.append(Place(str(like.dtype).removeprefix("torch."), tuple(like.shape), strides, start))
            end = start + extent * like.element_size()
        has = self.block.nbytes if self.block else 0
        if end > has or end < has // 2 and has > MANY_BYTES:
            for worker in list(self.viewers):  # before there is a new block all have closed the old one
                worker.close_block()
            self.block = None
            self.block = Block(end, self.on_gpu)
        return places

    def view(self, place: Place) -> torch.Tensor:
        return self.block.view(place)

    def read(self, place: Place) -> torch.Tensor:
        return self.block.view(place).to(self.device)

    def _has_ipc(self) -> bool:
        """Whether another process can open this one's GPU memory."""
        self.on_gpu, worker = True, Worker("eager", self, 60.0)
        try:
            self.place([])
            return worker.ask("rest") == {}
        except (Rejected, RuntimeError):
            self.block = None
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
    """What gradients are asked of, by name; `whose`: "nobody's", "parameters", "inputs" or "all"."""
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


def state_of(module: torch.nn.Module) -> dict[str, list]:
    """Of each tensor in the state_dict: shape, dtype, whether it is trained (None: no parameter), its bits' digest."""
    trained, state = {name: p.requires_grad for name, p in module.named_parameters()}, {}
    for name, x in module.state_dict().items():
        digest = hashlib.sha1(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        state[name] = [list(x.shape), str(x.dtype), trained.get(name), digest]
    return state


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (left, right)))


def random_states() -> list:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []]


def synchronize(device: str) -> None:
    if device == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def settle(device: str) -> None:
    """Waits for the GPU, and gives much unused memory back to it: the other processes need it."""
    synchronize(device)
    if device == "cuda" and torch.cuda.is_initialized():
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MANY_BYTES:
            torch.cuda.empty_cache()


def poison_memory(device: str, like: list, on: bool) -> None:
    """Fills blocks of these sizes with NaN and frees them, and has PyTorch fill what torch.empty gives."""
    torch._C._set_deterministic_algorithms(on, warn_only=True)  # torch's own function imports a compiler: seconds
    torch.utils.deterministic.fill_uninitialized_memory = on
    blocks = [torch.full_like(x, float("nan"), device=device) for x in like if on and x.is_floating_point()]
    del blocks


# What a candidate must leave as it was, for whoever else runs in its process.
SETTINGS = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the float32 matmul precision": torch._C._get_float32_matmul_precision,
    "torch.backends.cudnn.allow_tf32": torch._C._get_cudnn_allow_tf32,
    "cuDNN's benchmark mode": lambda: [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark],
    "determinism": lambda: [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic],
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
        self.role, self.device = role, device
        self.modules, self.ring, self.kept, self.settings = [], [], [], {}
        self.block: Block | None = None

    def load(self, path: Path, name: str, constants: dict) -> dict:
        """Imports a contender's file, the build included."""
        self._note_settings()
        begin = perf_counter()
        module = load(path)
        vars(module).update(constants)
        self.cls = getattr(module, name)
        return {"seconds": perf_counter() - begin, "changed": self._changed_settings()}

    def make(self, arguments: list, level: str, dtype: str, seed: int, instances: int = 1) -> dict:
        """Instances of the module, in training as the Model's constructor leaves them but for eval()."""
        self.modules, self.ring, self.kept = [], [], []
        set_precision(level)
        self._note_settings()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        self.modules = [make(self.cls, arguments, seed).to(self.device, DTYPES[dtype]) for _ in range(instances)]
        self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.timed, mode=COMPILE_MODES[self.role], dynamic=False)
        return {"state": state_of(self.modules[0]), "changed": self._changed_settings()}

    def share(self, **block) -> dict:
        """Opens the parent's memory; without a handle closes it."""
        self.ring, self.kept, self.block = [], [], None
        self.block = Block(**block) if block else None
        return {}

    def set_weights(self, places: dict, instance: int | None) -> dict:
        for module in self.modules if instance is None else [self.modules[instance]]:
            module.load_state_dict({name: self._tensor(place) for name, place in places.items()}, strict=True)
        return {}

    def call(self, sets, incoming, answers, order, keep, direction, mode, instance, whose, poison, stream, again, move):
        """All forward passes of `order`, then all backward passes; copies the answers to `keep` to their places."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls: none must end in eager mode
        module = self.modules[instance].train(mode == "train")
        if move:  # as `.to` moves weights: they stay the same objects
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.data = tensor.detach().clone()
        sets, incoming = ([[self._tensor(x) for x in each] for each in places] for places in (sets, incoming))
        wanted = [list(wanted_of(module, each, whose).values()) for each in sets]
        watched = {f"input {i}": x for each in sets for i, x in enumerate(each) if isinstance(x, torch.Tensor)}
        watched |= {f"the gradient that comes in for output {i}": x for each in incoming for i, x in enumerate(each)}
        watched |= dict(module.named_parameters()) | (dict(module.named_buffers()) if mode == "eval" else {})
        before = {name: (x._version, x.detach().clone() if poison else None) for name, x in watched.items()}
        for p in module.parameters() if incoming else ():
            p.grad = torch.full_like(p, 0.5)
        poison_memory(self.device, [self.block.view(place) for place in answers[0]], poison)
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
        changed = self._changed_settings()
        for name, x in watched.items():
            version, bits = before[name]
            if x._version != version or bits is not None and not same_bits(x, bits):
                changed.append(f"writes {name}, which a call must leave alone")
        for name, p in module.named_parameters() if incoming else ():
            if p.grad is None or bool((p.grad != 0.5).any()):
                changed.append(f"writes the .grad of {name}, which torch.autograd.grad leaves alone")
            p.grad = None
        poison_memory(self.device, [], False)
        module.eval()
        draws = random_states() != states
        return {"forms": list(forms.values()), "tree": str(tree), "changed": changed, "late": late, "draws": draws}

    def ready(self, ring: list, incoming: list, direction: str, whose: str, seconds: float) -> dict:
        """Sets the calls to be timed up and makes them for so many seconds: compilers compile, clocks settle."""
        self.direction, self.places, self.graph, self.buffer = direction, ring, None, None
        self.ring = [[self._tensor(x, own=True) for x in each] for each in ring]
        self.wanted = [list(wanted_of(self.modules[0], each, whose).values()) for each in self.ring]
        self.incoming = [self._tensor(place, own=True) for place in incoming]
        flush_bytes = CPU_FLUSH_BYTES
        if self.device == "cuda":
            flush_bytes = max(256 << 20, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
        self.buffer = torch.empty(flush_bytes, dtype=torch.uint8, device=self.device)
        if self.role == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
            for x in self.ring[0]:
                if isinstance(x, torch.Tensor):
                    torch._dynamo.mark_static_address(x)
        if self.role == "cudagraph":
            self._capture()
        self._claims(1, 1)
        begin, marks = perf_counter(), []
        while len(marks) < 9 or perf_counter() - begin < seconds:
            marks += self._claims(1, 1)
        ms, host_us, flush_ms = (statistics.median(column) for column in zip(*marks))
        reply = {"ms": ms, "host_us": host_us, "flush_ms": flush_ms}
        if self.device == "cuda":
            self.kept = []
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._timed_call(0)
            torch.cuda.synchronize()
            reply["peak"] = torch.cuda.max_memory_allocated() - before
        return reply

    def time(self, count: int, flushes: int) -> dict:
        """Milliseconds of so many calls, by this process's own clock. The parent holds its own against their sum."""
        return {"ms": [ms for ms, _, _ in self._claims(count, flushes)]}

    def answer(self, index: int, places: list) -> dict:
        """Hands one of the answers just timed over."""
        leaves, self.kept = self.kept[index], []
        forms = [form_of(leaf) for leaf in leaves]
        self._hand_over([leaves], [forms], [places], watch=False)
        return {"forms": forms, "changed": self._changed_settings()}

    def rest(self) -> dict:
        """Nothing; as after every request, much unused memory goes back to the device."""
        return {}

    def warm_up(self) -> dict:
        """One call on the inputs of the turn before; then takes the new ones.

        So no timed call waits for memory, nor for addresses that the GPU forgot while others had their turn.
        """
        self._timed_call(0)
        for inputs, places in zip(self.ring, self.places):
            for x, place in zip(inputs, places):
                if isinstance(place, Place):
                    x.data.copy_(self.block.view(place))
        synchronize(self.device)
        return {}

    def profile(self, path: str, calls: int = 10) -> dict:
        """What a call consists of, by torch.profiler: names, launches and microseconds. The trace goes to `path`."""
        with torch.profiler.profile() as found:
            for i in range(calls):
                self._timed_call(i)
            settle(self.device)
        found.export_chrome_trace(path)
        rows: dict[str, list] = {}
        for event in found.events():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu == (self.device == "cuda"):
                row = rows.setdefault(event.name, [0, 0.0])
                row[0] += 1 / calls
                row[1] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / calls
        return {"rows": [[name, *row] for name, row in rows.items()]}

    def _timed_call(self, index: int) -> list:
        """The outputs, or the gradients."""
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
        self.kept, marks, gpu = [], [], self.device == "cuda"
        for i in range(count):
            events = [Event(enable_timing=True) for _ in range(3)] if gpu else []
            if gpu:
                call_driver("cuCtxResetPersistingL2Cache")  # lines marked to be evicted last would outlive the flush
                events[0].record()
            for _ in range(flushes):  # overwrites at least twice what the last cache holds
                self.buffer.zero_()
            gpu and events[1].record()
            begin = perf_counter()
            self.kept.append(self._timed_call(i))
            host = perf_counter() - begin
            gpu and events[2].record()
            marks.append((events, host))
        if not gpu:
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
        busy = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(64):
                busy.zero_()  # milliseconds of work ahead: whoever does not wait for this stream reads the NaN
            for x, value in zip(tensors, values):
                x.copy_(value)
            yield

    def _hand_over(self, results, forms, answers: list, watch: bool = True) -> bool:
        """Copies tensors of the expected form to their places. True if one changes later: work goes on elsewhere."""
        copies = []
        for leaves, known, places in zip(results, forms, answers):
            tensors = [leaf.detach() for leaf, form in zip(leaves, known) if form["type"] == "Tensor"]
            for leaf, place in zip(tensors, places):
                expected = place.shape, f"torch.{place.dtype}", torch.strided
                if (tuple(leaf.shape), str(leaf.dtype), leaf.layout) == expected:
                    copies.append((leaf, self.block.view(place).copy_(leaf)))
        if watch:
            time.sleep(LATE_SECONDS)
        synchronize(self.device)
        return watch and not all(same_bits(leaf.to(copied.device), copied) for leaf, copied in copies)

    def _tensor(self, place, own: bool = False):
        """What lies at a place: in the shared memory where that is the device's, else in this process's `own`."""
        if not isinstance(place, Place):
            return place
        shared = self.block.view(place)
        if shared.device.type == self.device and not own:
            return shared
        return torch.empty_strided(place.shape, place.strides, dtype=shared.dtype, device=self.device).copy_(shared)

    def _note_settings(self) -> None:
        self.settings = {name: str(ask()) for name, ask in SETTINGS.items()}

    def _changed_settings(self) -> list[str]:
        now = {name: str(ask()) for name, ask in SETTINGS.items()}
        return [f"changes {name} from {was} to {now[name]}" for name, was in self.settings.items() if now[name] != was]


def serve(role: str, device: str, requests, replies) -> None:
    """The life of a contender's process."""
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays among its descendants
    os.dup2(2, 1)  # stdout is the table's
    warnings.filterwarnings("ignore")
    contender = Contender(role, device)
    while True:
        try:
            command, arguments = requests.recv()
        except EOFError:  # the parent has ended
            return
        try:
            reply = getattr(contender, command)(**arguments)
            if command not in ("time", "answer", "warm_up"):
                settle(device)
        except RAISED as error:
            failure = build_failure(error, at_import=command == "load")
            reply = {"raised": last_line(error), "build": failure, "memory": isinstance(error, torch.OutOfMemoryError)}
        try:
            replies.send_bytes(json.dumps(reply).encode())
        except BrokenPipeError:  # the parent has ended
            return


# ---- the parent's side


class Worker:
    """A contender's process, as the parent sees it."""

    @staticmethod
    def start_server() -> None:
        """Starts the process that the others are copies of: it has loaded torch, and never touches the GPU."""
        multiprocessing.set_forkserver_preload(["torch", "judge.worker"])
        multiprocessing.forkserver.ensure_running()

    def __init__(self, role: str, arena: Arena, timeout: float):
        self.start_server()
        context = multiprocessing.get_context("forkserver")
        self.role, self.arena, self.timeout = role, arena, timeout
        theirs, self._requests = context.Pipe(duplex=False)
        self._replies, mine = context.Pipe(duplex=False)
        self._process = context.Process(target=serve, args=(role, arena.device, theirs, mine), daemon=True)
        self._process.start()
        theirs.close()
        mine.close()

    def ask(self, command: str, **arguments) -> dict:
        """Lets the process go on with this to do, waits for its answer, and stops it again."""
        block = self.arena.block
        if block and self not in self.arena.viewers and command != "load":
            self.arena.viewers.add(self)
            self._ask("share", nbytes=block.nbytes, on_gpu=block.on_gpu, handle=block.handle)
        return self._ask(command, **arguments)

    def close_block(self) -> None:
        self.arena.viewers.discard(self)
        if self.alive():
            self._ask("share")

    def _ask(self, command: str, **arguments) -> dict:
        self._signal(signal.SIGCONT)
        patience = self.timeout * (10 if command in ("load", "make", "ready") else 1)
        try:
            self._requests.send((command, arguments))
            if not connection.wait([self._replies, self._process.sentinel], patience):
                self.kill()
                raise Rejected(f"gave no answer to '{command}' within {patience:g} seconds (--timeout): it hangs")
            said = self._replies.recv_bytes(1 << 24)
        except (EOFError, BrokenPipeError) as error:
            raise Rejected(f"ended its process{self._ending()}, and gave no answer to '{command}'") from error
        except OSError:  # more than an answer may be long, or not of the pipe's form
            said = b""
        try:
            reply = json.loads(said)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers")
        self._signal(signal.SIGSTOP)
        if reply.get("build"):
            raise Rejected(f"build failed: {reply['build']}", kind="build failed")
        if "raised" in reply:
            kind = "memory" if reply.get("memory") else "raised"
            raise Rejected(f"raised {reply['raised']}" + " at import" * (command == "load"), kind=kind)
        return reply

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
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
        if code is None:
            return ""
        return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
