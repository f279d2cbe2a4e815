"""Captions for pictures of a word that is being learnt (Gal et al. 2022, section 3).

They are those of diffusers' examples/textual_inversion/textual_inversion.py, which go back to the
prompts with which CLIP classifies ImageNet (Radford et al. 2021); that script has two of
those for styles twice.
"""

OBJECT = (
    "a photo of a {}",
    "a photo of my {}",
    "a photo of one {}",
    "a photo of the {}",
    "the photo of a {}",
    "a photo of a clean {}",
    "a photo of a cool {}",
    "a photo of a dirty {}",
    "a photo of a nice {}",
    "a photo of a small {}",
    "a photo of the clean {}",
    "a photo of the cool {}",
    "a photo of the large {}",
    "a photo of the nice {}",
    "a photo of the small {}",
    "a photo of the weird {}",
    "a good photo of a {}",
    "a good photo of the {}",
    "a bright photo of the {}",
    "a dark photo of the {}",
    "a close-up photo of a {}",
    "a close-up photo of the {}",
    "a cropped photo of a {}",
    "a cropped photo of the {}",
    "a rendering of a {}",
    "a rendition of a {}",
    "a rendition of the {}",
)
STYLE = (
    "a painting in the style of {}",
    "the painting in the style of {}",
    "a bright painting in the style of {}",
    "a clean painting in the style of {}",
    "a close-up painting in the style of {}",
    "a cool painting in the style of {}",
    "a cropped painting in the style of {}",
    "a dark painting in the style of {}",
    "a dirty painting in the style of {}",
    "a good painting in the style of {}",
    "a large painting in the style of {}",
    "a nice painting in the style of {}",
    "a small painting in the style of {}",
    "a weird painting in the style of {}",
    "a picture in the style of {}",
    "a rendering in the style of {}",
    "a rendition in the style of {}",
)
TEMPLATES = {"object": OBJECT, "style": STYLE}
"""The captions by what the word stands for; {} is the word."""
