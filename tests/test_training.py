"""A ModelNew in a training program: optimisers, mixed precision, parametrised weights, transforms, graphs.

Everywhere the measure is the Model in the same program: its losses step by step, its gradients, its dtypes.
"""

import copy
import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from cases import build, captured, converted, first_cases, learning_cases
from test_gradients import weights_of_the_sum
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


def batches(case, device, count: int) -> list[list[torch.Tensor]]:
    """Inputs of one step after the other, the same for everybody who asks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return [converted(case.inputs(), device) for _ in range(count)]


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Not one that a norm makes constant: each feature is drawn to a value of its own."""
    target = torch.linspace(-1, 1, out.shape[-1], device=out.device)
    return (out.float() - target).square().mean()


def losses_of(module, batches: Iterable, optimizer, loss_of: Callable = loss_of) -> list[float]:
    losses = []
    for inputs in batches:
        optimizer.zero_grad()
        loss = loss_of(module(*inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@learning_cases
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}], ids=str)
def test_losses_are_the_models_step_by_step(case, optimizer, how, device):
    """A compiled module sees the weights that the optimiser changed, too, and is not compiled again for them."""
    torch._dynamo.reset()
    model, new, _ = build(case, device)
    counter, steps = CompileCounterWithBackend("aot_eager"), batches(case, device, 6)
    compiled = torch.compile(copy.deepcopy(new), fullgraph=True, backend=counter)
    modules = model, new, compiled
    theirs, *ours = (losses_of(m, steps, optimizer(m.parameters(), lr=0.01, **how)) for m in modules)
    assert ours == [pytest.approx(theirs, rel=1e-4)] * 2
    assert counter.frame_count == 1


@first_cases
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_models_dtypes(case, low, device):
    """For every mixture of the dtypes of inputs and parameters: of the output, and of the gradients."""
    model, new, inputs = build(case, device)
    for *dtypes, of_parameters in itertools.product([torch.float32, low], repeat=len(inputs) + 1):
        seen = []
        for module in (model, new):
            leaves = [t.to(dtype).requires_grad_() for t, dtype in zip(inputs, dtypes, strict=True)]
            with torch.autocast(device.type, dtype=low):
                out = module.to(of_parameters)(*leaves)
            grads = torch.autograd.grad(out.float().square().sum(), [*leaves, *module.parameters()])
            with torch.no_grad(), torch.autocast(device.type, dtype=low):
                seen.append([out.dtype, module(*leaves).dtype, *(g.dtype for g in grads)])
        assert seen[1] == seen[0], (dtypes, of_parameters)


@learning_cases
def test_gradient_scaling(case, device):
    """Losses and scales of float16 training; a step whose gradients overflow is left out."""
    model, new, _ = build(case, device)
    histories = []
    for module in (model, new):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=3)
        histories.append([])
        for step, inputs in enumerate(batches(case, device, 6)):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                loss = loss_of(module(*inputs))
            before = [p.detach().clone() for p in module.parameters()]
            scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(map(torch.equal, module.parameters(), before)) == (step == 2)
            histories[-1].append((loss.item(), scaler.get_scale()))
    (theirs, their_scales), (ours, our_scales) = (zip(*history) for history in histories)
    assert our_scales == their_scales
    assert ours == pytest.approx(theirs, rel=2e-3)


