"""Schedulers stepped by hand, against diffusers' loops, and what a run by hand leaves alone."""

import copy
import gc
import inspect
import itertools
import pickle
import warnings

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.effort import examples, few
from support.upstream_samplers import (
    SD,
    SHAPE,
    build,
    config_of,
    magnification,
    model,
    reference,
    same,
    upstream_class,
)
from test_properties import FLOW_OPTIONS, OPTIONS, SEED, first_by_rounding, runs

from diffusax import samplers
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.random.torch_random import TorchGenerator

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

NAMES = sorted(samplers.SCHEDULERS)
# diffusers' own numbers, float32, are about this far from exact ones.
LOOSE = {"rtol": 2e-5, "atol": 2e-5}
SECOND = {"LCMScheduler": "denoised", "TCDScheduler": "pred_noised_sample"}


def options_for(name):
    if name.startswith(("EDM", "Flow")):
        return {}
    return SD | (
        {"algorithm_type": "sde-dpmsolver++"} if name == "DPMSolverMultistepScheduler" else {}
    )


def pair(name, steps=None, **config):
    """diffusers' scheduler with its timesteps set, and ours without."""
    config = {**options_for(name), **config}
    scheduler = build(name, steps, **config)
    return samplers.scheduler_from_config({**config_of(scheduler), **config}), scheduler


def takes(scheduler, name):
    return name in inspect.signature(scheduler.step).parameters


@jax.jit
def predict(x, t):
    return model(x, t, jnp)


def steps_of(scheduler, x, *, begin=0, **options):
    """Every x of a run by hand, the first one included."""
    xs = [np.asarray(x)]
    for t in scheduler.timesteps[begin:]:
        scaled = scheduler.scale_model_input(x, t)
        x = scheduler.step(predict(scaled, np.float32(t)), t, x, **options).prev_sample
        xs.append(np.asarray(x))
    return np.stack(xs)


def noises_of(generator):
    return (torch.randn(SHAPE, generator=generator) for _ in itertools.count())


def first_sample(schedule):
    generator = torch.Generator().manual_seed(1)
    (signal, noise), shape = schedule.levels[0], SHAPE
    clean, eps = (torch.randn(shape, generator=generator) for _ in range(2))
    return (signal * clean + noise * eps).float()


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_by_hand_equals_diffusers_with_its_generator(name):
    ours, scheduler = pair(name, 7)
    ours.set_timesteps(7)
    eta = {"eta": 0.4} if takes(scheduler, "eta") else {}
    schedule = ours.schedule(7, **eta)
    x = first_sample(schedule)
    theirs, mine = (torch.Generator().manual_seed(5) for _ in range(2))
    expected = reference(scheduler, x.double(), noises_of(theirs), **eta)
    given = {"generator": mine} if takes(ours, "generator") else {}
    same(steps_of(ours, x.numpy(), **eta, **given), expected, magnification(schedule))
    if name != "DPMSolverSDEScheduler":
        # The generator goes on as it does there.
        after = [torch.randn(3, generator=g) for g in (theirs, mine)]
        assert torch.equal(*after)
    if eta or schedule.draws_noise.any():
        assert given
        assert schedule.draws_noise.any()


def test_ddim_takes_the_noise_from_what_it_clipped():
    ours, scheduler = pair("DDIMScheduler", 5, clip_sample=True, clip_sample_range=0.5)
    ours.set_timesteps(5)
    x = first_sample(ours.schedule(5))
    options = {"eta": 0.4, "use_clipped_model_output": True}
    theirs, mine = (torch.Generator().manual_seed(5) for _ in range(2))
    expected = reference(scheduler, x.double(), noises_of(theirs), **options)
    found = steps_of(ours, x.numpy(), generator=mine, **options)
    np.testing.assert_allclose(found, expected, **LOOSE)
    # A timestep that is none of the run's has a row of its own.
    ours.set_timesteps(4)
    scheduler.set_timesteps(4)
    raw = predict(x.numpy(), 321.0)
    expected = scheduler.step(torch.tensor(np.asarray(raw)), 321, x, use_clipped_model_output=True)
    found = ours.step(raw, 321, x, use_clipped_model_output=True).prev_sample
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found, expected.prev_sample, **LOOSE)


