import pytest
from support.evaluation_rows import build_clip


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """The folder of a tiny CLIP, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("clip")
    return folder, build_clip(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Unpacked Parquet files go to a folder of this test's."""
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path_factory.mktemp("cache")))
