"""The real huggingface_hub client, against a small server that speaks the Hub's API."""

import ast
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from diffusers import AutoencoderTiny
from support.hub_server import serve
from support.tiny import randomize

from diffusax.checkpoints.files import choose_weights, variants
from diffusax.checkpoints.hub import resolve

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "image_encoder": [None, None],
}
FILES = {
    "README.md": b"a card",
    "model_index.json": json.dumps(INDEX).encode(),
    "model.safetensors": b"everything in one file",
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": b"full",
    "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
    "unet/diffusion_pytorch_model.bin": b"pickle",
    "vae/config.json": b"{}",
    "vae/diffusion_pytorch_model.safetensors": b"vae",
    "vae_1_0/config.json": b"{}",
    "vae_1_0/diffusion_pytorch_model.safetensors": b"an older one, in no index",
    "safety_checker/model.safetensors": b"not used",
    "text_encoder/config.json": b"{}",
    "text_encoder/model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    ).encode(),
    "text_encoder/model-00001-of-00001.safetensors": b"shard",
    "text_encoder/model-00009-of-00009.safetensors": b"stray",
    "tokenizer/merges.txt": b"#version: 0.2",
    "tokenizer/tokenizer_config.json": b"{}",
}
CONTROLLED = {
    "model_index.json": b'{"controlnet": ["diffusers", "MultiControlNetModel"]}',
    "controlnet/config.json": b"{}",
    "controlnet/diffusion_pytorch_model.safetensors": b"first",
    "controlnet_1/config.json": b"{}",
    "controlnet_1/diffusion_pytorch_model.safetensors": b"second",
    "unet/diffusion_pytorch_model.safetensors": b"in no index",
}
# As google/ddpm-cifar10-32: a pipeline of one network, whose files lie beside model_index.json.
FLAT = {
    "README.md": b"a card",
    "config.json": b"{}",
    "diffusion_pytorch_model.bin": b"pickle",
    "diffusion_pytorch_model.safetensors": b"network",
    "model_index.json": json.dumps(
        {
            "_class_name": "DDPMPipeline",
            "scheduler": ["diffusers", "DDPMScheduler"],
            "unet": ["diffusers", "UNet2DModel"],
        }
    ).encode(),
    "scheduler_config.json": b"{}",
}
UNET = ["unet/config.json", "unet/diffusion_pytorch_model.safetensors"]
VAE = ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"]
OTHERS = [
    "text_encoder/config.json",
    "text_encoder/model-00001-of-00001.safetensors",
    "text_encoder/model.safetensors.index.json",
    "tokenizer/merges.txt",
    "tokenizer/tokenizer_config.json",
]


@pytest.fixture(scope="module")
def taesd(tmp_path_factory):
    """A repository that holds one network at its root, as madebyollin/taesd does."""
    folder = tmp_path_factory.mktemp("taesd")
    sizes = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    depths = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    model = randomize(AutoencoderTiny(**sizes, **depths))
    model.save_pretrained(folder)
    model.half().save_pretrained(folder, variant="fp16")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return {**files, "taesd_decoder.safetensors": b"", "README.md": b"a card"}


@pytest.fixture(scope="module")
def server(taesd):
    repos = {
        "models/someone/tiny": FILES,
        "models/someone/taesd": taesd,
        "models/someone/controlled": CONTROLLED,
        "models/someone/flat": FLAT,
        "models/someone/single-file": {"v1-5.safetensors": b""},
        "models/someone/adapters": {"models/a.safetensors": b"file", "models/a.bin": b"pickle"},
        "models/someone/old": {
            "spiece.model": b"pieces",
            "tokenizer_config.json": b"{}",
            "both/spiece.model": b"pieces",
            "both/tokenizer.json": b"{}",
        },
        "models/someone/gated": None,
        "models/someone/busy": 429,
        "models/someone/down": 503,
    }
    with serve(repos) as (address, log):
        yield address, log, repos


@pytest.fixture
def requested(server):
    server[1].clear()
    return server[1]