@SEED
@hypothesis.settings(
    max_examples=examples(40, 300),
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(st.data())
def test_configurations_at_random_equal_diffusers(data):
    options = data.draw(st.sampled_from([OPTIONS, OPTIONS, FLOW_OPTIONS]))
    name = data.draw(st.sampled_from(sorted(options)))
    config, steps, skipped = data.draw(runs(name, options))
    if options is FLOW_OPTIONS and not name.startswith("Flow"):
        config |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    mu = {"mu": 0.8} if config.get("use_dynamic_shifting") else {}
    eta = {"TCDScheduler": {"eta": 0.3}, "DDIMScheduler": {"eta": 0.6}}.get(name, {})
    begin = skipped * samplers.SCHEDULERS[name].order
    # Runge-Kutta's rows at a run's late levels magnify rounding a thousand times.
    begin = 0 if name == "PNDMScheduler" and not config.get("skip_prk_steps") else begin
    odd = config.get("thresholding") and config.get("algorithm_type") == "dpmsolver"
    hypothesis.assume(not (odd and name == "DPMSolverSinglestepScheduler"))
    hypothesis.assume(steps > 2 or name != "KDPM2AncestralDiscreteScheduler")
    # So do those of the integrated noise from a level of almost no signal.
    scarce = config.get("rescale_betas_zero_snr") and config.get("algorithm_type") == "dpmsolver"
    hypothesis.assume(not scarce)
    try:
        ours = samplers.SCHEDULERS[name].from_config(config)
        schedule = ours.schedule(steps, begin=begin, **eta, **mu)
    except ValueError:
        # Others test what is refused.
        hypothesis.assume(False)
    scheduler = build(name, steps, more=mu, **config)
    hypothesis.assume(not first_by_rounding(config, schedule, scheduler))
    ours.set_timesteps(steps, **mu)
    if len(set(ours.timesteps.tolist())) < len(ours.timesteps) or data.draw(st.booleans()):
        ours.set_begin_index(begin)
    x = first_sample(schedule)
    noises = noises_of(torch.Generator().manual_seed(5))
    expected = reference(scheduler, x.double(), noises, begin=begin, **eta)
    generator = torch.Generator().manual_seed(5)
    given = {"generator": generator} if takes(ours, "generator") else {}
    actual = steps_of(ours, x.numpy(), begin=begin, **eta, **given)
    same(actual, expected, magnification(schedule))


@pytest.mark.parametrize(
    ("name", "given"),
    few(
        [
            ("DDPMScheduler", {"timesteps": [900, 800, 700, 300, 10]}),
            ("EulerDiscreteScheduler", {"timesteps": [900.0, 700.0, 650.0, 20.0]}),
            ("EulerDiscreteScheduler", {"sigmas": [14.6, 6.0, 2.5, 1.1, 0.3, 0.0]}),
            ("HeunDiscreteScheduler", {"timesteps": [981, 700, 301, 20]}),
            ("DPMSolverMultistepScheduler", {"timesteps": [999, 800, 500, 20]}),
            ("LCMScheduler", {"timesteps": [999, 759, 499, 259]}),
            ("FlowMatchEulerDiscreteScheduler", {"sigmas": [1.0, 0.8, 0.4, 0.1]}),
            ("FlowMatchEulerDiscreteScheduler", {"timesteps": [1000.0, 700.0, 200.0]}),
        ],
        ("EulerDiscreteScheduler", {"sigmas": [14.6, 6.0, 2.5, 1.1, 0.3, 0.0]}),
        ("DDPMScheduler", {"timesteps": [900, 800, 700, 300, 10]}),
        ("FlowMatchEulerDiscreteScheduler", {"sigmas": [1.0, 0.8, 0.4, 0.1]}),
    ),
)
def test_timesteps_and_sigmas_of_ones_own_equal_diffusers(name, given):
    config = options_for(name)
    scheduler = build(name, **given, **config)
    ours = samplers.scheduler_from_config({**config_of(scheduler), **config})
    ours.set_timesteps(**given)
    np.testing.assert_allclose(ours.timesteps, scheduler.timesteps, rtol=1e-5, atol=5e-3)
    schedule = ours.schedule(**given)
    x = first_sample(schedule)
    noises = noises_of(torch.Generator().manual_seed(5))
    expected = reference(scheduler, x.double(), noises)
    noise = {"generator": torch.Generator().manual_seed(5)} if takes(ours, "generator") else {}
    same(steps_of(ours, x.numpy(), **noise), expected, magnification(schedule))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_diffusers(name):
    ours, scheduler = pair(name, 5)
    ours.set_timesteps(5)
    if name == "DPMSolverSDEScheduler":
        ours, scheduler = pair(name, 5, noise_sampler_seed=3)
        ours.set_timesteps(5)
    x = y = first_sample(ours.schedule(5))
    generators = [torch.Generator().manual_seed(2) for _ in range(2)]
    field = None
    for t, u in zip(scheduler.timesteps, ours.timesteps):
        # The step takes the sample as it comes, in whatever state its caller left it.
        scaled = getattr(scheduler, "scale_model_input", lambda x, t: x)(x, t)
        output, sample = model(scaled, t.float(), torch), np.asarray(x)
        given = [{"generator": g} if takes(scheduler, "generator") else {} for g in generators]
        np.testing.assert_allclose(ours.scale_model_input(sample, u), scaled, **LOOSE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = scheduler.step(output, t, x, **given[0])
        y = ours.step(output.numpy(), u, sample, **given[1])
        assert y.prev_sample.dtype == jnp.float32
        assert list(y.keys()) == list(expected.keys())
        for field in expected:
            scale = 1 + abs(expected[field]).max().item()
            loose = 1e-3 if name == "DPMSolverSDEScheduler" else 3e-5
            np.testing.assert_allclose(y[field], expected[field], atol=loose * scale)
        x = expected.prev_sample
    assert y.to_tuple()[0] is y[0] is y.prev_sample
    if name in SECOND:
        assert field == SECOND[name]


@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_those_of_diffusers(name):
    ours, scheduler = pair(name)
    assert len(ours) == len(scheduler) == 1000
    assert ours.step_index is ours.begin_index is None
    assert ours.num_inference_steps == getattr(scheduler, "num_inference_steps", None)
    for steps in (None, 9):
        if steps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scheduler.set_timesteps(steps)
            ours.set_timesteps(steps)
            assert ours.num_inference_steps == steps
        deviation = getattr(scheduler, "init_noise_sigma", 1.0)
        np.testing.assert_allclose(ours.init_noise_sigma, float(deviation), rtol=1e-5)
        if scheduler.timesteps is not None and (steps or not name.startswith("EDM")):
            np.testing.assert_allclose(ours.timesteps, scheduler.timesteps, rtol=1e-5, atol=5e-3)
        if steps:
            whole = not torch.is_floating_point(scheduler.timesteps)
            assert (ours.timesteps.dtype == np.int64) == whole
            assert hasattr(ours, "sigmas") == hasattr(scheduler, "sigmas")
        if steps and hasattr(scheduler, "sigmas"):
            np.testing.assert_allclose(ours.sigmas, scheduler.sigmas, rtol=2e-5, atol=1e-6)
    assert ours.order == getattr(scheduler, "order", 1)


@pytest.mark.parametrize("name", NAMES)
def test_steps_take_the_arguments_of_diffusers(name):
    theirs = inspect.signature(upstream_class(name).step).parameters
    ours = inspect.signature(samplers.SCHEDULERS[name].step).parameters
    kept = [key for key in theirs if (name, key) != ("EDMEulerScheduler", "pred_original_sample")]
    assert list(ours)[: len(kept)] == kept
    for key in kept[4:]:
        assert ours[key].default == theirs[key].default, key


LEVELS = ["DDPMScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler"]
WITH_NOISE = [name for name in NAMES if hasattr(upstream_class(name), "add_noise")]


@pytest.mark.parametrize("name", few([n for n in WITH_NOISE if not n.startswith("Flow")], *LEVELS))
def test_noise_is_added_as_in_diffusers(name):
    ours, scheduler = pair(name, 6)
    ours.set_timesteps(6)
    x0, eps = (torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    rows = [0, 3, 5]
    for begin in (None, 2):
        if begin is not None and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
            ours.set_begin_index(begin)
        expected = scheduler.add_noise(x0, eps, scheduler.timesteps[rows])
        found = ours.add_noise(x0, eps, ours.timesteps[rows])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler", "LCMScheduler"])
def test_noise_and_velocity_of_training_are_pure(name):
    ours, scheduler = pair(name)
    x0, eps = (torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    t = torch.tensor([3, 500, 999])
    for method in ("add_noise", "get_velocity"):
        expected = getattr(scheduler, method)(x0, eps, t)
        given = x0.numpy(), eps.numpy(), t.numpy()
        np.testing.assert_allclose(jax.jit(getattr(ours, method))(*given), expected, atol=1e-5)
        half = getattr(ours, method)(jnp.asarray(given[0], jnp.bfloat16), *given[1:])
        assert half.dtype == jnp.bfloat16


def test_flow_matching_scales_noise_as_diffusers():
    ours, scheduler = pair("FlowMatchEulerDiscreteScheduler", 6, shift=3.0)
    x0, eps = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    ours.set_timesteps(6)
    expected = scheduler.scale_noise(x0, scheduler.timesteps[2:3], eps)
    found = ours.scale_noise(x0, ours.timesteps[2:3], eps)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_run_by_hand_enters_neither_equality_nor_hash_nor_config():
    ours, other = samplers.HeunDiscreteScheduler(**SD), samplers.HeunDiscreteScheduler(**SD)
    config, schedule, text = ours.to_config(), ours.schedule(9), repr(ours)
    ours.set_timesteps(4)
    x = first_sample(schedule).numpy()
    ours.step(x, ours.timesteps[0], x)
    assert ours == other
    assert (hash(ours), repr(ours)) == (hash(other), text)
    assert (ours.to_config(), ours.config) == (config, other.config)
    assert other.schedule(9) is ours.schedule(9) is schedule
    assert (other.step_index, ours.step_index) == (None, 1)
    assert samplers.HeunDiscreteScheduler.from_config(ours).num_inference_steps == 1000


def pickled(scheduler):
    return pickle.loads(pickle.dumps(scheduler))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize(
    ("name", "options"),
    [("UniPCMultistepScheduler", {}), ("EulerAncestralDiscreteScheduler", {"generator": 7})],
)
def test_copies_go_on_by_themselves(name, options, copied):
    ours = samplers.SCHEDULERS[name](**SD)
    ours.set_timesteps(6)
    x = first_sample(ours.schedule(6)).numpy()
    for t in ours.timesteps[:3]:
        scaled = ours.scale_model_input(x, t)
        x = ours.step(predict(scaled, t), t, x, **options).prev_sample
    second = copied(ours)
    found = [steps_of(scheduler, x, begin=3, **options) for scheduler in (ours, second)]
    np.testing.assert_array_equal(*found)


def memories(shape):
    """The arrays on the device with a sampler's memory slots, for samples of a shape."""
    gc.collect()
    return [array for array in jax.live_arrays() if array.shape[1:] == shape]


def test_samplers_that_count_no_rows_keep_no_memory():
    ours, x = samplers.DDIMScheduler(**SD), np.ones((1, 4, 7, 3), np.float32)
    ours.set_timesteps(5)
    ours.step(x, ours.timesteps[0], x)
    ours.step(x, 333, x)
    assert memories(x.shape) == []


def test_the_memory_of_a_loop_that_stopped_early_goes_with_its_scheduler():
    # Options that no other test has a schedule of.
    ours = samplers.DPMSolverMultistepScheduler(**{**SD, "beta_end": 0.0123})
    x = np.ones((1, 4, 7, 3), np.float32)
    ours.schedule(5)
    ours.set_timesteps(5)
    ours.step(x, ours.timesteps[0], x)
    samplers.scheduler_from_function(lambda steps: steps.rows, ours).schedule(5)
    assert len(memories(x.shape)) == 1
    del ours
    assert memories(x.shape) == []


def test_pndm_begins_at_either_row_of_the_timestep_that_it_repeats():
    for begin in (1, 2, 4):
        ours, scheduler = pair("PNDMScheduler", 8, skip_prk_steps=True)
        ours.set_timesteps(8)
        x = first_sample(ours.schedule(8, begin=begin))
        expected = reference(scheduler, x.double(), [], begin=begin)
        same(steps_of(ours, x.numpy(), begin=begin), expected)


def test_samplers_that_count_no_rows_step_at_any_timestep():
    ours, scheduler = pair("DDIMScheduler", 10)
    ours.set_timesteps(10)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for t in (901, 1, 333, 901):
        expected = scheduler.step(x.tanh(), t, x)
        found = ours.step(x.tanh(), t, x)
        for field in expected:
            np.testing.assert_allclose(found[field], expected[field], **LOOSE)
    ours, scheduler = pair("DDPMScheduler")
    found = ours.step(x.tanh(), 0, x).pred_original_sample
    np.testing.assert_allclose(found, scheduler.step(x.tanh(), 0, x).pred_original_sample, **LOOSE)


def ancestral(steps=5):
    scheduler = samplers.EulerAncestralDiscreteScheduler(**SD)
    scheduler.set_timesteps(steps)
    return scheduler


def test_an_integer_is_the_stream_after_the_initial_latents():
    x = TorchGenerator(7).randn(SHAPE) * 14
    generator = TorchGenerator(7)
    generator.randn(SHAPE)
    from_stream = steps_of(ancestral(), x, generator=generator)
    np.testing.assert_array_equal(steps_of(ancestral(), x, generator=7), from_stream)
    np.testing.assert_array_equal(steps_of(ancestral(), x, generator=[7]), from_stream)


def test_images_with_a_generator_each_have_the_noise_that_they_have_alone():
    x = TorchGenerator(7).randn((2, *SHAPE[1:])) * 14
    together = steps_of(ancestral(), x, generator=[3, 4])
    for i, seed in enumerate((3, 4)):
        alone = steps_of(ancestral(), x[i : i + 1], generator=seed)
        np.testing.assert_allclose(together[:, i : i + 1], alone, atol=1e-4)
    with pytest.raises(ValueError, match="generator has 3 entries for 2 images"):
        steps_of(ancestral(), x, generator=[1, 2, 3])


def test_without_a_generator_each_run_has_other_numbers():
    x = TorchGenerator(7).randn(SHAPE) * 14
    first, second = (steps_of(ancestral(), x)[-1] for _ in range(2))
    assert abs(first - second).max() > 0.1
    key = jax.random.key(3)
    first, second = (steps_of(ancestral(), x, generator=key)[-1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_one_program_serves_all_samplers_and_timesteps():
    shape = (1, 3, 5, 4)
    x = np.ones(shape, np.float32)
    names = iter(samplers.SCHEDULERS)
    run_all(itertools.islice(names, 1), x)
    with count_compilations() as compiled:
        run_all(names, x)
    assert compiled == []


def run_all(names, x):
    for name in names:
        scheduler = samplers.SCHEDULERS[name](**options_for(name))
        scheduler.set_timesteps(4)
        sample = x
        for t in scheduler.timesteps:
            sample = scheduler.step(x, t, sample).prev_sample


@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "EulerAncestralDiscreteScheduler"])
def test_the_pure_step_is_scanned_and_differentiated(name):
    scheduler = samplers.SCHEDULERS[name](**SD)
    schedule = scheduler.schedule(6)
    x = first_sample(schedule).numpy()
    noise = np.random.default_rng(0).normal(size=(6, *SHAPE)).astype(np.float32)

    def sample(x):
        state, table, step = scheduler.functional(6, x)

        def body(state, given):
            row, noise = given
            prediction = model(row.in_scale * state[0], row.timestep, jnp)
            return step(state, row, prediction, noise), None

        return jax.lax.scan(body, state, (table, noise))[0][0]

    scheduler.set_timesteps(6)
    y = x
    for t, drawn in zip(scheduler.timesteps, noise):
        given = {"generator": Fixed(drawn)} if takes(scheduler, "generator") else {}
        y = scheduler.step(predict(scheduler.scale_model_input(y, t), t), t, y, **given).prev_sample
    np.testing.assert_allclose(jax.jit(sample)(x), y, atol=2e-5)
    direction = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    _, slope = jax.jvp(lambda x: sample(x).sum(), (x,), (direction,))
    found = (jax.grad(lambda x: sample(x).sum())(x) * direction).sum()
    np.testing.assert_allclose(found, slope, rtol=1e-3)
    assert abs(slope) > 1e-3


class Fixed(TorchGenerator):
    """A generator whose numbers are given."""

    def __init__(self, values):
        self.values = values

    def randn(self, shape):
        return self.values


def test_errors_say_what_to_do():
    scheduler = samplers.EulerAncestralDiscreteScheduler(**SD)
    x = jnp.ones(SHAPE)
    with pytest.raises(ValueError, match="no run; call set_timesteps"):
        scheduler.step(x, 999.0, x)
    scheduler.set_timesteps(4)
    t = scheduler.timesteps
    with pytest.raises(ValueError, match=r"cannot be traced .* scheduler\.functional"):
        jax.jit(lambda x: scheduler.step(x, t[0], x).prev_sample)(x)
    with pytest.raises(ValueError, match="must be one of the run's timesteps"):
        scheduler.step(x, 500.0, x)
    with pytest.raises(ValueError, match="model_output must have the shape of sample"):
        scheduler.step(x[:, :2], t[0], x)
    scheduler.step(x, t[0], x)
    with pytest.raises(ValueError, match="timestep must be 666, that of row 1"):
        scheduler.step(x, t[2], x)
    for rest in t[1:]:
        x = scheduler.step(x, rest, x).prev_sample
    with pytest.raises(ValueError, match="beyond the 4 rows of the run; call set_timesteps"):
        scheduler.step(x, t[-1], x)
    with pytest.raises(ValueError, match="begin_index must be from 0 to 3"):
        scheduler.set_begin_index(4)
    state, table, step = scheduler.functional(4, x)
    row = jax.tree.map(lambda column: column[0], table)
    with pytest.raises(ValueError, match="noise must be given"):
        step(state, row, x)
    with pytest.raises(ValueError, match="s_churn must be 0"):
        samplers.EulerDiscreteScheduler().step(x, 1.0, x, s_churn=1.0)
    with pytest.raises(ValueError, match="does not take custom sigmas"):
        scheduler.set_timesteps(sigmas=[3.0, 1.0])
    with pytest.raises(AttributeError, match="its noise levels are alphas_cumprod"):
        _ = samplers.DDIMScheduler().sigmas