def output_and_gradients(new, inputs, reentrant: bool | None = None) -> list[torch.Tensor]:
    """The output and the gradients of inputs and parameters; None: without a checkpoint."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    new.zero_grad()
    out = new(*leaves) if reentrant is None else checkpoint(new, *leaves, use_reentrant=reentrant)
    out.backward(weights_of_the_sum(out))
    return [out.detach(), *(t.grad.clone() for t in (*leaves, *new.parameters()))]


@first_cases
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_activation_checkpointing(case, reentrant, device):
    """Reentrant, the forward first runs without gradients. That it has the same bits is asked in test_gpu.py, of the
    fast path alone: on the plain path it is one kernel after ATen's product, where with gradients ATen does all."""
    _, new, inputs = build(case, device)
    results = [output_and_gradients(new, inputs, way) for way in (None, reentrant)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class Softplus(nn.Module):
    """A parametrisation that notes each look at its parameter."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    def forward(self, value):
        self.looks += 1
        return nn.functional.softplus(value)


def on_the_layer(apply):
    """A parametrisation of the weight of the pair's Linear or Conv2d."""
    return lambda module: apply(next(m for m in module.children() if isinstance(m, (nn.Linear, nn.Conv2d))))


def on_every_vector(module):
    """One on each parameter beside that layer's: of the module itself and of its norm."""
    for owner in (module, *(m for m in module.children() if isinstance(m, nn.GroupNorm))):
        for name in [name for name, _ in owner.named_parameters(recurse=False)]:
            parametrize.register_parametrization(owner, name, Softplus())


PARAMETRIZATIONS = {
    "weight_norm": on_the_layer(parametrizations.weight_norm),
    "spectral_norm": on_the_layer(parametrizations.spectral_norm),
    "weight_norm by a hook": on_the_layer(nn.utils.weight_norm),
    "one of its own on every vector": on_every_vector,
}


@learning_cases
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("way", PARAMETRIZATIONS)
def test_parametrized_weights(case, way, device):
    """Spectral norm iterates at each look at the weight while training: one too many is another weight than theirs."""
    model, new, _ = build(case, device)
    for module in (model, new):
        torch.manual_seed(3)
        PARAMETRIZATIONS[way](module)
    new.load_state_dict(model.state_dict())
    steps, sgd = batches(case, device, 4), torch.optim.SGD
    theirs, ours = (losses_of(m, steps, sgd(m.parameters(), lr=0.1)) for m in (model, new))
    assert ours == pytest.approx(theirs, rel=1e-4)
    looks = [[p.looks for p in module.modules() if isinstance(p, Softplus)] for module in (model, new)]
    assert looks[1] == looks[0]
    with torch.no_grad():
        inputs = batches(case, device, 1)[0]
        torch.testing.assert_close(new.eval()(*inputs), model.eval()(*inputs), rtol=1e-3, atol=1e-3)


@first_cases
def test_per_sample_gradients(case, device):
    """vmap over grad: of the parameters and of the inputs, for each sample alone."""
    model, new, inputs = build(case, device)

    def per_sample(module, *inputs):
        def loss(parameters, *sample):
            return loss_of(functional_call(module, parameters, tuple(t.unsqueeze(0) for t in sample)))

        parameters = {name: p.detach() for name, p in module.named_parameters()}
        wanted = tuple(range(1 + len(inputs)))
        return vmap(grad(loss, argnums=wanted), in_dims=(None, *[0] * len(inputs)))(parameters, *inputs)

    torch.testing.assert_close(per_sample(new, *inputs), per_sample(model, *inputs), rtol=1e-3, atol=1e-5)


@first_cases
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen"])
@pytest.mark.parametrize("by", ["torch.func.jvp", "dual numbers"])
def test_forward_mode(case, by, frozen, device):
    """A lost tangent would be a gradient of zero that nobody notices."""
    model, new, inputs = build(case, device)
    new.requires_grad_(not frozen)
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def tangent_of(module):
        if by == "torch.func.jvp":
            return torch.func.jvp(module, tuple(inputs), tangents)[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(module(*map(forward_ad.make_dual, inputs, tangents))).tangent

    torch.testing.assert_close(tangent_of(new), tangent_of(model), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@learning_cases
def test_a_whole_training_step_in_a_cuda_graph(case):
    """Forward, backward and the optimiser's step, captured once and replayed on new inputs: the Model's losses."""

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01, capturable=True)

    device = torch.device("cuda")
    model, new, _ = build(case, device)
    steps = warm_up, *rest = batches(case, device, 6)
    optimizer, static = adam(new.parameters()), [t.clone() for t in warm_up]

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(new(*static))
        loss.backward()
        optimizer.step()
        return loss.detach()

    graph, first, loss = captured(step)
    losses = [first.item()]
    for inputs in rest:
        for t, value in zip(static, inputs, strict=True):
            t.copy_(value)
        graph.replay()
        losses.append(loss.item())
    assert losses == pytest.approx(losses_of(model, steps, adam(model.parameters())), rel=1e-4)
