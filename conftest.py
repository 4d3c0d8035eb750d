"""What the tests share: the device they run on, a fixed seed, the markers."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: idle threads do not keep a busy machine's cores
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers are as many as the cores

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    for expected in (
        "input's size at dim=. does not match num_features:UserWarning",  # the Model of linear_instance_norm_residual normalises one channel
        "Initializing zero-element tensors is a no-op:UserWarning",  # layers with no input features
        "`torch.jit.script:DeprecationWarning",  # PyTorch's own functional_call uses it
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{expected}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["on cpu", "on cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def strict_float32(monkeypatch):
    """Eager convolutions may use TF32 by default; the suite promises strict float32 unless the user allows less."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
