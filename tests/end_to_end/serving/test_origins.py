"""Pages of browsers that may not ask the server."""

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

from pi2.serving.application import list_own_names
from tests.helpers.servers import describe_plan, get, options, post, serve


def test_pages_of_other_origins_may_not_ask_unless_they_are_let(plan: Path) -> None:
    own = "http://chat.example"
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1})
    # What a page may send without asking the server first.
    simple = {"Content-Type": "text/plain"}
    preflight = {"Access-Control-Request-Method": "POST"}
    with serve([describe_plan(plan)]) as address:
        url = f"{address}/v1/completions"
        for origin in (own, "null", "http://localhost:1"):
            answer = post(url, content=body, headers={**simple, "Origin": origin})
            assert answer.status_code == 403
            assert answer.json()["error"]["type"] == "permission_error"
            asked = options(url, headers={**preflight, "Origin": origin})
            assert not asked.is_success
            for found in (answer, asked):
                assert not any(name.startswith("access-control") for name in found.headers)
        for fine in ({"Origin": address}, {"Origin": own, "Sec-Fetch-Site": "same-origin"}, {}):
            assert post(url, content=body, headers=fine).is_success
    with serve([describe_plan(plan)], origins=[own]) as address:
        url = f"{address}/v1/completions"
        asked = options(url, headers={**preflight, "Origin": own})
        assert asked.headers["access-control-allow-origin"] == own
        answer = post(url, content=body, headers={"Origin": own})
        assert answer.is_success and answer.headers["access-control-allow-origin"] == own
        other = {"Origin": "http://other.example"}
        assert post(url, content=body, headers=other).status_code == 403


def test_pages_whose_name_stands_for_this_machine_may_not_ask(plan: Path) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    names = list_own_names("127.0.0.1", has_keys=False)
    with serve([describe_plan(plan)], names=names) as address:
        port = address.rpartition(":")[2]
        rebound = f"evil.example:{port}"
        same = {"Host": rebound, "Origin": f"http://{rebound}", "Sec-Fetch-Site": "same-origin"}
        for path, kind in (("completions", "openai"), ("messages", "anthropic")):
            for headers in (same, {"Host": rebound}):
                answer = post(f"{address}/v1/{path}", json=body, headers=headers)
                assert answer.status_code == 403
                assert answer.json()["error"]["type"] == "permission_error"
                assert ("type" in answer.json()) == (kind == "anthropic")
        assert get(f"{address}/v1/models", headers={"Host": rebound}).status_code == 403
        assert get(f"{address}/", headers={"Host": rebound}).status_code == 403
        for name in ("localhost", "127.0.0.1", "[::1]"):
            head = {"Host": f"{name}:{port}"}
            assert post(f"{address}/v1/completions", json=body, headers=head).is_success
