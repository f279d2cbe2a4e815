"""What a built package says of itself, and what it tells users who have no clone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.repository import ROOT

from diffusax.boundary.messages import install_command

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text("utf-8")
HOME = "https://example.org/diffusax"
RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^()\s]+)\)")


@pytest.fixture(scope="module")
def metadata():
    """Returns what the build adds, for an address of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        # Its interface is a class without behaviour; hatchling is there only while building.
        interface = ModuleType("hatchling.metadata.plugin.interface")
        interface.MetadataHookInterface = object
        for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, interface.__name__, interface)
        patch.syspath_prepend(str(ROOT))
        import hatch_build

        def make(home):
            found = {}
            patch.setenv("DIFFUSAX_HOME", home)
            hatch_build.CustomMetadataHook.update(SimpleNamespace(root=str(ROOT)), found)
            return found

        yield make


def test_every_licence_in_the_package_is_in_its_metadata():
    project = PROJECT["project"]
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("LICENSE*")}
    assert ours | {"LICENSE"} == set(project["license-files"])
    assert "MIT" in (ROOT / "src/diffusax/data/clip_bpe/LICENSE").read_text()
    assert project["license"] == "Apache-2.0 AND MIT"


def test_an_address_makes_urls_and_the_readmes_links_absolute(metadata):
    found = metadata(f"{HOME}/")
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == set(found["urls"])
    assert all(url.startswith(HOME) for url in found["urls"].values())
    text = found["readme"]["text"]
    assert not RELATIVE.findall(text)
    assert f"]({HOME}/raw/main/docs/tasks.png)" in text
    assert f"]({HOME}/blob/main/docs/serving/devices.md)" in text


def test_without_an_address_there_are_no_links_to_nowhere(metadata):
    found = metadata("")
    assert found["urls"] == {}
    assert not RELATIVE.findall(found["readme"]["text"])
    assert "![" not in found["readme"]["text"]
    assert len(found["readme"]["text"]) > 0.95 * len(RELATIVE.sub("", README))


def test_the_readmes_links_lead_to_files():
    paths = {link.partition("#")[0] for link in RELATIVE.findall(README)}
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_the_package_is_built_from_is_in_the_source_archive():
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    needed = {"src", "README.md", "hatch_build.py", *PROJECT["project"]["license-files"]}
    covered = {path for path in needed if any(Path(path).match(p) for p in included)}
    # What is below a folder comes with it, and hatchling brings what it reads itself.
    below = {path for path in needed if path.split("/")[0] in included}
    assert needed - covered - below <= {"hatch_build.py"}
    assert all(any(ROOT.glob(pattern)) for pattern in included)


def test_an_error_names_an_extra_that_there_is():
    extras = set(PROJECT["project"]["optional-dependencies"])
    calls = re.compile(r"(?:require_extra|install_command)\([^()]*?\"([a-z-]+)\"\)")
    texts = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in texts for name in calls.findall(text)}
    assert named > {"train", "serve", "export"}
    assert named <= extras
    assert install_command("train") == "pip install 'diffusax[train]'"


@pytest.mark.slow
def test_without_pytorch_its_half_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport diffusax.torch"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torch is needed here; install it with pip install ")


def test_diffusax_torch_is_imported_before_anything_else_of_pytorch():
    """It mends what torchax 0.0.13 misses in torch 2.13, so nothing may import torchax before."""
    subprocess.run([sys.executable, "-c", "import diffusax.torch"], check=True)
