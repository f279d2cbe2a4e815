"""Metrics against PyTorch, NumPy and closed forms."""

import numpy as np
import pytest
import scipy.linalg
import torch

from diffusax.evaluation.metrics import (
    Gaussian,
    Moments,
    clip_score,
    direction_similarity,
    frechet_distance,
    image_similarity,
    load_statistics,
    mean_and_error,
    save_statistics,
    text_image_similarity,
)


def features(seed, n=5, d=16):
    return np.random.default_rng(seed).standard_normal((n, d), np.float32) * (seed + 1)


@pytest.mark.slow
def test_similarities_are_those_of_the_official_metrics():
    """The lines of metrics/clip_similarity.py in InstructPix2Pix, on the same features."""
    arrays = [features(seed) for seed in range(4)]
    tensors = [torch.tensor(x) for x in arrays]
    image_0, image_1, text_0, text_1 = (x / x.norm(dim=1, keepdim=True) for x in tensors)
    cosine = torch.nn.functional.cosine_similarity
    original, edited, before, after = arrays
    for actual, expected in (
        (text_image_similarity(original, before), cosine(image_0, text_0)),
        (image_similarity(original, edited), cosine(image_0, image_1)),
        (
            direction_similarity(original, edited, before, after),
            cosine(image_1 - image_0, text_1 - text_0),
        ),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_an_edit_that_changes_nothing_has_no_direction():
    x = features(0)
    np.testing.assert_array_equal(direction_similarity(x, x, features(1), features(2)), 0)


def test_clip_score_is_a_hundred_at_most_and_never_negative():
    x = features(0)
    np.testing.assert_allclose(clip_score(x, 3 * x), 100, rtol=1e-6)
    np.testing.assert_array_equal(clip_score(x, -x), 0)


def test_the_standard_error_is_that_of_the_mean():
    values = np.random.default_rng(0).standard_normal(1000)
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / 1000**0.5)
    assert mean_and_error([3.0]) == (3.0, 0.0)


def test_moments_in_batches_are_those_of_the_whole():
    x = features(2, n=50) + 3
    moments = Moments()
    for part in np.split(x, [7, 8, 30]):
        moments.add(part)
    mu, sigma = moments.gaussian()
    np.testing.assert_allclose(mu, x.astype(np.float64).mean(0), rtol=1e-12)
    np.testing.assert_allclose(sigma, np.cov(x.astype(np.float64), rowvar=False), rtol=1e-9)


def gaussian(seed, n=200, d=16):
    x = features(seed, n, d).astype(np.float64)
    return Gaussian(x.mean(0), np.cov(x, rowvar=False))


def straightforward(a, b):
    """As pytorch-fid computes it."""
    root = scipy.linalg.sqrtm(a.sigma @ b.sigma)
    return np.square(a.mu - b.mu).sum() + np.trace(a.sigma + b.sigma - 2 * root.real)


def test_frechet_distance_is_that_of_the_matrix_root():
    a, b = gaussian(0), gaussian(1)
    assert frechet_distance(a, b) == pytest.approx(straightforward(a, b), rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-9)


def test_frechet_distance_of_gaussians_with_common_axes_has_a_closed_form():
    """|mu_a - mu_b|^2 + sum (sqrt a_i - sqrt b_i)^2 for the variances along the axes."""
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    a, b = rng.uniform(0.1, 5, (2, 8))
    mu = rng.standard_normal((2, 8))
    pair = [Gaussian(m, (axes * v) @ axes.T) for m, v in zip(mu, (a, b))]
    expected = np.square(mu[0] - mu[1]).sum() + np.square(np.sqrt(a) - np.sqrt(b)).sum()
    assert frechet_distance(*pair) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_few_pictures_stays_a_number():
    """With fewer pictures than features both covariances are singular."""
    a, b = gaussian(0, n=5, d=64), gaussian(1, n=7, d=64)
    values = np.linalg.eigvals(a.sigma @ b.sigma)
    roots = np.sqrt(values.real.clip(0)).sum()
    expected = np.square(a.mu - b.mu).sum() + np.trace(a.sigma + b.sigma) - 2 * roots
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-5)
    assert frechet_distance(a, a) < 1e-5 * np.trace(a.sigma)


def test_statistics_are_kept_in_pytorch_fids_form(tmp_path):
    a = gaussian(0)
    save_statistics(tmp_path / "a.npz", a)
    for kept, given in zip(load_statistics(tmp_path / "a.npz"), a):
        np.testing.assert_array_equal(kept, given)


@pytest.mark.parametrize(
    "content",
    [{"mu": np.zeros(3)}, {"mu": np.zeros(3), "sigma": np.eye(2)}, b"PK\3\4 broken", b"x"],
)
def test_other_files_are_no_statistics(tmp_path, content):
    file = tmp_path / "a.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.savez(file, **content)
    with pytest.raises(ValueError, match=r"a\.npz .*mu"):
        load_statistics(file)


def test_statistics_of_different_features_and_of_one_picture_are_errors():
    with pytest.raises(ValueError, match=r"different lengths \(16 and 8\)"):
        frechet_distance(gaussian(0), gaussian(0, d=8))
    moments = Moments()
    moments.add(features(0, n=1))
    with pytest.raises(ValueError, match=r"at least 2 images .*got 1"):
        moments.gaussian()
