"""Callbacks under diffusers' names, against its own."""

import diffusers.callbacks
import numpy as np
import pytest
from support.pairs import generators

import diffusax
from diffusax import callbacks
from diffusax.pipelines.run.callbacks import Embeddings

SD, XL = "StableDiffusionPipeline", "StableDiffusionXLPipeline"


def draw(pipe, callback, **call):
    call = {"prompt": "a cat", "num_inference_steps": 5, "output_type": "np", **call}
    return pipe(**call, generator=generators(1), callback_on_step_end=callback).images


@pytest.mark.parametrize(
    ("class_name", "kind", "callback", "cutoff"),
    [
        (SD, "sd", "SDCFGCutoffCallback", {"cutoff_step_ratio": 0.4}),
        pytest.param(
            *(XL, "xl", "SDXLCFGCutoffCallback"),
            {"cutoff_step_ratio": None, "cutoff_step_index": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_cutoffs_turn_guidance_off_as_in_diffusers(pairs, class_name, kind, callback, cutoff):
    pair = pairs(class_name, kind)
    theirs = getattr(diffusers.callbacks, callback)(**cutoff)
    ours = getattr(callbacks, callback)(**cutoff)
    expected = draw(pair.reference, theirs)
    actual = draw(pair.ours, callbacks.MultiPipelineCallbacks([ours]))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    # diffusers' own object does the same.
    np.testing.assert_array_equal(draw(pair.ours, theirs), actual)
    assert np.abs(draw(pair.ours, None) - actual).max() > 1e-3


def test_cutoffs_serve_several_prompts(pairs):
    pipe = pairs(SD, "sd").ours
    options = {"prompt": ["a", "b"], "num_inference_steps": 2}
    unguided = draw(pipe, callbacks.SDCFGCutoffCallback(None, 0), **options)
    shown = []

    def by_hand(pipe, step, timestep, tensors):
        shown.append(tensors["prompt_embeds"])
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}

    by_hand.tensor_inputs = ["prompt_embeds"]
    np.testing.assert_array_equal(draw(pipe, by_hand, **options), unguided)
    assert len(shown[0]) == 4


def test_several_callbacks_are_called_in_their_order():
    seen = []

    class Noting(callbacks.PipelineCallback):
        tensor_inputs = ("latents", "prompt_embeds")

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            seen.append((step_index, callback_kwargs))
            return callback_kwargs + [self.config.cutoff_step_index]

    several = callbacks.MultiPipelineCallbacks([Noting(None, 3), Noting(None, 4)])
    assert several.tensor_inputs == ["latents", "prompt_embeds"]
    assert several(None, 7, 0.0, []) == [3, 4]
    assert seen == [(7, []), (7, [3])]


@pytest.mark.parametrize("given", [(None, None), (0.5, 1), (1.5,), (-0.1,), (1,), ("half",)])
def test_a_cutoff_is_one_fraction_or_one_step(given):
    with pytest.raises(ValueError, match="cutoff_step_ratio"):
        callbacks.SDCFGCutoffCallback(*given)
    with pytest.raises(ValueError):
        diffusers.callbacks.SDCFGCutoffCallback(*given)


def test_embeddings_part_as_tensors_do():
    values = np.arange(14.0).reshape(7, 2)
    torch = pytest.importorskip("torch")
    for count in (1, 2, 3, 7, 9):
        expected = torch.from_numpy(values).chunk(count)
        actual = values.view(Embeddings).chunk(count)
        assert [part.tolist() for part in actual] == [part.tolist() for part in expected]
    assert len(values.view(Embeddings).chunk(2, dim=1)) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("sampler", "every"), [("ddim", 2), ("heun", 1), ("pndm", 2)])
def test_the_older_callback_sees_what_it_does_in_diffusers(pairs, sampler, every):
    pair, seen = pairs(SD, "sd"), ([], [])
    with pair.sampler(sampler):
        for pipe, steps in zip((pair.reference, pair.ours), seen, strict=True):
            pipe(
                "a",
                num_inference_steps=4,
                callback=lambda i, t, x, steps=steps: steps.append((i, int(t), tuple(x.shape))),
                callback_steps=every,
            )
    assert seen[0] == seen[1]
    assert seen[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"callback": 3}, "callback must be callable"),
        ({"callback": print, "callback_steps": 0}, "callback_steps must be an integer of at least"),
        ({"callback": print, "callback_on_step_end": print}, "only one of callback and callback_"),
    ],
)
def test_an_older_callback_that_cannot_be_is_refused(pairs, given, message):
    with pytest.raises(ValueError, match=message):
        pairs(SD, "sd").ours("a", **given)


def test_an_unknown_argument_is_still_refused(pairs):
    with pytest.raises(TypeError, match=r"StableDiffusionPipeline.__call__.*callbacks"):
        pairs(SD, "sd").ours("a", callbacks=None)


def test_functions_of_diffusers_utils_are_in_utils():
    from diffusax.utils import load_image, make_image_grid

    assert (load_image, make_image_grid) == (diffusax.load_image, diffusax.make_image_grid)


@pytest.mark.parametrize("names", [["latents"], ["latents", "prompt_embeds"]])
def test_changes_in_place_of_tensors_are_those_that_a_callback_returns(pairs, names):
    pipe, seen = pairs(SD, "sd").ours, []

    def returned(pipe, step, timestep, tensors):
        assert isinstance(timestep, float)
        return {name: 0.9 * tensors[name] for name in names}

    def in_place(pipe, step, timestep, tensors):
        seen.append(timestep.item())
        for name in names:
            tensors[name].mul_(0.9)
        return {} if step else tensors

    in_place.tensor_inputs = returned.tensor_inputs = names
    expected = draw(pipe, returned)
    pipe.tensors = "pt"
    try:
        actual = draw(pipe, in_place)
        untouched = draw(pipe, lambda *_: None, output_type="latent")
    finally:
        pipe.tensors = None
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert seen == pipe.scheduler.schedule(5).timesteps.tolist()
    assert np.abs(draw(pipe, None) - actual).max() > 1e-2
    assert untouched.detach().numpy().shape == (1, 4, 16, 16)


def test_a_kind_that_is_none_is_refused(pairs):
    with pytest.raises(ValueError, match="tensors must be 'pt', 'jax' or None"):
        pairs(SD, "sd").ours.tensors = "np"
