"""A conversation in a terminal (`pi2 chat`)."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pi2.caches import replace_file
from pi2.diagnostics import UserError
from pi2.engine.answer import Ticket
from pi2.engine.loaded_model import LoadedModel
from pi2.serving.answer_reader import Fragment
from pi2.serving.call_patterns import ToolCall
from pi2.serving.chat_facts import read_chat_facts
from pi2.serving.hosts import Replay

SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "dry_multiplier": float,
    "seed": int,
    "max_tokens": int,
}
"""What `/set` sets, and how it is read."""

HELP = """\
/set NAME VALUE   set temperature, top_k, top_p, min_p, repetition_penalty, dry_multiplier, seed
                  or max_tokens; without VALUE the default, without NAME all are shown
/system [TEXT]    begin anew with a system message
/new              begin anew
/save FILE        write the conversation to a file
/load FILE        go on with a conversation that was saved
/stats            show what the model has done so far
/exit             end (also Ctrl-D)
Ctrl-C stops an answer.  Alt-Enter begins a new line."""


@dataclass(slots=True)
class Turn:
    """What an answer has taken."""

    tokens: int
    decode_tokens_s: float | None
    first_s: float
    prompt_tokens: int
    reused_tokens: int
    read_bytes: int
    finish_reason: str

    def describe(self) -> str:
        from pi2.plan.documents.quantities import approximate_bytes

        speed = "-" if self.decode_tokens_s is None else f"{self.decode_tokens_s:.1f}"
        known = f", {self.reused_tokens} known" if self.reused_tokens else ""
        reason = self.finish_reason
        if reason == "repeats":
            reason = "ended: it only repeats; --set sampling.end_repeats=false lets it"
        return (
            f"{self.tokens} tokens ({reason}) · {speed} tokens/s · first after "
            f"{self.first_s:.2f} s · prompt of {self.prompt_tokens} tokens{known} · "
            f"{approximate_bytes(self.read_bytes)} from flash"
        )


@dataclass(slots=True)
class Session:
    """A conversation."""

    model: LoadedModel
    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings in addition to the plan's sampling."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Messages after the system message."""
    turn: Turn | None = None
    """What the last answer has taken."""
    replay: Replay = field(default_factory=Replay, repr=False)
    """The tokens that answers were drawn as: their text need not be encoded as these."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.answers]

    def ask(self, text: str) -> Iterator[Fragment]:
        """Say ``text`` and yield the answer; closing the iterator keeps the part received so far.
        UserError P601 for a long conversation, P608 or P609 without a working template."""
        model = self.model
        facts = read_chat_facts(model)
        prompt = model.render_chat([*self.messages, {"role": "user", "content": text}])
        request = model.describe_request(
            model.begin(self.replay.encode(prompt, model.encode_text)),
            shown_ids=facts.shown_ids,
            **self.settings,
        )
        self.answers.append({"role": "user", "content": text})
        reader = facts.make_reader(prompt=prompt)
        ticket = Ticket(request)
        before, start = model.stats.flash_read_bytes, time.perf_counter()
        first_s, said = None, ""

        def read() -> Iterator[Fragment | ToolCall]:
            nonlocal first_s
            for piece in self._generate(ticket):
                first_s = first_s or time.perf_counter() - start
                yield from reader.push(piece)
            yield from reader.flush()

        try:
            for item in read():
                assert not isinstance(item, ToolCall)
                said += item.text if item.part == "content" else ""
                yield item
        finally:
            ticket.cancel()
            self.answers.append({"role": "assistant", "content": said})
            self._note_turn(ticket, first_s, model.stats.flash_read_bytes - before, start)
            if ticket.result is not None:
                self.replay.note_answer(prompt, request.prompt_ids, ticket.result)
        if ticket.error is not None:
            raise ticket.error

    def _generate(self, ticket: Ticket) -> Iterator[str]:
        scheduler = self.model.scheduler
        scheduler.submit(ticket)
        while True:
            scheduler.wait([ticket])
            ended = ticket.ended
            while ticket.pieces:
                yield ticket.pieces.popleft().text
            if ended:
                return

    def _note_turn(
        self, ticket: Ticket, first_s: float | None, read_bytes: int, start: float
    ) -> None:
        tokens = 0 if ticket.answer is None else ticket.answer.made_tokens
        taken_s = time.perf_counter() - start - (first_s or 0.0)
        self.turn = Turn(
            tokens=tokens,
            decode_tokens_s=(tokens - 1) / taken_s if tokens > 1 and taken_s > 0 else None,
            first_s=first_s or 0.0,
            prompt_tokens=len(ticket.request.prompt_ids),
            reused_tokens=ticket.reused_tokens,
            read_bytes=read_bytes,
            finish_reason="stopped" if ticket.result is None else ticket.result.finish_reason,
        )

    def run_command(self, line: str) -> str:
        """Carry out a command, such as ``/set seed 1``; return what to show.  Raises UserError
        P684 for one that is not understood, or a file that cannot be read or written."""
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match name:
            case "/set":
                return self._set(rest)
            case "/system":
                self.system, self.answers = rest or None, []
                return "a new conversation"
            case "/new":
                self.answers = []
                return "a new conversation"
            case "/save":
                return self._save(rest)
            case "/load":
                return self._load(rest)
            case "/stats":
                return "nothing was said yet" if self.turn is None else self.turn.describe()
            case "/help":
                return HELP
        raise _refuse(f"there is no command {name!r}", help="/help lists them")

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        if not name:
            planned = self.model.chat_sampling | {"max_tokens": "to the end"}
            return "\n".join(
                f"{key} = {self.settings.get(key, planned.get(key))}" for key in SETTINGS
            )
        if name not in SETTINGS:
            raise _refuse(f"there is no setting {name!r}", help=", ".join(SETTINGS))
        if not value.strip():
            self.settings.pop(name, None)
            return f"{name} is the plan's"
        try:
            found = SETTINGS[name](value)
        except ValueError:
            raise _refuse(f"{name} is a number, not {value.strip()!r}") from None
        self.model.describe_request([0], **{**self.settings, name: found})
        self.settings[name] = found
        return f"{name} = {found}"

    def _save(self, name: str) -> str:
        if not name:
            raise _refuse("/save needs the name of a file")
        path = Path(os.path.expanduser(name))
        text = json.dumps({"messages": self.messages, "settings": self.settings}, indent=1)
        try:
            path.parent.stat()  # no folder is made
            replace_file(path, f"{text}\n".encode())
        except OSError as error:
            raise _refuse(f"cannot write {path}: {error.strerror}") from None
        return f"{len(self.answers)} messages in {path}"

    def _load(self, name: str) -> str:
        if not name:
            raise _refuse("/load needs the name of a file")
        path = Path(os.path.expanduser(name))
        try:
            found = json.loads(path.read_text("utf-8"))
            messages = [
                {key: _check_text(item[key]) for key in ("role", "content")}
                for item in found["messages"]
            ]
            settings = {key: SETTINGS[key](str(value)) for key, value in found["settings"].items()}
        except OSError as error:
            raise _refuse(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _refuse(f"{path} is no conversation that /save has written") from None
        self.model.describe_request([0], **settings)  # nothing is changed where it is refused
        self.system = None
        if messages and messages[0]["role"] == "system":
            self.system = messages.pop(0)["content"]
        self.answers, self.settings = messages, settings
        return f"{len(messages)} messages"


def _check_text(value: object) -> str:
    """The value, if it is a text; else TypeError."""
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _refuse(message: str, help: str | None = None) -> UserError:
    return UserError.of("P684", message, help=help)
