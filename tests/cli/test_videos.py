"""Videos from the command line."""

import numpy as np
import pytest
from PIL import Image
from support.pairs import picture
from support.tiny_transformers import wan_pipeline, wan_transformer

import diffusax
from diffusax.cli import main
from diffusax.images import clips

SIZE = ["--height", "16", "--width", "32", "--steps", "2", "--guidance", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan") / "tiny"
    wan_pipeline(folder)
    return folder


def test_generate_writes_the_frames_that_python_draws(model, tmp_path, capsys):
    output = tmp_path / "clip.gif"
    given = ["--model", str(model), *SIZE, "--frames", "5", "--fps", "10", "--seed", "3"]
    main(["generate", "a cat", *given, "--num-images", "2", "--output", str(output)])
    files = [tmp_path / "clip-0.gif", tmp_path / "clip-1.gif"]
    assert f"{files[1]} (5 frames, seed 3)" in capsys.readouterr().out
    pipe = diffusax.WanPipeline.from_pretrained(model)
    size = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    more = {"guidance_scale": 1.0, "num_videos_per_prompt": 2, "seed": 3}
    expected = pipe("a cat", **size, **more).frames
    for file, frames in zip(files, expected, strict=True):
        clip = Image.open(file)
        assert (clip.n_frames, clip.size, clip.info["duration"]) == (5, (32, 16), 100)
        clip.seek(4)
        # GIF has 256 colours.
        shown = np.asarray(clip.convert("RGB")) / 255
        assert np.abs(shown - frames[4]).mean() < 0.05


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--output", "clip.png"], "WanPipeline generates videos; give --output as .mp4 or .gif"),
        (["--frames", "4"], "num_frames must be one more than a multiple of 2"),
        (["--output", "clip.avi"], "--output must be a .png or .mp4 or .gif file"),
    ],
)
def test_what_cannot_be_is_an_error(model, tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["generate", "a cat", "--model", str(model), *SIZE, *args])
    assert message in capsys.readouterr().err


def test_images_have_no_frames(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for args in (["--frames", "5"], ["--output", "image.gif"]):
        with pytest.raises(SystemExit):
            main(["generate", "a cat", "--steps", "1", *args])
        assert "StableDiffusionPipeline generates images" in capsys.readouterr().err


def test_generate_begins_a_video_with_an_image(tmp_path):
    components = {"transformer": wan_transformer(4, in_channels=10)}
    wan_pipeline(tmp_path / "tiny", "WanImageToVideoPipeline", **components)
    picture(0, 48, 24).save(tmp_path / "in.png")
    given = ["--model", str(tmp_path / "tiny"), "--image", str(tmp_path / "in.png"), *SIZE]
    main(["generate", "a cat", *given, "--frames", "5", "--output", str(tmp_path / "clip.gif")])
    clip = Image.open(tmp_path / "clip.gif")
    assert (clip.n_frames, clip.size) == (5, (32, 16))


def test_videos_are_as_fast_as_the_model_s_own(tmp_path):
    wan_pipeline(tmp_path / "tiny", expand_timesteps=True)
    given = ["generate", "a cat", "--model", str(tmp_path / "tiny"), *SIZE]
    for more, frames in (([], 24), (["--fps", "8"], 8)):
        main([*given, "--frames", "9", "--output", str(tmp_path / "clip.gif"), *more])
        clip, lasting = Image.open(tmp_path / "clip.gif"), 0
        for i in range(9):
            clip.seek(i)
            lasting += clip.info["duration"]
        assert lasting == pytest.approx(1000 * 9 / frames, abs=5)


@pytest.fixture(scope="module")
def server(model):
    pytest.importorskip("imageio_ffmpeg")
    from support.running_server import running

    with running(str(model)) as found:
        yield found


def test_a_server_s_videos_are_saved_as_they_are(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["generate", "a cat", "--server", server.url, *SIZE, "--frames", "5", "--seed", "3"]
    main([*given, "--num-images", "2"])
    assert capsys.readouterr().out == "out-0.mp4 (video, seed 3)\nout-1.mp4 (video, seed 3)\n"
    data = (tmp_path / "out-1.mp4").read_bytes()
    assert "Seed: 4, Size: 32x16, Frames: 5, FPS: 16" in clips.text_of(data)
    main([*given, "--fps", "10", "--output", "clip.gif"])
    clip = Image.open("clip.gif")
    assert (clip.n_frames, clip.size, clip.info["duration"]) == (5, (32, 16), 100)


def test_a_server_s_model_says_what_it_generates(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["generate", "a cat", "--server", server.url, *SIZE, "--output", "clip.png"])
    assert "tiny generates videos; give --output as .mp4" in capsys.readouterr().err
