"""A contender in a process of its own.

The parent (`Worker`) sends a request and waits for the answer; the process (`serve`) is stopped (SIGSTOP) whenever it is not its turn. It sees the
inputs and the weights, never the Model's answers. Tensors lie in memory that both see (`Arena`); requests are pickled, which a parent may
do, and answers are JSON, so that nothing a candidate writes is run by the parent.
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
LATE_SECONDS = 2e-3  # how long an answer that was handed over is watched for changes
MANY_BYTES = 1 << 30  # of memory that PyTorch keeps unused: more is given back to the device
Event, perf_counter = torch.cuda.Event, time.perf_counter  # before any candidate could replace them


class Rejected(Exception):
    """The candidate is wrong, for the reason in the text."""


class Raised(Rejected):
    """A call ended in an exception; the process goes on."""


class NoRoom(Raised):
    """There was too little memory."""


class BuildFailed(Rejected):
    """The candidate could not be compiled."""


# ---- memory that both sides see


class Place(NamedTuple):
    """Where in an arena a tensor lies."""

    dtype: str
    shape: tuple
    strides: tuple  # in elements
    offset: int  # in bytes


class Arena:
    """The parent's block of memory: of a GPU by CUDA IPC or, where that is not to be had, of the host, copied outside the clock."""

    def __init__(self, device: str, ipc: bool = True):
        self.device, self.on_gpu = device, device == "cuda" and ipc
        self.memory: Memory | None = None
        self.nbytes = 0
        self.viewers: set[Worker] = set()

    def place(self, requests: list) -> list[Place]:
        """Room for all tensors of a request at once, each given with its strides (None: dense) and whether it is off any alignment."""
        places, end = [], 0
        for like, strides, odd in requests:
            strides = strides or tuple(math.prod(like.shape[i + 1 :]) for i in range(like.dim()))
            start = -(-end // 512) * 512 + odd * like.element_size()
            extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, strides)) if like.numel() else 0
            places.append(Place(str(like.dtype).removeprefix("torch."), tuple(like.shape), strides, start))
            end = start + extent * like.element_size()
        if end > self.nbytes or end < self.nbytes // 2 and self.nbytes > MANY_BYTES:
            for worker in list(self.viewers):  # the old block is freed, by all who have it open, before there is a new one
                worker.see(None)
            self.memory, self.nbytes = None, end
            self.memory = Memory.of_gpu(end) if self.on_gpu else Memory.of_host(end)
        return places

    def read(self, place: Place) -> torch.Tensor:
        return self.view(place).to(self.device)

    def view(self, place: Place) -> torch.Tensor:
        return view(self.memory.storage, place)


class Memory:
    """A block that other processes may open by its handle."""

    @classmethod
    def of_host(cls, nbytes: int) -> Memory:
        block = cls()
        block.file = os.memfd_create("arena")
        os.truncate(block.file, nbytes)
        block.free = partial(os.close, block.file)
        block.handle = f"/proc/{os.getpid()}/fd/{block.file}", nbytes
        block.storage = torch.UntypedStorage.from_file(block.handle[0], True, nbytes)
        return block

    @classmethod
    def of_gpu(cls, nbytes: int) -> Memory:
        """Of the driver, not of PyTorch's allocator: a process that was killed while it had the block open must not keep it from being freed."""
        block, pointer, handle = cls(), ctypes.c_uint64(), IpcHandle()
        torch.cuda.synchronize()  # there is a context now
        torch.cuda.empty_cache()
        call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        block.free = partial(call_driver, "cuMemFree_v2", pointer)
        block.handle = bytes(handle), nbytes
        block.storage = storage_at(pointer.value, nbytes)
        return block

    @classmethod
    def opened(cls, handle: tuple) -> Memory:
        """What another process has."""
        block, (name, nbytes) = cls(), handle
        if isinstance(name, str):
            block.storage, block.free = torch.UntypedStorage.from_file(name, True, nbytes), lambda: None
        else:
            torch.cuda.synchronize()
            pointer = ctypes.c_uint64()
            call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), IpcHandle.from_buffer_copy(name), ctypes.c_uint(1))
            block.storage, block.free = storage_at(pointer.value, nbytes), partial(call_driver, "cuIpcCloseMemHandle", pointer)
        return block

    def __del__(self):
        self.storage = None
        with contextlib.suppress(Exception):  # at the end of a process there may be no driver any more
            self.free()


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 64)]


