"""Private names of other libraries do what they are used for, and only two files use them."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import accelerate
import diffusers
import jax
import jax.numpy as jnp
import pytest
import torch
import tyro
import tyro.extras
from flax import nnx

import diffusax
from diffusax.cli import parsing  # noqa: F401  (tyro as the command line has it)
from diffusax.runtime import compat
from diffusax.runtime.programs.compilations import count_compilations

SOURCES = Path(diffusax.__file__).parent
COMPAT = {"runtime/compat.py", "interop/torch/compat.py"}


def test_jax_tells_of_its_compilations():
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 17 + 3)(jnp.ones(3)).block_until_ready()
    assert set(compiled) == {compat.COMPILE_EVENT}


def test_jax_writes_calls_of_cudnn_without_it():
    compat.pretend_cudnn()
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    assert module.cuda_versions is not None or module.check_cudnn_version() == 90800
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    attend = jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q, implementation="cudnn"))
    assert "cudnn" in attend.trace(q).lower(lowering_platforms=("cuda",)).as_text()


class _Broken(nnx.Module):
    """A module with an array in the place of something static."""

    def __init__(self):
        self.parts = (jnp.ones(3),)


def test_flax_builds_modules_without_checks():
    with compat.unchecked_modules(), compat.unchecked_modules():
        assert len(_Broken().parts) == 1
    with pytest.raises(ValueError, match="static"):
        _Broken()


def test_jax_tells_what_a_scan_carries():
    def body(carried, x):
        return carried @ kernel + x, carried.sum()

    kernel = jnp.ones((2, 2))
    jaxpr = jax.make_jaxpr(lambda c, xs: jax.lax.scan(body, c, xs))(kernel, jnp.ones((3, 2, 2)))
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    assert compat.scan_sizes(scan.params, len(scan.invars)) == (1, 1)


def test_jax_tells_whether_it_is_tracing():
    def told(x):
        found.append(compat.is_tracing())
        return x

    found: list[bool] = []
    told(1.0), jax.jit(told)(1.0), jax.grad(told)(1.0), jax.vmap(told)(jnp.ones(2))
    assert found == [False, True, True, True]


def test_jax_remembers_which_process_it_was_until_it_forgets(monkeypatch):
    state = importlib.import_module("jax._src.distributed").global_state
    assert compat.joined_part() == (0, 1)
    monkeypatch.setattr(state, "process_id", 2)
    monkeypatch.setattr(state, "num_processes", 3)
    assert compat.joined_part() == (2, 3)
    compat.forget_joining()
    assert (state.process_id, state.num_processes) == (0, 1)


def test_tyro_is_told_to_parse_with_argparse():
    compat.use_argparse()
    settings = importlib.import_module("tyro._settings")._experimental_options
    assert settings is tyro._experimental_options
    assert settings["backend"] == "argparse"
    assert not settings["utf8_boxes"]
    assert not settings["ansi_codes"]


def test_tyro_forgets_what_it_did_not_recognise():
    module = importlib.import_module("tyro._backends._argparse_formatter")
    module.global_unrecognized_arg_and_prog.append(("--such", "a program"))
    compat.forget_unrecognized()
    assert module.global_unrecognized_arg_and_prog == []


@pytest.mark.filterwarnings("ignore:get_parser")
def test_tyro_tells_of_a_commands_options():
    from diffusax.cli.export import Export

    (title, text, options), *_ = compat.command_groups(tyro.extras.get_parser(Export, prog="x"))
    assert title == ""
    assert text.split()
    assert {"name", "flags", "text", "positional", "required"} == set(options[0])
    by_name = {option["name"]: option for option in options}
    assert any(option["positional"] for option in options)
    assert by_name["--dtype"]["flags"].startswith("--dtype")
    assert by_name["--dtype"]["text"].endswith("(default: float32)")


TORCHAX = {
    "tensor.Tensor": "jax apply_jax_ _env",
    "tensor.Environment": "dispatch _to_copy get_and_rotate_prng_key override_property t2j_iso",
    "tensor.OperatorNotFound": "",
    "view.View": "jax torch update replace_source_jax get_transformation_chain",
    "view.NarrowInfo": "update_tensor transform_tensor",
    "ops.ops_registry.Operator": "",
    "ops.jaten._aten_convolution": "",
}
"""What diffusax takes of torchax's classes, by attribute; `_env` is an instance's."""


@pytest.mark.parametrize("name", TORCHAX)
def test_torchax_has(name):
    from diffusax.interop.torch.importing import torchax_module

    module, _, attribute = name.rpartition(".")
    found = getattr(torchax_module(module), attribute)
    for method in TORCHAX[name].split():
        assert method == "_env" or hasattr(found, method)


def test_torchax_lets_an_environment_of_its_own_cast_dispatch_and_register():
    from diffusax.interop.torch import compat as names
    from diffusax.interop.torch.environment import MixedEnvironment, computing, environment, wrap

    env = environment()
    tensor = wrap(jnp.ones(3))
    assert names.environment_of(tensor) is env
    assert names.environment_of(names.View(tensor, names.NarrowInfo(slice(2)), env)) is env
    with env.dispatching():
        assert torch.ops.aten.add.Tensor(tensor, tensor).jax().tolist() == [2, 2, 2]
    asked = []

    class Asking(MixedEnvironment):
        def cast_device(self, tensor, device):
            asked.append(device)
            return super().cast_device(tensor, device)

    own = Asking()
    own.register(torch.special.entr, lambda x: x + 40, True)
    with own:
        cast = names.Tensor(jnp.ones(3), own).to(torch.int32)
        assert torch.special.entr(cast).jax().tolist() == [41, 41, 41]
    assert asked == [None]
    with computing():
        slices = tensor[:2]
    assert isinstance(slices, names.View)
    assert slices.parent is tensor
    assert slices.view_info.slices == slice(2)


def test_torchax_convolves_in_one_dimension():
    from diffusax.interop.torch.compat import torchax_convolution

    x, kernel = jnp.ones((1, 1, 4)), jnp.ones((1, 1, 2))
    y = torchax_convolution(x, kernel, None, [1], [0], [1], False, [0], 1)
    assert y.tolist() == [[[2, 2, 2]]]


def test_torch_computes_on_the_host_inside_modes_and_classes():
    from diffusax.interop.torch import compat as names
    from diffusax.interop.torch.environment import environment

    class Marked(torch.Tensor):
        pass

    marked = torch.ones(2).as_subclass(Marked)
    with environment(), names.on_host():
        assert type(torch.zeros(2) + 1) is torch.Tensor
        assert type(marked + 1) is torch.Tensor
    with names.plain_tensors():
        assert type(marked + 1) is torch.Tensor
    assert type(marked + 1) is Marked


def test_torch_knows_the_leaves_of_its_named_results():
    from diffusax.interop.torch.compat import map_leaves, tree_leaves

    found = torch.ones(2, 3).max(dim=1)
    assert [x.shape for x in tree_leaves({"a": [found, 1]})[:2]] == [(2,), (2,)]
    assert map_leaves(torch.Tensor, lambda x: x.ndim, {"a": [found, "b"]})["a"][0][0] == 1


def test_torch_tells_of_its_operations():
    from diffusax.interop.torch.compat import UNSAFE_INDEX_PUT, is_view, writes_in_place

    aten = torch.ops.aten
    assert writes_in_place(aten.add_.Tensor)
    assert not writes_in_place(aten.add.Tensor)
    assert not writes_in_place(torch.add)
    assert is_view(aten.transpose.int)
    assert not is_view(aten.add.Tensor)
    assert not is_view(torch.add)
    assert UNSAFE_INDEX_PUT.default.name() == "aten::_unsafe_index_put"
    assert (aten.add_.Tensor.name(), aten.relu_.default.name()) == (
        "aten::add_.Tensor",
        "aten::relu_",
    )
    assert isinstance(aten.add, torch._ops.OpOverloadPacket)


def test_torch_tells_of_its_modules():
    from diffusax.interop.torch import compat as names

    layer = torch.nn.Linear(2, 3)
    before = names.version_of(layer.weight)
    with torch.no_grad():
        layer.weight.add_(1)
    assert names.version_of(layer.weight) == before + 1
    assert names.parameters_of(layer)["bias"] is layer.bias
    layer.weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert names.parameters_of(layer)["weight"] is layer.weight
    hook = lambda *given: None  # noqa: E731
    layer.register_forward_hook(hook)
    layer.register_forward_pre_hook(hook)
    assert [*names.forward_hooks(layer).values()] == [hook]
    assert [*names.forward_pre_hooks(layer).values()] == [hook]
    hooked = {name for name, table in names.all_hooks(layer).items() if table}
    assert hooked == {"_forward_hooks", "_forward_pre_hooks"}
    assert "weight" not in names.MODULE_ATTRIBUTES
    own = set(vars(layer)) - names.MODULE_ATTRIBUTES
    assert own == {"training", "in_features", "out_features"} | hooked


def test_torch_and_accelerate_and_diffusers_tell_what_they_wrap():
    from diffusax.interop.torch import compat as names

    layer = torch.nn.Linear(2, 3)
    assert names.uncompiled(torch.compile(layer, backend="eager")) is layer
    assert names.uncompiled(layer) is layer
    assert not names.has_accelerate_hook(layer)
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.ModelHook())
    assert names.has_accelerate_hook(layer)
    pipe = diffusers.DiffusionPipeline()
    assert names.progress_bar_options(pipe) == {}
    pipe.set_progress_bar_config(disable=True)
    assert names.progress_bar_options(pipe) == {"disable": True}


def test_the_package_imports_neither_torch_nor_torchax_nor_tyro():
    program = (
        "import sys, diffusax, diffusax.runtime.compat\n"
        "print({'torch', 'torchax', 'tyro'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr


LIBRARIES = (
    "accelerate|diffusers|flax|huggingface_hub|jax|jaxlib|tokenizers|torch|torchax|transformers"
    "|tyro"
)
PRIVATE_PATH = re.compile(rf"({LIBRARIES})(\.\w+)*\._[a-z]\w*(\.\w+)*")
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Public in spite of their names: those of named tuples, and the exit of a process.
KNOWN = {"_replace", "_asdict", "_fields", "_make", "_exit"}


def test_no_private_name_of_a_library_is_used_elsewhere():
    """Whatever begins with an underscore and is not defined in the package is another's."""
    trees = {
        str(file.relative_to(SOURCES)): ast.parse(file.read_text("utf-8"))
        for file in SOURCES.rglob("*.py")
    }
    trees = {name: tree for name, tree in trees.items() if name not in COMPAT}
    own = {name for tree in trees.values() for name in _defined(tree)} | KNOWN
    found = [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        for line, name in _used(tree)
        if name not in own
    ]
    assert not found, "move these to runtime/compat.py or interop/torch/compat.py"


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.distributed",
        "from jax._src import distributed",
        "from tyro import _arguments",
        "importlib.import_module('jax._src.cudnn')",
        "tyro._experimental_options",
        "jax.jit(f)._cache_size()",
        "getattr(pipe, '_progress_bar_config')",
        "class A(Environment):\n    def f(self):\n        return self._ops",
        "'_hf_hook' in vars(part)",
    ],
)
def test_a_private_name_would_be_found(line):
    assert [name for _, name in _used(ast.parse(line)) if name not in _defined(ast.parse(line))]


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos._exit(1)",
        "from diffusax._version import __version__",
        "class A:\n    _x = 1\n    def _f(self):\n        self._y = self._x",
        "{'_class_name': 1}['_class_name']",
    ],
)
def test_other_names_would_not(line):
    own = {*_defined(ast.parse(line)), *KNOWN}
    assert not [name for _, name in _used(ast.parse(line)) if name not in own]


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that classes and functions of a file give to what is theirs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Dict):
            yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in [x for t in targets for x in getattr(t, "elts", [t])]:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    yield str(target.slice.value)
                elif (
                    isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self"
                ):
                    yield target.attr


def _used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names that a file asks for, of modules and of objects, by line."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if PRIVATE_PATH.match(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [path for path in paths if PRIVATE_PATH.match(path)]
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            found = [node.attr]
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
            texts = [text for text in texts if isinstance(text, str)]
            found = [text for text in texts if PRIVATE_PATH.fullmatch(text)]
            if name in ("getattr", "setattr", "hasattr", "delattr"):
                found += [text for text in texts if PRIVATE.fullmatch(text)]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            holder = node.comparators[0]
            if isinstance(holder, ast.Call) and getattr(holder.func, "id", "") == "vars":
                found = [str(node.left.value)]
        for name in found:
            if not (PRIVATE.match(name) is None and PRIVATE_PATH.match(name) is None):
                yield node.lineno, name


@pytest.mark.parametrize("effort", [-1.0, 0.0, 1.0])
def test_compilers_take_an_effort(effort):
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile(compat.effort_options(effort))
    assert compiled(2.0) == 3.0
