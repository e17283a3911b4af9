"""A server with a tiny model, and clients of it that others wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.servers import make_chat_plan

    return make_chat_plan(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def address(plan: Path) -> Iterator[str]:
    from tests.helpers.servers import describe_plan, serve

    with serve([describe_plan(plan, overrides={"decode.batch": 4})]) as address:
        yield address


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's library, which takes seconds to import: only the worker that needs it does."""
    return pytest.importorskip("openai", reason="needs OpenAI's client")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="needs Anthropic's client")


@pytest.fixture(scope="module")
def client(address: str, openai: Any) -> Any:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def other(address: str, anthropic: Any) -> Any:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
