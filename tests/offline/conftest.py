import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """Halves the time, most of which is compilation; other tests get programs of their own."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
