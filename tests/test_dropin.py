"""ModelNew takes Model's place: the same constructor, parameters, state, copies, hooks and repr."""

import copy
import inspect
import pickle

import pytest
import torch
from accuracy import assert_as_accurate_as_eager, assert_same_form, draws, forward
from cases import CASES, FIRST, STEMS, Case, build, converted, first_cases, problem, solution
from test_invalid import complaint, outcome
from torch import nn
from torch.nn.utils import prune
from torch.utils._pytree import tree_map_only


def both(case: Case, seed: int = 7) -> tuple[nn.Module, nn.Module]:
    """A Model and a ModelNew, each made after the same seed, untouched."""
    modules = []
    for cls in (problem(case.stem).Model, solution(case.stem).ModelNew):
        torch.manual_seed(seed)
        modules.append(cls(*case.init))
    return modules[0], modules[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_made_as_the_model_is(case):
    """The same signature, modules, attributes, weights after the same seed, state_dict and repr; nothing of our own."""
    model, new = both(case)
    drawn_after = torch.rand(1)
    torch.manual_seed(7)
    problem(case.stem).Model(*case.init)
    assert torch.equal(drawn_after, torch.rand(1))  # ModelNew draws no more and no fewer random numbers
    for (name, ours), (other, theirs) in zip(new.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad
    ours, theirs = new.state_dict(), model.state_dict()
    assert [(k, v.shape, v.dtype) for k, v in ours.items()] == [(k, v.shape, v.dtype) for k, v in theirs.items()]
    assert ours._metadata == theirs._metadata
    assert [(n, type(m)) for n, m in new.named_modules() if n] == [(n, type(m)) for n, m in model.named_modules() if n]
    assert vars(new).keys() == vars(model).keys()
    assert [n for n, _ in new.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert repr(new) == repr(model).replace("Model(", "ModelNew(", 1)
    for method in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(type(m), method)).parameters.values() for m in (new, model))
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


COPIES = {"pickle": lambda module: pickle.loads(pickle.dumps(module)), "deepcopy": copy.deepcopy}


@first_cases
@pytest.mark.parametrize("way", COPIES)
def test_copies_work_and_are_independent(case, way, device, deterministic):
    _, new, inputs = build(case, device)
    expected = new.train()(*inputs).detach()
    other = COPIES[way](new)
    assert type(other) is type(new) and torch.equal(other.eval()(*inputs), expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.5)
    assert torch.equal(new(*inputs), expected)


@first_cases
def test_default_dtype_and_device_are_respected(case):
    with torch.device("meta"), torch.no_grad():
        model, new = both(case)
        inputs = case.inputs()
        assert all(t.is_meta for t in [*inputs, *new.parameters()])
        assert_same_form(new(*inputs), model(*inputs))
    torch.set_default_dtype(torch.float64)
    try:
        model, new = both(case)
        inputs = converted(case.inputs(), dtype=torch.float64)
        assert [p.dtype for p in new.parameters()] == [p.dtype for p in model.parameters()]
        torch.testing.assert_close(new(*inputs), model(*inputs))
    finally:
        torch.set_default_dtype(torch.float32)


CHANGES = [lambda p: p.data.mul_(-0.7), lambda p: p.data.normal_(), lambda p: setattr(p, "data", p.data * 2)]


@first_cases
@pytest.mark.parametrize("change", CHANGES, ids=["scaled", "filled", "replaced"])
def test_new_weights_are_used_at_once(case, device, change):
    """Nothing is kept from an earlier call: neither a step of an optimiser nor a write through .data goes unseen."""

    def change_after_a_call(model, new, inputs):
        forward(new, inputs)
        for one, other in zip(model.parameters(), new.parameters(), strict=True):
            change(other)
            one.data.copy_(other.data)
        return inputs

    assert_as_accurate_as_eager(forward, draws(case, device, torch.float32, change_after_a_call))


def squeeze(module, inputs, output=None):
    """A hook before or after a module. Not only another scale, which a norm takes out again."""
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.InstanceNorm2d)):
        return (inputs[0].tanh(),) if output is None else output.tanh()


