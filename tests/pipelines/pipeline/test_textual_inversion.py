"""Words of textual inversion: diffusers' pictures and ids, every format, and clear refusals."""

import dataclasses
import json

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support.compiled_programs import compiled_programs, forget_executables
from support.effort import first
from support.pairs import Pair

import diffusax
from diffusax.models.encoders.token_table import ROWS
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.text.prompts import tokenize_prompts

CALL = {"num_inference_steps": 2, "output_type": "np", "guidance_scale": 3.0, "seed": 1}
ALONE = {"device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
VOCABULARY = 49408


def vectors(count, width=32, seed=0):
    """Like the table of the tiny checkpoints, whose deviation is 0.3."""
    return 0.3 * np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def table(pipe, name="text_encoder"):
    embeddings = pipe.params[name]["text_model"]["embeddings"]
    return np.asarray(embeddings["token_embedding"]["embedding"])


def loaded(tiny_checkpoints, kind="sd"):
    return quiet(diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline(kind)[0]))


def theirs_of(tiny_checkpoints, kind="sd"):
    folder, _ = tiny_checkpoints.pipeline(kind)
    return quiet(diffusers.DiffusionPipeline.from_pretrained(folder))


@pytest.fixture
def pipe(tiny_checkpoints):
    return loaded(tiny_checkpoints)


@pytest.fixture(scope="module")
def shared(tiny_checkpoints):
    """A pipeline for tests that leave it without words."""
    return loaded(tiny_checkpoints)


@pytest.fixture
def bare(shared):
    yield shared
    shared.unload_textual_inversion()


@pytest.fixture(scope="module")
def old(tiny_checkpoints):
    """A pipeline with a word, for mistakes, which leave it as it is."""
    pipe = loaded(tiny_checkpoints)
    pipe.load_textual_inversion({"<old>": TABLE[0]})
    return pipe


def tensor(array):
    return torch.from_numpy(array)


PROMPTS = ["a photo of <toy>, with <cat> on it", "two DOGS and <toy><cat>"]
NEGATIVES = ["<ugly> blurry", "bad, <ugly>, <cat>"]


def test_pictures_and_ids_are_those_of_diffusers(tiny_checkpoints, tmp_path):
    pair = Pair(theirs_of(tiny_checkpoints), loaded(tiny_checkpoints))
    save_file({"<toy>": vectors(1)[0]}, tmp_path / "toy.safetensors")
    save_file({"<cat>": vectors(3, seed=1)}, tmp_path / "learned_embeds.safetensors")
    ugly = tensor(vectors(2, seed=2))
    for pipe in (pair.reference, pair.ours):
        pipe.load_textual_inversion(tmp_path, weight_name="toy.safetensors")
        pipe.load_textual_inversion(str(tmp_path))
        pipe.load_textual_inversion({"x": ugly}, token="<ugly>")
    same_ids(pair, [*PROMPTS, *NEGATIVES])
    prompts = {"prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0], "num_inference_steps": 2}
    pictures = pair.check(**prompts)
    for pipe in (pair.reference, pair.ours):
        pipe.unload_textual_inversion("<toy>")
    same_ids(pair, PROMPTS)
    assert np.abs(pair.check(**prompts) - pictures).max() > 0.01


def same_ids(pair, prompts, tokenizer="tokenizer"):
    theirs, ours = getattr(pair.reference, tokenizer), getattr(pair.ours, tokenizer)
    converted = pair.reference.maybe_convert_prompt(prompts, theirs)
    expected = theirs(converted, padding="max_length", truncation=True).input_ids
    np.testing.assert_array_equal(ours.windows(prompts), expected)
    converted = pair.ours.maybe_convert_prompt(prompts, ours)
    np.testing.assert_array_equal(ours.windows(converted), expected)


def same_embeddings(pair, prompt):
    expected = pair.reference.encode_prompt(prompt, **ALONE)
    for ours, theirs in zip(pair.ours.encode_prompt(prompt, **ALONE), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), atol=1e-4)


