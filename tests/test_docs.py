"""The code in README.md and docs/ runs, its commands parse, and its links lead somewhere.

Tiny checkpoints of the same kind stand in for Hub repositories, sizes and step counts are made
smaller, and pictures and data sets are drawn at random. The Python blocks of a page share one
namespace, in order. A block that cannot run has a comment before it, `<!-- not run: why -->`.
"""

import importlib
import json
import re
import shlex
from pathlib import Path

import diffusers
import jax
import pytest
import yaml
from support.data_sets import write_image_folder
from support.effort import few
from support.evaluation_rows import build_clip, build_dino
from support.ip_adapters import write_hub_files
from support.pairs import mask, picture
from support.qwen_edits import PLUS, make_areas_smaller
from support.repository import ROOT
from support.tiny import build_asymmetric, randomize
from support.tiny_flux3 import flux3_pipeline
from support.tiny_language import build_language_model
from support.tiny_transformers import FLUX_FILL, wan_image_components, wan_vace_transformer
from support.tiny_transformers import flux_controlnet as flux_controlnet
from support.tiny_transformers import flux_pipeline as build_flux
from support.tiny_transformers import klein_pipeline as build_klein
from support.tiny_transformers import krea2_pipeline as build_krea2
from support.tiny_transformers import qwen_image21_pipeline as build_qwen_image21
from support.tiny_transformers import qwen_image_pipeline as build_qwen_image
from support.tiny_transformers import wan_pipeline as build_wan
from support.tiny_transformers import z_image_pipeline as build_z_image
from support.tiny_unconditional import build_unconditional
from support.video_training import write_clips

from diffusax.checkpoints import hub
from diffusax.cli.console import COMMANDS
from diffusax.pipelines.plan.descriptions import DESCRIPTIONS
from diffusax.utils import export_to_video

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
WHY = r"(?:<!-- not run: (?P<why>.*?) -->\n\n?)?"
BLOCK = re.compile(WHY + r"```(?P<kind>\w+)\n(?P<code>.*?)```", re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)
HEADING = re.compile(r"^#+ (.*)$", re.M)

SD, XL = "stable-diffusion-v1-5/stable-diffusion-v1-5", "stabilityai/stable-diffusion-xl-base-1.0"
PIPELINES = {
    SD: "sd",
    "stabilityai/stable-diffusion-2-1": "sd",
    "stable-diffusion-v1-5/stable-diffusion-inpainting": "sd-inpaint",
    "timbrooks/instruct-pix2pix": "sd-instruct",
    "SimianLuo/LCM_Dreamshaper_v7": "lcm",
    XL: "xl",
    "stabilityai/stable-diffusion-xl-refiner-1.0": "xl-refiner",
    "stabilityai/sdxl-turbo": "xl",
    "sdxl-lightning": "xl",
    "diffusers/sdxl-instructpix2pix-768": "xl-instruct",
}
PARTS = {
    "latent-consistency/lcm-sdxl": ("xl", "unet"),
    "madebyollin/sdxl-vae-fp16-fix": ("xl", "vae"),
}
CONTROLNETS = {
    "lllyasviel/sd-controlnet-canny": ("sd", 0),
    "lllyasviel/sd-controlnet-depth": ("sd", 1),
    "diffusers/controlnet-canny-sdxl-1.0": ("xl", 0),
}
T2I_ADAPTERS = {
    "TencentARC/t2i-adapter-canny-sdxl-1.0": ("xl", 0),
    "depth-adapter": ("sd", 0),
    "colour-adapter": ("sd", 1),
}
IP_ADAPTERS = "h94/IP-Adapter"
WHOLE_CLIP = ("openai/clip-vit-large-patch14", "yuvalkirstain/PickScore_v1")
DINOV2 = "facebook/dinov2-base"
TAESD = "madebyollin/taesd"
LANGUAGE_MODELS = {"Qwen/Qwen3-4B": "Qwen3ForCausalLM", "google/t5-v1_1-xxl": "T5EncoderModel"}
DDPM = "google/ddpm-cat-256"
Z_IMAGE = "Tongyi-MAI/Z-Image-Turbo"
WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
WAN_IMAGE = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
WAN_VACE = "Wan-AI/Wan2.1-VACE-1.3B-diffusers"
KREA2, QWEN_IMAGE21 = "krea/Krea-2-Raw", "Qwen/Qwen-Image-2.1"
QWEN_IMAGE, QWEN_IMAGE_EDIT = "Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit-2511"
FLUX = {
    "black-forest-labs/FLUX.1-dev": {},
    "black-forest-labs/FLUX.1-Fill-dev": FLUX_FILL,
}
FLUX_CONTROLNET = "InstantX/FLUX.1-dev-Controlnet-Canny"
KLEIN = "black-forest-labs/FLUX.2-klein-4B"
KLEIN_3 = "black-forest-labs/flux-3-image-klein"
ASYMMETRIC = "cross-attention/asymmetric-autoencoder-kl-x-1-5"
SMALLER = (
    (r"\b(height|width)=\d+", r"\1=64"),
    (r"\.resize\(\(\d+, \d+\)\)", ".resize((64, 64))"),
    (r"dtype=\"b?float16\"", 'dtype="float32"'),
    (r",\s*variant=\"fp16\"", ""),
    (r"num_inference_steps=(\d\d+)", "num_inference_steps=6"),
    (r"num_frames=\d+", "num_frames=5"),
    (r"num_frames=\(\d+,\)", "num_frames=(5,)"),
    (r"832x480", "32x16"),
)


