"""What a module gives: its outputs and gradients by name, with weights and inputs drawn by seed, from memory full of NaN."""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Callable

import torch
from torch.utils._pytree import tree_flatten

GRADIENT = "gradient of "  # what the names of gradients begin with, beside "output"
unforeseen = random.SystemRandom()


def perturb(model: torch.nn.Module, seed: int) -> None:
    """New values for everything floating in the state, of the size and sign it had; what is all zero becomes small numbers."""
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    generators = {tensor.device: torch.Generator(tensor.device).manual_seed(seed) for tensor in tensors}
    for tensor in tensors:
        generator = generators[tensor.device]
        factors = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)
        if tensor.any():
            tensor.mul_(factors)
        else:
            tensor.copy_(factors.sub_(1.0))


def relocate(*modules: torch.nn.Module) -> None:
    """Moves the modules' parameters and buffers to other places in memory, drawn among a few. As with `.to`, they stay the same objects."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for tensor in unforeseen.sample(tensors, len(tensors)):
        spare = [torch.empty_like(tensor) for _ in range(unforeseen.randrange(3))]  # where the tensor would have come to lie
        tensor.data = tensor.detach().clone()
        del spare


def clone_all(tensors: list) -> list:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in tensors]


def by_name(inputs: list) -> dict[str, torch.Tensor]:
    return {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def observe(module: Callable, inputs: list, backward: bool, seed: int) -> dict[str, object]:
    """What one call gives, by name: the outputs and, with the backward pass, a gradient for each floating input and parameter.

    The incoming gradients are random (a sum as loss would make many a wrong backward look right) and the same for the same seed.
    """
    if not backward:
        with torch.no_grad():
            return named_outputs(module(*inputs))
    inputs = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    wanted = {GRADIENT + name: x for name, x in by_name(inputs).items() if x.requires_grad}
    wanted.update((GRADIENT + name, p) for name, p in module.named_parameters() if p.requires_grad)
    seen = named_outputs(module(*inputs))
    roots = [out for out in seen.values() if isinstance(out, torch.Tensor) and out.requires_grad]
    if wanted and not roots:
        raise RuntimeError("no output requires a gradient")
    if wanted:
        gradients = torch.autograd.grad(roots, list(wanted.values()), random_like(roots, seed), allow_unused=True)
        seen = {name: out.detach() if isinstance(out, torch.Tensor) else out for name, out in seen.items()}
        seen.update(zip(wanted, gradients))
    return seen


def random_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Normal numbers that hardly round in any dtype, so that a run and its float64 reference get the same ones."""
    generators = {tensor.device: torch.Generator(tensor.device).manual_seed(seed) for tensor in tensors}
    drawn = (torch.randn(x.shape, generator=generators[x.device], device=x.device) for x in tensors)
    return [values.bfloat16().to(x.dtype) for values, x in zip(drawn, tensors)]


def named_outputs(result) -> dict[str, object]:
    leaves, spec = tree_flatten(result)
    if isinstance(result, torch.Tensor):
        return {"output": result}
    return {"structure": spec, **{f"output {i}": leaf for i, leaf in enumerate(leaves)}}


@contextlib.contextmanager
def poisoned(device: str, like: list):
    """Memory is full of NaN inside: blocks of the outputs' sizes are filled and freed, and PyTorch fills what torch.empty hands out."""
    if device == "cuda":
        floating = [x for x in like if isinstance(x, torch.Tensor) and x.is_floating_point()]
        blocks = [torch.full(x.shape, float("nan"), dtype=x.dtype, device=device) for x in floating]
        del blocks
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches = getattr(torch.utils, "deterministic", None)  # newer than the oldest supported PyTorch
    filling = switches.fill_uninitialized_memory if switches else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        if switches:
            switches.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
            if switches:
                switches.fill_uninitialized_memory = filling


def behaviour(model: torch.nn.Module) -> list[tuple]:
    """What an instance adds to its classes: functions of its own, and hooks."""
    return [
        (name, key, value if callable(value) else list(value.values()))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if (callable(value) and not isinstance(value, torch.Tensor)) or key.endswith("_hooks")
    ]
