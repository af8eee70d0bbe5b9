"""Tests which page origins a server allows (CORS)."""

import httpx
import pytest

from jsparse.server.origins import checked
from jsparse.server.run import own_names
from tests.support import patient
from tests.support.serving_http import a_service, an_engine, serving

PAGE, OTHER = "http://localhost:3000", "http://evil.example"
BODY = {"prompt": "w1", "max_tokens": 1}
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module", params=["key", "no key"])
def http(request):
    """A client of a server that allows PAGE, with a key or with checks of Host and Origin."""
    key = request.param == "key"
    rules = {"api_key": "key"} if key else {"hosts": own_names("127.0.0.1", "127.0.0.1", ())}
    service = a_service(origins=checked([PAGE]), **rules)
    headers = {"Authorization": "Bearer key"} if key else {}
    with (
        serving(service, an_engine()) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
    ):
        yield client


def allowed(got):
    return got.headers.get("access-control-allow-origin")


def test_preflight_needs_no_key(http):
    headers = {"Origin": PAGE, **ASKS}
    got = patient.options(f"{http.base_url}/v1/completions", headers=headers)
    assert got.status_code == 200
    assert allowed(got) == PAGE
    assert "POST" in got.headers["access-control-allow-methods"]
    assert "authorization" in got.headers["access-control-allow-headers"]
    refused = patient.options(
        f"{http.base_url}/v1/completions", headers=headers | {"Origin": OTHER}
    )
    assert refused.status_code == 400
    assert allowed(refused) is None


def test_responses_and_errors_are_readable_for_pages_of_allowed_origins(http):
    for body, status in ((BODY, 200), (BODY | {"stream": True}, 200), (BODY | {"n": 0}, 400)):
        got = http.post("/v1/completions", json=body, headers={"Origin": PAGE})
        assert (got.status_code, allowed(got)) == (status, PAGE), body


def test_refusals_and_server_errors_are_readable(http, monkeypatch):
    got = http.get("/nothing", headers={"Origin": PAGE})
    assert (got.status_code, allowed(got)) == (404, PAGE)
    monkeypatch.setattr("jsparse.server.completions.complete", None)
    # over a separate connection, which the server closes after an exception
    got = patient.post(
        f"{http.base_url}/v1/completions", json=BODY, headers={**http.headers, "Origin": PAGE}
    )
    assert (got.status_code, allowed(got)) == (500, PAGE)
    assert got.json()["error"]["code"] == "server_error"
    if "authorization" in http.headers:
        got = patient.get(f"{http.base_url}/metrics", headers={"Origin": PAGE})
        assert (got.status_code, allowed(got)) == (401, PAGE)


def test_other_origins_and_hosts_are_still_refused(http):
    got = http.post("/v1/completions", json=BODY, headers={"Origin": OTHER})
    assert allowed(got) is None
    if "authorization" not in http.headers:
        assert got.json()["error"]["code"] == "foreign_host"
        for origin in ("http://localhost.evil.example:3000", "null"):
            got = http.get("/health", headers={"Origin": origin})
            assert (got.status_code, allowed(got)) == (403, None)
        headers = {"Origin": PAGE, "Host": "rebind.evil.example"}
        assert http.get("/health", headers=headers).status_code == 403


def test_without_the_option_no_origin_is_allowed():
    service = a_service()
    with serving(service, None) as url:
        for method in ("GET", "OPTIONS"):
            got = patient.request(method, f"{url}/health", headers={"Origin": PAGE, **ASKS})
            assert not any(name.startswith("access-control") for name in got.headers)


def test_star_allows_any_origin_and_no_other_host():
    hosts = own_names("127.0.0.1", "127.0.0.1", ())
    with serving(a_service(origins=checked(["*"]), hosts=hosts), None) as url:
        got = patient.get(f"{url}/version", headers={"Origin": OTHER})
        assert (got.status_code, allowed(got)) == (200, "*")
        got = patient.get(f"{url}/version", headers={"Origin": OTHER, "Host": "evil.example"})
        assert got.status_code == 403


def test_invalid_origins_are_refused():
    for origin in ["localhost:3000", "http://a/", "http://a/b", "", "http://a,b"]:
        with pytest.raises(ValueError, match=r"^--allowed-origins .*: must be an origin"):
            checked([origin])
        assert checked(["HTTP://A:1", "vscode-webview://x"]) == {
            "http://a:1",
            "vscode-webview://x",
        }, origin


def test_responses_disable_content_sniffing(http):
    for method, path in [("GET", "/v1/completions"), ("POST", "/v1/completions"), ("GET", "/")]:
        got = http.request(method, path, json=BODY | {"stream": True})
        assert got.headers.get_list("x-content-type-options") == ["nosniff"], (method, path)
