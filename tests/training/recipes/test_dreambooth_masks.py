"""Masks of a subject beside its class."""

import numpy as np
import pytest
from support.data_sets import picture

from diffusax.training import (
    CacheConfig,
    CacheDataConfig,
    DreamBoothConfig,
    DreamBoothDataConfig,
    cache_latents,
    dreambooth,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pictures of a subject, half of them partly transparent, and of its class."""
    subject, dogs = (tmp_path_factory.mktemp(name) for name in ("subject", "dogs"))
    for i in range(4):
        image = picture(i)
        if i % 2:
            image.putalpha(image.convert("L").point(lambda value: 255 * (value > 127)))
        image.save(subject / f"{i}.png")
        picture(10 + i).save(dogs / f"{i}.png")
    return subject, dogs


def recipe(checkpoint, folders, **data):
    subject, dogs = map(str, folders)
    return dreambooth(
        DreamBoothConfig(
            model=str(checkpoint),
            instance_data=subject,
            instance_prompt="a photo of sks dog",
            class_prompt="a photo of dog",
            class_data=dogs,
            class_images=4,
            data=DreamBoothDataConfig(**data),
        )
    )


def test_all_of_the_class_counts_beside_masks_of_the_subject(checkpoint, folders):
    made = recipe(checkpoint, folders, resolution=32, mask="alpha", mask_normalized=False)
    rows = [made.example(made.source[i], np.random.default_rng(0)) for i in range(4)]
    weights = np.stack([row["loss_weights"] for row in rows])
    assert (weights[:, 1] == 1).all()
    assert (weights[::2, 0] == 1).all()
    assert (weights[1::2, 0] < 1).any()


@pytest.fixture(scope="module")
def caches(checkpoint, folders, tmp_path_factory):
    """Caches of the same pictures: with masks or without, and of other sizes."""
    made = tmp_path_factory.mktemp("caches")
    kinds = {
        "plain": {"resolution": 32},
        "masked": {"resolution": 32, "mask": "alpha"},
        "large": {"resolution": 64},
        "sizes": {"buckets": ("32x32", "40x32")},
    }
    for kind, options in kinds.items():
        data = CacheDataConfig(str(folders[0]), center_crop=True, **options)
        cache_latents(CacheConfig(model=str(checkpoint), data=data, output=str(made / kind)))
    return made


def of_caches(checkpoint, caches, subject, dogs):
    return recipe(checkpoint, (caches / subject, caches / dogs))


def test_a_cache_without_masks_counts_everywhere_beside_one_with_masks(checkpoint, caches):
    for masked, kinds in enumerate([("masked", "plain"), ("plain", "masked")]):
        made = of_caches(checkpoint, caches, *kinds)
        rows = [made.example(made.source[i], np.random.default_rng(0)) for i in range(4)]
        weights = np.stack([row["loss_weights"] for row in rows])
        assert weights.dtype == np.float32
        assert (weights[:, 1 - masked] == 1).all()
        assert (weights[1::2, masked] < 1).any()
    plain = of_caches(checkpoint, caches, "plain", "plain")
    assert "loss_weights" not in plain.example(plain.source[0], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("plain", "large"), "large holds latents of images of 64x64 pixels, and .*32x32"),
        (("plain", "sizes"), "sizes holds latents of several sizes, .*without"),
        (("sizes", "sizes"), "sizes and .*sizes hold latents of several"),
    ],
)
def test_caches_of_sizes_that_do_not_go_together_are_refused(checkpoint, caches, kinds, message):
    with pytest.raises(ValueError, match=message):
        of_caches(checkpoint, caches, *kinds)
