import pytest
from hub_server import running
from huggingface_hub import constants


@pytest.fixture
def hub(monkeypatch):
    """Starts a Hub with these repositories, which is that of huggingface_hub from now on."""
    contexts = []

    def start(repos):
        context = running(repos)
        address, state = context.__enter__()
        contexts.append(context)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return state

    yield start
    for context in contexts:
        context.__exit__(None, None, None)
