"""What tests of the page share: a browser, a server that draws at the pace of the test, a tab."""

import pytest


@pytest.fixture(scope="module")
def browser():
    from support.browser import chromium

    with chromium() as found:
        yield found


@pytest.fixture
def server():
    from support.fake_server import serving

    with serving() as found:
        yield found


@pytest.fixture
def visitor(browser, server):
    from support.browser import visiting

    with visiting(browser, server.url) as found:
        yield found
