"""Several processes: training in parallel, and tensors that are spread over a mesh."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import FIRST, ROOT, WITH_PARAMETERS, build
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch is built without torch.distributed")


def torchrun(*arguments, cwd: Path, timeout: float = 200) -> subprocess.CompletedProcess:
    """Two processes, of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout)


def test_losses_in_parallel_are_the_models_alone():
    """By gloo on the CPU; by NCCL it is run by hand."""
    done = torchrun(ROOT / "tests" / "parallel_training.py", "cpu", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(": same:", done.stdout)) == 3 * len(FIRST)


# ---- DTensor


@pytest.fixture
def mesh(device):
    """Of this process alone: enough to have tensors of the kind."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("case", FIRST, ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_dtensors_are_right_or_refused_in_words(case, placement, recorded, mesh, device):
    """Our operators have no rule for how a mesh would share their work; the plain way has. fully_shard and DDP need none."""
    model, new, inputs = build(case, device)
    spread = [distribute_tensor(t, mesh, [placement]) for t in inputs]
    try:
        with torch.set_grad_enabled(recorded):
            out = distribute_module(new, mesh)(*spread)
    except (RuntimeError, NotImplementedError) as refusal:
        assert re.search("sharding strategy|DTensor|tensor parallel", str(refusal))
        return
    torch.testing.assert_close(out.full_tensor(), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in FIRST if case.stem in WITH_PARAMETERS], ids=str)
def test_a_norm_sharded_by_itself_is_right_or_refused(case, mesh, device):
    """fully_shard gathers a module's weights when it is called, which a fused norm is not. The whole ModelNew is what to shard."""
    model, new, inputs = build(case, device)
    for child in new.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    try:
        out = fully_shard(new, mesh=mesh)(*inputs)
    except RuntimeError as refusal:
        assert "DTensor" in str(refusal)
        return
    torch.testing.assert_close(out, model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in FIRST if "linear" in case.stem], ids=str)
@pytest.mark.parametrize(
    "style", [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())], ids=["columns", "rows"]
)
def test_a_linear_layer_split_over_the_mesh(case, style, mesh, device):
    """Tensor parallelism of the layer inside: it takes and gives plain tensors."""
    model, new, inputs = build(case, device)
    name = next(name for name, child in new.named_children() if isinstance(child, torch.nn.Linear))
    torch.testing.assert_close(parallelize_module(new, mesh, {name: style})(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
