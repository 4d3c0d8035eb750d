"""What a candidate may switch in its process beside computing, and how it is put back.

All contenders are to run under the switches of the run: TF32 as --precision says, cuDNN's benchmark mode off. A
candidate that switches something is told so, and the switch is put back before its next answer and its next timing. A
hook or a mode that it leaves behind stays, since it slows nobody but itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from signal import SIG_DFL, SIGCONT
from typing import NamedTuple

import torch
import torch.utils.checkpoint

from judge.source import set_precision

# PyTorch has two ways to allow TF32. A flag of the older one raises an error when it is read after the newer one was
# used, and is right again as soon as the newer one's values are as they were.
OPERATORS = [("generic", "all"), *(("cuda", op) for op in ("all", "matmul", "conv", "rnn"))]
OPERATORS += [("mkldnn", op) for op in ("all", "matmul", "conv", "rnn")]


class Switch(NamedTuple):
    name: str
    get: Callable[[], object]
    put: Callable[[object], object] | None = None  # None where it stays as the candidate left it


def of_operators() -> list[str]:
    if not hasattr(torch._C, "_get_fp32_precision_getter"):  # before PyTorch 2.9
        return []
    return [torch._C._get_fp32_precision_getter(*operator) for operator in OPERATORS]


def older(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:
        return "mixed"


def precision() -> list:
    flags = torch._C._get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32, torch._C._get_cublas_allow_tf32
    return [*map(older, flags), *of_operators()]


def put_precision(was: list) -> None:
    for operator, value in zip(OPERATORS, was[3:]):
        torch._C._set_fp32_precision_setter(*operator, value)
    torch._C._set_float32_matmul_precision(was[0])
    torch._C._set_cudnn_allow_tf32(was[1])
    torch._C._set_cublas_allow_tf32(was[2])


def flag(name: str, of: str) -> Switch:
    return Switch(name, getattr(torch._C, f"_get_{of}"), getattr(torch._C, f"_set_{of}"))


def checkpoint(*given, use_reentrant=None, **how):
    """torch.utils.checkpoint's, never the reentrant kind, whose gradients torch.autograd.grad refuses to give."""
    KIND[0] = KIND[0] if use_reentrant is False else "reentrant (judged as if not: torch.autograd.grad refuses that)"
    return CHECKPOINT(*given, use_reentrant=False, **how)


KIND, CHECKPOINT = ["not reentrant"], torch.utils.checkpoint.checkpoint
torch.utils.checkpoint.checkpoint = checkpoint


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0


def put_stream(was: int) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.set_stream(torch.cuda.ExternalStream(was) if was else torch.cuda.default_stream())


def handles_resumption() -> bool:
    """Which comes before the contender's own clock starts. Of a handler in C signal.getsignal does not know."""
    LIBC.sigaction(SIGCONT, None, ACTION)
    return any(ACTION.raw[:8])


LIBC, ACTION = ctypes.CDLL(None), ctypes.create_string_buffer(1 << 10)  # of a struct sigaction, its handler first


PLACES = (torch, torch.nn, torch.nn.functional, torch.nn.Module, torch.Tensor)
FUNCTIONS = [(place, name, getattr(place, name)) for place in PLACES for name in dir(place)]
FUNCTIONS = [each for each in FUNCTIONS if callable(each[-1])]


def replaced() -> list[str]:
    """PyTorch's functions in whose place another module has put its own. (Its compiler replaces some, too.)"""
    now = [(place, name, was, getattr(place, name, None)) for place, name, was in FUNCTIONS]
    module_of = lambda x: str(getattr(x, "__globals__", {}).get("__name__"))  # noqa: E731
    others = [(place, name, x) for place, name, was, x in now if x != was]
    return [f"{place.__name__}.{name}" for place, name, x in others if not module_of(x).startswith("torch.")]


C = torch._C
SWITCHES = [
    Switch("TF32, the precision of float32 products", precision, put_precision),
    flag("cuDNN's benchmark mode", "cudnn_benchmark"),
    flag("whether cuDNN is used", "cudnn_enabled"),
    flag("whether cuDNN is deterministic", "cudnn_deterministic"),
    flag("whether only deterministic kernels are used", "deterministic_algorithms"),
    flag("the filling of new memory", "deterministic_fill_uninitialized_memory"),
    Switch("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Switch("whether gradients are recorded", torch.is_grad_enabled, C._set_grad_enabled),
    Switch("anomaly detection", torch.is_anomaly_enabled, C.set_anomaly_enabled),
    Switch("the number of threads", torch.get_num_threads, torch.set_num_threads),
    flag("mkldnn", "mkldnn_enabled"),
    *(
        Switch(f"{kind} attention", getattr(C, f"_get_{kind}_sdp_enabled"), getattr(C, f"_set_sdp_use_{kind}"))
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
    Switch("whether backward passes use threads", C._is_multithreading_enabled, C._set_multithreading_enabled),
    Switch("the hooks on saved tensors", lambda: C._autograd._top_saved_tensors_default_hooks(True) is not None),
    Switch("the flushing of denormal numbers", lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    *(
        Switch(f"autocast of {kind}", partial(C.is_autocast_enabled, kind), partial(C.set_autocast_enabled, kind))
        for kind in ("cuda", "cpu")
    ),
    Switch("reduced precision within half-precision products", C._get_cublas_allow_fp16_reduced_precision_reduction),
    Switch("the cores this process may use", lambda: sorted(os.sched_getaffinity(0)), partial(os.sched_setaffinity, 0)),
    Switch("the trace or profile function", lambda: [repr(sys.gettrace()), repr(sys.getprofile())]),
    Switch("the torch function modes", C._len_torch_function_stack),  # a default device is one
    Switch("the torch dispatch modes", C._len_torch_dispatch_stack),
    Switch("the hooks on all modules", lambda: len(torch.nn.modules.module._global_forward_hooks)),
    Switch("its checkpoints", lambda: KIND[0], partial(KIND.__setitem__, 0)),
    Switch("the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    Switch("the current directory", os.getcwd, os.chdir),
    Switch("whether it computes when it is resumed", handles_resumption, lambda _: LIBC.signal(SIGCONT, SIG_DFL)),
    Switch("the current stream", stream, put_stream),
]


class Switches:
    """How everything stands when this is made."""

    def __init__(self):
        self.was = [switch.get() for switch in SWITCHES]

    def put_back(self) -> list[str]:
        """What has been switched since, in words; it is as it was afterwards, where that can be."""
        said = []
        for i, switch in enumerate(SWITCHES):
            now = switch.get()
            if now == self.was[i]:
                continue
            said.append(f"switches {switch.name} from {brief(self.was[i], now)} to {brief(now, self.was[i])}")
            if switch.put is None:
                self.was[i] = now
            else:
                switch.put(self.was[i])
        return said


def brief(value: object, other: object) -> str:
    """Of a list only what differs."""
    if not isinstance(value, list) or not isinstance(other, list) or len(value) != len(other):
        return str(value)
    return ", ".join(dict.fromkeys(str(mine) for mine, theirs in zip(value, other) if mine != theirs))


@contextlib.contextmanager
def kept(level: str):
    """The run's switches hold before and after what a Model's file does within."""
    set_precision(level)
    switches = Switches()
    try:
        yield
    finally:
        switches.put_back()
