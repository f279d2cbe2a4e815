"""The files with which servers are run: what they say is there, and nginx does as told."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time

import pytest
import yaml
from support.repository import ROOT
from support.running_server import running

from diffusax.cli import serve
from diffusax.serving.client import ENDED, Client, Refusal
from diffusax.serving.web import capabilities

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
KEYS = tuple(f"key-number-{i}" for i in range(8))


def test_the_manifest_runs_the_server():
    texts = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
    deployment, service, budget = yaml.safe_load_all(texts)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command, *args = container["args"]
    options = serve.command(args)
    assert command == "serve"
    assert options.port == container["ports"][0]["containerPort"]
    assert container["env"][0]["name"] == serve.KEYS
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + options.drain_seconds
    paths = {operation.path for operation in capabilities.OPERATIONS if operation.open}
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")]
    assert set(probes) == paths == {"/health", "/ready"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_image_runs_the_server():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    arguments = re.findall(r"^CMD (.*)$", text, re.M)[-1]
    program, command, *args = [*json.loads(entry), *json.loads(arguments)]
    assert (program, command) == ("diffusax", "serve")
    assert f"EXPOSE {serve.command(args).port}" in text
    assert f":{serve.command(args).port}/health" in text
    allowed = (ROOT / ".dockerignore").read_text("utf-8").split()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert {f"!{name}" for name in copied} <= set(allowed)
    assert all((ROOT / name).exists() for name in copied)


@contextlib.contextmanager
def proxied(folder, ports):
    """Runs nginx as deploy/nginx.conf has it, before servers at these ports; gives its address."""
    text = (ROOT / "deploy" / "nginx.conf").read_text("utf-8")
    for old, new in zip(("7861", "7862"), ports):
        text = text.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
    names = "client_body", "proxy", "fastcgi", "uwsgi", "scgi"
    paths = "".join(f"{name}_temp_path {folder}/{name};" for name in names)
    head = f"daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}}"
    (folder / "nginx.conf").write_text(f"{head}\nhttp {{ access_log off; {paths}\n{text}\n}}\n")
    process = subprocess.Popen([NGINX, "-e", folder / "errors", "-c", folder / "nginx.conf"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None, reason="there is no nginx: apt-get install nginx-light")
def test_nginx_sends_a_client_to_one_of_two_servers(tmp_path):
    generation = {"prompt": "a red apple", "num_inference_steps": 1, "seed": 1}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(running(keys=KEYS)) for _ in range(2)]
        ports = [server.url.rpartition(":")[2] for server in servers]
        url = stack.enter_context(proxied(tmp_path, ports))
        clients = [Client(url, key) for key in KEYS]
        time.sleep(1)
        ids = [client.submit(generation)["id"] for client in clients]
        used = {next(i for i, one in enumerate(servers) if _has(one, id)) for id in ids}
        assert used == {0, 1}
        for client, id in zip(clients, ids):
            while (job := client.job(id))["state"] not in ENDED:
                time.sleep(0.1)
            assert (job["state"], job["error"]) == ("done", None)
            assert client.image(id, 0).startswith(b"\x89PNG")
        # One that stops tells so, and its clients' new requests go to the other.
        servers[0].service.draining = True
        more = [client.submit(generation)["id"] for client in clients]
        assert all(_has(servers[1], id) for id in more)
        for client, id in zip(clients, more):
            assert client.job(id)["id"] == id
        with pytest.raises(Refusal, match="there is no job"):
            clients[0].job("nothing")


def _has(server, id):
    return any(job.id == id for job in server.engine.jobs())
