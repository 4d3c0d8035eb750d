"""ModelNew takes Model's place: the same constructor, parameters, state, copies, hooks, repr and errors."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, assert_same_form
from cases import CASES, DTYPES, FIRST, STEMS, WITH_PARAMETERS, Case, build, converted, in_dtype, problem, solution
from torch import nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only

cases = pytest.mark.parametrize("case", CASES, ids=str)
first_cases = pytest.mark.parametrize("case", FIRST, ids=str)
stems = pytest.mark.parametrize("stem", STEMS)


def both(case: Case, seed: int = 7) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A Model and a ModelNew, each made after the same seed, untouched."""
    modules = []
    for cls in (problem(case.stem).Model, solution(case.stem).ModelNew):
        torch.manual_seed(seed)
        modules.append(cls(*case.arguments()))
    return modules[0], modules[1]


@torch.no_grad()
def equal_outputs(a: torch.nn.Module, b: torch.nn.Module, inputs: list) -> bool:
    return torch.equal(a(*inputs), b(*inputs))


# ---- construction and state


@stems
def test_constructor_and_forward_have_the_models_signature(stem):
    model, new = problem(stem).Model, solution(stem).ModelNew
    for method in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(cls, method)).parameters.values() for cls in (new, model))
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


@cases
def test_the_same_seed_gives_the_same_weights(case):
    model, new = both(case)
    drawn_after = torch.rand(1)
    torch.manual_seed(7)
    problem(case.stem).Model(*case.arguments())
    assert torch.equal(drawn_after, torch.rand(1))  # ModelNew draws no more and no fewer random numbers
    for (name, ours), (other, theirs) in zip(new.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad


@cases
def test_state_dict_has_the_models_keys_in_order(case):
    model, new = both(case)
    ours, theirs = new.state_dict(), model.state_dict()
    assert [(k, v.shape, v.dtype) for k, v in ours.items()] == [(k, v.shape, v.dtype) for k, v in theirs.items()]
    assert ours._metadata == theirs._metadata


@cases
def test_strict_load_both_ways(case):
    model, new = both(case)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.normal_()
    model.load_state_dict(new.state_dict(), strict=True)
    other = solution(case.stem).ModelNew(*case.arguments())
    other.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), new.parameters(), strict=True))


@cases
def test_modules_and_attributes_are_the_models(case):
    model, new = both(case)
    assert [(n, type(m)) for n, m in new.named_modules() if n] == [(n, type(m)) for n, m in model.named_modules() if n]
    assert vars(new).keys() == vars(model).keys()  # no tensor, operator or extension of our own on the module
    assert [n for n, _ in new.named_buffers()] == [n for n, _ in model.named_buffers()]


@cases
def test_repr_is_the_models_but_for_the_name(case):
    model, new = both(case)
    assert repr(new) == repr(model).replace("Model(", "ModelNew(", 1)


@first_cases
def test_default_dtype_and_device_are_respected(case, monkeypatch):
    with torch.device("meta"):
        assert all(p.is_meta for p in solution(case.stem).ModelNew(*case.arguments()).parameters())
    torch.set_default_dtype(torch.float64)
    try:
        model, new = both(case)
        assert [p.dtype for p in new.parameters()] == [p.dtype for p in model.parameters()]
        inputs = converted(case.inputs(), dtype=torch.float64)
        assert new(*inputs).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# ---- copies


COPIES = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda module: torch.load(io.BytesIO(saved(module)), weights_only=False),
}


def saved(thing) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@first_cases
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("used", [False, True], ids=["before its first call", "after a call"])
def test_copies_work_and_are_independent(case, used, way, device):
    _, new, inputs = build(case, device)
    if used:
        new(*inputs)
    expected = new(*inputs).detach() if used else None
    other = COPIES[way](new)
    assert type(other) is type(new)
    assert equal_outputs(other, new, inputs) and (expected is None or torch.equal(other(*inputs), expected))
    before = new(*inputs).detach()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    assert torch.equal(new(*inputs), before)


@first_cases
def test_state_survives_a_file(case, device, tmp_path):
    model, new, inputs = build(case, device)
    torch.save(new.state_dict(), tmp_path / "weights.pt")
    other = solution(case.stem).ModelNew(*case.arguments()).to(device)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert equal_outputs(other, new, inputs)
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)


@first_cases
def test_new_weights_are_used_at_once(case, device):
    """Nothing is kept from an earlier call: neither a step of an optimiser nor a write through .data goes unseen."""
    model, new, inputs = build(case, device)
    new(*inputs)
    for change in (lambda p: p.data.mul_(-0.7), lambda p: p.data.copy_(torch.randn_like(p)), lambda p: setattr(p, "data", p.data * 2)):
        for one, other in zip(model.parameters(), new.parameters(), strict=True):
            change(one)
            other.data.copy_(one.data)
        assert_as_accurate_as_eager(lambda module, x: {"output": module(*x).detach()}, [(model, new, inputs)])


