"""Programs compiled before the first call: used, saved, loaded, exported, lowered for elsewhere."""

import json
import logging
import os
import shutil

import fits_table
import jax
import numpy as np
import pytest
from jax import export
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec
from support.compiled_programs import compiled_programs, forget_executables
from support.effort import first
from support.many_devices import split_small_arrays

import diffusax
from diffusax.models.ops.attention import attention
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline import ahead as fits
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.runtime.programs import saved
from diffusax.runtime.programs.cache import enable_compilation_cache
from diffusax.runtime.programs.compilations import count_compilations
from diffusax.runtime.programs.exporting import export_requests, flat_arguments
from diffusax.runtime.programs.program import PROGRAMS, Program, lower
from diffusax.runtime.programs.topology import topology_mesh
from diffusax.runtime.switches import in_mesh

CALL = {"num_inference_steps": 3, "output_type": "np", "seed": 1}


@pytest.fixture(scope="module")
def pipe():
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(autouse=True)
def forget():
    forget_executables()
    yield
    forget_executables()


def requests(pipe, b=1, size=None, mesh=None, **arguments):
    call = ahead.example_call(pipe, b, size, arguments)
    return ahead.requests(pipe.parts, pipe.task, call, mesh)


def test_what_was_compiled_ahead_is_used(pipe):
    expected = pipe("a frog", num_images_per_prompt=2, **CALL).images
    pipe("a frog", **CALL)
    forget_executables()
    jax.clear_caches()
    assert pipe.compile(batch_sizes=[1, 2]) is pipe
    assert {name: len(p.executables) for name, p in PROGRAMS.items() if p.executables} == {
        "encode_texts": 1,
        "denoise": 2,
        "decode": 2,
    }
    with compiled_programs() as compiled:
        again = pipe("a frog", num_images_per_prompt=2, **CALL).images
        np.testing.assert_allclose(again, expected, atol=1e-5)
        pipe("a boat", **CALL, guidance_scale=3.0)
    assert compiled == []
    with pytest.raises(ValueError, match=r"StableDiffusionPipeline: .*sharpness"):
        pipe.compile(sharpness=3)


@pytest.mark.slow
def test_every_task_knows_its_programs(tiny_checkpoints):
    path, _ = tiny_checkpoints.pipeline("sd")
    net, _ = tiny_checkpoints.controlnet("sd")
    tasks = {
        "StableDiffusionImg2ImgPipeline": {"encode_image"},
        "StableDiffusionInpaintPipeline": {"encode_image"},
        "StableDiffusionControlNetPipeline": {"embed_control"},
    }
    for name, more in tasks.items():
        given = {}
        if "Control" in name:
            given["controlnet"] = diffusax.ControlNetModel.from_pretrained(net)
        pipe = getattr(diffusax, name).from_pretrained(path, **given)
        pipe.set_progress_bar_config(disable=True)
        found = requests(pipe, size=(64, 64))
        names = {request.program.name for request in found}
        assert names == {"encode_texts", "denoise", "decode", *more}


@pytest.mark.slow
def test_saved_programs_are_loaded_where_they_fit_and_only_there(pipe, tmp_path, caplog):
    expected = pipe("a frog", **CALL).images
    with pytest.raises(ValueError, match="no program was compiled ahead"):
        pipe.save_compiled(tmp_path)
    pipe.compile()
    files = pipe.save_compiled(tmp_path)
    assert len(files) == 3
    forget_executables()
    assert pipe.load_compiled(tmp_path) == 3
    jax.clear_caches()
    with count_compilations() as compiled:
        again = pipe("a frog", **CALL).images
    np.testing.assert_array_equal(again, expected)
    # What draws keys and noise is compiled when it is called; three large programs are not.
    assert len(compiled) < 12
    assert not any(PROGRAMS[name].compiled_shapes for name in ("encode_texts", "denoise", "decode"))

    forget_executables()
    files[0].write_bytes(files[0].read_bytes()[:-9])
    assert pipe.load_compiled(tmp_path) == 2
    assert "its checksum is wrong" in caplog.text
    index = json.loads((tmp_path / "programs.json").read_text())
    for name in saved.environment():
        other = {**index, "environment": {**index["environment"], name: "other"}}
        (tmp_path / "programs.json").write_text(json.dumps(other))
        caplog.clear()
        assert pipe.load_compiled(tmp_path) == 0
        assert f"{name} other" in caplog.text
    with pytest.raises(ValueError, match=r"holds no programs\.json"):
        pipe.load_compiled(tmp_path / "nothing")