@pytest.fixture(scope="module")
def xl_pair(tiny_checkpoints, tmp_path_factory):
    """Pipelines of SDXL with one word of two embeddings for each text encoder."""
    pair = Pair(theirs_of(tiny_checkpoints, "xl"), loaded(tiny_checkpoints, "xl"))
    file = tmp_path_factory.mktemp("xl") / "style.safetensors"
    first, second = vectors(2), vectors(2, width=24, seed=1)
    save_file({"clip_l": first, "clip_g": second}, file)
    pair.ours.load_textual_inversion(file, token="style>")
    for array, number in ((first, ""), (second, "_2")):
        pair.reference.load_textual_inversion(
            {"style": tensor(array)},
            token="style>",
            tokenizer=getattr(pair.reference, f"tokenizer{number}"),
            text_encoder=getattr(pair.reference, f"text_encoder{number}"),
        )
    return pair


def test_both_text_encoders_of_sdxl(xl_pair):
    prompt = "a dog in style>, style>"
    same_ids(xl_pair, [prompt])
    same_ids(xl_pair, [prompt], "tokenizer_2")
    same_embeddings(xl_pair, prompt)


@pytest.mark.slow
def test_images_of_sdxl_equal_diffusers(xl_pair):
    xl_pair.check(prompt="a dog in style>", negative_prompt="a style> cat", num_inference_steps=2)


