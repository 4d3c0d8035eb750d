"""What a candidate must leave alone.

A candidate that replaces the clock or the comparison is judged by its own rules; one that slows down what the Model is made of looks
fast beside it. So whatever judging relies on is noted before the candidate's file is loaded, and afterwards must be the very same: the
functions and what is in them, the harness's own modules and their constants, PyTorch's operators, layers, hooks, modes and switches.

A candidate runs in the judge's process, and no list of this kind is ever complete: it is for accidents and for the known tricks.
"""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from types import FunctionType

import torch
from torch import library
from torch.nn.modules import module as nn_module

from judge.pairs import Problem

# PyTorch itself wraps these when torch.compile is first used, and leaves a note of its own on the class.
_REPLACED_BY_PYTORCH = {"torch.manual_seed", "torch.nn.Module.__init__", "torch.nn.Module.__setstate__"}
_ADDED_BY_PYTORCH = {"___needs_generation_tag_patch"}
_PACKAGE = __name__.partition(".")[0]
_GLOBAL_HOOKS = [
    name for name, value in vars(nn_module).items() if name.startswith("_global_") and isinstance(value, dict)
]
# Of PyTorch's description of an operator: which files the kernels come from that run on the devices judged here, and in its autograd.
_ORIGINS = re.compile(r"^(?:CPU|CUDA|Autograd\w*|Composite\w*)(?:\[alias\])?: registered at (.+?):\d+ ::", re.MULTILINE)
_TORCH = os.path.dirname(torch.__file__)  # PyTorch overrides some operators itself, when they are first used