def test_a_new_shape_is_one_line_in_the_log(pipe, caplog):
    jax.clear_caches()
    with caplog.at_level(logging.INFO, "diffusax.runtime.programs.program"):
        pipe("a frog", **CALL)
        lines = [m for m in caplog.messages if "compiled, or read from the cache, in" in m]
        assert [line.split(":")[0] for line in lines] == [
            "encode_texts for tokens 2x1x28 int32",
            "denoise for state 6x1x8x8x8 float32",
            "decode for latents 1x8x8x8 float32",
        ]
        caplog.clear()
        pipe("a boat", **CALL)
        assert not caplog.messages


def test_memory_counts_parameters_and_temporaries(pipe):
    pipe.compile()
    report = pipe.memory()
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(p)) for name, p in pipe.params.items()}
    assert report["parameters"] == pytest.approx({k: v / 1e9 for k, v in sizes.items()})
    (denoise,) = (value for name, value in report.items() if name.startswith("denoise"))
    assert denoise["temporaries"] > 0


def test_memory_of_a_call_needs_a_topology(pipe):
    with pytest.raises(ValueError, match="need a topology, such as h200:1"):
        pipe.memory(batch_size=4)
    with pytest.raises(ValueError, match="need a topology"):
        pipe.memory(guidance_scale=2.0)


def test_figures_of_a_cost():
    from diffusax.runtime.devices.chips import CARDS, CHIPS
    from diffusax.runtime.programs.cost import Cost

    chip = CARDS["l4"].chip
    cost = Cost(2.42, 3.0, arguments=4.0, temporaries=2.0, code=0.5, peak=7.0, kernels=9)
    figures = cost.figures(chip)
    assert figures["results"] == 0.5
    # 121 TFLOP/s take longer than 300 GB/s.
    assert figures["seconds"] == 0.02
    assert figures["fits"]
    assert figures["kernels"] == 9
    # XLA has 92% of a GPU's 24.1 GB, and all of a TPU's 16 GB.
    assert cost._replace(peak=22.1).figures(chip)["fits"]
    assert not cost._replace(peak=22.3).figures(chip)["fits"]
    assert cost._replace(peak=15.9).figures(CHIPS["TPU v5e"])["fits"]
    assert not cost._replace(peak=16.1).figures(CHIPS["TPU v5e"])["fits"]
    assert "fits" not in cost.figures(None)


@pytest.mark.parametrize(
    ("gb", "verdict"),
    [
        (18.0, "yes"),
        (18.2, "with XLA_CLIENT_MEM_FRACTION=0.92"),
        (22.1, "with XLA_CLIENT_MEM_FRACTION=0.92"),
        (22.3, "no (22.2 of 24.1 GB usable)"),
    ],
)
def test_tables_say_which_share_of_a_card_they_mean(gb, verdict):
    from diffusax.cli.fits import verdict as said
    from diffusax.runtime.devices.chips import CARDS

    assert said(gb, CARDS["l4"].chip) == verdict


def test_a_table_ends_with_the_whole_call(capsys):
    """Programs that fit one by one may not fit together with the others' parameters."""
    from diffusax.cli.fits import print_cost, print_pipeline
    from diffusax.runtime.devices.chips import CARDS
    from diffusax.runtime.programs.cost import Cost

    chip = CARDS["l4"].chip
    print_cost("denoise", Cost(1.0, 1.0, 17.0, 1.0, 0.0, peak=18.0), chip)
    print_pipeline({"parameters": 19.0, "peak": 22.5}, chip)
    print_pipeline({"parameters": 19.0}, chip)
    denoise, whole, unknown = capsys.readouterr().out.splitlines()
    assert denoise.endswith("  yes")
    assert whole.endswith("  no (22.2 of 24.1 GB usable)")
    assert whole.index("22.50") == denoise.index("18.00")
    assert unknown.endswith("no: a program does not fit")


def test_the_table_of_machines_keeps_the_same_share():
    assert [fits_table.card_for(gb) for gb in (7.3, 7.4, 22.0, 22.1)] == [
        *("8 GB", "12 GB", "24 GB", "40 GB")
    ]


