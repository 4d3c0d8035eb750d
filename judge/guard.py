"""What a candidate must leave alone.

A candidate that replaces the clock or the comparison is judged by its own rules. So whatever judging relies on is noted before the
candidate's file is loaded, and afterwards must be the very same objects. The harness's own modules are watched like PyTorch's.
"""

from __future__ import annotations

import sys
import time

import torch

# torch.manual_seed is wrapped by PyTorch itself when torch.compile is first used.
_REPLACED_BY_PYTORCH = {"torch.manual_seed"}


def _owners() -> dict[str, object]:
    owners: dict[str, object] = {
        "time": time,
        "torch": torch,
        "torch.cuda": torch.cuda,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
    }
    package = __name__.partition(".")[0]
    owners.update((name, module) for name, module in sorted(sys.modules.items()) if name.startswith(f"{package}."))
    return owners


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


# Process-wide settings: how each is read, and how it is put back.
_SETTINGS = {
    "torch.backends.cuda.matmul.allow_tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value),
    ),
    "torch.backends.cudnn.allow_tf32": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
    ),
    "the float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic mode": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
}


class Guard:
    """Notes the present state; `check` says what has changed since, and puts it back, so that the next pair is judged fairly."""

    def __init__(self):
        self._attributes = [
            (f"{label}.{name}", owner, name, value)
            for label, owner in _owners().items()
            for name, value in vars(owner).items()
            if callable(value) and f"{label}.{name}" not in _REPLACED_BY_PYTORCH
        ]
        # Both classes inherit most methods: one put on top of an inherited one is a new name.
        self._names = {cls: set(vars(cls)) for cls in (torch.Tensor, torch.cuda.Event)}
        self._settings = {label: read() for label, (read, _) in _SETTINGS.items()}

    def check(self) -> list[str]:
        complaints = []
        for label, owner, name, value in self._attributes:
            if vars(owner).get(name) is not value:
                complaints.append(f"replaces {label}")
                setattr(owner, name, value)
        for cls, names in self._names.items():
            for name in set(vars(cls)) - names:
                complaints.append(f"replaces {cls.__module__}.{cls.__name__}.{name}")
                delattr(cls, name)
        for label, (read, write) in _SETTINGS.items():
            before, now = self._settings[label], read()
            if now != before:
                complaints.append(f"changes {label} from {before} to {now}")
                write(before)
        return complaints
