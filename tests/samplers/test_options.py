"""Options and arguments that are wrong, odd, or at the edge of what is possible."""

import json
import shutil

import diffusers
import numpy as np
import pytest
from support.upstream_samplers import SD, build, compare, config_of, upstream_class

import diffusax
from diffusax import samplers
from diffusax.samplers.names import SCHEDULERS

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beta_end", -1),
        ("beta_end", float("nan")),
        ("beta_start", [0.1]),
        ("beta_start", "0.1"),
        ("num_train_timesteps", 0),
        ("num_train_timesteps", 10**9),
        ("num_train_timesteps", 1000.0),
        ("num_train_timesteps", True),
        ("trained_betas", [0.1, float("nan")]),
        ("trained_betas", 0.1),
        ("steps_offset", -1),
        ("prediction_type", ["epsilon"]),
        ("timestep_spacing", None),
        ("use_karras_sigmas", "yes"),
        ("sigma_max", -3.0),
        ("sigma_max", float("inf")),
    ],
)
def test_values_out_of_type_or_range_are_one_sentence_that_names_them(name, value):
    for make in (samplers.EulerDiscreteScheduler.from_config, samplers.scheduler_from_config):
        with pytest.raises(ValueError, match=f"{name}.*EulerDiscreteScheduler"):
            make({"_class_name": "EulerDiscreteScheduler", name: value})
    with pytest.raises(ValueError, match=name):
        samplers.EulerDiscreteScheduler(**{name: value})


def test_numbers_of_numpy_and_whole_numbers_for_fractions_are_taken():
    betas = np.linspace(0.001, 0.02, 50)
    scheduler = samplers.DDIMScheduler(trained_betas=betas, clip_sample_range=np.float32(2))
    assert scheduler.trained_betas == tuple(betas.tolist())
    assert samplers.DDIMScheduler(clip_sample_range=2) == samplers.DDIMScheduler(
        clip_sample_range=2.0
    )


def test_things_that_are_no_configs_are_errors():
    for config in (3, ["DDIMScheduler"], None, "euler"):
        with pytest.raises(ValueError, match="mapping"):
            samplers.DDIMScheduler.from_config(config)
    with pytest.raises(ValueError, match="not supported"):
        samplers.scheduler_from_config({"_class_name": ["DDIMScheduler"]})


def test_config_reads_like_diffusers():
    mine = samplers.DDIMScheduler(beta_start=0.001)
    assert mine.config.beta_start == mine.config["beta_start"] == dict(mine.config)["beta_start"]
    assert mine.config.get("made_up") is None
    assert not hasattr(mine.config, "made_up")
    with pytest.raises(TypeError):
        mine.config["beta_start"] = 1
    theirs = build("DDIMScheduler", beta_start=0.001).config
    assert set(theirs) - set(mine.config) <= {"_diffusers_version"}
    assert set(mine.config["_use_default_values"]) == set(theirs["_use_default_values"])


@pytest.mark.parametrize("second", ["DPMSolverMultistepScheduler", "PNDMScheduler", "LCMScheduler"])
def test_from_config_of_a_config_equals_diffusers(second):
    """The idiom of diffusers' tutorials, there and back."""
    given = {**SD, "steps_offset": 1, "skip_prk_steps": True}
    mine = samplers.PNDMScheduler.from_config(given)
    theirs = upstream_class("PNDMScheduler").from_config(given)
    extra = {"use_karras_sigmas": True} if "DPM" in second else {"steps_offset": 2}
    mine = samplers.SCHEDULERS[second].from_config(mine.config, **extra)
    theirs = upstream_class(second).from_config(theirs.config, **extra)
    for key, value in mine.to_config().items():
        assert key == "_class_name" or theirs.config[key] == value, key
    mine = samplers.PNDMScheduler.from_config(mine.config)
    theirs = upstream_class("PNDMScheduler").from_config(theirs.config)
    for key, value in mine.to_config().items():
        assert key == "_class_name" or theirs.config[key] == value, key
    assert mine.skip_prk_steps
    # And from diffusers' own config object.
    assert samplers.PNDMScheduler.from_config(theirs.config) == mine


def test_a_sampler_is_read_from_a_folder(tmp_path):
    build("PNDMScheduler", **SD, skip_prk_steps=True).save_pretrained(tmp_path / "scheduler")
    pndm = diffusax.PNDMScheduler.from_pretrained(tmp_path, subfolder="scheduler")
    assert (pndm.beta_start, pndm.skip_prk_steps) == (0.00085, True)
    shutil.copytree(tmp_path / "scheduler", tmp_path / "alone")
    euler = diffusax.EulerDiscreteScheduler.from_pretrained(
        str(tmp_path / "alone"), use_karras_sigmas=True
    )
    assert (euler.beta_start, euler.use_karras_sigmas) == (0.00085, True)
    assert euler == samplers.EulerDiscreteScheduler.from_config(pndm, use_karras_sigmas=True)
    with pytest.raises(ValueError, match="missing"):
        diffusax.EulerDiscreteScheduler.from_pretrained(tmp_path, subfolder="other")