class Client:
    """A process whose Hub is ours; it evaluates one expression after another."""

    PROGRAM = """
        import sys
        import huggingface_hub
        from diffusax.networks import load_network
        from diffusax.checkpoints.hub import resolve
        from diffusax.checkpoints.ip_adapter import find_ip_adapter
        def broken(error):
            def call(*args, **kwargs):
                raise error
            return call
        for line in sys.stdin:
            try:
                answer = eval(line)
            except (ValueError, AttributeError) as error:
                answer = f"error: {error}"
            print(repr(str(answer)), flush=True)
    """

    def __init__(self, endpoint, home, **environment):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_DISABLE_XET": "1", **environment},
        )

    def __call__(self, expression):
        print(expression, file=self.process.stdin, flush=True)
        return ast.literal_eval(self.process.stdout.readline())

    def resolve(self, call, cache):
        """The folder that `resolve(...)` gives with this cache, or its error."""
        return self(f"resolve({call}, cache_dir={str(cache)!r})")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def clients(server, tmp_path_factory):
    """With a connection, with the Hub switched off, with a Hub that does not answer."""
    home = tmp_path_factory.mktemp("home")
    hub = server[0]
    made = {
        "online": Client(hub, home),
        "offline": Client(hub, home, HF_HUB_OFFLINE="1"),
        "unreachable": Client("http://127.0.0.1:9", home),
    }
    yield made
    for client in made.values():
        client.close()


@pytest.fixture
def online(clients):
    return clients["online"]


@pytest.fixture
def offline(clients):
    return clients["offline"]


@pytest.fixture
def unreachable(clients):
    return clients["unreachable"]


def test_only_what_is_used_is_fetched_and_the_cache_serves_offline(
    online, offline, unreachable, requested, tmp_path
):
    call = "'someone/tiny', variant='fp16'"
    folder = online.resolve(call, tmp_path)
    assert not folder.startswith("error"), folder
    half = ["unet/config.json", "unet/diffusion_pytorch_model.fp16.safetensors"]
    assert sorted(set(requested)) == sorted(["model_index.json", *half, *VAE, *OTHERS])
    requested.clear()
    assert offline.resolve(call, tmp_path) == folder
    assert online.resolve(call + ", local_files_only=True", tmp_path) == folder
    assert unreachable.resolve(call, tmp_path) == folder
    assert requested == []


def test_components_that_are_not_needed_are_not_fetched(online, requested, tmp_path):
    call = "'someone/tiny', skip=('vae', 'text_encoder', 'tokenizer')"
    folder = online.resolve(call, tmp_path)
    assert not folder.startswith("error"), folder
    assert sorted(set(requested)) == ["model_index.json", *UNET]


def test_configs_come_without_parameters(online, offline, requested, tmp_path):
    call = "'someone/tiny', weights=False"
    folder = online.resolve(call, tmp_path)
    assert not folder.startswith("error"), folder
    assert "unet/config.json" in requested
    assert not [name for name in requested if name.endswith(".safetensors")]
    assert offline.resolve(call, tmp_path) == folder


def test_one_component_is_fetched_alone(online, offline, unreachable, requested, tmp_path):
    call = "'someone/tiny', subfolder='vae'"
    folder = online.resolve(call, tmp_path)
    assert folder.endswith("/vae")
    assert sorted(set(requested)) == VAE
    assert sorted(os.listdir(folder)) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert offline.resolve(call, tmp_path) == folder
    assert unreachable.resolve(call, tmp_path) == folder
    # The cache has one component of the pipeline now, not the pipeline.
    answer = offline.resolve("'someone/tiny'", tmp_path)
    assert "'someone/tiny' is not in the local cache" in answer


def test_a_model_of_sentencepiece_is_fetched_where_there_is_no_newer_file(online, tmp_path):
    alone = online.resolve("'someone/old', weights=False", tmp_path)
    assert sorted(os.listdir(alone)) == ["spiece.model", "tokenizer_config.json"]
    both = online.resolve("'someone/old', subfolder='both'", tmp_path)
    assert os.listdir(both) == ["tokenizer.json"]


def test_a_cache_with_a_part_of_the_pipeline_says_what_is_missing(online, unreachable, tmp_path):
    online.resolve("'someone/tiny', skip=('vae',)", tmp_path)
    answer = unreachable.resolve("'someone/tiny'", tmp_path)
    assert "is only partly in the local cache (not vae), and the Hub is not reachable" in answer


