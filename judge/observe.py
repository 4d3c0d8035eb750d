"""What a module gives: its outputs and gradients by name, with weights and inputs drawn by seed, from memory full of NaN."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten

from judge.compare import same_bits

GRADIENT = "gradient of "  # what the names of gradients begin with, beside "output"
unforeseen = random.SystemRandom()


def perturb(model: torch.nn.Module, seed: int, signs: bool = False) -> None:
    """New values for everything floating in the state, of the size and sign it had; what is all zero becomes small numbers.

    With `signs`, about half of the parameters' values get the other sign; buffers, a variance say, keep theirs.
    """
    parameters = {name for name, _ in model.named_parameters()} if signs else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    generators = {tensor.device: torch.Generator(tensor.device).manual_seed(seed) for tensor in tensors.values()}
    for name, tensor in tensors.items():
        generator = generators[tensor.device]
        factors = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)
        if name in parameters:
            factors *= torch.empty_like(tensor).uniform_(-1, 1, generator=generator).sign()
        if tensor.any():
            tensor.mul_(factors)
        else:
            tensor.copy_(factors.sub_(1.0))


def relocate(*modules: torch.nn.Module) -> None:
    """Moves the modules' parameters and buffers to other places in memory, drawn among a few. As with `.to`, they stay the same objects."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    for tensor in unforeseen.sample(tensors, len(tensors)):
        spare = [
            torch.empty_like(tensor) for _ in range(unforeseen.randrange(3))
        ]  # where the tensor would have come to lie
        tensor.data = tensor.detach().clone()
        del spare


def clone_all(tensors: list) -> list:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in tensors]


def spread_out(inputs: list, seed: int) -> None:
    """Makes floating values three times as large and of both signs, in place."""
    torch.manual_seed(seed)
    for x in inputs:
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.mul_(torch.randint_like(x, 2).mul_(6).sub_(3))


def transposed(inputs: list) -> list:
    """The same values, whose first dimension is the innermost in memory instead of the last."""
    return [
        x.transpose(0, -1).contiguous().transpose(0, -1) if isinstance(x, torch.Tensor) and x.dim() > 1 else x
        for x in inputs
    ]


def by_name(inputs: list) -> dict[str, torch.Tensor]:
    return {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def random_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Normal numbers that hardly round in any dtype, so that a run and its float64 reference get the same ones."""
    generators = {tensor.device: torch.Generator(tensor.device).manual_seed(seed) for tensor in tensors}
    drawn = (torch.randn(x.shape, generator=generators[x.device], device=x.device) for x in tensors)
    return [values.bfloat16().to(x.dtype) for values, x in zip(drawn, tensors)]


def expanded_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The same numbers all along the first dimension, in memory but once, as behind a sum or a mean."""
    return [x[:1].expand_as(x) if x.dim() else x for x in random_like(tensors, seed)]


def repeated_like(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The numbers of `expanded_like`, each in a place of its own."""
    return [x.contiguous() for x in expanded_like(tensors, seed)]


def observe(
    module: Callable, inputs: list, backward: bool, seed: int, incoming: Callable = random_like
) -> dict[str, object]:
    """What one call gives, by name: the outputs and, with the backward pass, a gradient for each floating input and parameter.

    The incoming gradients are random (a sum as loss would make many a wrong backward look right) and the same for the same seed.
    """
    if not backward:
        with torch.no_grad():
            return named_outputs(module(*inputs))
    inputs = [
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    ]
    wanted = {GRADIENT + name: x for name, x in by_name(inputs).items() if x.requires_grad}
    wanted.update((GRADIENT + name, p) for name, p in module.named_parameters() if p.requires_grad)
    seen = named_outputs(module(*inputs))
    roots = [out for out in seen.values() if isinstance(out, torch.Tensor) and out.requires_grad]
    if wanted and not roots:
        raise RuntimeError("no output requires a gradient")
    if wanted:
        given = incoming(roots, seed)
        gradients = torch.autograd.grad(roots, list(wanted.values()), given, allow_unused=True)
        if not all(map(same_bits, given, incoming(roots, seed))):
            raise RuntimeError("the backward pass writes the gradient that comes in")
        seen = {name: out.detach() if isinstance(out, torch.Tensor) else out for name, out in seen.items()}
        seen.update(zip(wanted, gradients))
    return seen


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
