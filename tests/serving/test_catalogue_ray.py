"""Two replicas of the server under Ray Serve on this machine, one of which is killed."""

import collections
import contextlib
import os
import signal
import time
import urllib.request

import psutil
import pytest

from diffusax.serving.client import ENDED, Client, Refusal

ray = pytest.importorskip("ray")
serve = pytest.importorskip(
    "ray.serve", reason="there is no Ray Serve: pip install 'ray[serve]'", exc_type=ImportError
)

PORT = 18197
DRAWING = {"prompt": "a red apple", "num_inference_steps": 1, "seed": 1}


@pytest.fixture(scope="module")
def url():
    from diffusax.serving.catalogue.catalogue import Catalogue
    from diffusax.serving.with_ray import application

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    made = application(
        lambda: Catalogue("emoji"),
        replicas=(2, 2),
        resources={"CPU": 0.5},
        drain_seconds=5,
    )
    serve.run(made)
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


def finish(client, ids):
    for id in ids:
        until = time.monotonic() + 60
        while (job := client.job(id))["state"] not in ENDED:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert (job["state"], job["error"]) == ("done", None)
        assert client.image(id, 0).startswith(b"\x89PNG")


def states():
    found = serve.status().applications["default"].deployments["diffusax"]
    return {str(name): count for name, count in found.replica_states.items()}


def replicas():
    """The processes of the replicas."""
    found = []
    for process in psutil.Process().children(recursive=True):
        # Those that end meanwhile have no command any more.
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def known(client, id):
    try:
        return client.job(id)["id"] == id
    except Refusal as error:
        return error.status != 404


@pytest.mark.slow
def test_jobs_are_found_at_their_replicas_until_these_die(url):
    client = Client(url)
    ids = [client.submit(DRAWING)["id"] for _ in range(6)]
    owners = collections.Counter(id.partition(".")[0] for id in ids)
    # The idlest gets the next one, as far as replicas have told.
    assert len(owners) == 2
    finish(client, ids)
    with pytest.raises(Refusal, match="there is no job"):
        client.job("nobody.nothing")
    with urllib.request.urlopen(f"{url}/ready") as answer:
        assert answer.status == 200

    before = replicas()
    os.kill(before[0], signal.SIGKILL)
    until = time.monotonic() + 90
    while len(set(replicas()) - {before[0]}) < 2 or states() != {"RUNNING": 2}:
        assert time.monotonic() < until
        time.sleep(1)
    # One of them has forgotten its jobs, the other has not.
    left = [id for id in ids if known(client, id)]
    assert len(left) in owners.values()
    finish(client, [*left, *(client.submit(DRAWING)["id"] for _ in range(4))])
