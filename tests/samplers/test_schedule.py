import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.upstream_samplers import SD, upstream_class

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

X = np.random.default_rng(0).normal(size=(1, 4, 4, 2)).astype(np.float32)

SWAPPED = [k for k in samplers.SCHEDULERS if not k.startswith(("EDM", "Flow"))]


def drift(x, t, i):
    return jnp.tanh(x) + jnp.cos(t / 100)


def fixed_noise(row):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), row), X.shape)


def test_one_program_serves_all_samplers_and_step_counts():
    traces = []

    @jax.jit
    def run(x, table, start, stop):
        traces.append(1)
        return samplers.run(drift, samplers.init_state(x), table, start, stop, fixed_noise)[0]

    results = []
    for name in samplers.SAMPLER_NAMES:
        for steps in (4, 9, 30):
            schedule = samplers.scheduler_from_name(name, SD).schedule(steps)
            results.append(run(X, schedule.table(), np.int32(0), np.int32(len(schedule))))
    assert len(traces) == 1
    assert np.isfinite(results).all()


@pytest.mark.parametrize("name", ["unipc", "heun", "dpm++2m_sde"])
def test_rows_in_pieces_equal_one_go(name):
    schedule = samplers.scheduler_from_name(name, SD).schedule(6)
    table, n = schedule.table(), len(schedule)

    @jax.jit
    def run(state, table, start, stop):
        return samplers.run(drift, state, table, start, stop, fixed_noise)

    state = samplers.init_state(jnp.asarray(X))
    whole = run(state, table, 0, n)
    for k in range(n):
        state = run(state, table, k, k + 1)
    np.testing.assert_array_equal(state, whole)


@pytest.mark.parametrize("name", sorted(samplers.SCHEDULERS))
def test_config_goes_to_diffusers_and_back(name):
    overrides = {"final_sigmas_type": "sigma_min"} if "DPMSolver" in name else {}
    betas = {} if name.startswith(("EDM", "Flow")) else SD
    scheduler = samplers.SCHEDULERS[name].from_config({**betas, **overrides})
    upstream = upstream_class(name).from_config(scheduler.to_config())
    config = json.loads(upstream.to_json_string())
    for key, value in scheduler.to_config().items():
        if key != "lambda_min_clipped":
            assert config[key] == value, key
    assert samplers.scheduler_from_config(config) == scheduler


def test_config_of_stable_diffusion_1_is_read_with_the_options_that_pndm_lacks():
    config = {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.6.0",
        **SD,
        "num_train_timesteps": 1000,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
        "clip_sample": False,
    }
    scheduler = samplers.scheduler_from_config(config)
    assert scheduler.steps_offset == 1
    swapped = samplers.EulerDiscreteScheduler.from_config(scheduler)
    assert (swapped.steps_offset, swapped.beta_schedule) == (1, "scaled_linear")
    # PNDM's default "leading" was never given, so Euler's own default holds; and back again.
    assert swapped.timestep_spacing == "linspace"
    assert samplers.PNDMScheduler.from_config(swapped) == scheduler


@pytest.mark.parametrize("first", SWAPPED)
def test_swapping_gives_the_options_that_it_gives_in_diffusers(first):
    given = {**SD, "steps_offset": 1, "prediction_type": "v_prediction"}
    if first.startswith("DPMSolver"):
        given["final_sigmas_type"] = "sigma_min"
    ours = samplers.SCHEDULERS[first].from_config(given)
    theirs = upstream_class(first).from_config(given)
    for second in SWAPPED:
        swapped = samplers.SCHEDULERS[second].from_config(ours).to_config()
        upstream = upstream_class(second).from_config(theirs.config).config
        for key, value in swapped.items():
            # DPMSolverSinglestep has no timestep spacing in diffusers.
            if key in upstream and key not in ("_class_name", "lambda_min_clipped"):
                assert upstream[key] == value, (second, key)


@pytest.mark.parametrize(
    ("cls", "options", "named"),
    [
        ("DDPMScheduler", {"variance_type": "learned_range"}, "variance_type"),
        ("UniPCMultistepScheduler", {"solver_p": "other"}, "solver_p"),
        ("EulerDiscreteScheduler", {"beta_schedule": "sigmoid"}, "beta_schedule"),
        ("EulerDiscreteScheduler", {"timestep_type": "other"}, "timestep_type"),
        ("EulerDiscreteScheduler", {"made_up": 1}, "made_up"),
        ("PNDMScheduler", {"prediction_type": "sample"}, "prediction_type"),
        ("DDIMScheduler", {"timestep_spacing": "even"}, "timestep_spacing"),
        ("EulerDiscreteScheduler", {"use_karras_sigmas": True, "use_beta_sigmas": True}, "only"),
        ("IPNDMScheduler", {}, "IPNDMScheduler"),
    ],
)
def test_unsupported_options_are_errors_that_name_them(cls, options, named):
    with pytest.raises(ValueError, match=named):
        samplers.scheduler_from_config({"_class_name": cls, **options})


def test_bad_runs_are_errors():
    ddim, euler = samplers.DDIMScheduler(), samplers.EulerDiscreteScheduler()
    with pytest.raises(ValueError, match="at least 1"):
        ddim.schedule(0)
    with pytest.raises(ValueError, match="at most num_train_timesteps"):
        ddim.schedule(1001)
    with pytest.raises(ValueError, match="does not take custom timesteps"):
        ddim.schedule(timesteps=[3, 2])
    with pytest.raises(ValueError, match="descending"):
        euler.schedule(timesteps=[2, 3])
    with pytest.raises(ValueError, match="exactly one"):
        euler.schedule(timesteps=[3, 2], sigmas=[3.0, 2.0, 0.0])
    with pytest.raises(ValueError, match="unknown sampler"):
        samplers.scheduler_from_name("eulr")


def test_the_samplers_of_a_scheduler_are_those_for_its_networks():
    def fitting(cls, **options):
        found, others = samplers.fitting_samplers(samplers.SCHEDULERS[cls](**options))
        assert sorted([*found, *itertools.chain(*others.values())]) == list(samplers.SAMPLER_NAMES)
        return found

    velocity = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    continuous = {"prediction_type": "v_prediction", "timestep_type": "continuous"}
    names = ("flow_euler", "flow_lcm")
    flow = sorted(["flow_heun", *names, *(f"{name}_karras" for name in names)])
    assert fitting("FlowMatchHeunDiscreteScheduler") == flow
    assert {"unipc", "deis", "dpm++2m", *flow} <= set(
        fitting("UniPCMultistepScheduler", **velocity)
    )
    assert fitting("EDMEulerScheduler") == ["edm_dpm++2m", "edm_euler"]
    assert "euler" in fitting("EulerDiscreteScheduler", **continuous)
    assert "edm_euler" not in fitting("EulerDiscreteScheduler", **continuous)
    for kind in ("epsilon", "v_prediction"):
        found = fitting("DDIMScheduler", prediction_type=kind)
        assert len(found) == len(samplers.SAMPLER_NAMES) - len(flow) - 2


def test_a_name_is_for_the_networks_of_the_config_that_it_is_given():
    assert samplers.scheduler_from_name("flow_euler", SD).process == "flow"
    with pytest.raises(ValueError, match=r"'flow_euler' is for networks trained with flow match"):
        samplers.scheduler_from_name("flow_euler", {"_class_name": "DDIMScheduler", **SD})