def name(path):
    return str(path.relative_to(ROOT))


def blocks(page, kind):
    """The code of each block of a kind that is to run."""
    found = [match for match in BLOCK.finditer(page.read_text("utf-8")) if match["kind"] == kind]
    assert all(match["why"] is None or len(match["why"]) > 10 for match in found)
    return [match["code"] for match in found if match["why"] is None]


def smaller(code):
    for pattern, shorter in SMALLER:
        code = re.sub(pattern, shorter, code)
    return code


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Halves the time, most of which is compilation; later tests get programs of their own."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def tiny_taesd():
    channels = {f"{side}_block_out_channels": (8, 8, 8) for side in ("encoder", "decoder")}
    counts = {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
    return diffusers.AutoencoderTiny(**channels, **counts)


@pytest.fixture(scope="module")
def stand_in(tiny_checkpoints, tmp_path_factory):
    """A function that gives the folder of a tiny checkpoint for a Hub repository."""

    def find(repo):
        if repo in PIPELINES:
            return tiny_checkpoints.pipeline(PIPELINES[repo])[0]
        if repo in PARTS:
            kind, part = PARTS[repo]
            return tiny_checkpoints.pipeline(kind)[0] / part
        if repo in CONTROLNETS:
            family, seed = CONTROLNETS[repo]
            return tiny_checkpoints.controlnet(family, "a", seed)[0]
        if repo in T2I_ADAPTERS:
            return tiny_checkpoints.t2i_adapter(*T2I_ADAPTERS[repo])[0]
        folder = tmp_path_factory.mktemp("network")
        if repo in WHOLE_CLIP:
            build_clip(folder)
        elif repo == DINOV2:
            build_dino(folder)
        elif repo == IP_ADAPTERS:
            for part, kind in (("models", "sd"), ("sdxl_models", "xl")):
                unet = tiny_checkpoints.pipeline(kind)[1].unet
                write_hub_files(folder / part, unet, kind)
        elif repo == ASYMMETRIC:
            build_asymmetric(folder)
        elif repo == Z_IMAGE:
            build_z_image(folder)
        elif repo == WAN:
            build_wan(folder)
        elif repo == WAN_IMAGE:
            build_wan(folder, "WanImageToVideoPipeline", **wan_image_components())
        elif repo == WAN_VACE:
            build_wan(folder, "WanVACEPipeline", transformer=wan_vace_transformer())
        elif repo == KREA2:
            build_krea2(folder)
        elif repo == QWEN_IMAGE_EDIT:
            build_qwen_image(folder, PLUS, zero_cond_t=True)
        elif repo == QWEN_IMAGE:
            build_qwen_image(folder)
        elif repo == QWEN_IMAGE21:
            build_qwen_image21(folder)
        elif repo in FLUX:
            kind = "FluxFillPipeline" if FLUX[repo] else "FluxPipeline"
            build_flux(folder, kind, **FLUX[repo])
        elif repo == FLUX_CONTROLNET:
            flux_controlnet().save_pretrained(folder)
        elif repo == KLEIN:
            build_klein(folder, layers=28, is_distilled=True)
        elif repo == KLEIN_3:
            flux3_pipeline(folder, distilled=True, layers=32)
        elif repo in LANGUAGE_MODELS:
            build_language_model(folder, LANGUAGE_MODELS[repo])
        elif repo == DDPM:
            build_unconditional(folder)
        else:
            randomize(tiny_taesd()).save_pretrained(folder)
        return folder

    return find


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    make_areas_smaller(monkeypatch.setattr)
    for number, file in enumerate(("photo", "edges", "depth", "drawing")):
        picture(number, 64, 64).save(f"{file}.png")
    mask(1, 64, 64).save("mask.png")
    write_image_folder(Path("pictures"), 8)
    write_clips(Path("clips"))
    export_to_video([picture(0, 64, 64)] * 5, "depth.mp4")
    Path("run.yaml").write_text("model: emoji\ndata: {path: pictures}\n")
    return tmp_path


@pytest.fixture
def repositories(stand_in, monkeypatch):
    """Makes the Hub repositories that a text names ones of this machine."""

    def put(text):
        steering = (*CONTROLNETS, *T2I_ADAPTERS, IP_ADAPTERS)
        others = (
            *FLUX,
            FLUX_CONTROLNET,
            *LANGUAGE_MODELS,
            *WHOLE_CLIP,
            DINOV2,
            TAESD,
            ASYMMETRIC,
            DDPM,
            Z_IMAGE,
            WAN,
            WAN_IMAGE,
            WAN_VACE,
            KREA2,
            QWEN_IMAGE,
            QWEN_IMAGE_EDIT,
            QWEN_IMAGE21,
            KLEIN,
            KLEIN_3,
        )
        for repo in (*PIPELINES, *PARTS, *steering, *others):
            if repo in text:
                monkeypatch.setitem(hub.EMBEDDED, repo, stand_in(repo))

    # PyTorch's pipelines, too.
    theirs = diffusers.DiffusionPipeline.from_pretrained.__func__

    def from_pretrained(cls, repo, **options):
        return theirs(cls, hub.EMBEDDED.get(repo, repo), **options)

    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained)
    )
    return put