class AtAddress:
    def __init__(self, pointer: int, nbytes: int):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}


def storage_at(pointer: int, nbytes: int) -> torch.UntypedStorage:
    return torch.as_tensor(AtAddress(pointer, nbytes), device="cuda").untyped_storage()


def call_driver(name: str, *arguments) -> None:
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise RuntimeError(f"{name} failed with error {error}")


def view(storage: torch.UntypedStorage, place: Place) -> torch.Tensor:
    empty = torch.empty(0, dtype=getattr(torch, place.dtype), device=storage.device)
    return empty.set_(storage, place.offset // empty.element_size(), place.shape, place.strides)


# ---- what every contender does, in the parent and in the workers alike


def forward(module, inputs: list, direction: str):
    with torch.set_grad_enabled(direction != "forward"):
        return module(*inputs)


def roots_of(result) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def gradients(result, wanted: list, incoming: list, again: bool = False) -> tuple:
    """The gradients of all that is wanted; with `again` those that the same graph gives when it is asked a second time."""
    if again:
        torch.autograd.grad(roots_of(result), wanted, incoming, allow_unused=True, retain_graph=True)
    return torch.autograd.grad(roots_of(result), wanted, incoming, allow_unused=True)


def wanted_of(module: torch.nn.Module, inputs: list, whose: str) -> dict[str, torch.Tensor]:
    """What gradients are asked of, by name; the inputs record one if theirs are."""
    floating = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())}
    for x in floating.values():
        x.requires_grad_(whose in ("all", "inputs"))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return (floating if whose in ("all", "inputs") else {}) | (trained if whose in ("all", "parameters") else {})


def step(module, inputs: list, direction: str, wanted: list, incoming: list | None) -> list:
    """One call as it is timed: the outputs, or the gradients."""
    result = forward(module, inputs, direction)
    if direction == "forward_backward" and incoming:
        result = gradients(result, wanted, incoming)
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_flatten(result)[0]]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the last bit: NaN equals the same NaN, and 0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.is_floating_point():
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        left, right = left.view(bits), right.view(bits)
    return torch.equal(left, right)


def form_of(leaf) -> dict:
    """What is known of an output before anything touches it."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may compute when it is asked
        return {"type": type(leaf).__name__, "value": repr(leaf) if not isinstance(leaf, torch.Tensor) else ""}
    strides = leaf.stride() if leaf.layout == torch.strided and leaf.numel() else ()
    form = {"type": "Tensor", "dtype": str(leaf.dtype), "shape": list(leaf.shape), "device": leaf.device.type, "layout": str(leaf.layout)}
    # The stride of a dimension of one element means nothing.
    return {**form, "stride": [stride if size > 1 else 0 for size, stride in zip(leaf.shape, strides)], "requires_grad": leaf.requires_grad}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def poisoned(device: str, like: list):
    """Memory is full of NaN inside: blocks of the outputs' sizes are filled and freed, and PyTorch fills what torch.empty hands out."""
    if device == "cuda":
        blocks = [torch.full_like(x, float("nan")) for x in like if x.is_floating_point()]
        del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# What a candidate must leave as it was, for whoever else runs in its process.
SETTINGS = {
    "the default dtype": torch.get_default_dtype,
    "the default device": lambda: str(torch.get_default_device()),
    "the float32 matmul precision": lambda: torch._C._get_float32_matmul_precision(),
    "torch.backends.cudnn.allow_tf32": lambda: torch._C._get_cudnn_allow_tf32(),
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.enabled,
    "torch.backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "torch.backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "the number of threads": torch.get_num_threads,
    "whether gradients are recorded": torch.is_grad_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast": lambda: [torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")],
    "attention's kernels": lambda: [torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled()],
    "the cores this process may use": lambda: sorted(os.sched_getaffinity(0)),
    "the trace or profile function": lambda: [str(sys.gettrace()), str(sys.getprofile())],
    "the torch function modes": torch._C._len_torch_function_stack,
    "the torch dispatch modes": torch._C._len_torch_dispatch_stack,
    "the hooks on all modules": lambda: len(torch.nn.modules.module._global_forward_hooks) + len(torch.nn.modules.module._global_forward_pre_hooks),
    "the current directory": os.getcwd,
    "the current stream": lambda: torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0,
}