# ---- the life of a module


CONVERSIONS = {
    ".half()": lambda m: m.half(),
    ".double()": lambda m: m.double(),
    ".bfloat16()": lambda m: m.bfloat16(),
    ".half().float()": lambda m: m.half().float(),
    ".to(float64)": lambda m: m.to(torch.float64),
}


@first_cases
@pytest.mark.parametrize("way", CONVERSIONS)
def test_conversions(case, way, device):
    model, new, inputs = build(case, device)
    model, new = CONVERSIONS[way](model), CONVERSIONS[way](new)
    dtype = next((p.dtype for p in model.parameters()), {".half()": torch.float16, ".bfloat16()": torch.bfloat16}.get(way, torch.float64))
    inputs = converted(inputs, dtype=dtype)
    with torch.no_grad():
        assert_same_form(new(*inputs), model(*inputs))
    assert_as_accurate_as_eager(lambda module, x: {"output": module(*x).detach()}, [(model, new, inputs)])


@first_cases
def test_train_and_eval_give_the_same(case, device):
    model, new, inputs = build(case, device)
    trained = new.train()(*inputs).detach()
    assert new.training
    assert torch.equal(new.eval()(*inputs), trained) and not new.training
    with torch.no_grad():
        assert_same_form(new(*inputs), model.eval()(*inputs))


@first_cases
def test_hooks_fire(case, device):
    _, new, inputs = build(case, device)
    plain, seen = new(*inputs).detach(), []

    def before(module, args):
        seen.append("before")
        return tuple(a * 2 for a in args)

    def after(module, args, output):
        seen.append("after")
        return output + 1

    doubled = new(*[t * 2 for t in inputs]).detach()
    with new.register_forward_pre_hook(before), new.register_forward_hook(after):
        assert torch.equal(new(*inputs), doubled + 1)
    assert seen == ["before", "after"]
    assert torch.equal(new(*inputs), plain)


@first_cases
def test_gradient_hooks_fire(case, device):
    _, new, inputs = build(case, device)
    seen = []
    new.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(len(grad_input)))
    inputs[0].requires_grad_()
    new(*inputs).sum().backward()
    assert seen == [len(inputs)]


@first_cases
def test_functional_call_with_other_weights(case, device):
    model, new, inputs = build(case, device)
    weights = {name: torch.randn_like(p) for name, p in new.named_parameters()}
    out = torch.func.functional_call(new, weights, tuple(inputs))
    torch.testing.assert_close(out, torch.func.functional_call(model, weights, tuple(inputs)), rtol=1e-4, atol=1e-4)


@first_cases
def test_keyword_arguments(case, device):
    _, new, inputs = build(case, device)
    names = [*inspect.signature(new.forward).parameters]
    assert torch.equal(new(**dict(zip(names, inputs, strict=True))), new(*inputs))


# ---- another layer where the Model has its Linear or Conv2d


