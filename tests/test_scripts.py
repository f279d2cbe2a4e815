"""Scripts of examples/ and benchmarks/ find what they import, and pytest each file of tests."""

import os
import runpy
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from support.repository import ROOT

FILES = sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("benchmarks/*.py")])
OWN = {file.stem for file in FILES}
# flax_old.py runs in an environment with the diffusers of old.
SCRIPTS = [f for f in FILES if "__main__" in f.read_text("utf-8") and f.stem != "flax_old"]


@pytest.fixture
def alone(monkeypatch):
    """As in a process of its own: no folder of another script is searched, none is imported."""
    folders = [p for p in sys.path if not Path(p).is_relative_to(ROOT / "examples")]
    monkeypatch.setattr(sys, "path", [p for p in folders if p != str(ROOT / "benchmarks")])
    for name in OWN & set(sys.modules):
        monkeypatch.delitem(sys.modules, name)
    # Draws the icons of data that is made once; no dependency of the tests.
    monkeypatch.setitem(sys.modules, "resvg_py", types.ModuleType("resvg_py"))
    # Some choose their devices, which the processes of other tests would have too.
    with mock.patch.dict(os.environ):
        yield
    for name in OWN & set(sys.modules):
        del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_finds_what_it_imports(script, alone, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="imported")


def test_no_two_files_of_tests_have_one_name():
    # pytest does not collect both in one process.
    names = [file.name for file in ROOT.glob("tests/**/test_*.py")]
    assert len(names) == len(set(names))
