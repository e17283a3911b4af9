"""The line of those who wait for a model that has no room."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from pi2.cli.serve import list_plans
from pi2.diagnostics import UserError
from pi2.serving.errors import ApiError
from pi2.serving.hosts import Host, Hosts, ServedPlan, Turn
from tests.helpers.gguf_files import write_random_gguf
from tests.helpers.patience import PATIENCE_S

GIB = 1 << 30


class Model:
    """Stands for a loaded model."""

    change: UserError | None = None

    def find_change(self) -> UserError | None:
        return self.change


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is loaded (+) and given back (-); no model is behind it."""
    found: list[str] = []

    async def start(self: Host) -> None:
        found.append(f"+{self.plan.name}")
        await asyncio.sleep(0)
        if self.plan.name == "broken":
            raise ApiError(500, "it cannot be loaded")
        self._model = Model()  # type: ignore[assignment]

    async def stop(self: Host) -> None:
        if self.is_loaded:
            assert not self.users
            found.append(f"-{self.plan.name}")
            self._model = None
            await asyncio.sleep(0)

    monkeypatch.setattr(Host, "start", start)
    monkeypatch.setattr(Host, "stop", stop)
    return found


def run(names: str, memory_gib: int, work: Callable[[Hosts], Awaitable[None]]) -> None:
    plans = [ServedPlan(name=name, path=Path(name), budget_bytes=GIB) for name in names.split()]

    async def live() -> None:
        hosts = Hosts(plans, memory_bytes=memory_gib * GIB)
        await hosts.start()
        await asyncio.wait_for(work(hosts), PATIENCE_S)
        await hosts.stop()

    asyncio.run(live())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def join(hosts: Hosts, name: str, waiting: int = 256) -> Turn:
    return hosts.join(name, waiting=waiting)


def test_new_requests_line_up_behind_the_one_who_waits_for_another_plan(moves: list[str]) -> None:
    async def work(hosts: Hosts) -> None:
        first, second = join(hosts, "a"), join(hosts, "a")
        assert first.ready.done() and second.ready.done()
        other = join(hosts, "b")
        await settle()
        late = join(hosts, "a")
        await settle()
        assert not other.ready.done() and not late.ready.done()
        hosts.leave(first)
        await settle()
        assert not other.ready.done(), "the other use of it goes on"
        hosts.leave(second)
        await settle()
        assert other.ready.done() and not late.ready.done()
        hosts.leave(other)
        await settle()
        assert late.ready.done()
        hosts.leave(late)

    run("a b", 1, work)
    assert moves == ["+a", "-a", "+b", "-b", "+a", "-a"]


def test_constant_use_starves_nobody_and_all_who_wait_go_on_together(moves: list[str]) -> None:
    async def work(hosts: Hosts) -> None:
        using = join(hosts, "a")
        waiting = [join(hosts, name) for name in ("b", "c", "b")]
        await settle()
        order = []
        for _ in range(4):
            following = join(hosts, "a")  # before the last one ends: it is always wanted
            hosts.leave(using)
            await settle()
            for turn in [turn for turn in waiting if turn.ready.done()]:
                order.append(turn.host.plan.name)
                waiting.remove(turn)
                hosts.leave(turn)
            await settle()
            using = following
        assert order == ["b", "b", "c"]
        hosts.leave(using)

    run("a b c", 1, work)
    assert moves[:6] == ["+a", "-a", "+b", "-b", "+c", "-c"]


def test_models_that_need_not_leave_are_used_meanwhile() -> None:
    async def work(hosts: Hosts) -> None:
        first, second = join(hosts, "a"), join(hosts, "b")
        hosts.leave(second)
        second = join(hosts, "b")
        third = join(hosts, "c")
        await settle()
        late = join(hosts, "a")
        assert not late.ready.done(), "it was not used for longest, and has to leave"
        hosts.leave(late)
        another = join(hosts, "b")
        assert another.ready.done()
        hosts.leave(first)
        await settle()
        assert third.ready.done()
        for turn in (second, third, another):
            hosts.leave(turn)

    run("a b c", 2, work)