def test_several_controlnets_are_one_component(online, requested, tmp_path):
    online.resolve("'someone/controlled'", tmp_path)
    assert sorted(set(requested)) == sorted(name for name in CONTROLLED if "unet/" not in name)


def test_a_pipeline_whose_files_lie_beside_its_index(
    online, offline, unreachable, requested, tmp_path
):
    folder = online.resolve("'someone/flat'", tmp_path)
    assert not folder.startswith("error"), folder
    unused = {"README.md", "diffusion_pytorch_model.bin"}
    assert sorted(set(requested)) == sorted(set(FLAT) - unused)
    requested.clear()
    assert offline.resolve("'someone/flat'", tmp_path) == folder
    assert unreachable.resolve("'someone/flat'", tmp_path) == folder
    assert requested == []


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_repository_that_is_one_network(online, offline, requested, tmp_path, variant):
    call = f"load_network('someone/taesd', variant={variant!r}, cache_dir={str(tmp_path)!r})"
    answer = online(call)
    assert answer.startswith("AutoencoderTiny(")
    assert ("float16" if variant else "float32") in answer
    suffix = f".{variant}" if variant else ""
    weights = f"diffusion_pytorch_model{suffix}.safetensors"
    assert sorted(set(requested)) == ["config.json", weights]
    assert offline(call) == answer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("'someone/absent'", "no such repository on the Hub"),
        ("'someone/gated'", "is gated"),
        ("'someone/tiny', revision='v9'", "has no revision 'v9'"),
        ("'someone/tiny', local_files_only=True", "not in the local cache"),
        ("'a b c'", "neither a folder here nor a Hub repository id"),
        ("'someone/tiny', variant='bf16'", "no weights of variant='bf16'; it has 'fp16'"),
        ("'someone/tiny', subfolder='vae', variant='fp16'", "no weights of variant='fp16'"),
        ("'someone/tiny', subfolder='prior'", "has no checkpoint in prior in diffusers'"),
        ("'someone/single-file'", "has no checkpoint in diffusers' layout"),
        ("'someone/busy'", "gives an error for 'someone/busy': 429 Too Many"),
        (
            "'someone/down'",
            "not in the local cache, and the Hub is not reachable: Server error '503",
        ),
    ],
)
def test_what_cannot_be_fetched_is_one_clear_sentence(online, tmp_path, call, message):
    answer = online.resolve(call, tmp_path)
    assert answer.startswith("error:")
    assert message in answer
    assert "\n" not in answer


def test_an_ip_adapters_file_is_fetched_alone(online, offline, requested, tmp_path):
    def find(client, name, folder="models", repo="someone/adapters"):
        call = f"find_ip_adapter({repo!r}, {folder!r}, {name!r}, cache_dir={str(tmp_path)!r})"
        return client(call)

    assert find(online, "a.safetensors").endswith("models/a.safetensors")
    assert requested == ["models/a.safetensors"]
    assert find(offline, "a.safetensors") == find(online, "a.safetensors")
    for client, name, message in (
        (online, "b.safetensors", "'someone/adapters' has no file models/b.safetensors"),
        (offline, "b.safetensors", "models/b.safetensors of 'someone/adapters' is not in the"),
        (online, "a.bin", "is not a safetensors file, and loading it could run code"),
    ):
        assert message in find(client, name)
    assert "no such repository" in find(online, "a.safetensors", repo="someone/nothing")


def test_only_a_connection_problem_lets_the_cache_serve(server, online, tmp_path):
    """Too many requests, or a bug in the client, are not answered from the cache."""
    call = "'someone/changing'"
    server[2]["models/someone/changing"] = FILES
    folder = online.resolve(call, tmp_path)
    server[2]["models/someone/changing"] = 503
    assert online.resolve(call, tmp_path) == folder
    server[2]["models/someone/changing"] = 429
    assert "429 Too Many" in online.resolve(call, tmp_path)
    assert online("setattr(huggingface_hub, 'HfApi', broken(AttributeError('a bug')))") == "None"
    try:
        assert online.resolve(call, tmp_path) == "error: a bug"
    finally:
        online("setattr(huggingface_hub, 'HfApi', huggingface_hub.hf_api.HfApi)")