@pytest.fixture
def offloaded(tiny_checkpoints):
    """A pipeline whose text encoder and autoencoder are in the host's memory."""
    path, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.DiffusionPipeline.from_pretrained(path)
    for name in ("text_encoder", "vae"):
        pipe.params[name] = jax.tree.map(np.array, pipe.params[name])
    return pipe


def test_parameters_that_come_for_their_turn_count_for_their_program(pipe, offloaded):
    devices = make_mesh("data=1", devices=jax.local_devices()[:1])
    for some, resident in ((pipe, True), (offloaded, False)):
        shares = fits.parameter_shares(some.parts, devices)
        found = {r.program.name: r for r in requests(some, size=(64, 64), mesh=devices)}
        kept = {k: fits.resident_parameters(r, some.parts, shares) for k, r in found.items()}
        assert kept["denoise"] == pytest.approx(shares["unet"])
        for name, component in (("encode_texts", "text_encoder"), ("decode", "vae")):
            assert kept[name] == pytest.approx(shares.get(component, 0))
            assert (kept[name] > 0) == resident


@pytest.mark.slow
def test_a_call_takes_as_much_as_each_program(offloaded):
    pytest.importorskip("libtpu")
    report = offloaded.memory("v5e:2x2", mesh="data=1", size=(32, 32), guidance_scale=3.0)
    peaks = [program["peak"] for name, program in report.items() if " " in name]
    assert report["pipeline"]["peak"] >= max(peaks)


@pytest.mark.slow
def test_memory_on_devices_that_are_elsewhere(pipe):
    pytest.importorskip("libtpu")
    sizes = {name: sum(x.nbytes for x in jax.tree.leaves(p)) for name, p in pipe.params.items()}
    for mesh, parts in (("data=2", 1), ("data=1,fsdp=2", 2)):
        with split_small_arrays():
            report = pipe.memory("v5e:2x2", mesh=mesh, batch_size=2, guidance_scale=3.0)
        whole = report["pipeline"]
        assert whole["fits"]
        assert whole["memory"] == 16
        assert set(report["parameters"]) == set(sizes)
        assert whole["parameters"] == sum(report["parameters"].values())
        # Small arrays, and those that two devices do not divide, are whole.
        share = report["parameters"]["unet"] / (sizes["unet"] / 1e9)
        assert 1 / parts - 1e-9 < share < 1 / parts + 0.1
        names = [name.split(" ")[0] for name in report if " " in name]
        assert names == ["encode_texts", "denoise", "decode"]
        for name, program in report.items():
            if " " in name:
                assert program["fits"]
                assert program["seconds"] > 0
                parts_of_peak = ("arguments", "results", "temporaries", "code")
                assert program["peak"] == pytest.approx(sum(program[k] for k in parts_of_peak))
                assert program["peak"] < whole["peak"]
    # Nothing is kept for calls.
    assert not any(" " in name for name in pipe.memory())


@pytest.mark.slow
def test_exported_programs_draw_the_same_for_any_number_of_images(pipe, tmp_path):
    found = {r.program.name: r for r in requests(pipe, b=2, guidance_scale=3.0)}
    platforms = ("cpu", "tpu", "cuda")
    axes = ahead.image_axes
    files = export_requests(list(found.values()), tmp_path, platforms, image_axes=axes)
    assert {f.name for f in files} == {*(f"{name}.stablehlo" for name in found), "programs.json"}
    prepared = pipe.task(
        pipe.parts, ahead.example_call(pipe, 3, None, {**CALL, "guidance_scale": 3.0})
    )
    state = np.zeros((6, *prepared.plan.latents.shape), np.float32)
    state[0] = prepared.plan.latents
    c, rows = pipe.parts, (np.int32(0), np.int32(3))
    given = (c.denoiser_params, state, prepared.plan, *rows)
    run = export.deserialize((tmp_path / "denoise.stablehlo").read_bytes())
    assert run.platforms == ("cpu", "tpu", "cuda")
    after = run.call(flat_arguments(found["denoise"], given))
    expected = PROGRAMS["denoise"](
        c.denoiser, c.denoiser_params, jax.numpy.array(state), *given[2:]
    )
    np.testing.assert_allclose(after, expected, atol=1e-4)
    run = export.deserialize((tmp_path / "decode.stablehlo").read_bytes())
    images, finite = run.call(flat_arguments(found["decode"], (c.params["vae"], after[0])))
    assert images.shape == (3, 64, 64, 3)
    assert finite.all()
    np.testing.assert_allclose(
        images, pipe("", num_images_per_prompt=3, guidance_scale=3.0, **CALL).images, atol=1e-4
    )
    with pytest.raises(ValueError, match="platforms must be of cpu, cuda, rocm, tpu"):
        export_requests(list(found.values()), tmp_path, ("metal",))


