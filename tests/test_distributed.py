"""Several processes: training in parallel, and tensors that are spread over a mesh."""

import re
import subprocess
import sys

import pytest
import torch
from cases import FIRST, ROOT, build, first_cases
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


@first_cases
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_dtensors_are_right_or_refused_in_words(case, placement, recorded, mesh, device):
    """Our operators have no rule for how a mesh would share their work; the plain way has."""
    model, new, inputs = build(case, device)
    spread = [distribute_tensor(t, mesh, [placement]) for t in inputs]
    expected = model(*inputs)
    try:
        with torch.set_grad_enabled(recorded):
            out = distribute_module(new, mesh)(*spread)
    except NotImplementedError as refusal:
        assert "sharding strategy" in str(refusal)
        return
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-4)