class WithAdapter(nn.Module):
    """As LoRA does it: the layer, frozen, and a small one beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.adapter = layer.requires_grad_(False), copy.deepcopy(layer)
        with torch.no_grad():
            self.adapter.weight.mul_(0.1)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


def with_a_forward_of_its_own(layer):
    original = layer.forward
    layer.forward = lambda x: 2 * original(x)
    return layer


def without_a_bias(layer):
    layer.register_parameter("bias", None)
    return layer


LAYERS = {
    "in a Sequential": lambda layer: nn.Sequential(layer, nn.Tanh()),
    "with an adapter": WithAdapter,
    "with a forward of its own": with_a_forward_of_its_own,
    "without a bias": without_a_bias,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "quantized": lambda layer: torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})[0],
}


@pytest.mark.parametrize("case", [case for case in FIRST if case.stem in WITH_PARAMETERS], ids=str)
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("way", LAYERS)
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_another_layer_in_the_place_of_the_models(case, recorded, way, device):
    if way == "quantized" and device.type != "cpu":
        pytest.skip("PyTorch's quantized layers are for the CPU")
    model, new, inputs = build(case, device)
    for module in (model, new):
        name = next(name for name, child in module.named_children() if isinstance(child, (nn.Linear, nn.Conv2d)))
        setattr(module, name, LAYERS[way](getattr(module, name)))
    with torch.set_grad_enabled(recorded):
        torch.testing.assert_close(new(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


# ---- tensors of other kinds: the Model's result, or an error in words


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Boxed(torch.Tensor):
    """A tensor around another one, which every operator is carried out on."""

    @staticmethod
    def __new__(cls, inner):
        return cls._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda boxed: boxed.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, function(*args, **kwargs))


def values(t: torch.Tensor) -> torch.Tensor:
    return t.inner if isinstance(t, Boxed) else t.detach().as_subclass(torch.Tensor)


@first_cases
@pytest.mark.parametrize("kind", [lambda t: t.detach().as_subclass(Named), Boxed], ids=["a plain subclass", "a wrapper"])
def test_subclasses_of_tensor(case, kind, device):
    """In the inputs: the output is of the Model's class, with the right values and gradients."""
    model, new, inputs = build(case, device)
    results = []
    for module in (model, new):
        leaves = [kind(t).requires_grad_() for t in inputs]
        with torch.no_grad():
            unrecorded = module(*leaves)
        out = module(*leaves)
        results.append([unrecorded, out, *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        assert type(ours) is type(theirs)
        torch.testing.assert_close(values(ours), values(theirs), rtol=1e-4, atol=1e-4)


KINDS = {
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
    "nested and strided": lambda t: torch.nested.nested_tensor(list(t)),
    "masked": lambda t: torch.masked.masked_tensor(t, t > 0),
    "of MKLDNN": lambda t: t.to_mkldnn(),
}


@first_cases
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning", "ignore:.* is not implemented in __torch_dispatch__:UserWarning")
def test_tensors_of_other_layouts_are_the_models_affair(case, kind, recorded, device):
    """None of them is read as if its numbers lay in rows: the Model's answer, or an error."""
    if kind == "of MKLDNN" and device.type != "cpu":
        pytest.skip("for the CPU")
    model, new, inputs = build(case, device)
    inputs = [KINDS[kind](t) for t in inputs]
    with torch.set_grad_enabled(recorded):
        try:
            out = new(*inputs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as refusal:
            assert len(str(refusal)) > 20
        else:
            torch.testing.assert_close(out, model(*inputs))


# ---- errors: the Model's type, and words that name what is wrong

F32, F16, F64, INT, CPLX = torch.float32, torch.float16, torch.float64, torch.int64, torch.complex64
LINEAR, GROUPED, CONV = (5, 7), (5, 8, 4, (8,)), (3, 8, 3, 4, (8, 1, 1), (8, 1, 1))
RANK = "dim|rank|[0-9]D"
SIZE = "shape|size|features|channels|multipl|broadcast|match"
DTYPE = "type|Long|Int|Half|Bool|Float|float|int64"
# what is wrong, constructor arguments, inputs as (shape, dtype) or None where the constructor itself raises, words of the message
ERRORS = {
    "instance_norm": [
        ("two dimensions", (3,), [((2, 3), F32)], RANK),
        ("one dimension", (3,), [((3,), F32)], RANK),
        ("no dimensions", (3,), [((), F32)], RANK),
        ("five dimensions", (3,), [((2, 3, 1, 4, 4), F32)], RANK),
        ("a single spatial value", (3,), [((2, 3, 1, 1), F32)], "spatial"),
        ("a single spatial value, unbatched", (3,), [((3, 1, 1), F32)], "spatial"),
        ("integers", (3,), [((2, 3, 4, 4), INT)], DTYPE),
        ("booleans", (3,), [((2, 3, 4, 4), torch.bool)], DTYPE),
        ("complex numbers", (3,), [((2, 3, 4, 4), CPLX)], DTYPE),
    ],
    "linear_instance_norm_residual": [
        ("x of other features", LINEAR, [((2, 6), F32), ((2, 7), F32)], SIZE),
        ("x of one dimension", LINEAR, [((5,), F32), ((7,), F32)], f"{RANK}|spatial"),
        ("x of three dimensions", LINEAR, [((2, 2, 5), F32), ((2, 2, 7), F32)], RANK),
        ("x without dimensions", LINEAR, [((), F32), ((2, 7), F32)], f"{RANK}|{SIZE}"),
        ("y of other rows", LINEAR, [((2, 5), F32), ((3, 7), F32)], SIZE),
        ("y of other features", LINEAR, [((2, 5), F32), ((2, 6), F32)], SIZE),
        ("a single feature", (5, 1), [((2, 5), F32), ((2, 1), F32)], "spatial|feature"),
        ("x of integers", LINEAR, [((2, 5), INT), ((2, 7), F32)], DTYPE),
        ("x in float16", LINEAR, [((2, 5), F16), ((2, 7), F16)], DTYPE),
        ("x in float64", LINEAR, [((2, 5), F64), ((2, 7), F32)], DTYPE),
        ("a negative number of features", (5, -1), None, "negative|dimension"),
    ],
    "linear_swish_group_norm": [
        ("x of other features", GROUPED, [((2, 6), F32)], SIZE),
        ("x of one dimension", GROUPED, [((5,), F32)], RANK),
        ("x of three dimensions", GROUPED, [((2, 2, 5), F32)], f"{RANK}|channels"),
        ("x without dimensions", GROUPED, [((), F32)], f"{RANK}|{SIZE}"),
        ("a bias that does not broadcast", (5, 8, 4, (7,)), [((2, 5), F32)], SIZE),
        ("a bias of other rows", (5, 8, 4, (3, 8)), [((2, 5), F32)], SIZE),
        ("a bias of three dimensions", (5, 8, 4, (8, 2, 8)), [((2, 5), F32)], f"{RANK}|{SIZE}"),
        ("groups that do not divide", (5, 8, 3, (8,)), None, "divisible"),
        ("no groups", (5, 8, 0, (8,)), None, "zero"),
        ("a single value in a group", (5, 8, 8, (8,)), [((1, 5), F32)], "more than 1 value"),
        ("x of integers", GROUPED, [((2, 5), INT)], DTYPE),
        ("x in float16", GROUPED, [((2, 5), F16)], DTYPE),
        ("x in float64", GROUPED, [((2, 5), F64)], DTYPE),
    ],
    "conv_sigmoid_group_norm": [
        ("x of other channels", CONV, [((2, 4, 6, 7), F32)], "channels"),
        ("x of two dimensions", CONV, [((6, 7), F32)], RANK),
        ("x of five dimensions", CONV, [((1, 2, 3, 6, 7), F32)], RANK),
        ("an unbatched image", CONV, [((3, 6, 7), F32)], f"{RANK}|channels"),
        ("an image smaller than the kernel", CONV, [((2, 3, 2, 7), F32)], "[Kk]ernel size|size"),
        ("a bias that does not broadcast", (3, 8, 3, 4, (7, 1, 1), (8, 1, 1)), [((2, 3, 6, 7), F32)], SIZE),
        ("a scale that does not broadcast", (3, 8, 3, 4, (8, 1, 1), (8, 3, 1)), [((2, 3, 6, 7), F32)], SIZE),
        ("groups that do not divide", (3, 8, 3, 3, (8, 1, 1), (8, 1, 1)), None, "divisible"),
        ("a single value in a group", (3, 8, 3, 8, (8, 1, 1), (8, 1, 1)), [((1, 3, 3, 3), F32)], "more than 1 value"),
        ("x of integers", CONV, [((2, 3, 6, 7), INT)], DTYPE),
        ("x in float16", CONV, [((2, 3, 6, 7), F16)], DTYPE),
        ("x in float64", CONV, [((2, 3, 6, 7), F64)], DTYPE),
    ],
}


@pytest.mark.parametrize(
    ("stem", "init", "inputs", "words"),
    [pytest.param(stem, *row[1:], id=f"{stem} of {row[0]}") for stem in STEMS for row in ERRORS.get(stem, [])],
)
def test_errors_are_the_models_and_name_what_is_wrong(stem, init, inputs, words, device):
    def attempt(cls):
        module = cls(*init).to(device)
        module(*[torch.ones(shape, dtype=dtype, device=device) for shape, dtype in inputs])

    with pytest.raises(Exception) as theirs:
        attempt(problem(stem).Model)
    with pytest.raises(theirs.type, match=words):
        attempt(solution(stem).ModelNew)


@pytest.mark.parametrize("stem", WITH_PARAMETERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=in_dtype)
def test_parameters_of_mixed_dtypes(stem, dtype, device):
    """One parameter in another dtype than the rest: the Model's result, or an error in words; never its bytes misread."""
    case = next(c for c in FIRST if c.stem == stem)
    names = [name for name, _ in problem(stem).Model(*case.arguments()).named_parameters()]
    for name in names:
        model, new, inputs = build(case, device)
        model.get_parameter(name).data = model.get_parameter(name).data.to(dtype)
        new.get_parameter(name).data = new.get_parameter(name).data.to(dtype)
        with torch.no_grad():
            try:
                expected = model(*inputs)
            except RuntimeError:
                with pytest.raises(RuntimeError, match=DTYPE):
                    new(*inputs)
                continue
            try:
                out = new(*inputs)
            except RuntimeError as refusal:
                assert len(str(refusal)) > 20
                continue
        torch.testing.assert_close(out.double(), expected.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("stem", WITH_PARAMETERS)
def test_inputs_on_another_device_are_refused_in_words(stem):
    """Inputs on the meta device, weights on the CPU: there are no values to compute with."""
    _, new, inputs = build(next(c for c in FIRST if c.stem == stem))
    with pytest.raises(RuntimeError, match="device|meta"):
        new(*converted(inputs, device="meta")).cpu()