@pytest.fixture(scope="module")
def shapes(tiny_checkpoints):
    """A tiny checkpoint of shapes, in half precision, whose attention is long enough at 128."""
    path, _ = tiny_checkpoints.pipeline("sd")
    return ahead.shapes_only(diffusax.DiffusionPipeline, path, dtype="bfloat16")


@pytest.mark.parametrize(("platform", "call"), [("cuda", "__cudnn$fmha"), ("tpu", "tpu_custom")])
def test_programs_for_accelerators_call_their_attention(shapes, platform, call):
    found = {r.program.name: r for r in requests(shapes, size=(128, 128))}
    for name in ("denoise", "decode"):
        text = lower(found[name], lowering_platforms=(platform,)).as_text()
        assert call in text, name
        assert "stablehlo.convolution" in text


@pytest.mark.parametrize("d", first([40, 64, 160]))
def test_the_compiler_for_tpus_takes_attention_on_a_mesh(d):
    pytest.importorskip("libtpu")

    mesh = topology_mesh("v5e:2x2", "data=2,tensor=2")
    place = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    shape = jax.ShapeDtypeStruct((4, 2048, 4, d), jax.numpy.bfloat16, sharding=place)

    def loss(*qkv):
        return attention(*qkv).astype(jax.numpy.float32).sum()

    for function in (attention, jax.grad(loss, (0, 1, 2))):
        with in_mesh(mesh):
            compiled = jax.jit(function).lower(shape, shape, shape).compile()
        assert "tpu_custom_call" in compiled.as_text()
        # Each device has its share, and asks no other for anything.
        assert "all-gather" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=1", "data=2,tensor=2", "data=1,fsdp=4"])
def test_the_compiler_for_tpus_takes_every_program(shapes, mesh):
    pytest.importorskip("libtpu")
    from diffusax.runtime.devices.chips import chip_of
    from diffusax.runtime.programs.cost import cost_of

    devices = topology_mesh("v5e:2x2", mesh)
    chip = chip_of(devices.devices.flat[0])
    for request in requests(shapes, b=4, size=(128, 128), mesh=devices):
        with in_mesh(devices):
            compiled = lower(request, lowering_platforms=("tpu",)).compile()
        cost = cost_of(compiled)
        assert cost.fits(chip)
        assert cost.peak > cost.arguments > 0
        if request.program.name != "encode_texts":
            assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.parametrize("mesh", ["data=4", "data=1,fsdp=4", "data=1,tensor=4", "data=2,tensor=2"])
def test_no_kernel_of_cudnn_is_left_to_be_partitioned(mesh):
    pytest.importorskip("libtpu")

    def loss(*qkv):
        return attention(*qkv).astype(jax.numpy.float32).sum()

    # Five heads, which four devices do not divide, and an odd length.
    q, k = (jax.ShapeDtypeStruct((4, t, 5, 64), jax.numpy.bfloat16) for t in (256, 77))
    with in_mesh(topology_mesh("v5e:2x2", mesh)):
        for function in (attention, jax.grad(loss, (0, 1, 2))):
            text = jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
            assert "__cudnn$fmha" in text
            # XLA's compiler for GPUs fails where JAX's own partitioning takes no such mesh.
            assert "CustomSPMDPartitioning" not in text


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=1,fsdp=4", "data=2,tensor=2"])
def test_every_program_for_gpus_partitions_without_cudnn(shapes, mesh):
    pytest.importorskip("libtpu")

    devices = topology_mesh("v5e:2x2", mesh)
    for request in requests(shapes, b=4, size=(128, 128), mesh=devices):
        with in_mesh(devices):
            text = lower(request, lowering_platforms=("cuda",)).as_text()
        assert "CustomSPMDPartitioning" not in text


