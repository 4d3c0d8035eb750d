"""What the tests share: the device they run on, a fixed seed, the markers."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: idle threads do not keep a busy machine's cores

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "ahead(call): the fixture `ahead` gives what call(**parameters) has returned in another thread")
    for expected in (
        "input's size at dim=. does not match num_features:UserWarning",  # the Model of linear_instance_norm_residual normalises one channel
        "Initializing zero-element tensors is a no-op:UserWarning",  # layers with no input features
        "`torch.jit.script:DeprecationWarning",  # PyTorch's own functional_call uses it
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{expected}")


# What older versions of PyTorch lack: until which one, and how it shows. A test that fails there for this reason is skipped.
LACKING = (
    ("2.1", r"not implemented for 'Half'|only support Bfloat16 as the autocast_cpu_dtype", "float16 on a CPU"),
    ("2.1", r"Python 3\.11\+ not yet supported for torch\.compile", "torch.compile with this Python"),
    ("2.1", r"no attribute '(export|jagged|opcheck|weight_norm)'|unexpected keyword argument 'materialize_grads'", "what the test asks with"),
    ("2.6", r"no attribute 'aoti_compile_and_package'", "packages of AOTInductor"),
    ("2.5", r"ArgsMismatchError: too many positional arguments", "torch.compile of a Function in another's backward"),
)


# What they import is not there: fully_shard, and what counts a Model's work.
collect_ignore = ["tests/test_distributed.py"] if torch.__version__ < "2.6" else []
collect_ignore += ["tests/test_harness.py", "tests/test_readme.py", "tests/test_training.py"] if torch.__version__ < "2.1" else []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call():
    outcome = yield
    if outcome.excinfo:
        said = f"{outcome.excinfo[0].__name__}: {outcome.excinfo[1]}"
        for version, pattern, what in LACKING:
            if torch.__version__ < version and re.search(pattern, said):
                outcome.force_exception(pytest.skip.Exception(f"PyTorch {torch.__version__} has not: {what}"))


# A long compilation runs on a core that the tests leave idle: it begins with the session, and whoever wants its result has a late turn.
# Who measures time comes last, when nothing else runs.
MEASURED = ("::test_cold_import", "tests/test_harness.py")
_one_at_a_time = ThreadPoolExecutor(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (any(name in item.nodeid for name in MEASURED), item.get_closest_marker("ahead") is not None))


def pytest_runtestloop(session):
    if not session.config.option.collectonly:
        for item in session.items:
            if marker := item.get_closest_marker("ahead"):
                parameters = item.callspec.params if hasattr(item, "callspec") else {}
                item.ahead = _one_at_a_time.submit(marker.kwargs["call"], **parameters)


def pytest_sessionfinish():
    _one_at_a_time.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def ahead(request):
    return request.node.ahead.result()


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