@first_cases
@pytest.mark.parametrize("on", ["the first module", "the norm", "every module"])
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_the_modules_inside_count(case, kind, on, device):
    model, new, inputs = build(case, device)
    results, notes = [], []
    for module in (model, new):
        first, *_, norm = [*module.children(), *module.children()]
        owner = {"the first module": first, "the norm": norm}.get(on)
        register = getattr(owner or nn.modules.module, f"register_{'' if owner else 'module_'}{kind}")
        called = []
        with register(squeeze if "forward" in kind else lambda module, *grads: called.append(type(module))):
            x = inputs[0].clone().requires_grad_()
            out = module(x, *inputs[1:])
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
            with torch.no_grad():
                results[-1].append(module(*inputs))
        notes.append([kind for kind in called if kind is not type(module)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert notes[0] == notes[1]


# Below is another layer put where the Model has its own: one that is made of it, itself, changed in place, or None.
def replace(module, name: str, change) -> None:
    if change is None:
        return setattr(module, name, None)
    part = getattr(module, name)
    if isinstance(part, nn.Parameter):  # or its place would take nothing else
        delattr(module, name)
    setattr(module, name, change(part) or part)


def with_its_own(method: str):
    def change(layer):
        if original := getattr(layer, method, None):
            setattr(layer, method, lambda *args: original(*args).tanh())

    return change


def of_a_class_of_its_own(layer):
    kind = type(layer)
    layer.__class__ = type("Squeezed", (kind,), {"__call__": lambda self, x: kind.__call__(self, x).tanh()})


class WithAdapter(nn.Module):
    """As LoRA does it: the layer, frozen, and a small one beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.adapter = layer.requires_grad_(False), copy.deepcopy(layer)
        self.adapter.weight.data.mul_(-0.1)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


LAYERS = {
    "with an adapter": WithAdapter,
    "quantized": lambda layer: torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear})[0],
    "of a class of its own": of_a_class_of_its_own,
    "in a Sequential": lambda layer: nn.Sequential(layer, nn.Tanh()),
    "with a forward of its own": with_its_own("forward"),
    "with a _conv_forward of its own": with_its_own("_conv_forward"),
    "without a bias": lambda layer: layer.register_parameter("bias", None),
    "with padding": lambda layer: setattr(layer, "padding", (1, 1)),  # of no meaning to a Linear, like a stride
    "with a stride": lambda layer: setattr(layer, "stride", (2, 1)),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "that is None": None,
}


def channels_of(norm: nn.InstanceNorm2d) -> int:
    """Of the tensor it is given: instance_norm's has four, the rows of a Linear are one."""
    return 4 if norm.num_features == 4 else 1


def of_other_settings(norm):
    if isinstance(norm, nn.GroupNorm):
        norm.weight = norm.bias = None
        return norm
    norm = nn.InstanceNorm2d(channels_of(norm), eps=0.5, affine=True)
    nn.init.constant_(norm.weight, 2)
    return norm


def with_statistics_of_its_own(norm):
    if isinstance(norm, nn.InstanceNorm2d):  # a GroupNorm has none
        return nn.InstanceNorm2d(channels_of(norm), track_running_stats=True).eval()


def without_the_statistics_it_asks_for(norm):
    if isinstance(norm, nn.InstanceNorm2d):  # PyTorch refuses that in evaluation
        norm.eval().track_running_stats = True


def with_parameters_it_was_not_made_with(norm):
    if isinstance(norm, nn.InstanceNorm2d):  # affine stays False
        norm.weight, norm.bias = (nn.Parameter(torch.full((channels_of(norm),), value)) for value in (2.0, 1.0))


NORMS = {
    "of other settings": of_other_settings,
    "with parameters it was not made with": with_parameters_it_was_not_made_with,
    "with statistics of its own": with_statistics_of_its_own,
    "without the statistics it asks for": without_the_statistics_it_asks_for,
    "of a class of its own": of_a_class_of_its_own,
    "with a forward of its own": with_its_own("forward"),
    "with an _apply_instance_norm of its own": with_its_own("_apply_instance_norm"),
    "left out": lambda norm: nn.Identity(),
    "in a Sequential": nn.Sequential,
    "that is None": None,
}

STAND_INS = {  # the class or the name of the part that is replaced, and what makes another one of it
    **{f"the layer {name}": ((nn.Linear, nn.Conv2d), way) for name, way in LAYERS.items()},
    **{f"the norm {name}": ((nn.GroupNorm, nn.InstanceNorm2d), way) for name, way in NORMS.items()},
    **{f"a number as {name}": ((name,), lambda part: 0.5) for name in ("bias", "scale")},
}


@first_cases
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("what", STAND_INS)
@pytest.mark.parametrize("recorded", [False, True, None], ids=["without gradients", "with gradients", "frozen"])
def test_something_else_in_the_place_of_the_models(case, recorded, what, device):
    if what == "the layer quantized" and device.type != "cpu":
        pytest.skip("PyTorch's quantized layers are for the CPU")
    model, new, inputs = build(case, device)
    which, way = STAND_INS[what]
    parts = dict(model.named_children()) | model._parameters
    name = next((name for name, part in parts.items() if name in which or type(part) in which), None)
    if name is None:
        pytest.skip("has none")
    for module in (model, new):
        replace(module.requires_grad_(recorded is not None), name, way)
    with torch.set_grad_enabled(recorded is not False):
        ours, models = (outcome(lambda: module.to(device)(*inputs)) for module in (new, model))
    if isinstance(models, Exception):
        assert way in (None, without_the_statistics_it_asks_for)
    assert not (wrong := complaint(ours, models, tolerance=1e-4)), wrong


@first_cases
@torch.no_grad()
@pytest.mark.parametrize("method", ["forward", "_conv_forward", "_apply_instance_norm"])
def test_another_method_put_on_the_classes_of_the_layers(case, method, device, monkeypatch):
    model, new, inputs = build(case, device)
    for kind in map(type, model.children()):
        if was := getattr(kind, method, None):
            monkeypatch.setattr(kind, method, lambda *args, was=was: was(*args).tanh())
    torch.testing.assert_close(new(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem.startswith("linear_")])
def test_more_rows_than_a_grid_has_blocks_for_are_left_to_cublas(stem):
    is_large = solution(stem)._is_large
    assert is_large(65535 * 128, 128, 128) and not is_large(65535 * 128 + 1, 128, 128)


@first_cases
@pytest.mark.parametrize("eps", [0.0, 1e-50], ids=["0", "0 in float32"])
@torch.no_grad()
def test_equal_values_without_an_epsilon(case, eps, device):
    model, new, inputs = build(case, device)
    for module in (model, new):
        list(module.children())[-1].eps = eps
        for parameter in module.parameters():
            parameter.fill_(0.5)
    inputs = [torch.zeros_like(x) for x in inputs]
    found, expected = new(*inputs), model(*inputs)
    assert torch.equal(found.isfinite(), expected.isfinite())
    if eps == 0:  # else the Model's output may be rounding, as large as 1e25 makes it
        torch.testing.assert_close(found, expected, equal_nan=True)


@first_cases
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recorded", [False, True], ids=["without gradients", "with gradients"])
def test_traced_or_scripted_by_torch_jit(case, recorded, device):
    """What is traced without gradients is differentiated, too."""
    model, new, inputs = build(case, device)
    with torch.set_grad_enabled(recorded):
        traced = torch.jit.trace(new, tuple(inputs))
    (x, *others) = (t.requires_grad_() for t in inputs)
    modules = traced, torch.jit.script(new), model
    *ours, theirs = ([out := m(x, *others), *torch.autograd.grad(out.square().sum(), x)] for m in modules)
    torch.testing.assert_close(ours, [theirs] * 2, rtol=1e-3, atol=1e-4)


def by_fx(module, inputs):
    quantize = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = torch.ao.quantization.get_default_qconfig_mapping("x86")
    return quantize.prepare_fx(module, mapping, tuple(inputs)), quantize.convert_fx


def as_an_exported_program(module, inputs):
    quantize = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    exported = torch.export.export(module, tuple(inputs)).module()
    return quantize.prepare_pt2e(exported, quantizer), quantize.convert_pt2e


QUANTIZED = [(case, by_fx, 0.1) for case in FIRST]
QUANTIZED += [(case, as_an_exported_program, 0.0) for case in FIRST if case.stem == "conv_sigmoid_group_norm"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("case", "way", "tolerance"), QUANTIZED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_quantized(case, way, tolerance):
    """What rewrites a module sees the Model's layers."""
    model, new, inputs = build(case)
    results, layers = [], []
    for module in (model, new):
        prepared, convert = way(module.eval(), inputs)
        layers.append([node.target for node in prepared.graph.nodes if node.target in dict(model.named_children())])
        prepared(*inputs)
        results.append(convert(prepared)(*inputs))
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    assert layers[1] == layers[0]
    assert not torch.equal(results[1], new(*inputs))  # it is quantized, not passed by


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


@first_cases
@pytest.mark.parametrize("kind", [Named, Boxed])
def test_subclasses_of_tensor(case, kind, device):
    """In the inputs: the output is of the Model's class, with the right values and gradients."""
    model, new, inputs = build(case, device)
    results = []
    for module in (model, new):
        leaves = [(Boxed(t) if kind is Boxed else t.clone().as_subclass(Named)).requires_grad_() for t in inputs]
        with torch.no_grad():
            unrecorded = module(*leaves)
        out = module(*leaves)
        results.append([unrecorded, out, *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        assert type(ours) is type(theirs)
        if kind is Boxed:
            ours, theirs = ours.inner, theirs.inner
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
