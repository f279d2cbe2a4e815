"""How processes find each other, and which devices are theirs."""

import logging

import jax
import pytest

from diffusax.runtime.devices.processes import gpus_of_task, initialize

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def slurm(gpus, tasks, nodes, **more):
    step = {"SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes), "SLURM_LOCALID": "0"}
    return {**step, "SLURM_GPUS_ON_NODE": str(gpus), **more}


@pytest.mark.parametrize(
    ("environ", "own", "warned"),
    [
        (slurm(8, 1, 1), list(range(8)), False),
        (slurm(4, 3, 3), [0, 1, 2, 3], False),
        (slurm(8, 2, 2, CUDA_VISIBLE_DEVICES="4,5"), [0, 1], False),
        (slurm(8, 16, 2), None, False),
        (slurm(1, 2, 2), None, False),
        (slurm(8, 4, 2), None, True),
        (slurm(8, 4, 2, JAX_LOCAL_DEVICE_IDS="0,1,2,3"), None, False),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, None, False),
        ({}, None, False),
    ],
)
def test_one_task_on_a_node_has_all_of_its_gpus(environ, own, warned, caplog):
    with caplog.at_level(logging.WARNING, "diffusax"):
        assert gpus_of_task(environ) == own
    assert [("JAX_LOCAL_DEVICE_IDS" in message) for message in caplog.messages] == [True] * warned


@pytest.fixture
def joined(monkeypatch):
    """What JAX is asked for."""
    for name in (*VARIABLES, "JAX_LOCAL_DEVICE_IDS", *slurm(1, 1, 1)):
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: calls.append((a, k)))
    monkeypatch.setattr(jax.config, "update", lambda *a: None)
    return calls


def test_jax_is_told_the_gpus_of_this_process(joined, monkeypatch):
    initialize(heartbeat_seconds=10)
    initialize(local_device_ids=(2, 3))
    for name, value in slurm(2, 1, 1).items():
        monkeypatch.setenv(name, value)
    initialize()
    assert [options.get("local_device_ids") for _, options in joined] == [None, [2, 3], [0, 1]]
    assert joined[0][1] == {"heartbeat_timeout_seconds": 10}


def test_a_coordinator_alone_is_enough_where_jax_finds_the_rest(joined, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    initialize()
    assert [places for places, _ in joined] == [("a:1",)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((None, "2", "0"), "must be set together"),
        (("a:1", "2", None), "must be set together"),
        (("a:1", None, None), "JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set with"),
    ],
)
def test_variables_that_are_missing_are_named(values, message, joined, monkeypatch):
    def alone(*args, **options):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", alone)
    for name, value in zip(VARIABLES, values, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        initialize()
