"""Draws a contact sheet with the model inside the package; needs no network."""

import argparse
import time
from pathlib import Path

import diffusax
from diffusax.pictures import contact_sheet

PROMPTS = (
    "a red apple",
    "a grinning face on a pink background",
    "a sunflower on a blue background",
    "a fire engine",
    "a pizza on a green background",
    "a cat face on a purple background",
    "a red heart on a yellow background",
    "a full moon on a black background",
)


def main() -> None:
    """Draws each prompt, and says how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=2.0)
    args = parser.parse_args()
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    for run in ("first run, with compilation", "second run, other noise"):
        start = time.perf_counter()
        seed = 0 if run.startswith("second") else 1
        images = pipe(
            list(PROMPTS),
            num_inference_steps=args.steps,
            guidance_scale=args.guidance,
            seed=seed,
        ).images
        print(f"{len(images)} pictures in {time.perf_counter() - start:.2f} s ({run})")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet([image.resize((192, 192), 1) for image in images], columns=4).save(args.output)
    print(f"wrote {args.output}: " + "; ".join(PROMPTS))


if __name__ == "__main__":
    main()