@pytest.mark.parametrize("name", sorted(samplers.SCHEDULERS))
def test_compatibles_are_those_of_diffusers(name):
    mine = {cls.__name__ for cls in samplers.SCHEDULERS[name]().compatibles}
    theirs = {cls.__name__ for cls in build(name).compatibles}
    assert mine == theirs


def test_every_class_is_public_once():
    for name, cls in samplers.SCHEDULERS.items():
        assert getattr(diffusax, name) is cls is getattr(samplers, name)
        assert diffusax.__all__.count(name) == samplers.__all__.count(name) == 1


def test_schedules_and_tables_are_computed_once():
    scheduler = samplers.EulerDiscreteScheduler(**SD)
    first = scheduler.schedule(20, begin=3)
    equal = samplers.EulerDiscreteScheduler.from_config(SD)
    assert equal.schedule(20, begin=3) is first
    assert first.table() is first.table()
    assert scheduler.schedule(20) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.table().update[0] = 1


def test_a_thousand_heun_steps_have_the_height_of_one():
    heun = samplers.HeunDiscreteScheduler(**SD)
    assert heun.schedule(1).table().update.shape == heun.schedule(1000).table().update.shape


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDPMScheduler", "PNDMScheduler"])
def test_leading_spacing_that_leaves_no_room_for_the_offset_is_an_error(name):
    """diffusers ends in an IndexError."""
    scheduler = samplers.SCHEDULERS[name](**SD, steps_offset=1)
    with pytest.raises(ValueError, match=r"timestep 1000, beyond num_train_timesteps=1000"):
        scheduler.schedule(1000)
    assert len(scheduler.schedule(500)) >= 500


@pytest.mark.parametrize("name", ["DDIMScheduler", "DDPMScheduler"])
@pytest.mark.parametrize("options", [{"beta_end": 0.2}, {"rescale_betas_zero_snr": True}])
def test_clipping_where_no_signal_is_left_equals_diffusers(name, options):
    config = {**options, "timestep_spacing": "trailing"}
    theirs = build(name, 10, **config)
    compare(samplers.scheduler_from_config(config_of(theirs)).schedule(10), theirs)
    with pytest.raises(ValueError, match=r"prediction_type='epsilon'.*v_prediction"):
        samplers.SCHEDULERS[name](**config, clip_sample=False).schedule(10)


@pytest.mark.parametrize(
    ("name", "options", "begin"),
    [
        ("DDIMScheduler", {"clip_sample": False, "timestep_spacing": "linspace"}, 1),
        ("DPMSolverMultistepScheduler", {"use_lu_lambdas": True}, 0),
    ],
    ids=["begun after it", "its own timestep"],
)
def test_a_level_without_signal_equals_diffusers(name, options, begin):
    config = {**options, "rescale_betas_zero_snr": True}
    schedule = samplers.SCHEDULERS[name].from_config(config).schedule(4, begin=begin)
    compare(schedule, build(name, 4, **config), begin=begin)


def test_one_training_timestep_has_the_first_beta():
    mine = samplers.DDIMScheduler(num_train_timesteps=1, beta_start=0.1, beta_end=0.3)
    theirs = build("DDIMScheduler", num_train_timesteps=1, beta_start=0.1, beta_end=0.3)
    np.testing.assert_allclose(mine.alphas_cumprod, theirs.alphas_cumprod)


def test_full_noise_at_the_last_step_is_finite():
    """At eta=1 the square root of what rounding leaves below zero."""
    scheduler = samplers.DDIMScheduler.from_pretrained("emoji", "scheduler", clip_sample=False)
    for steps in range(1, 60):
        assert np.isfinite(scheduler.schedule(steps, eta=1.0).table().update).all()


@pytest.mark.parametrize("final", ["sigma_min", "zero"])
def test_a_run_given_its_own_sigmas_back_is_the_same(final):
    euler = samplers.EulerDiscreteScheduler(
        **SD, use_karras_sigmas=True, final_sigmas_type=final, sigma_min=0.0291675
    )
    theirs = build("EulerDiscreteScheduler", 7, **config_options(euler))
    sigmas = theirs.sigmas.tolist()
    again = build("EulerDiscreteScheduler", sigmas=sigmas, **config_options(euler))
    compare(euler.schedule(sigmas=sigmas), again)


def config_options(scheduler):
    return {key: value for key, value in scheduler.to_config().items() if key[0] != "_"}