def run(codes, source, repositories):
    repositories("".join(codes))
    names = {"__name__": "__main__"}
    for number, code in enumerate(codes):
        exec(compile(smaller(code), f"{source}, block {number}", "exec"), names)


CODE = [page for page in PAGES if blocks(page, "python")]
QUICK = [ROOT / "README.md", DOCS / "start/quickstart.md"]


@pytest.mark.parametrize("page", few(CODE, *QUICK), ids=name)
def test_python_code_runs(page, place, repositories):
    run(blocks(page, "python"), name(page), repositories)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_run(notebook, place, repositories):
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert codes
    assert not any(cell.get("outputs") for cell in cells)
    run(codes, name(notebook), repositories)


def commands(page):
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = (line.split("  #")[0] for line in text.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("diffusax ")]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name)
def test_commands_are_understood(page, place):
    for command, *args in commands(page):
        assert command in COMMANDS
        if "--help" not in args:
            importlib.import_module(f"diffusax.cli.{command.replace('-', '_')}").command(args)


def anchors(page):
    """The anchors of a page's headings, as Markdown's table of contents names them."""
    headings = HEADING.findall(FENCED.sub("", page.read_text("utf-8")))
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_table_of_arguments_says_what_the_code_says():
    page = (DOCS / "api/arguments.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.M))
    assert rows == DESCRIPTIONS


def test_every_page_is_in_the_menu():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))

    def files(menu):
        if isinstance(menu, str):
            return [menu]
        parts = menu.values() if isinstance(menu, dict) else menu
        return [file for part in parts for file in files(part)]

    listed = [file for file in files(config["nav"]) if not file.startswith("http")]
    pages = [str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)]
    assert sorted(listed) == sorted(pages)
