import pytest
from support.data_sets import edit_row, row, write_parquet
from support.tiny import build_stable_diffusion


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny Stable Diffusion checkpoint."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_stable_diffusion(folder)
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Thirty random pictures with captions, in Parquet."""
    return write_parquet(tmp_path_factory.mktemp("pictures"), [row(i) for i in range(30)], shards=2)


@pytest.fixture(scope="session")
def edits(tmp_path_factory):
    """Sixteen random pictures with their negatives and instructions, in Parquet."""
    return write_parquet(tmp_path_factory.mktemp("edits"), [edit_row(i) for i in range(16)])


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path_factory.getbasetemp() / "diffusax-cache"))
