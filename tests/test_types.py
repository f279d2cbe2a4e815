"""What type checkers see: every public name with its type, and errors where a program is wrong."""

import ast
import inspect
import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT
from support.stubs import MODULES, PACKAGE, STUBS
from test_docs import PAGES, blocks
from test_public_names import NAMES

import diffusax
from diffusax import import_paths
from diffusax.pipelines import classes

# What a user's mypy does with an installed diffusax; types that do not matter here are not read.
CONFIG = """[mypy]
strict = true
python_version = 3.11
follow_imports = silent
ignore_missing_imports = true
{more}
[mypy-diffusers.*,flax.*,huggingface_hub.*,msgspec.*,optax.*,orbax.*,scipy.*,tokenizers.*,torch.*]
follow_imports = skip
"""


def checked(folder, programs, more=""):
    """What mypy says of programs: (file, line, message) each."""
    for name, code in programs.items():
        (folder / name).write_text(code, "utf-8")
    (folder / "mypy.ini").write_text(CONFIG.format(more=more))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", *programs],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT / "src"), "MYPY_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.*?):(\d+): (?:note|error): (.*)$", done.stdout, re.M)
    return [(name, int(line), text) for name, line, text in found]


@pytest.mark.parametrize("path", STUBS)
def test_the_stubs_are_those_of_the_code(path):
    assert (PACKAGE / path).read_text("utf-8") == STUBS[path](), (
        "run PYTHONPATH=tests python tests/support/stubs.py"
    )


def test_every_name_at_run_time_is_in_the_stub():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text("utf-8"))
    named = {alias.asname for node in ast.walk(tree) for alias in getattr(node, "names", ())}
    named |= {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)}
    assert {*diffusax.__all__, *import_paths._NAMES, *MODULES} <= named
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    attributes = {module.split(".")[1] for module in NAMES if "." in module}
    assert attributes - {"interop"} <= {*MODULES} <= folders | {p.stem for p in PACKAGE.iterdir()}


PROGRAM = """
import diffusax
from diffusax import AutoPipelineForText2Image, DiffusionPipeline, samplers
from diffusax import StableDiffusionXLPipeline, UNet2DConditionModel

pipe = StableDiffusionXLPipeline.from_pretrained("folder")
unet = UNet2DConditionModel.from_pretrained("folder", subfolder="unet")
reveal_type(pipe)  # StableDiffusionXLPipeline
reveal_type(pipe("a cat", height=64, seed=[0, 1]))  # ImagePipelineOutput
reveal_type(pipe.unet)  # UNet2DConditionModel
reveal_type(pipe.text_encoder_2)  # CLIPTextModelWithProjection
reveal_type(pipe.unet(0, 1, None))  # UNet2DConditionOutput
reveal_type(AutoPipelineForText2Image.from_pretrained("folder"))  # DiffusionPipeline
reveal_type(diffusax.CLIPTokenizer.from_pretrained("folder"))  # CLIPTokenizer
reveal_type(samplers.scheduler_from_name("euler"))  # Scheduler
images, *_ = pipe("a cat", return_dict=False)
pipe.scheduler = diffusax.DDIMScheduler.from_config(pipe.scheduler.config)
DiffusionPipeline.from_pretrained("folder").scheduler = pipe.scheduler
diffusax.NoSuchThing  # error: has no attribute "NoSuchThing"
samplers.NoSuchThing  # error: has no attribute "NoSuchThing"
from diffusax.models import NoSuchThing  # error: has no attribute "NoSuchThing"
pipe("a cat", num_inference_step=3)  # error: did you mean "num_inference_steps"?
pipe("a cat", height="64")  # error: incompatible type "str"; expected "int | None"
pipe("a cat", output_type="tensor")  # error: expected "Literal['pil', 'np', 'jax', 'pt', 'latent']"
pipe("a cat", latents="noise")  # error: incompatible type "str"
pipe.encode_prompt("a cat", clip_skips=1)  # error: did you mean "clip_skip"?
unet(0, 1, encoder_hidden_state=None)  # error: did you mean "encoder_hidden_states"?
unet(0, 1, None, return_dict="no")  # error: incompatible type "str"; expected "bool"
unet.no_such_layer  # error: has no attribute "no_such_layer"
diffusax.DDIMScheduler(beta_begin=0.1)  # error: Unexpected keyword argument "beta_begin"
diffusax.make_mesh("data=2", axis="x")  # error: Unexpected keyword argument "axis"
"""


