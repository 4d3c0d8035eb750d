"""Several processes: training in parallel, and tensors that are spread over a mesh."""

import re
import subprocess
import sys

import pytest
import torch
from cases import FIRST, ROOT, build, first_cases, learning_cases
from test_invalid import complaint, outcome
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch is built without torch.distributed")


@pytest.mark.slow
def test_losses_in_parallel_are_the_models_alone():
    """By gloo on the CPU; by NCCL it is run by hand."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [ROOT / "tests" / "tools" / "parallel_training.py", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(": same:", done.stdout)) == 3 * len(FIRST)


@pytest.fixture
def mesh(device):
    """Of this process alone: enough to have tensors of the kind."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@first_cases
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_dtensors_are_right_or_refused_in_words(case, placement, recorded, mesh, device):
    """Our operators have no rule for how a mesh would share their work; the plain path has."""
    model, new, inputs = build(case, device)
    spread = [distribute_tensor(t, mesh, [placement]).requires_grad_(recorded) for t in inputs]

    def over_the_mesh(module):
        with torch.set_grad_enabled(recorded):
            return distribute_module(module, mesh)(*spread).full_tensor()

    ours, models = (outcome(lambda: over_the_mesh(module)) for module in (new, model))
    if isinstance(ours, Exception) and "sharding strategy" in str(ours) and "aten." not in str(ours):
        assert device.type == "cuda" or not recorded  # training on a CPU is the plain path
        assert "linear" not in case.stem  # these look at the type of their tensors
    else:  # no refusal of our operators: then it is one of the Model, too
        assert not (wrong := complaint(ours, models, tolerance=1e-4)), wrong


@learning_cases
@pytest.mark.parametrize("which", ["the norm", "every layer"])
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_layers_sharded_by_themselves(case, recorded, which, mesh, device):
    """fully_shard gathers a layer's weights when the layer is called: it must be, not only its weights be taken."""
    model, new, inputs = build(case, device)
    layers = [child for child in new.children() if any(True for _ in child.parameters())]
    for layer in layers[-1:] if which == "the norm" else layers:
        fully_shard(layer, mesh=mesh)
    with torch.set_grad_enabled(recorded):
        out = fully_shard(new, mesh=mesh)(*inputs)
    torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=1e-4)


BY = {"columns": ColwiseParallel(output_layouts=Replicate()), "rows": RowwiseParallel(input_layouts=Replicate())}


@pytest.mark.parametrize("case", [case for case in FIRST if "linear" in case.stem], ids=str)
@pytest.mark.parametrize("style", BY.values(), ids=BY)
def test_a_linear_layer_split_over_the_mesh(case, style, mesh, device):
    """Tensor parallelism of the layer inside: it takes and gives plain tensors."""
    model, new, inputs = build(case, device)
    name = next(name for name, child in new.named_children() if isinstance(child, torch.nn.Linear))
    out = parallelize_module(new, mesh, {name: style})(*inputs)
    torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=1e-4)
