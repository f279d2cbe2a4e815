"""The job files in examples/distributed: they can be read, and their commands understood."""

import re
import shlex
import subprocess

import pytest
import yaml
from support.repository import ROOT

from diffusax.cli import generate

FOLDER = ROOT / "examples" / "distributed"
JOBS = sorted(path for path in FOLDER.iterdir() if path.suffix != ".md")


def commands(text):
    """The arguments of diffusax's commands in a job file; 3 of 16 where numbers are the job's."""
    text = re.sub(r"\$\(\([^)]*CHIPS \+ chip[^)]*\)\)/", "3/", text)
    text = re.sub(r"\$(JOB_COMPLETION_INDEX|SLURM_PROCID)", "3", text)
    text = re.sub(r"\$SLURM_NTASKS|\$\(\([^)]*\)\)", "16", text)
    joined = re.sub(r"\\\n\s*", " ", text)
    return [shlex.split(found) for found in re.findall(r"diffusax (generate [^&'\n]*)", joined)]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_the_commands_are_understood(path):
    text = path.read_text("utf-8")
    if path.suffix == ".yaml":
        pod = yaml.safe_load(text)["spec"]["template"]["spec"]
        text = pod["containers"][0]["args"][0]
    ((_, *args),) = commands(text)
    command = generate.command(args)
    assert (command.shard, command.engine) in (("3/16", "local"), (None, "ray"))
    assert command.format == "webdataset"


@pytest.mark.parametrize("path", [p for p in JOBS if p.suffix != ".yaml"], ids=lambda p: p.name)
def test_scripts_are_bash(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_the_indexed_job_has_a_pod_for_each_shard():
    spec = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text("utf-8"))["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 16
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