@pytest.mark.parametrize("one", first([0, 1, 2]))
def test_programs_of_several_hosts_are_lowered_where_they_run(shapes, one):
    """Each host encodes and decodes its own images, on its own devices."""
    pytest.importorskip("libtpu")

    devices = topology_mesh("v4:2x2x4", "data=4,fsdp=4")
    assert len({device.process_index for device in devices.devices.flat}) == 4
    found = {r.program.name: r for r in requests(shapes, b=16, size=(64, 64), mesh=devices)}
    request = found[("encode_texts", "denoise", "decode")[one]]
    own = ahead.mesh_of_program(request, devices)
    assert own.size == (16 if request.program.name == "denoise" else 4)
    with in_mesh(own):
        assert lower(request, lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("name", ["v9", "rtx3090:1", "H300:8", "h100:", "v5e", "", "h100:8x8"])
def test_topologies_that_there_are_not_need_no_compiler_to_say_so(name):
    with pytest.raises(ValueError, match=r"topology must be one of a100, .* such as v5e:2x2"):
        topology_mesh(name)


@pytest.mark.parametrize("name", ["h100:0", "0xh100:8", "h100:99999", "99999xh100:8"])
def test_numbers_of_cards_that_cannot_be(name):
    with pytest.raises(ValueError, match="1 to 16 cards on each of 1 to 4096 hosts"):
        topology_mesh(name)


def test_topologies_that_cannot_be():
    pytest.importorskip("libtpu")
    with pytest.raises(ValueError, match=r"topology 'v9:2x2' is not one that libtpu knows"):
        topology_mesh("v9:2x2")
    with pytest.raises(ValueError, match="does not fit 4 devices"):
        topology_mesh("v5e:2x2", "tensor=3")


def test_a_topology_takes_no_mesh_that_runs_refuse():
    pytest.importorskip("libtpu")
    assert topology_mesh("V4:2x2x4", "data=4,tensor=4").size == 16
    assert topology_mesh("v5e:2x4", "data=1,tensor=8").size == 8
    with pytest.raises(ValueError, match="tensor axis within a process"):
        topology_mesh("v4:2x2x4", "data=2,tensor=8")


@pytest.fixture
def no_cache_yet(monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    names = (
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    values = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_compilation_cache_lies_where_the_variables_say(no_cache_yet, tmp_path):
    no_cache_yet.setenv("XDG_CACHE_HOME", str(tmp_path))
    no_cache_yet.setenv("DIFFUSAX_COMPILATION_CACHE", "off")
    assert enable_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    no_cache_yet.delenv("DIFFUSAX_COMPILATION_CACHE")
    (tmp_path / "file").touch()
    assert enable_compilation_cache(tmp_path / "file" / "below") is None
    expected = tmp_path / "diffusax" / "programs"
    assert enable_compilation_cache() == expected
    assert jax.config.jax_compilation_cache_dir == str(expected)
    # What JAX was told before stays.
    assert enable_compilation_cache(tmp_path / "other") == expected
    no_cache_yet.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.jit(lambda x: x * os.getpid())(np.float32(2)).block_until_ready()
    assert any(expected.iterdir())


def test_a_cache_that_cannot_be_written_is_one_warning(no_cache_yet, tmp_path, caplog):
    no_cache_yet.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    folder = enable_compilation_cache(tmp_path / "programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    double = Program(lambda x: x * 2)

    def kept(length):
        np.testing.assert_array_equal(double(np.ones(length, np.float32)), np.full(length, 2.0))
        return folder.is_dir() and len(list(folder.glob("jit__lambda*-cache")))

    assert kept(1) == 1
    shutil.rmtree(folder)
    folder.touch()
    assert not kept(2) + kept(3)
    found = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [str(folder) in record.getMessage() for record in found] == [True]
    # Once the folder is there again, programs are kept again.
    folder.unlink()
    assert kept(4) == 1


def test_what_a_full_disk_left_of_a_program_is_removed(no_cache_yet, tmp_path):
    whole, half, young = (tmp_path / f"jit_{name}-cache" for name in ("whole", "half", "young"))
    for file in (whole, half, young):
        file.touch()
    whole.with_name("jit_whole-atime").touch()
    os.utime(half, (0, 0))
    enable_compilation_cache(tmp_path)
    assert (whole.exists(), half.exists(), young.exists()) == (True, False, True)
