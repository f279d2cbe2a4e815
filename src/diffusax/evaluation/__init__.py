"""Measures how good a model is: similarities, preferences, and the Frechet Inception distance."""

from diffusax.evaluation.edit_runs import EditScores, evaluate_edits
from diffusax.evaluation.edits import Edits, EditSettings
from diffusax.evaluation.features import CLIP, DINO, Inception
from diffusax.evaluation.images import ImageScores, evaluate_images, statistics
from diffusax.evaluation.measures import Measures
from diffusax.evaluation.metrics import (
    Gaussian,
    Mean,
    clip_score,
    direction_similarity,
    frechet_distance,
    image_similarity,
    load_statistics,
    pixel_distances,
    save_statistics,
    text_image_similarity,
)
from diffusax.evaluation.preferences import Aesthetic, HPSv2, PickScore

__all__ = [
    "CLIP",
    "DINO",
    "Aesthetic",
    "EditScores",
    "EditSettings",
    "Edits",
    "Gaussian",
    "HPSv2",
    "ImageScores",
    "Inception",
    "Mean",
    "Measures",
    "PickScore",
    "clip_score",
    "direction_similarity",
    "evaluate_edits",
    "evaluate_images",
    "frechet_distance",
    "image_similarity",
    "load_statistics",
    "pixel_distances",
    "save_statistics",
    "statistics",
    "text_image_similarity",
]
