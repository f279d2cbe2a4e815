"""Runs that begin late (image to image) or end early (SDXL's base), and the levels of their x."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.upstream_samplers import (
    SD,
    SHAPE,
    build,
    compare,
    config_of,
    model,
    noised,
    ours,
    reference,
    same,
)
from test_against_diffusers import CASES

from diffusax import samplers
from diffusax.runtime.random.brownian import BrownianNoise

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]


NAMES = sorted(samplers.SCHEDULERS)


def options_for(name):
    return {} if name.startswith(("EDM", "Flow")) else SD


def pair(name, config, steps):
    scheduler = build(name, steps, **config)
    return samplers.scheduler_from_config({**config_of(scheduler), **config}), scheduler


@pytest.mark.parametrize(("name", "config"), CASES)
def test_a_run_that_begins_late_equals_diffusers_image_to_image(name, config):
    for steps, skipped in ((10, 4), (10, 1), (20, 3), (12, 11)):
        mine, scheduler = pair(name, config, steps)
        begin = skipped * scheduler.order
        eta = {"eta": 0.3} if name == "TCDScheduler" else {}
        compare(mine.schedule(steps, begin=begin, **eta), scheduler, begin=begin, **eta)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_ends_early_has_the_first_rows_of_the_whole_run(name):
    mine, scheduler = pair(name, options_for(name), 9)
    for end in (1, 5, len(scheduler.timesteps)):
        mine, scheduler = pair(name, options_for(name), 9)
        compare(
            mine.schedule(9, end=end), scheduler, end=end, **({"eta": 0.0} if "TCD" in name else {})
        )


# diffusers' DDIMInverseScheduler adds no noise.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "DDIMInverseScheduler"])
@pytest.mark.parametrize("begin", [0, 3])
def test_levels_are_those_of_add_noise(name, begin):
    """As diffusers' inpainting pipelines use it: the level of the next timestep after each row.

    After the last row they have none, and the level is that of the result.
    """
    mine, scheduler = pair(name, options_for(name), 8)
    begin *= scheduler.order
    schedule = mine.schedule(8, begin=begin)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    found = []

    def add(timestep):
        found.append(
            [float(noised(scheduler, *x, timestep[None])) for x in ((one, none), (none, one))]
        )

    def constrain(x, after):
        if after is not None:
            add(after)
        return x

    add(scheduler.timesteps[begin])
    noises = [torch.randn(SHAPE) for _ in range(50)]
    reference(scheduler, torch.randn(SHAPE).double(), noises, begin=begin, constrain=constrain)
    np.testing.assert_allclose(schedule.levels[:-1], found, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(schedule.table().level[: len(schedule)], schedule.levels[1:], 1e-6)
    np.testing.assert_array_equal(schedule.ending_clean.levels, [*schedule.levels[:-1], [1, 0]])


ENDS = {
    "ddim": ("DDIMScheduler", {"set_alpha_to_one": False, "clip_sample": False}, {}),
    "ddim, clean": ("DDIMScheduler", {"clip_sample": False}, {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}, {}),
    "pndm, two rows": ("PNDMScheduler", {"skip_prk_steps": True, "steps_offset": 1}, {"begin": 7}),
    "pndm, Runge-Kutta": ("PNDMScheduler", {"steps_offset": 1}, {}),
    "tcd": ("TCDScheduler", {}, {}),
    "euler": ("EulerDiscreteScheduler", {"final_sigmas_type": "sigma_min"}, {}),
    "euler, sigmas": ("EulerDiscreteScheduler", {}, {"sigmas": [9.0, 2.0, 0.5]}),
    "heun": ("HeunDiscreteScheduler", {}, {}),
    "dpm": ("DPMSolverMultistepScheduler", {"final_sigmas_type": "sigma_min"}, {}),
    "dpm singlestep": ("DPMSolverSinglestepScheduler", {"final_sigmas_type": "sigma_min"}, {}),
    "deis": ("DEISMultistepScheduler", {}, {}),
    "unipc": ("UniPCMultistepScheduler", {"final_sigmas_type": "sigma_min"}, {}),
    "flow": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}, {}),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_perfect_network_ends_at_the_last_level(case):
    name, options, arguments = ENDS[case]
    mine = samplers.SCHEDULERS[name](**({} if case == "flow" else SD), **options)
    schedule = mine.schedule(**{**({} if "sigmas" in arguments else {"steps": 8}), **arguments})
    sample, noise = jnp.full((1, 2, 2, 1), 0.7), jnp.full((1, 2, 2, 1), -1.3)
    predicted = noise - sample if case == "flow" else noise
    (signal, level), last = schedule.levels[0], schedule.levels[-1]
    state = samplers.init_state(signal * sample + level * noise)
    rows = 0, len(schedule)
    run = samplers.run(lambda *_: predicted, state, schedule.table(), *rows, lambda _: noise)
    expected = last[0] * sample + last[1] * noise
    np.testing.assert_allclose(run[0], expected, rtol=1e-4, atol=1e-4)


def test_a_run_cut_short_ends_at_the_level_of_the_next_row():
    scheduler = samplers.EulerDiscreteScheduler(**SD)
    whole, cut = scheduler.schedule(10), scheduler.schedule(10, end=6)
    np.testing.assert_array_equal(cut.levels, whole.levels[:7])
    np.testing.assert_array_equal(cut.table().level[5:], [whole.levels[6]] * 2043)


@pytest.mark.parametrize(
    "name", ["DDIMScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler"]
)
def test_known_latents_are_put_back_after_each_row_as_in_diffusers_inpainting(name):
    no_clipping = {"clip_sample": False} if name == "DDIMScheduler" else {}
    mine, scheduler = pair(name, {**SD, **no_clipping}, 6)
    generator = torch.Generator().manual_seed(5)
    known, eps, x = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    mask = (torch.rand(SHAPE, generator=generator) > 0.5).float()
    x = x * float(scheduler.init_noise_sigma)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)

    def blend(x, after):
        given = known if after is None else scheduler.add_noise(known, eps, after[None])
        return (1 - mask) * given + mask * x

    expected = reference(scheduler, x.double(), [], constrain=blend)

    def constrain(x, signal, noise, i):
        given = signal * known.numpy() + noise * eps.numpy()
        return (1 - mask.numpy()) * given + mask.numpy() * x

    schedule = mine.schedule(6)
    actual = samplers.run(
        lambda x, t, i: model(x, t, jnp),
        samplers.init_state(jnp.asarray(x.numpy())),
        schedule.table(),
        0,
        len(schedule),
        lambda i: jnp.zeros(SHAPE),
        constrain,
    )
    same([np.asarray(actual[0])], [expected[-1]])


def test_images_with_different_samplers_and_lengths_share_a_batch():
    runs = [
        samplers.scheduler_from_name("ddim", SD).schedule(5, eta=0.5),
        samplers.scheduler_from_name("heun", SD).schedule(7),
        samplers.scheduler_from_name("unipc", SD).schedule(9, begin=4),
        samplers.scheduler_from_name("euler_a", SD).schedule(12, end=9),
    ]
    x = np.random.default_rng(0).normal(size=(4, *SHAPE[1:])).astype(np.float32)
    noises = np.random.default_rng(1).normal(size=(20, 4, *SHAPE[1:])).astype(np.float32)
    known = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)

    def sample(x, table, stop, images):
        def denoiser(x, t, i):
            return model(x, jnp.reshape(t, (-1, 1, 1, 1)), jnp)

        def constrain(x, signal, noise, i):
            kept = signal * known[images] + noise * noises[0, images]
            return jnp.where(jnp.arange(6) < 2, kept, x)

        state = samplers.init_state(jnp.asarray(x))
        noise = jnp.asarray(noises[:, images])
        return samplers.run(denoiser, state, table, 0, stop, lambda i: noise[i], constrain)[0]

    table = samplers.stack_tables([run.table() for run in runs])
    together = sample(x, table, 13, slice(None))
    for k, run in enumerate(runs):
        alone = sample(x[k : k + 1], run.table(), len(run), slice(k, k + 1))
        np.testing.assert_allclose(together[k], alone[0], atol=4e-6)


def test_bad_parts_are_errors():
    heun = samplers.HeunDiscreteScheduler()
    for part in ({"begin": -1}, {"begin": 9}, {"end": 0}, {"end": 10}, {"begin": 4, "end": 4}):
        with pytest.raises(ValueError, match="from 0 to 9"):
            heun.schedule(5, **part)
    with pytest.raises(ValueError, match="multiple of 2"):
        heun.schedule(5, begin=3)
    with pytest.raises(ValueError, match="begin must be a whole number"):
        heun.schedule(5, begin=2.0)


MOTIONS = [
    ({"timestep_spacing": "linspace"}, 7, 0),
    ({"use_karras_sigmas": True, "noise_sampler_seed": [2**40]}, 6, 0),
    ({"timestep_spacing": "trailing", "prediction_type": "v_prediction"}, 6, 2),
]


@pytest.mark.parametrize(("options", "steps", "begin"), MOTIONS)
def test_a_seeded_brownian_motion_is_that_of_diffusers(options, steps, begin):
    config = {**SD, "noise_sampler_seed": 5, **options}
    mine, scheduler = pair("DPMSolverSDEScheduler", config, steps)
    schedule = mine.schedule(steps, begin=2 * begin)
    noise = BrownianNoise(schedule.motion, tuple(SHAPE[i] for i in (0, 2, 3, 1)))
    drawn = [torch.from_numpy(noise.row(i).transpose(0, 3, 1, 2)) for i in range(len(schedule))]
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * schedule.levels[0, 1]
    x = x.float()
    found = ours(schedule, x.numpy(), drawn)[-1]
    scheduler.set_begin_index(2 * begin)
    with warnings.catch_warnings():
        # torchsde's, of the rounding of the highest sigma.
        warnings.simplefilter("ignore")
        for t in scheduler.timesteps[2 * begin :]:
            scaled = scheduler.scale_model_input(x, t)
            x = scheduler.step(model(scaled, t.float(), torch), t, x).prev_sample
    # A sigma that is off by the last digit of float32 changes its noise by a thousandth.
    np.testing.assert_allclose(found, x, atol=1e-3)
