"""Draws pictures of a class on a mesh, and prints the share of its bytes that each device has.

python class_pictures_run.py MODEL FOLDER MESH
"""

import sys
from pathlib import Path

import jax

from diffusax.pipelines import DiffusionPipeline
from diffusax.training.recipes.class_images import ClassImages


def main(model: str, folder: str, mesh: str) -> None:
    load, opened = DiffusionPipeline.from_pretrained, []

    def remember(*args, **kwargs):
        opened.append(load(*args, **kwargs))
        return opened[-1]

    DiffusionPipeline.from_pretrained = remember
    drawn = ClassImages(model, "a photo of dog", 32, steps=2, batch_size=2, mesh=mesh)
    drawn.ensure(Path(folder), 2)
    (pipe,) = opened
    leaves = jax.tree.leaves(dict(pipe.params))
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    print(own / sum(leaf.nbytes for leaf in leaves))


if __name__ == "__main__":
    main(*sys.argv[1:])