def _owners(problem: Problem | None) -> dict[str, object]:
    """Modules and classes whose functions are watched, by the name a complaint gives them."""
    owners: dict[str, object] = {
        "builtins": builtins,
        "time": time,
        "torch": torch,
        "torch.autograd": torch.autograd,
        "torch.cuda": torch.cuda,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.linalg": torch.linalg,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
    }
    owners.update((f"torch.nn.{name}", value) for name, value in vars(torch.nn).items() if isinstance(value, type))
    for name, module in sorted(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}."):
            owners[name] = module
            classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
            owners.update((f"{name}.{cls.__name__}", cls) for cls in classes)
    if problem:
        owners.update({"the Model's file": problem.module, "Model": problem.model_class})
    return owners


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _autocast() -> tuple[bool, bool]:
    """On CUDA and on the CPU. Newer versions of PyTorch warn of the function that all versions have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()


def _set_autocast(modes: tuple[bool, bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_autocast_enabled(modes[0])
        torch.set_autocast_cpu_enabled(modes[1])


def _attention() -> tuple[bool, bool, bool]:
    kinds = torch.backends.cuda
    return kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled()


def _set_attention(enabled: tuple[bool, bool, bool]) -> None:
    kinds = torch.backends.cuda
    for enable, value in zip((kinds.enable_flash_sdp, kinds.enable_mem_efficient_sdp, kinds.enable_math_sdp), enabled):
        enable(value)


def _switch(owner: object, name: str) -> tuple:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Process-wide settings: how each is read, and how it is put back.
_SETTINGS = {
    "torch.backends.cuda.matmul.allow_tf32": _switch(torch.backends.cuda.matmul, "allow_tf32"),
    "torch.backends.cudnn.allow_tf32": _switch(torch.backends.cudnn, "allow_tf32"),
    "torch.backends.cudnn.enabled": _switch(torch.backends.cudnn, "enabled"),
    "torch.backends.cudnn.benchmark": _switch(torch.backends.cudnn, "benchmark"),
    "torch.backends.cudnn.deterministic": _switch(torch.backends.cudnn, "deterministic"),
    "torch.backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "the float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic mode": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "which attention kernels are enabled": (_attention, _set_attention),
    "which cores the process may use": (lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)),
    "the trace function": (sys.gettrace, sys.settrace),
    "the profile function": (sys.getprofile, sys.setprofile),
}


def _readable(read: Callable[[], object]) -> object:
    try:
        return read()
    except RuntimeError:  # PyTorch's old names have no word for what its new ones were set to
        return "what its old name cannot say"


# Stacks of modes that see every call of PyTorch: how high each is, and how its top is taken off.
_MODES = {
    "torch function mode": (torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),
    "torch dispatch mode": (torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack),
}


@functools.cache
def _operators() -> dict[str, str]:
    """PyTorch's description of each of ATen's operators. `_changed_operators` brings it up to date."""
    return {
        name: torch._C._dispatch_dump(name)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }


def _changed_operators() -> list[str]:
    """Operators that somebody else than PyTorch overrode since this was last asked. What Python overrode is put back; C++ cannot be."""
    known, changed = _operators(), []
    for name, before in known.items():
        now = torch._C._dispatch_dump(name)
        if now != before:
            known[name] = now
            if any(not origin.startswith(_TORCH) for origin in {*_ORIGINS.findall(now)} - {*_ORIGINS.findall(before)}):
                changed.append(name)
    if changed:
        keys = {
            f"{name.replace('::', '/')}/{key}"
            for name in changed
            for key in ("CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA")
        }
        for held in [thing for thing in gc.get_objects() if type(thing) is library.Library]:
            if keys & {key.replace(".default", "") for key in held._op_impls}:
                held._destroy()
        known.update((name, torch._C._dispatch_dump(name)) for name in changed)
    return changed


def _inside(function: object) -> tuple | None:
    """What can be exchanged inside a function that stays the same object."""
    return (
        (function.__code__, function.__defaults__, function.__kwdefaults__)
        if isinstance(function, FunctionType)
        else None
    )


class Guard:
    """Notes the present state; `check` says what has changed since, and puts it back, so that the next pair is judged fairly."""

    def __init__(self, problem: Problem | None = None):
        owners = _owners(problem)
        self._functions = [
            (f"{label}.{name}", owner, name, value, _inside(value))
            for label, owner in owners.items()
            for name, value in vars(owner).items()
            if (callable(value) or isinstance(value, (property, staticmethod, classmethod)))
            and f"{label}.{name}" not in _REPLACED_BY_PYTORCH
        ]
        # Classes inherit most methods: one put on top of an inherited one is a new name.
        self._names = {cls: (label, set(vars(cls))) for label, cls in owners.items() if isinstance(cls, type)}
        self._constants = [
            (f"{label}.{name}", owner, name, value, copy.deepcopy(value))
            for label, owner in owners.items()
            if label.startswith(f"{_PACKAGE}.") and not isinstance(owner, type)
            for name, value in vars(owner).items()
            if isinstance(value, (bool, int, float, str, tuple, dict)) and not name.startswith("__")
        ]
        self._settings = {label: read() for label, (read, _) in _SETTINGS.items()}
        self._modes = {label: height() for label, (height, _) in _MODES.items()}
        self._hooks = {name: dict(getattr(nn_module, name)) for name in _GLOBAL_HOOKS}
        _operators()

    def check(self) -> list[str]:
        # Modes first: whatever is called below goes through them.
        complaints = [f"leaves a {label} on" for label, (height, _) in _MODES.items() if height() > self._modes[label]]
        for label, (height, take_off) in _MODES.items():
            while height() > self._modes[label]:
                take_off()
        for label, owner, name, value, inside in self._functions:
            if vars(owner).get(name) is not value:
                complaints.append(f"replaces {label}")
                setattr(owner, name, value)
            if _inside(value) != inside:
                complaints.append(f"replaces the code of {label}")
                value.__code__, value.__defaults__, value.__kwdefaults__ = inside
        for cls, (label, names) in self._names.items():
            for name in set(vars(cls)) - names - _ADDED_BY_PYTORCH:
                complaints.append(f"replaces {label}.{name}")
                delattr(cls, name)
        for label, owner, name, value, before in self._constants:
            if vars(owner).get(name) is not value or value != before:
                complaints.append(f"replaces {label}")
                if isinstance(value, dict):  # others hold this very object
                    value.clear()
                    value.update(before)
                setattr(owner, name, value)
        found = {
            label: _readable(read) for label, (read, _) in _SETTINGS.items()
        }  # all, before any is put back: some are one and the same
        changed = [label for label, now in found.items() if now != self._settings[label]]
        complaints += [f"changes {label} from {self._settings[label]} to {found[label]}" for label in changed]
        for label, (_, write) in _SETTINGS.items():
            if changed:
                write(self._settings[label])
        for name, before in self._hooks.items():
            hooks = getattr(nn_module, name)
            if dict(hooks) != before:
                complaints.append(f"leaves torch.nn's {name} changed")
                hooks.clear()
                hooks.update(before)
        return complaints + [f"replaces the operator {name}" for name in _changed_operators()]
