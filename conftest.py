"""What the tests share: the device they run on, a fixed seed, and where tests that need a GPU are left out."""

import contextlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: idle threads free their cores
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers are as many as the cores

import pytest
import torch

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def pytest_sessionstart(session):
    """Each worker builds some of the kernel files, so that none waits for a file that another one builds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from cases import STEMS, solution

        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        for stem in STEMS[worker :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            with contextlib.suppress(Exception):  # the tests that need the file say so
                solution(stem)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # these first, or one worker ends long after
    if not torch.cuda.is_available():
        left_out = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(params=DEVICES, ids=lambda device: f"on {device}")
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def deterministic():
    """For tests that compare bits: cuDNN adds up in a fixed order then, where a pair takes the plain path; our kernels
    do always. PyTorch also fills fresh memory with NaN, that of our operators too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def strict_float32(monkeypatch):
    """Eager convolutions may use TF32 by default; the suite promises strict float32 unless the user allows less."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def matmul_tf32():
    """Allows TF32 in matrix products, or forbids it, and puts back what was set. (The setting is made by __getattr__.
    The monkeypatch of pytest 9.2 takes it for a new attribute and tries to delete it.)"""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda allowed: setattr(matmul, "allow_tf32", allowed)
    matmul.allow_tf32 = before