def settings() -> dict:
    return {name: ask() for name, ask in SETTINGS.items()}


# ---- the process


class Contender:
    """Answers the parent's requests, each by the method of its name."""

    def __init__(self, role: str, device: str):
        self.role, self.device = role, device
        self.flush_buffer = None
        self.driver = ctypes.CDLL("libcuda.so.1") if device == "cuda" else None
        self.settings = {}

    def load(self, path: Path) -> dict:
        """Imports a candidate's file, the build included."""
        self.settings = settings()
        begin = perf_counter()
        self.cls = load(path).ModelNew
        return {"seconds": perf_counter() - begin, "changed": self._changed_settings()}

    def make(self, level: str, dtype: str, seed: int, arguments=None, path=None, constants=None, instances=1) -> dict:
        """Instances of the module, and the form of their state. `path` is given for the Model's own file, `arguments` for a candidate."""
        self.modules, self.ring, self.kept = [], [], []
        set_precision(level, level == "high", level == "high")
        self.dtype, self.settings = DTYPES[dtype], settings()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        if path:
            self.problem = Problem(path, constants)
            self.cls, arguments = self.problem.module.Model, self.problem.arguments(seed)
        self.modules = [make(self.cls, arguments, seed) for _ in range(instances)]
        trained = {name: p.requires_grad for name, p in self.modules[0].named_parameters()}
        state = {name: [str(t.dtype), list(t.shape), trained.get(name)] for name, t in self.modules[0].state_dict().items()}
        return {"state": state, "changed": self._changed_settings()}

    def to_device(self) -> dict:
        self.modules = [module.to(device=self.device, dtype=self.dtype) for module in self.modules]
        self.module = self.timed = self.modules[0]
        if self.role in COMPILE_MODES:
            self.timed = torch.compile(self.module, mode=COMPILE_MODES[self.role], dynamic=False)
        return {}

    def prepare(self, batch: int | None, directions: list[str], seed: int) -> dict:
        """One call in each direction, on inputs of its own: a compiler compiles here."""
        for direction in directions:
            inputs = self.problem.inputs(batch, self.device, self.dtype, seed)
            wanted = list(wanted_of(self.module, inputs, WHOSE[direction]).values())
            incoming = [torch.ones_like(x) for x in roots_of(forward(self.module, inputs, direction))]
            step(self.timed, inputs, direction, wanted, incoming if wanted else [])
        return self.release()

    def share(self, handle) -> dict:
        self.ring, self.memory = [], None
        self.memory = Memory.opened(handle) if handle else None
        return {}

    def set_weights(self, places: dict, instance: int | None) -> dict:
        for module in self.modules if instance is None else [self.modules[instance]]:
            module.load_state_dict({name: self._tensor(place) for name, place in places.items()}, strict=True)
        synchronize(self.device)
        return {}

    def get_weights(self, places: dict, instance: int = 0) -> dict:
        for name, tensor in self.modules[instance].state_dict().items():
            view(self.memory.storage, places[name]).copy_(tensor)
        synchronize(self.device)
        return {}

    def move_weights(self) -> dict:
        """To other places in memory. As with `.to`, they stay the same objects."""
        kept = [tensor.data for tensor in (*self.module.parameters(), *self.module.buffers())]
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            tensor.data = tensor.detach().clone()
        del kept
        return {}

    def call(
        self, sets: list, answers: list, incoming: list, order=(0,), keep=(0,), direction="forward", mode="eval", instance=0,
        whose="all", poison=False, stream=False, again=False,
    ) -> dict:  # fmt: skip
        """All forward passes of `order`, then all backward passes; copies the answers of the calls to `keep` to where they are asked for."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.config.recompile_limit = 64  # so many kinds of calls are asked for: none must end in eager mode
        module = self.modules[instance].train(mode == "train")
        sets, incoming = ([[self._tensor(x) for x in each] for each in places] for places in (sets, incoming))
        wanted = [wanted_of(module, each, whose if any(incoming) else "parameters") for each in sets]
        watched = {f"input {i}": x for each in sets for i, x in enumerate(each) if isinstance(x, torch.Tensor)}
        watched |= {f"the gradient that comes in for output {i}": x for each in incoming for i, x in enumerate(each)}
        watched |= dict(module.named_parameters())
        versions = {name: x._version for name, x in watched.items()}
        for p in module.parameters() if any(incoming) else ():
            p.grad = torch.full_like(p, 0.5)
        random_state, self.settings = random_states(), settings()
        queue = self._late(sets) if stream else contextlib.nullcontext()
        fill = poisoned(self.device, [view(self.memory.storage, place) for place in answers[0]]) if poison else contextlib.nullcontext()
        inference = torch.inference_mode() if mode == "inference" else contextlib.nullcontext()
        with queue, fill, inference:
            results, forms = {}, {}
            for position, i in enumerate(order):
                result = forward(module, sets[i], direction)
                leaves, tree = tree_flatten(result)
                if position in keep:
                    results[position], forms[position] = leaves, [form_of(leaf) for leaf in leaves]
                del result, leaves
            for position, i in enumerate(order):
                if incoming and incoming[i]:
                    gradient = gradients(results[position], list(wanted[i].values()), incoming[i], again)
                    results[position] = [*results[position], *gradient]
                    forms[position] += [form_of(leaf) for leaf in gradient]
            late = self._hand_over([results[position] for position in keep], [forms[position] for position in keep], answers)
        changed = self._changed_settings() + [f"writes {name}" for name, x in watched.items() if x._version != versions[name]]
        for name, p in module.named_parameters() if any(incoming) else ():
            if p.grad is None or bool((p.grad != 0.5).any()):
                changed.append(f"writes the .grad of {name}, which torch.autograd.grad leaves alone")
            p.grad = None
        module.eval()
        draws = random_states() != random_state
        return {"forms": [forms[position] for position in keep], "tree": str(tree), "changed": changed, "late": late, "draws": draws}

    def ready(self, ring: list, incoming: list, direction: str, seconds: float, flush_bytes: int) -> dict:
        """Sets up the calls to be timed and makes them until the seconds are over: handles, clocks and caches of code come to rest."""
        self.direction, self.ring = direction, [[self._tensor(x) for x in each] for each in ring]
        self.wanted = [list(wanted_of(self.module, each, WHOSE[direction]).values()) for each in self.ring]
        self.incoming, self.places = [self._tensor(place) for place in incoming], ring
        self.graph, self.flush_bytes = None, flush_bytes
        if self.role == "max-autotune":  # it replays CUDA graphs, and would copy inputs that may move; these do not
            for x in self.ring[0]:
                if isinstance(x, torch.Tensor):
                    torch._dynamo.mark_static_address(x)
        if self.role == "cudagraph":
            self._capture()
        begin, taken = perf_counter(), []
        while len(taken) < 3 or perf_counter() - begin < seconds:
            taken += self._claims(1, 1)
        reply = {"ms": statistics.median(taken)}
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._step(0)
            torch.cuda.synchronize()
            reply["peak"] = torch.cuda.max_memory_allocated() - before
            reply["host_us"] = statistics.median(self._host_us() for _ in range(9))
            self._flush(1)
            reply["flush_us"] = 1e3 * min(self._elapsed(self._flush, 1) for _ in range(5))
        return reply

    def time(self, count: int, flushes: int) -> dict:
        """Milliseconds of so many calls, by this process's own clock. The parent holds its own against their sum."""
        if self.memory.storage.device.type != self.device:  # what the parent has drawn comes from host memory
            for each, places in zip(self.ring, self.places):
                for x, place in zip(each, places):
                    if isinstance(place, Place):
                        x.detach().copy_(view(self.memory.storage, place))
        return {"ms": self._claims(count, flushes)}

    def answer(self, index: int, places: list) -> dict:
        """Hands one of the answers just timed over."""
        leaves = self.kept[index]
        forms = [form_of(leaf) for leaf in leaves]
        late = self._hand_over([leaves], [forms], [places], wait=False)
        self.kept = []
        return {"forms": [forms], "late": late, "changed": self._changed_settings()}

    def release(self) -> dict:
        """Memory that is kept unused goes back to the device, where others may take it."""
        self.kept = []
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def profile(self, path: str, calls: int = 10) -> dict:
        """What the calls consist of, by torch.profiler: name, launches and microseconds a call. The trace goes to `path`."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            for i in range(calls):
                self._step(i % len(self.ring))
            synchronize(self.device)
        found.export_chrome_trace(path)
        kernels: dict[str, list] = {}
        for event in found.events():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu == (self.device == "cuda"):
                row = kernels.setdefault(event.name, [0, 0.0])
                row[0] += 1
                row[1] += event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
        return {"rows": [[name, count / calls, us / calls] for name, (count, us) in kernels.items()]}

    def _step(self, index: int) -> list:
        if self.graph:
            self.graph[0].replay()
            return self.graph[1]
        return step(self.timed, self.ring[index], self.direction, self.wanted[index], self.incoming)

    def _claims(self, count: int, flushes: int) -> list[float]:
        """GPU events around each call, which stay in a queue until the last is launched; the host's clock on a CPU."""
        self.kept, marks = [], []
        for i in range(count):
            self._flush(flushes)
            if self.device == "cuda":
                start, end = Event(enable_timing=True), Event(enable_timing=True)
                start.record()
                answer = self._step(i % len(self.ring))
                end.record()
                marks.append((start, end))
            else:
                begin = perf_counter()
                answer = self._step(i % len(self.ring))
                marks.append(1e3 * (perf_counter() - begin))
            self.kept.append(answer)
            del answer
        synchronize(self.device)
        return [start.elapsed_time(end) for start, end in marks] if self.device == "cuda" else marks

    def _host_us(self) -> float:
        """Microseconds until a call has launched its work on an idle GPU."""
        torch.cuda.synchronize()
        return 1e6 * self._seconds(self._step, 0)

    def _seconds(self, call, *arguments) -> float:
        begin = perf_counter()
        result = call(*arguments)
        taken = perf_counter() - begin
        del result
        return taken

    def _elapsed(self, call, *arguments) -> float:
        start, end = Event(enable_timing=True), Event(enable_timing=True)
        start.record()
        call(*arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def _flush(self, times: int) -> None:
        """Overwrites at least twice what the last cache holds. Lines to be evicted last would outlive it: they first lose that rank."""
        if self.flush_buffer is None:
            size = self.flush_bytes
            if self.driver:
                size = max(size, 256 << 20, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
            self.flush_buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.driver and (error := self.driver.cuCtxResetPersistingL2Cache()):
            raise RuntimeError(f"cuCtxResetPersistingL2Cache failed with error {error}")
        for _ in range(times):
            self.flush_buffer.zero_()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
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
        tensors = [x for each in sets for x in each if isinstance(x, torch.Tensor) and x.is_floating_point()]
        values = [x.data.clone() for x in tensors]
        for x in tensors:
            x.data.fill_(float("nan"))  # .data: these writes are not the candidate's
        busy = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(64):
                busy.zero_()  # milliseconds of work ahead: whoever does not wait for this stream reads the NaN
            for x, value in zip(tensors, values):
                x.data.copy_(value)
            yield
        torch.cuda.synchronize()

    def _hand_over(self, results: list, forms: list, answers: list, wait: bool = True) -> bool:
        """Copies tensors of the expected form to their places. True if one of them changes after that: work goes on elsewhere."""
        copies = []
        for leaves, known, places in zip(results, forms, answers):
            tensors = [leaf for leaf, form in zip(leaves, known) if form["type"] == "Tensor"]
            for leaf, place in zip(tensors, places):
                if tuple(leaf.shape) == place.shape and str(leaf.dtype) == f"torch.{place.dtype}" and leaf.layout == torch.strided:
                    target = view(self.memory.storage, place)
                    with torch.no_grad():
                        target.copy_(leaf)
                    copies.append((leaf.detach(), target))
        if wait:
            time.sleep(LATE_SECONDS)
        synchronize(self.device)
        return wait and not all(same_bits(leaf.to(target.device), target) for leaf, target in copies)

    def _tensor(self, place):
        if not isinstance(place, Place):
            return place
        shared = view(self.memory.storage, place)
        if shared.device.type == self.device:
            return shared
        return torch.empty_strided(place.shape, place.strides, dtype=shared.dtype, device=self.device).copy_(shared)

    def _changed_settings(self) -> list[str]:
        now = settings()
        return [f"changes {name} from {was} to {now[name]}" for name, was in self.settings.items() if now[name] != was]


WHOSE = {"forward": "nobody's", "forward_recorded": "parameters", "forward_backward": "all"}  # gradients, by direction


def random_states() -> list:
    return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []]


def serve(role: str, device: str, requests, replies) -> None:
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays among its descendants
    os.dup2(2, 1)  # stdout is the table's
    own = {0, 1, 2, requests.fileno(), replies.fileno()}
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - own:  # those of the judge's other processes
        with contextlib.suppress(OSError):
            os.close(fd)
    warnings.filterwarnings("ignore")
    contender = Contender(role, device)
    while True:
        command, arguments = requests.recv()
        try:
            reply = getattr(contender, command)(**arguments)
            if command not in ("time", "answer") and device == "cuda" and torch.cuda.memory_reserved() > MANY_BYTES:
                torch.cuda.empty_cache()
        except torch.OutOfMemoryError as error:
            reply = {"raised": last_line(error), "memory": True}
            contender.release()
        except RAISED as error:
            reply = {"raised": last_line(error), "build": build_failure(error, at_import=command == "load")}
        replies.send_bytes(json.dumps(reply).encode())


# ---- the parent's side


class Worker:
    """A contender's process, as the parent sees it."""

    def __init__(self, role: str, device: str, timeout: float):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "judge.worker"])
        self.role, self.timeout, self.asked, self.pending = role, timeout, None, False
        self._arena: Arena | None = None
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
        patience = self.timeout * (10 if self.asked in ("load", "prepare", "ready", "make") else 1)
        if not connection.wait([self._replies, self._process.sentinel], patience):
            self.kill()
            raise Rejected(f"gave no answer to '{self.asked}' within {patience:g} seconds (--timeout): it hangs")
        try:
            reply = json.loads(self._replies.recv_bytes(1 << 24))
            assert isinstance(reply, dict)
        except EOFError as error:
            raise Rejected(self._ending()) from error
        except (OSError, ValueError, AssertionError) as error:
            self.kill()
            raise Rejected("wrote something of its own into the pipe of its answers") from error
        self._signal(signal.SIGSTOP)
        if reply.get("build"):
            raise BuildFailed(f"build failed: {reply['build']}")
        if "raised" in reply:
            raise (NoRoom if reply.get("memory") else Raised)(f"raised {reply['raised']}" + " at import" * (self.asked == "load"))
        return reply

    def ask(self, command: str, **arguments) -> dict:
        self.send(command, **arguments)
        return self.hear()

    def see(self, arena: Arena | None) -> None:
        """Opens the parent's memory, if that is another block than before; with None closes what is open."""
        if self._arena and self._arena is not arena or arena and self not in arena.viewers:
            if self._arena:
                self._arena.viewers.discard(self)
            if self.alive():
                self.ask("share", handle=arena and arena.memory.handle)
            self._arena = arena
            if arena:
                arena.viewers.add(self)

    def alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        if self._arena:
            self._arena.viewers.discard(self)
        for pid in [*self.strays(), self._process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        self._process.join(5)

    def strays(self) -> list[int]:
        """Descendants outside the worker's process group, which goes on while the group is stopped."""
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