@pytest.mark.slow
def test_one_text_encoder_of_sdxl_at_a_time(tiny_checkpoints):
    pipe = loaded(tiny_checkpoints, "xl")
    tokenizer, encoder = pipe.tokenizer_2, pipe.text_encoder_2
    pair = {"clip_l": vectors(1), "clip_g": vectors(1, width=24)}
    pipe.load_textual_inversion({"<a>": pair["clip_g"]}, tokenizer=tokenizer)
    pipe.load_textual_inversion(pair, token="<b>", text_encoder=encoder)
    pipe.load_textual_inversion({"<c>": pair["clip_l"]})
    assert (list(pipe.tokenizer.words), list(pipe.tokenizer_2.words)) == (["<c>"], ["<a>", "<b>"])
    with pytest.raises(ValueError, match=r"takes 32; give text_encoder=pipe\.text_encoder_2"):
        pipe.load_textual_inversion({"<d>": pair["clip_g"]})
    with pytest.raises(ValueError, match="tokenizer must be this pipeline's tokenizer or tokeni"):
        pipe.load_textual_inversion({"<d>": pair["clip_g"]}, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the dictionary has no vectors for text_encoder_2"):
        pipe.load_textual_inversion({"clip_l": pair["clip_l"]}, token="<d>")
    pipe.unload_textual_inversion("<b>", text_encoder=encoder)
    pipe.unload_textual_inversion()
    assert not pipe.tokenizer.words
    assert not pipe.tokenizer_2.words


def test_another_word_compiles_nothing(pipe):
    plain, before = pipe("a <cat>", **CALL).images, table(pipe)
    programs = pipe.text_encoder.network
    pipe.load_textual_inversion({"<cat>": vectors(2)})
    first = pipe("a <cat>", **CALL).images
    assert table(pipe).shape[0] == (VOCABULARY // ROWS + 1) * ROWS
    with count_compilations() as compiled:
        pipe.load_textual_inversion([{"<dog>": vectors(75, seed=1)}, {"<hat>": vectors(8)}])
        second = pipe("a <cat>", **CALL).images
        others = pipe("a <dog> in a <hat>", **CALL).images
        pipe.unload_textual_inversion(["<cat>", "<dog>"])
        moved = pipe("a <hat>", **CALL).images
        pipe.unload_textual_inversion()
        again = pipe("a <cat>", **CALL).images
    assert compiled == []
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(again, plain)
    np.testing.assert_array_equal(table(pipe), before)
    assert pipe.text_encoder.network == programs
    assert pipe.text_encoder.switches.own_rows is None
    assert min(np.abs(a - plain).max() for a in (first, others, moved)) > 0.01


def test_a_table_of_many_words_grows_once_more(bare):
    before = table(bare)
    bare.load_textual_inversion([{f"<w{i}>": vectors(70, seed=i)} for i in range(4)])
    assert len(table(bare)) == VOCABULARY + 2 * ROWS
    np.testing.assert_array_equal(table(bare)[VOCABULARY + 70], vectors(1, seed=1)[0])
    with pytest.raises(TypeError, match="no argument 'tokens'"):
        bare.load_textual_inversion({"<x>": vectors(1)}, tokens="<y>")
    bare.unload_textual_inversion(["<w0>", "<w2>"])
    assert len(table(bare)) == VOCABULARY + ROWS
    np.testing.assert_array_equal(table(bare)[VOCABULARY : VOCABULARY + 70], vectors(70, seed=1))
    np.testing.assert_array_equal(table(bare)[VOCABULARY + 70 :][:70], vectors(70, seed=3))
    assert not table(bare)[VOCABULARY + 140 :].any()
    assert bare.tokenizer.words["<w3>"] == VOCABULARY + 70
    np.testing.assert_array_equal(table(bare)[:VOCABULARY], before)


TABLE = vectors(2)


@pytest.mark.parametrize(
    ("given", "token", "words"),
    first(
        [
            ({"<x>": TABLE[0]}, None, {"<x>": TABLE[:1]}),
            ({"<x>": jnp.asarray(TABLE)}, "<y>", {"<y>": TABLE}),
            (torch.nn.Parameter(tensor(TABLE)), "<y>", {"<y>": TABLE}),
            (tensor(TABLE), ["<y>", "<z>"], {"<y>": TABLE[:1], "<z>": TABLE[1:]}),
            ([TABLE, {"<x>": TABLE[0]}], ["<y>", "<z>"], {"<y>": TABLE, "<z>": TABLE[:1]}),
            ([{"<x>": TABLE}, {"<y>": TABLE}], None, {"<x>": TABLE, "<y>": TABLE}),
            ({"<x>": TABLE, "<y>": TABLE[1]}, None, {"<x>": TABLE, "<y>": TABLE[1:]}),
            ({"string_to_param": {"*": tensor(TABLE)}, "name": "x>"}, None, {"x>": TABLE}),
            ({"emb_params": TABLE.astype(np.float64)}, "Neg-5", {"Neg-5": TABLE}),
            ({"emb_params": tensor(TABLE).bfloat16()}, "Neg-5", {"Neg-5": TABLE}),
        ],
        5,
    ),
)
def test_dictionaries_and_arrays_are_words(bare, given, token, words):
    bare.load_textual_inversion(given, token)
    for word, rows in words.items():
        ids = bare.tokenizer.ids_of(f"{word.upper()} {word}")
        assert len(ids) == 2 * len(rows)
        np.testing.assert_allclose(table(bare)[ids[: len(rows)]], rows, atol=2e-3)


def test_files_and_folders_are_words(bare, tmp_path):
    """The name of a file is the word where the file has none; older formats too."""
    style = tmp_path / "a style.safetensors"
    save_file({"emb_params": TABLE.astype(np.float16)}, style)
    bare.load_textual_inversion(style)
    bare.load_textual_inversion(tmp_path, token="<folder>")
    save_file({"*": TABLE}, tmp_path / "other.w.safetensors")
    bare.load_textual_inversion(str(tmp_path), weight_name="other.w.safetensors")
    (tmp_path / "below").mkdir()
    save_file({"<x>": TABLE}, tmp_path / "below" / "learned_embeds.safetensors")
    bare.load_textual_inversion(str(tmp_path), subfolder="below")
    bare.load_textual_inversion([style, style], token=["<one>", "<two>"])
    words = ["a style", "<folder>", "other.w", "<x>", "<one>", "<two>"]
    assert [word for word in bare.tokenizer.words if not word.endswith("_1")] == words


def test_words_come_from_repositories(hub, bare, tmp_path):
    save_file({"<x>": TABLE}, tmp_path / "learned_embeds.safetensors")
    content = (tmp_path / "learned_embeds.safetensors").read_bytes()
    files = {"learned_embeds.safetensors": content, "sub/y.safetensors": content}
    pickled = {"learned_embeds.bin": b"x"}
    hub({"models/someone/words": files, "models/someone/old": pickled})
    cache = {"cache_dir": tmp_path / "cache"}
    bare.load_textual_inversion("someone/words", **cache)
    options = {"token": "<y>", "subfolder": "sub", "weight_name": "y.safetensors"}
    bare.load_textual_inversion("someone/words", **options, **cache)
    assert list(bare.tokenizer.words) == ["<x>", "<x>_1", "<y>", "<y>_1"]
    with pytest.raises(
        ValueError, match=r"'someone/old' has no file learned_embeds\.safetensors; name"
    ):
        bare.load_textual_inversion("someone/old", **cache)
    with pytest.raises(ValueError, match="could run code"):
        bare.load_textual_inversion("someone/old", weight_name="learned_embeds.bin", **cache)
    with pytest.raises(ValueError, match="no such repository"):
        bare.load_textual_inversion("someone/else", **cache)


@pytest.mark.parametrize(
    ("given", "token", "message"),
    [
        (
            {"<x>": vectors(1, 1024)},
            None,
            "1024 numbers .* this one is for Stable Diffusion 2",
        ),
        (
            {"<x>": vectors(1, 7)},
            None,
            "has 7 numbers in each vector of '<x>', but text_encoder",
        ),
        ({"<x>": vectors(76)}, None, "has 76 vectors of '<x>', but text_encoder reads at most 75"),
        ({"<x>": vectors(1001)}, None, "has 1001 vectors for one word"),
        ({"<old>": TABLE}, None, "token '<old>' of the dictionary cannot be added, as tokenizer"),
        ({"<OLD>": TABLE}, None, "tokenizer has '<old>' already"),
        ({"<old>_1": TABLE}, None, "'<old>_1' .* cannot be added, as tokenizer has '<old>' alr"),
        ({"cat": TABLE}, None, "tokenizer has 'cat' already; give another token="),
        ({"<x>": TABLE, "<X>": TABLE}, None, "tokenizer has '<x>' already"),
        ([{"<x>": TABLE}, {"<x>": TABLE}], None, "token '<x>' is there twice"),
        ([{"<x>": TABLE}], ["<y>", "<z>"], "token has 2 words for 1 embeddings"),
        (TABLE, None, "the array does not name its word; give it with token="),
        ({"emb_params": TABLE}, None, "the dictionary does not name its word"),
        ({"<x>": TABLE}, " <x>", "must be a text without spaces around it"),
        ({"<x>": TABLE}, "a\ud800", "must be a text without spaces around it"),
        ({"<x>": TABLE * np.nan}, None, "numbers in '<x>' that are not finite"),
        ({"<x>": TABLE.astype(int)}, None, "'<x>' of int64 .2, 32., but an embedding is a vec"),
        ({"<x>": TABLE[None]}, None, "but an embedding is a vector"),
        ({"<x>": [[1.0], [1.0, 2.0]]}, None, "but an embedding is a vector"),
        ({"<x>": TABLE[:0]}, None, "but an embedding is a vector"),
        ({"clip_l": TABLE, "clip_g": TABLE}, "<x>", "for Stable Diffusion XL, but this pipeline"),
        ({"clip_l": TABLE, "clip_g": TABLE[:1]}, "<x>", r"got 2 in clip_l and 1 in clip_g"),
        ({"a.lora_up.weight": TABLE, "b": TABLE}, None, "holds 2 tensors .* and is no embedding"),
        ({}, None, "holds 0 tensors .nothing. and is no embedding"),
        ([], None, "no embedding is given"),
        ("there/is.safetensors", None, "there is no file there/is.safetensors"),
        ("there/is.pt", None, r"could run code; .*\{'emb_params': torch.load\('is.pt', weights_o"),
        ("is.bin", None, r"safetensors.torch.save_file\(torch.load\('is.bin', weights_only=True\)"),
    ],
)
def test_what_cannot_be_is_one_sentence(old, given, token, message):
    before = old.tokenizer, table(old)
    with pytest.raises(ValueError, match=message) as error:
        old.load_textual_inversion(given, token)
    assert "\n" not in str(error.value)
    assert old.tokenizer is before[0]
    np.testing.assert_array_equal(table(old), before[1])


def test_folders_that_cannot_be(bare, tmp_path):
    with pytest.raises(ValueError, match=r"a single \.safetensors file \(it has none\); name"):
        bare.load_textual_inversion(tmp_path)
    (tmp_path / "x.pt").touch()
    with pytest.raises(ValueError, match=r"x\.pt is not a safetensors file"):
        bare.load_textual_inversion(tmp_path)
    for name in "ab":
        save_file({"<x>": TABLE}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"it has a\.safetensors, b\.safetensors\); name the file"):
        bare.load_textual_inversion(tmp_path)
    with pytest.raises(ValueError, match=r"tokens has '<y>'; the words .* are none"):
        bare.unload_textual_inversion("<y>")


def damaged(rng, content):
    """A mutation of a safetensors file's bytes."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    (name,) = header
    match rng.integers(8):
        case 0:
            return content[: rng.integers(len(content))]
        case 1:
            content = bytearray(content)
            for _ in range(rng.integers(1, 6)):
                content[rng.integers(len(content))] = rng.integers(256)
            return bytes(content)
        case 2:
            huge = int(rng.choice([2**63, 2**40, length + 1, length - 1, 0]))
            return huge.to_bytes(8, "little") + content[8:]
        case 3:
            rows, width = header[name]["shape"]
            shapes = [[rows * width], [width, rows], [1, rows * width], [0, width], [rows, width]]
            header[name]["shape"] = shapes[rng.integers(len(shapes))]
        case 4:
            header[name]["dtype"] = str(rng.choice(["I32", "F16", "F64", "BOOL", "F8_E4M3", "X"]))
        case 5:
            header["<more>" if rng.random() < 0.5 else "a.b"] = header[name]
        case 6:
            header.pop(name)
        case 7:
            numbers = np.frombuffer(data, np.float32).copy()
            numbers[rng.integers(len(numbers))] = rng.choice([np.nan, np.inf, 1e30])
            data = numbers.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_broken_file_is_one_sentence_or_a_word(tmp_path):
    """With the emoji model, whose tokenizer is small."""
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    whole, broken = tmp_path / "whole.safetensors", tmp_path / "broken.safetensors"
    save_file({"<x>": vectors(2, pipe.text_encoder.config.hidden_size)}, whole)
    content, refused = whole.read_bytes(), []
    for seed in range(100):
        broken.write_bytes(damaged(np.random.default_rng(seed), content))
        try:
            pipe.load_textual_inversion(broken)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert pipe.tokenizer.words
            pipe.unload_textual_inversion()
    assert 60 < len(refused) < 100
    assert not pipe.tokenizer.words
    for message in refused:
        assert "\n" not in message
        assert str(broken) in message
        assert len(message) < 600


@pytest.mark.slow
def test_a_saved_pipeline_has_its_words_in_diffusers(pipe, tmp_path):
    pipe.load_textual_inversion([{"<toy>": vectors(3)}, {"Hat>": vectors(1, seed=1)}])
    pipe.save_pretrained(tmp_path)
    theirs = quiet(diffusers.StableDiffusionPipeline.from_pretrained(tmp_path))
    again = quiet(diffusax.StableDiffusionPipeline.from_pretrained(tmp_path))
    assert theirs.text_encoder.get_input_embeddings().weight.shape == (VOCABULARY + 4, 32)
    assert again.tokenizer.words == pipe.tokenizer.words
    pair = Pair(theirs, again)
    same_ids(pair, ["a <toy> with a hat>"])
    same_embeddings(pair, "a <toy> with a hat>")
    again.unload_textual_inversion("<toy>")
    again.load_textual_inversion({"<new>": vectors(2, seed=2)})
    pipe.unload_textual_inversion("<toy>")
    pipe.load_textual_inversion({"<new>": vectors(2, seed=2)})
    prompt = "hat> <new>"
    for ours, other in zip(pipe.encode_prompt(prompt), again.encode_prompt(prompt)):
        np.testing.assert_allclose(ours, other, atol=1e-5)


def test_weights_and_long_prompts(bare):
    bare.load_textual_inversion([{"<cat>": vectors(3)}, {"style_(x)": vectors(2, seed=1)}])
    tokenize = bare.tokenizer.ids_of
    cat, style = tokenize("<cat>"), tokenize("style_(x)")
    assert (len(cat), len(style)) == (3, 2)
    assert tokenize("<cat> <cat>_1 <cat>_2") == cat
    assert tokenize("<cat>_1") == cat[1:2]
    spelled = "<cat> <cat>_1 <cat>_2"
    converted = bare.maybe_convert_prompt(["<cat> <cat>, a dog", "a <CAT>"], bare.tokenizer)
    assert converted == [f"{spelled} {spelled}, a dog", "a <CAT> <cat>_1 <cat>_2"]
    prompt = r"a (<cat>:1.3) in style_\(x\)"
    texts = prompt, prompt.replace("<cat>", spelled)
    one, other = (bare.encode_prompt(text, prompt_weighting=True)[0] for text in texts)
    np.testing.assert_array_equal(one, other)
    found = tokenize_prompts(bare.tokenizer, prompt, weighting=True)
    ids, weights = found.input_ids[0, 0], found.weights[0, 0]
    np.testing.assert_allclose(weights[np.isin(ids, cat)], [1.3] * 3, rtol=1e-6)
    assert set(style) <= set(ids[weights == 1].tolist())
    # The second vector would be the first of the next window.
    text = "word " * 74 + "<cat> end"
    windows = tokenize_prompts(bare.tokenizer, text, long_prompt=True).input_ids[0]
    assert cat[0] not in windows[0]
    assert windows[1, 1:4].tolist() == cat
    ids, rest = bare.tokenizer.fit("a <cat> here", 3)
    assert (ids[1:], rest) == (cat[:2], "<cat> here")


def test_a_text_encoder_without_the_words(bare, tiny_checkpoints):
    bare.load_textual_inversion({"<cat>": vectors(1)})
    other = diffusax.StableDiffusionPipeline.from_pipe(bare)
    assert list(other.tokenizer.words) == ["<cat>"]
    other.text_encoder = loaded(tiny_checkpoints).text_encoder
    with pytest.raises(ValueError, match="prompt has the word '<cat>', for which text_encoder has"):
        other("a <cat>", **CALL)
    other.unload_textual_inversion()
    assert list(bare.tokenizer.words) == ["<cat>"]


@pytest.mark.slow
def test_half_precision_and_casts(pipe):
    pipe.to("bfloat16")
    pipe.load_textual_inversion({"<cat>": vectors(2)})
    assert table(pipe).dtype == jnp.bfloat16
    pipe.to("float32")
    np.testing.assert_allclose(table(pipe)[VOCABULARY : VOCABULARY + 2], vectors(2), atol=5e-3)


@pytest.mark.slow
def test_pure_functions_and_programs_made_ahead(pipe, tmp_path):
    pipe.load_textual_inversion({"<cat>": vectors(2)})
    expected = pipe("a <cat>", **CALL).images
    options = {k: v for k, v in CALL.items() if k != "output_type"}
    inputs = pipe.prepare_inputs("a <cat>", **options)
    np.testing.assert_allclose(pipe.generate_fn(pipe.params, inputs), expected, atol=1e-4)
    pipe.compile(guidance_scale=3.0)
    pipe.save_compiled(tmp_path)
    try:
        forget_executables()
        assert pipe.load_compiled(tmp_path) == 3
        pipe.load_textual_inversion({"<dog>": vectors(2, seed=1)})
        with compiled_programs() as compiled:
            np.testing.assert_allclose(pipe("a <cat>", **CALL).images, expected, atol=1e-4)
            assert np.abs(pipe("a <dog>", **CALL).images - expected).max() > 0.01
        assert compiled == []
    finally:
        forget_executables()


@pytest.mark.slow
def test_a_running_batch_sees_words_from_the_next_call_on(pipe):
    with diffusax.RunningBatch(pipe) as batch:
        before = batch.submit("a <cat>", **CALL)
        pipe.load_textual_inversion({"<cat>": vectors(2)})
        after = batch.submit("a <cat>", **CALL)
        images = [future.result().images for future in (before, after)]
    np.testing.assert_allclose(images[1], pipe("a <cat>", **CALL).images, atol=1e-4)
    pipe.unload_textual_inversion()
    np.testing.assert_allclose(images[0], pipe("a <cat>", **CALL).images, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class OfPyTorch:
    """As the network of a PyTorch module."""

    config = None


def test_what_takes_no_words(bare, monkeypatch, tiny_checkpoints):
    monkeypatch.setattr(bare.text_encoder, "network", OfPyTorch())
    with pytest.raises(ValueError, match="text_encoder is no CLIP text encoder of diffusax's own"):
        bare.load_textual_inversion({"<cat>": vectors(1)})
    monkeypatch.undo()
    folder, _ = tiny_checkpoints.pipeline("sd")
    options = {"text_encoder": None, "tokenizer": None}
    without = diffusax.StableDiffusionPipeline.from_pretrained(folder, **options)
    with pytest.raises(ValueError, match="this pipeline has no text encoder"):
        without.load_textual_inversion({"<cat>": vectors(1)})
