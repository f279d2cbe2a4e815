"""The tiny PyTorch pipelines that other tests run on JAX: every class of diffusers has one."""

from support.torch_families import REGISTRY, WITHOUT_ENTRY, all_image_pipelines


def test_every_image_pipeline_has_an_entry_or_a_reason() -> None:
    found = set(all_image_pipelines())
    assert len(found) > 150
    known = set(REGISTRY) | set(WITHOUT_ENTRY)
    assert not found - known
    assert not set(REGISTRY) & set(WITHOUT_ENTRY)
    assert all(WITHOUT_ENTRY.values())


def test_no_parameter_is_left_at_zero() -> None:
    pipe, _ = REGISTRY["StableDiffusionControlNetPipeline"]()
    for name, parameter in pipe.controlnet.named_parameters():
        assert parameter.abs().max() > 0, name
        assert not parameter.requires_grad