def test_steps_and_timesteps_together_are_refused_as_in_diffusers():
    with pytest.raises(ValueError, match=r"exactly one.*got .*steps.* and timesteps"):
        samplers.DDPMScheduler().schedule(2, timesteps=[5, 1])
    with pytest.raises(ValueError, match=r"exactly one.*got none"):
        samplers.DDPMScheduler().schedule()
    with pytest.raises(ValueError, match="only pass one"):
        diffusers.DDPMScheduler().set_timesteps(2, timesteps=[5, 1])


@pytest.mark.parametrize("name", [k for k, v in samplers.SCHEDULERS.items() if v.custom])
def test_wrong_timesteps_and_sigmas_are_refused(name):
    scheduler = samplers.SCHEDULERS[name]()
    for timesteps in ([5, -1], [1001], [3, 3], [1, 2], [], [float("nan")], ["a"], [[3, 2]], 7):
        with pytest.raises(ValueError, match="timesteps"):
            scheduler.schedule(timesteps=timesteps)
    for sigmas in ([1.0, -1.0], [1.0, 2.0], [], [float("inf"), 0.0]):
        with pytest.raises(ValueError, match=r"sigmas|steps"):
            scheduler.schedule(sigmas=sigmas)
    if not name.startswith("Flow"):
        with pytest.raises(ValueError, match="timesteps"):
            scheduler.schedule(timesteps=[1000])
        with pytest.raises(ValueError, match=r"sigmas|steps"):
            scheduler.schedule(sigmas=[1.0])


@pytest.mark.parametrize("name", ["LCMScheduler", "TCDScheduler"])
@pytest.mark.parametrize(
    "more",
    [
        {"strength": 0.5},
        {"original_inference_steps": 100},
        {"original_inference_steps": 20, "strength": 0.75},
    ],
)
def test_distilled_timesteps_by_strength_and_original_steps_equal_diffusers(name, more):
    eta = {"eta": 0.3} if name == "TCDScheduler" else {}
    theirs = build(name, 4, more=more)
    mine = samplers.SCHEDULERS[name]()
    compare(mine.schedule(4, **more, **eta), theirs, **eta)
    with pytest.raises(ValueError, match="strength must be between 0 and 1"):
        mine.schedule(4, strength=1.5)
    with pytest.raises(ValueError, match="original_inference_steps times strength"):
        mine.schedule(4, strength=0.0)
    with pytest.raises(ValueError, match="original_inference_steps must be at"):
        mine.schedule(4, original_inference_steps=1001 if name == "LCMScheduler" else 0)
    with pytest.raises(ValueError, match="does not take custom strength"):
        samplers.DDIMScheduler().schedule(4, strength=0.5)


@pytest.mark.parametrize("name", ["LCMScheduler", "TCDScheduler"])
def test_timesteps_off_the_distilled_ones_equal_diffusers(name):
    eta = {"eta": 0.3} if name == "TCDScheduler" else {}
    timesteps = [990, 613, 402, 7]
    theirs = build(name, timesteps=timesteps)
    compare(samplers.SCHEDULERS[name]().schedule(timesteps=timesteps, **eta), theirs, **eta)


def test_learned_variances_are_refused_where_they_would_be_drawn_from():
    for variance in ("learned", "learned_range"):
        with pytest.raises(ValueError, match=f"variance_type='{variance}'"):
            samplers.DDPMScheduler(variance_type=variance)
        scheduler = samplers.DPMSolverMultistepScheduler(variance_type=variance)
        assert scheduler.config.variance_type == variance
    json.dumps(scheduler.to_config())


@pytest.mark.parametrize("name", ["DDIMScheduler", "LCMScheduler", "EulerDiscreteScheduler"])
def test_too_few_betas_are_one_sentence(name):
    scheduler = SCHEDULERS[name](trained_betas=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"each of num_train_timesteps=1000 \(got 2\)"):
        scheduler.schedule(3)


def test_powers_and_timesteps_without_numbers_are_one_sentence():
    scheduler = SCHEDULERS["EDMEulerScheduler"](rho=1e-9)
    with pytest.raises(ValueError, match=r"rho must be larger for sigma_max=.* \(got 1e-09\)"):
        scheduler.set_timesteps(3)
    scheduler = SCHEDULERS["FlowMatchEulerDiscreteScheduler"](shift_terminal=0.5)
    scheduler.set_timesteps(1)
    with pytest.raises(ValueError, match="timestep"):
        scheduler.step(np.ones((1, 4)), scheduler.timesteps[0], np.ones((1, 4)))


def test_betas_that_leave_no_signal_are_one_sentence():
    """diffusers' numbers are not finite there."""
    options = {"beta_start": 0.5, "beta_end": 0.5, "skip_prk_steps": True}
    assert not diffusers.PNDMScheduler(**options).alphas_cumprod[-1]
    with pytest.raises(ValueError, match="betas that leave some signal and some noise"):
        diffusax.PNDMScheduler(**options).schedule(4)