def test_a_full_disk_is_not_blamed_on_the_hub(online, tmp_path):
    online("setattr(huggingface_hub, 'hf_hub_download', broken(OSError(28, 'No space left')))")
    try:
        answer = online.resolve("'someone/tiny'", tmp_path)
    finally:
        online(
            "setattr(huggingface_hub, 'hf_hub_download', "
            "huggingface_hub.file_download.hf_hub_download)"
        )
    assert "gives an error for 'someone/tiny': [Errno 28] No space left" in answer


def test_local_folders_are_taken_as_they_are(tmp_path):
    assert resolve(tmp_path) == tmp_path
    (tmp_path / "unet").mkdir()
    assert resolve(tmp_path, subfolder="unet") == tmp_path / "unet"
    for path in (tmp_path / "no", str(tmp_path / "no"), "./no", "~/no/such/folder"):
        with pytest.raises(ValueError, match="is no folder here"):
            resolve(path)
    with pytest.raises(ValueError, match=r"there is no folder .*vae"):
        resolve(tmp_path, subfolder="vae")
    for subfolder in ("../unet", "/unet"):
        with pytest.raises(ValueError, match="subfolder must be a folder of the checkpoint"):
            resolve(tmp_path, subfolder=subfolder)
    (tmp_path / "file.bin").touch()
    with pytest.raises(ValueError, match="is a file, not a folder"):
        resolve(str(tmp_path / "file.bin"))


@pytest.mark.parametrize("wrong", [None, 3, ["a"], b"a"])
def test_a_wrong_path_is_one_sentence(wrong):
    with pytest.raises(ValueError, match="path_or_repo must be a folder or a Hub repository id"):
        resolve(wrong)


def make_folder(path, **components):
    path.mkdir()
    index = {name: ["diffusers", "X"] for name in components}
    (path / "model_index.json").write_text(json.dumps(index))
    for name, files in components.items():
        (path / name).mkdir()
        for file in files:
            (path / name / file).touch()
    return path


def test_a_variant_that_no_component_has_is_refused(tmp_path, caplog):
    plain, half = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
    none = make_folder(tmp_path / "none", unet=[plain], vae=[plain])
    with pytest.raises(ValueError, match="has no weights of variant='fp16'; leave variant out"):
        resolve(none, variant="fp16")
    some = make_folder(tmp_path / "some", unet=[half], vae=[plain], tokenizer=["merges.txt"])
    with pytest.raises(ValueError, match="has no weights of variant='ema'; it has 'fp16'"):
        resolve(some, variant="ema")
    with caplog.at_level(logging.WARNING):
        assert resolve(some, variant="fp16") == some
    assert "has no variant 'fp16' of vae; other weights of it are loaded" in caplog.text


def test_the_variant_is_chosen_and_plain_weights_where_it_has_none():
    plain, half = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"
    assert choose_weights([plain, half]) == plain
    assert choose_weights([plain, half], "fp16") == half
    assert choose_weights([plain], "fp16") == plain
    assert choose_weights([half]) is None
    assert choose_weights(["model.safetensors.index.fp16.json"], "fp16") is not None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.safetensors", []),
        ("model.safetensors.index.json", []),
        ("model-00001-of-00002.safetensors", []),
        ("other.fp16.safetensors", []),
        ("model.fp16.safetensors", ["fp16"]),
        ("model.non_ema.safetensors", ["non_ema"]),
        ("model.fp16-00001-of-00002.safetensors", ["fp16"]),
        ("model.safetensors.index.fp16.json", ["fp16"]),
        ("diffusion_pytorch_model.fp16.safetensors.index.json", ["fp16"]),
        ("diffusion_pytorch_model.safetensors.fp16.index.json", ["fp16"]),
        ("model-00001-of-00002.fp16.safetensors", ["fp16"]),
        ("model.non_ema-00001-of-00002.safetensors", ["non_ema"]),
    ],
)
def test_variants_among_file_names(name, found):
    assert variants([name, "config.json"]) == found