def test_mypy_knows_names_and_finds_what_is_wrong_in_a_program(tmp_path):
    names = [(module, name) for module, found in NAMES.items() for name in found.split()]
    # A tree of parameters, and images in any form.
    names = [one for one in names if one[1] not in ("Params", "PipelineImageInput")]
    lines = [f"import {module}" for module in NAMES]
    lines += [f"reveal_type({module}.{name})" for module, name in names]
    found = checked(tmp_path, {"program.py": PROGRAM, "names.py": "\n".join(lines)})

    of_names = {line: text for name, line, text in found if name == "names.py"}
    assert len(of_names) == len(names)
    unknown = [(names[line - 1 - len(NAMES)], text) for line, text in of_names.items()]
    assert [one for one in unknown if one[1] == 'Revealed type is "Any"'] == []

    said = {}
    for name, line, text in found:
        if name == "program.py":
            said.setdefault(line, []).append(text)
    for number, line in enumerate(PROGRAM.split("\n"), 1):
        _, _, wanted = line.partition("  # ")
        texts = said.pop(number, [])
        as_told = any(wanted.removeprefix("error: ") in text for text in texts)
        assert as_told if wanted else texts == [], (line, texts)


def test_the_components_of_pipelines_are_of_the_classes_that_checkers_are_told(tiny_checkpoints):
    tree = ast.parse((PACKAGE / "pipelines/classes/__init__.pyi").read_text("utf-8"))
    told = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            told[node.name] = {
                line.target.id: ast.unparse(line.annotation.slice)
                for line in node.body
                if isinstance(line, ast.AnnAssign)
            }
    for kind in ("sd", "xl"):
        pipe = diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline(kind)[0])
        for cls in type(pipe).__mro__:
            for name, wanted in told.get(cls.__name__, {}).items():
                value = getattr(pipe, name)
                mro = [base.__name__ for base in type(value).__mro__]
                assert value is None or wanted in ("Any", *mro), (kind, name)


def test_the_stub_has_every_call_with_its_arguments():
    tree = ast.parse((PACKAGE / "pipelines/classes/__init__.pyi").read_text("utf-8"))
    calls = {
        node.name: [arg.arg for arg in [*line.args.args, *line.args.kwonlyargs]]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.FunctionDef) and line.name == "__call__"
    }
    for name in classes.__all__:
        own = list(inspect.signature(getattr(classes, name).__call__).parameters)
        assert [arg for arg in calls[name] if arg in own] == own


# In these it is other libraries whose names and results have no types, or ones that may be None.
OTHERS = ("server.md", "torch.md")


@pytest.mark.slow
def test_programs_of_the_pages_and_examples_have_no_errors_of_types(tmp_path):
    programs = {
        re.sub(r"\W", "_", str(page.relative_to(ROOT))) + ".py": "\n".join(blocks(page, "python"))
        for page in PAGES
        if page.name not in OTHERS
    }
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples/research").glob("*.py")]
    programs |= {f"examples_{file.name}": file.read_text("utf-8") for file in examples}
    more = "allow_redefinition = true\nallow_untyped_defs = true\nallow_untyped_calls = true\n"
    more += "allow_incomplete_defs = true\nallow_subclassing_any = true\n"
    more += "disable_error_code = no-redef"
    assert checked(tmp_path, programs, more) == []
