"""Served plans, their models, and turns in shared memory. Sampled tokens and calls are remembered:
a next turn begins with the same tokens."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Literal

from pi2.diagnostics import UserError
from pi2.engine.answer import SequenceResult
from pi2.engine.file_loading import list_resident
from pi2.engine.generation import Driver
from pi2.logging import get_logger
from pi2.memory.matrix_pool import MatrixPlace, MatrixPool
from pi2.orchestrator import change_budget, load
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.refit import read_plan
from pi2.serving.chat_facts import ChatFacts, read_chat_facts
from pi2.serving.errors import ApiError, explain_user_error
from pi2.serving.housekeeping import keep_house

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from pi2.engine.loaded_model import LoadedModel


_MOST_CONVERSATIONS = 64
_MOST_CHARACTERS = 8 << 20
_MOST_CALLS = 1024
_MOST_TIMES = 8


class Replay:
    """Remembers sampled tokens.  Any thread may ask."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, array[int]] = OrderedDict()
        """Tokens by the text of prompt and answer, least recently used first."""
        self._characters = 0
        self._calls: OrderedDict[str, list[str]] = OrderedDict()
        """The model's tokens, by its text and calls: each time, the latest last."""
        self._lock = Lock()

    def note(self, text: str, ids: Sequence[int]) -> None:
        """Remember that ``text``, a prompt and its answer, was ``ids``, no end token among them."""
        with self._lock:
            if text in self._turns or len(text) > _MOST_CHARACTERS:
                return
            self._turns[text] = array("i", ids)
            self._characters += len(text)
            while len(self._turns) > _MOST_CONVERSATIONS or self._characters > _MOST_CHARACTERS:
                self._characters -= len(self._turns.popitem(last=False)[0])

    def note_answer(self, prompt: str, prompt_ids: Sequence[int], result: SequenceResult) -> None:
        """Remember the tokens after ``prompt``, if the model ended its answer itself."""
        if result.finish_reason == "eos":
            self.note(prompt + result.text, [*prompt_ids, *result.token_ids[:-1]])

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of a prompt: remembered ones of its longest beginning, then ``encode``'s."""
        with self._lock:
            found = self._find(text)
            if not found:
                return encode(text)
            self._turns.move_to_end(found)
            ids = list(self._turns[found])
        rest = text[len(found) :]
        return ids + (encode(rest) if rest else [])

    def _find(self, text: str) -> str:
        """The longest beginning of ``text`` that is remembered."""
        return max((turn for turn in self._turns if text.startswith(turn)), key=len, default="")

    def measure(self, text: str) -> int:
        """Characters of the longest beginning that is remembered."""
        with self._lock:
            return len(self._find(text))

    def note_calls(self, content: str, calls: Sequence[tuple[str, Any]], written: str) -> None:
        """Remember how the model wrote ``content`` and ``calls``."""
        if len(written) > _MOST_CHARACTERS // _MOST_CALLS:
            return
        with self._lock:
            key = _describe_answer(content, calls)
            self._calls[key] = [*self._calls.get(key, ()), written][-_MOST_TIMES:]
            self._calls.move_to_end(key)
            while len(self._calls) > _MOST_CALLS:
                self._calls.popitem(last=False)

    def recall(self, answers: Sequence[tuple[str, Sequence[tuple[str, Any]]]]) -> list[str | None]:
        """How the model wrote each answer, the latest first for repeats; None if unknown."""
        keys = [_describe_answer(content, calls) for content, calls in answers]
        with self._lock:
            known = {key: list(self._calls.get(key, ())) for key in keys}
        found = [known[key].pop() if known[key] else None for key in reversed(keys)]
        return found[::-1]


