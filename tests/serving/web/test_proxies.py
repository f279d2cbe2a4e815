"""Behind proxies: who a client is, and how it asked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.running_server import running

from diffusax.cli.serve import command
from diffusax.serving.web.proxies import Proxies


def seen(trusted=("127.0.0.1", "10.0.0.0/8"), peer="127.0.0.1", **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    listed = [(b"host", b"inner:7860")]
    for name, values in named.items():
        listed += [
            (name.lower().encode(), value.encode())
            for value in ([values] if isinstance(values, str) else values)
        ]
    scope = {"type": "http", "client": (peer, 5), "scheme": "http", "headers": listed}
    before = list(listed)
    found = Proxies(trusted).seen(scope)
    assert scope["headers"] == before
    host = dict(found["headers"])[b"host"].decode()
    return found["client"][0], found["scheme"], host


PLAIN = ("127.0.0.1", "http", "inner:7860")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, PLAIN),
        ({"X_Forwarded_For": "5.6.7.8"}, ("5.6.7.8", "http", "inner:7860")),
        (
            {"X_Forwarded_For": "5.6.7.8", "X_Forwarded_Proto": "https"},
            ("5.6.7.8", "https", "inner:7860"),
        ),
        (
            {"X_Forwarded_Proto": "https", "X_Forwarded_Host": "art.example.org"},
            ("127.0.0.1", "https", "art.example.org"),
        ),
        # What a client writes itself stands before the address that the proxy adds.
        ({"X_Forwarded_For": "1.1.1.1, 5.6.7.8"}, ("5.6.7.8", "http", "inner:7860")),
        ({"X_Forwarded_For": ["1.1.1.1", "5.6.7.8"]}, ("5.6.7.8", "http", "inner:7860")),
        # Trusted proxies on the way are passed over.
        ({"X_Forwarded_For": "1.1.1.1, 5.6.7.8, 10.2.3.4"}, ("5.6.7.8", "http", "inner:7860")),
        (
            {"X_Forwarded_For": "5.6.7.8, 10.2.3.4", "X_Forwarded_Proto": "https, http"},
            ("5.6.7.8", "https", "inner:7860"),
        ),
        ({"X_Forwarded_For": "10.9.9.9, 10.2.3.4"}, ("10.9.9.9", "http", "inner:7860")),
        ({"X_Forwarded_For": "nonsense, 10.2.3.4"}, ("10.2.3.4", "http", "inner:7860")),
        ({"X_Forwarded_For": "nonsense"}, PLAIN),
        ({"X_Forwarded_For": "[2001:db8::1]:443"}, ("2001:db8::1", "http", "inner:7860")),
        ({"X_Forwarded_For": "5.6.7.8:1234"}, ("5.6.7.8", "http", "inner:7860")),
        ({"X_Forwarded_For": "5.6.7.8", "X_Forwarded_Proto": "javascript"},
         ("5.6.7.8", "http", "inner:7860")),
        ({"X_Forwarded_For": "5.6.7.8", "X_Forwarded_Host": "a b"},
         ("5.6.7.8", "http", "inner:7860")),
        (
            {"Forwarded": 'for=1.1.1.1, for="[2001:db8::7]:80";proto=https;host="a.org"'},
            ("2001:db8::7", "https", "a.org"),
        ),
        (
            {"Forwarded": "for=5.6.7.8;proto=https, for=10.0.0.3;proto=http"},
            ("5.6.7.8", "https", "inner:7860"),
        ),
        ({"Forwarded": "for=unknown;proto=https"}, ("127.0.0.1", "https", "inner:7860")),
        # The headers of one kind are read: a client could write those of the other.
        ({"X_Forwarded_For": "5.6.7.8", "Forwarded": "for=1.1.1.1;proto=https"},
         ("5.6.7.8", "http", "inner:7860")),
    ],
)  # fmt: skip
def test_what_trusted_proxies_tell_is_believed(headers, expected):
    assert seen(**headers) == expected


def test_others_are_not_believed():
    headers = {"X_Forwarded_For": "5.6.7.8", "X_Forwarded_Proto": "https"}
    assert seen(peer="192.168.0.9", **headers) == ("192.168.0.9", "http", "inner:7860")
    assert seen(trusted=(), **headers) == PLAIN
    assert seen(trusted=("::1",), **headers) == PLAIN
    assert seen(peer="::ffff:127.0.0.1", **headers)[0] == "5.6.7.8"


@settings(max_examples=examples(200, 5000), deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=20), st.text(max_size=40))
def test_strange_headers_raise_nothing(addresses, forwarded, scheme, host):
    given_ = {"X_Forwarded_For": addresses, "X_Forwarded_Proto": scheme, "X_Forwarded_Host": host}
    as_sent = {name: value.encode().decode("latin-1") for name, value in given_.items()}
    for headers in (as_sent, {"Forwarded": forwarded.encode().decode("latin-1")}):
        _, found, _ = seen(**headers)
        assert found in ("http", "https")


def test_a_proxy_must_be_an_address():
    with pytest.raises(ValueError, match=r"--proxy-headers must be an address or a network"):
        command(["--proxy-headers", "my-proxy"]).run()


@pytest.fixture(scope="module")
def server():
    with running(proxies=("127.0.0.1",), hosts=("art.example.org",)) as found:
        yield found


HTTPS = {"X_Forwarded_For": "5.6.7.8", "X_Forwarded_Proto": "https"}
FEW = {"prompt": "a", "num_inference_steps": 1, "response_format": "url"}


def test_addresses_in_replies_are_those_of_the_proxy(server):
    asked = {**HTTPS, "X_Forwarded_Host": "art.example.org"}
    answer = server.post("/v1/images/generations", FEW, **asked)
    assert answer.status == 200, answer.body
    url = answer.json["data"][0]["url"]
    assert url.startswith("https://art.example.org/jobs/")
    # A browser that asks through the proxy is at home there.
    own = {"Origin": "https://art.example.org"}
    assert server.get("/capabilities", **asked, **own).status == 200
    foreign = {"Origin": "https://evil.example"}
    assert server.get("/capabilities", **asked, **foreign).status == 403


def test_clients_are_told_apart_by_their_addresses(server):
    for address in ("5.6.7.8", "9.9.9.9"):
        asked = {**HTTPS, "X_Forwarded_For": address}
        job = server.post("/jobs", {"prompt": "a", "num_inference_steps": 1}, **asked).json
        assert server.engine.job(job["id"]).client == address
        server.finish(job["id"])


def test_names_are_checked_all_the_same(server):
    answer = server.get("/capabilities", **HTTPS, X_Forwarded_Host="evil.example")
    assert answer.status == 421
    # A page that was rebound to the proxy's address may write any header but Host.
    asked = {**HTTPS, "X_Forwarded_Host": "localhost", "Host": "evil.example"}
    assert server.get("/capabilities", **asked).status == 421
