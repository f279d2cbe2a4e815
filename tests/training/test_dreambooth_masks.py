"""Masks of a subject beside its class."""

import numpy as np
import pytest
from pictures import picture

from diffusax.training import DreamBoothConfig, DreamBoothDataConfig, dreambooth


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