def _describe_answer(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    return json.dumps([content.strip(), list(calls)], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPlan:
    name: str
    path: Path
    budget_bytes: int
    """Memory that the plan promises to stay within."""
    places: int = 1
    """Sequences that go on at the same time."""
    description: str = ""
    overrides: Mapping[str, object] = field(default_factory=dict)
    idle_s: float | None = None
    """Seconds without a request after which it is unloaded."""
    is_pinned: bool = False
    """Whether it makes no room for others, nor leaves when it is idle."""
    load: Literal["room", "start", "request"] = "room"
    yields: bool = False
    """Whether it gives memory up when the machine is short of it."""
    matrices: Mapping[MatrixPlace, int] = field(default_factory=dict)
    """Bytes of its resident matrices, which plans of the same file share."""


def count_bytes(plans: Iterable[ServedPlan]) -> int:
    """Bytes that plans need together: matrices of several count once."""
    listed = list(plans)
    parts = [size for plan in listed for size in plan.matrices.values()]
    union = {place: size for plan in listed for place, size in plan.matrices.items()}
    return sum(plan.budget_bytes for plan in listed) - sum(parts) + sum(union.values())


class Host:
    def __init__(self, plan: ServedPlan, pool: MatrixPool | None = None) -> None:
        self.plan = plan
        self._pool = pool
        self.stated_bytes = plan.budget_bytes
        """The budget before it was changed."""
        self.created = int(time.time())
        """When the server began to offer it, in seconds since 1970."""
        self.users = 0
        """Requests that use it."""
        self.waiting = 0
        """Requests that are in line for it."""
        self.used_at = 0.0
        """Time of the last use, by the monotonic clock."""
        self._model: LoadedModel | None = None
        self._driver: Driver | None = None
        self._thread: Thread | None = None
        self.replay = Replay()
        """Tokens of conversations."""
        self.embedding_turn = asyncio.Lock()
        """Held by the request whose text is embedded: one at a time, while generations go on."""
        self.embedding_clients = 0
        """Requests for embeddings that are under way or wait."""
        self._vocabulary: LLTokenizer | None = None
        self._facts: ChatFacts | UserError | None = None
        self._resolved: ResolvedPlan | None = None

    @property
    def is_loaded(self) -> bool:
        return self._model is not None

    def find_change(self) -> UserError | None:
        """Why it has to be loaded anew before it answers again."""
        return None if self._model is None else self._model.find_change()

    @property
    def model(self) -> LoadedModel:
        assert self._model is not None, "it is not loaded"
        return self._model

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "it is not loaded"
        return self._driver

    async def start(self) -> None:
        """Load the model in the thread that will compute: the plan may bind it to a core."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[LoadedModel] = loop.create_future()

        def work() -> None:
            try:
                plan = self.plan
                model = load(plan.path, set=plan.overrides, pool=self._pool)
                model.keep_prefixes()
                model.keep_template_process()
            except BaseException as error:
                loop.call_soon_threadsafe(loaded.set_exception, error)
                return
            driver = Driver(model.scheduler)
            self._driver = driver
            loop.call_soon_threadsafe(loaded.set_result, model)
            try:
                driver.run()
            finally:
                model.close()

        self._thread = Thread(target=work, name=f"pi2-{self.plan.name}", daemon=True)
        self._thread.start()
        self._model = await loaded
        self.used_at = time.monotonic()
        get_logger().info("model served", model=self.plan.name, load_s=round(self.model.load_s, 2))

    async def stop(self) -> None:
        if self._driver is None or self._thread is None:
            return
        driver, thread = self._driver, self._thread
        self._model = self._driver = self._thread = self._vocabulary = None
        await asyncio.to_thread(driver.end)
        await asyncio.to_thread(thread.join)
        gc.collect()
        get_logger().info("model given back", model=self.plan.name)

    async def change_budget(self, budget_bytes: int) -> None:
        """Fit it to another budget, now if it is loaded; UserError P745 and of the plan."""
        if self._model is not None:
            await asyncio.to_thread(change_budget, self._model, budget_bytes)
            assert self._model.origin is not None
            overrides: Mapping[str, object] = self._model.origin[1]
            resolved = self._model.plan
            budget_bytes = resolved.plan.memory.budget
        else:
            read = partial(read_plan, self.plan.path, overrides=self.plan.overrides)
            fitted = await asyncio.to_thread(read, memory_bytes=budget_bytes)
            overrides, resolved = fitted.overrides, fitted.resolved
        self.plan = replace(
            self.plan,
            budget_bytes=budget_bytes,
            overrides=overrides,
            matrices=list_resident(resolved),
        )
        self._resolved = None

    def read_plan(self) -> ResolvedPlan:
        if self._model is not None:
            return self._model.plan
        if self._resolved is None:
            self._resolved = read_plan(self.plan.path, overrides=self.plan.overrides).resolved
        return self._resolved

    def find_vocabulary(self) -> LLTokenizer:
        """What grammars know of its tokens; takes a second the first time."""
        from pi2.serving.call_grammars import load_vocabulary

        if self._vocabulary is None:
            model = self.model
            settings = model.plan.model.tokenizer
            self._vocabulary = load_vocabulary(
                model.tokenizer, model.plan.model.shape.vocab, settings.eos
            )
        return self._vocabulary

    def find_chat_facts(self) -> ChatFacts:
        """What its chat template says; UserError P608 or P609 if it has none that works."""
        if self._facts is None:
            try:
                self._facts = read_chat_facts(self.model)
            except UserError as error:
                self._facts = error
        if isinstance(self._facts, UserError):
            raise self._facts
        return self._facts


def list_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``values`` that are not None."""
    return {key: value for key, value in values.items() if value is not None}


@dataclass(slots=True, eq=False)
class Turn:
    """A request's use of a plan, which begins when `ready` is done."""

    host: Host
    ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the model is in memory for this request, or holds why it cannot be."""


class Hosts:
    """Served plans within one memory budget, which take turns: the first request in line decides
    which models leave, and later requests for those line up behind it."""

    def __init__(self, plans: Sequence[ServedPlan], *, memory_bytes: int | None = None) -> None:
        """``memory_bytes``: most bytes of all budgets together; None: no limit."""
        pool = MatrixPool()
        self.hosts = {plan.name: Host(plan, pool) for plan in plans}
        assert len(self.hosts) == len(plans), "names are unique"
        self._memory_bytes = memory_bytes
        self._line: list[Turn] = []
        self._leaving: Sequence[Host] = ()
        """Models that have to make room: they get no new users."""
        self._changed = asyncio.Event()
        """A use has ended, or a waiting one was given up."""
        self._mover: asyncio.Task[None] | None = None
        """The task that loads and unloads models as long as requests wait."""
        self._closing = False
        self._moving = asyncio.Lock()
        """Held while models are loaded, unloaded or changed."""
        self._keeper: asyncio.Task[None] | None = None
        """The task that unloads idle models, and yields memory."""

    @property
    def used_bytes(self) -> int:
        return count_bytes(host.plan for host in self._list_loaded())

    def find(self, name: str) -> Host:
        """The plan of a name, with or without Ollama's tag; ApiError 404 if there is none."""
        host = self.hosts.get(name) or self.hosts.get(name.removesuffix(":latest"))
        if host is None:
            message = f"The model '{name}' does not exist; there are: {', '.join(self.hosts)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return host

    def join(self, name: str, *, waiting: int) -> Turn:
        """Ask for a plan; await ``ready``, and `leave` in any case.  ApiError 404 for an unknown
        name, 429 if ``waiting`` requests are in line, 503 if the server closes or the plan never
        fits."""
        host = self.find(name)
        if self._closing:
            raise ApiError(503, "the server is being closed", retry_after_s=1)
        has_room = host.is_loaded or self._memory_bytes is None
        if not has_room and host.plan.budget_bytes > (self._memory_bytes or 0):
            raise ApiError(503, f"there is no memory for '{name}'")
        turn = Turn(host)
        change = host.find_change()
        if change is not None and change.diagnostics[0].code == "P696" and host.users:
            raise explain_user_error(change)
        if host.is_loaded and host not in self._leaving and change is None:
            self._admit(turn)
            return turn
        idle = self._list_loaded(idle=True)
        must_wait = bool(self._line) or self._count_missing_bytes(host, without=idle) > 0
        if must_wait and host.waiting >= waiting:
            raise ApiError(
                429,
                f"Too many requests are waiting for '{name}', which is not in memory.",
                code="rate_limit_exceeded",
                retry_after_s=5,
            )
        self._line.append(turn)
        host.waiting += 1
        if self._mover is None:
            self._mover = asyncio.create_task(self._move())
        return turn

    def leave(self, turn: Turn) -> None:
        if turn in self._line:
            self._remove(turn)
        elif turn.ready.done() and not turn.ready.cancelled() and turn.ready.exception() is None:
            turn.host.users -= 1
            turn.host.used_at = time.monotonic()
        self._changed.set()

    async def start(self) -> None:
        """Load what there is memory for, in the order of the plans: first those that want it."""
        hosts = sorted(self.hosts.values(), key=lambda host: host.plan.load != "start")
        for host in hosts:
            if host.plan.load != "request" and self._count_missing_bytes(host) <= 0:
                await host.start()
        self._keeper = asyncio.create_task(keep_house(self))

    async def stop(self) -> None:
        """Give everything back; who waits is told so (ApiError 503)."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        for turn in list(self._line):
            self._fail(turn, ApiError(503, "the server is being closed", retry_after_s=1))
        self._changed.set()
        if self._mover is not None:
            await self._mover
        for host in self.hosts.values():
            await host.stop()

    def _list_loaded(self, *, idle: bool = False) -> list[Host]:
        """Models in memory, least recently used first; ``idle``: only unused ones."""
        found = [host for host in self.hosts.values() if host.is_loaded]
        if idle:
            found = [host for host in found if not host.users and not host.plan.is_pinned]
        return sorted(found, key=lambda host: host.used_at)

    def _count_missing_bytes(self, host: Host, *, without: Sequence[Host] = ()) -> int:
        """Bytes that other models, those ``without`` which excepted, have to give back before
        ``host`` can be loaded."""
        if self._memory_bytes is None:
            return 0
        staying = [other.plan for other in self._list_loaded() if other not in without]
        return count_bytes([*staying, host.plan]) - self._memory_bytes

    def _remove(self, turn: Turn) -> None:
        self._line.remove(turn)
        turn.host.waiting -= 1

    def _admit(self, turn: Turn) -> None:
        turn.host.users += 1
        turn.ready.set_result(None)

    def _fail(self, turn: Turn, error: Exception) -> None:
        self._remove(turn)
        if not turn.ready.done():
            turn.ready.set_exception(error)

    def _admit_all(self) -> None:
        for turn in list(self._line):
            if turn.host.is_loaded and turn.host not in self._leaving:
                if turn.host.find_change() is not None:
                    continue
                self._remove(turn)
                if not turn.ready.done():
                    self._admit(turn)

    async def _move(self) -> None:
        try:
            while self._line:
                host = self._line[0].host
                has_room = await self._make_room(host)
                self._leaving = ()
                self._admit_all()  # some may have been told to leave and need not
                if has_room and not host.is_loaded:
                    async with self._moving:
                        await self._load(host)
                    self._admit_all()
        finally:
            self._mover = None

    async def unload_idle(self) -> None:
        """Unload models that were not used for the time that their plans state."""
        for host in self._list_loaded(idle=True):
            idle_s = host.plan.idle_s
            if idle_s is not None and time.monotonic() - host.used_at >= idle_s:
                async with self._moving:
                    if host.is_loaded and not host.users and not host.waiting:
                        await host.stop()

    async def change_budget(self, memory_bytes: int, name: str | None = None) -> None:
        """Fit the model ``name``, or all together, to another budget; unused models leave first.
        UserError P745 if one cannot be so small."""
        async with self._moving:
            if name is not None:
                await self.hosts[name].change_budget(memory_bytes)
                return
            while self.used_bytes > memory_bytes and len(self._list_loaded()) > 1:
                if not (idle := self._list_loaded(idle=True)):
                    break
                await idle[0].stop()
            loaded = self._list_loaded() or list(self.hosts.values())
            whole = sum(host.stated_bytes for host in loaded)
            for host in loaded:
                share = memory_bytes * host.stated_bytes // whole
                is_one = len(self.hosts) == 1
                await host.change_budget(share if is_one else min(host.stated_bytes, share))
            if len(self.hosts) > 1 or self._memory_bytes is not None:
                self._memory_bytes = memory_bytes
            self._changed.set()

    async def _load(self, host: Host) -> None:
        """Load a model; if it cannot be, those who wait for it learn why."""
        try:
            await host.start()
        except Exception as error:
            for turn in [turn for turn in self._line if turn.host is host]:
                self._fail(turn, error)

    async def _make_room(self, host: Host) -> bool:
        """Unload models until ``host`` fits; False if no request waits for it any more."""
        while host.find_change() is not None:
            if not host.users:
                await host.stop()
                break
            self._changed.clear()
            await self._changed.wait()
        # Chosen once: it would not end if the choice followed what is used at the moment.
        self._leaving = self._choose_leaving(host)
        while self._count_missing_bytes(host) > 0:
            if not host.waiting:
                return False
            idle = self._list_loaded(idle=True)
            if self._count_missing_bytes(host, without=idle) > 0:
                idle = [other for other in idle if other in self._leaving]
            if idle:
                await idle[0].stop()
                continue
            self._changed.clear()
            await self._changed.wait()
        return bool(host.waiting)

    def _choose_leaving(self, host: Host) -> list[Host]:
        """Models that make room for ``host``: idle ones first, then least recently used."""
        found: list[Host] = []
        able = [other for other in self._list_loaded() if not other.plan.is_pinned]
        for other in sorted(able, key=lambda other: other.users > 0):
            if self._count_missing_bytes(host, without=found) <= 0:
                break
            found.append(other)
        return found