def test_whoever_gives_up_holds_nobody_back(moves: list[str]) -> None:
    async def work(hosts: Hosts) -> None:
        first, other = join(hosts, "a"), join(hosts, "b")
        await settle()
        late = join(hosts, "a")
        assert not late.ready.done()
        hosts.leave(other)
        await settle()
        assert late.ready.done()
        assert hosts.hosts["b"].waiting == 0
        hosts.leave(first)
        hosts.leave(late)
        assert hosts.hosts["a"].users == 0

    run("a b", 1, work)
    assert moves == ["+a", "-a"]


def test_the_line_has_an_end() -> None:
    async def work(hosts: Hosts) -> None:
        with pytest.raises(ApiError, match="does not exist"):
            join(hosts, "nothing")
        turns = [join(hosts, "a", waiting=0), *(join(hosts, "b", waiting=2) for _ in range(2))]
        await settle()
        for name, waiting in (("b", 2), ("a", 0)):
            with pytest.raises(ApiError) as refused:
                join(hosts, name, waiting=waiting)
            assert (refused.value.status, refused.value.retry_after_s) == (429, 5)
        for turn in turns:
            hosts.leave(turn)

    run("a b", 1, work)


def test_what_is_idle_makes_room_although_nobody_may_wait() -> None:
    async def work(hosts: Hosts) -> None:
        turn = join(hosts, "b", waiting=0)
        await turn.ready
        hosts.leave(turn)

    run("a b", 1, work)


def test_those_who_wait_learn_that_a_model_cannot_be_loaded_and_the_next_goes_on() -> None:
    async def work(hosts: Hosts) -> None:
        turns = [join(hosts, name) for name in ("broken", "broken", "b")]
        for turn in turns[:2]:
            with pytest.raises(ApiError, match="cannot be loaded"):
                await turn.ready
            hosts.leave(turn)
        await turns[2].ready
        hosts.leave(turns[2])
        assert all(not host.users and not host.waiting for host in hosts.hosts.values())

    run("a broken b", 1, work)


def test_who_waits_when_the_server_closes_is_told() -> None:
    async def work(hosts: Hosts) -> None:
        first, other = join(hosts, "a"), join(hosts, "b")
        await settle()
        hosts.leave(first)
        await hosts.stop()
        with pytest.raises(ApiError, match="being closed"):
            await other.ready
        with pytest.raises(ApiError, match="being closed"):
            join(hosts, "a")

    run("a b", 1, work)


def test_model_whose_file_has_changed_is_loaded_anew_when_nobody_uses_it(moves: list[str]) -> None:
    async def work(hosts: Hosts) -> None:
        first = join(hosts, "a")
        assert first.ready.done()
        first.host.model.change = UserError.of("P532", "it was cut", help="")  # type: ignore[attr-defined]
        late, other = join(hosts, "a"), join(hosts, "b")
        await settle()
        assert other.ready.done() and not late.ready.done()
        hosts.leave(first)
        await settle()
        assert late.ready.done() and moves == ["+a", "+b", "-a", "+a"]
        hosts.leave(late)
        hosts.leave(other)

    run("a b", 2, work)


def test_a_model_without_memory_for_progress_takes_no_new_request(moves: list[str]) -> None:
    async def work(hosts: Hosts) -> None:
        first = join(hosts, "a")
        first.host.model.change = UserError.of("P696", "memory is short", help="")  # type: ignore[attr-defined]
        with pytest.raises(ApiError, match="memory is short") as caught:
            join(hosts, "a")
        assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "10"})
        assert join(hosts, "b").ready.done()
        hosts.hosts["b"].users -= 1
        hosts.leave(first)
        late = join(hosts, "a")
        await settle()
        assert late.ready.done() and moves == ["+a", "+b", "-a", "+a"]
        hosts.leave(late)

    run("a b", 2, work)


def test_a_gguf_file_is_described_before_it_is_loaded(tmp_path: Path) -> None:
    shape = {"hidden": 64, "ffn": 96, "layers": 1, "context": 64}
    (plan,) = list_plans((write_random_gguf(tmp_path, shape),), {})
    assert Host(plan).read_plan().file is not None
