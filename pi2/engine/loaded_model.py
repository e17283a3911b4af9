"""A model that is ready to run: what `pi2.load` returns."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

import numpy as np

from pi2.arrays import F32
from pi2.diagnostics import UserError
from pi2.engine.answer import Constraint, GenerationOptions, GenerationRequest, Ticket
from pi2.engine.generation import (
    AsyncGeneration,
    BatchGeneration,
    Driver,
    Generation,
    embed_tokens,
    iterate_logits,
    stream_pieces,
)
from pi2.engine.opening import Parts
from pi2.engine.prefixes import make_kept_prefixes
from pi2.engine.sampling import SamplingOptions
from pi2.engine.scheduler import Scheduler
from pi2.engine.speculation import make_speculation
from pi2.engine.statistics import RunStatistics, SpeculationCounters, UnitUse
from pi2.machine.memory import measure_reads
from pi2.memory.budget import Pressure, SegmentUse, read_pressure
from pi2.memory.matrix_pool import MatrixPool
from pi2.memory.ring import Expected
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.common import choose_chat_sampling
from pi2.tokens.table_tokenizer import Coder, take_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pi2.backends.faults.shortage import MemoryWatch
    from pi2.engine.accounts import Account
    from pi2.engine.message_shapes import Message, WriteCalls
    from pi2.engine.model_texts import ChatTemplate, ModelTexts
    from pi2.store.reader import NeuronStore


class LoadedModel:
    """A plan's model, loaded.  Use it as a context manager, or call ``close``.

    Any threads may share it.  As many generations go on at the same time as the plan's
    ``decode.batch`` says; others wait in line.  After ``close``, everything that computes raises
    UserError P615."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._pressure = read_pressure()
        self.changes: tuple[str, ...] = ()
        """Values made smaller or larger to fit the plan to another budget, a line each."""
        self.origin: tuple[Path, dict[str, object]] | None = None
        """The plan's file, and the values that it was loaded with."""
        plan = parts.resolved.plan
        own = weakref.proxy(self)  # no circle: a closed model that is dropped gives its memory back
        self._scheduler = Scheduler(
            parts.forward,
            context=plan.kv.context,
            piece_tokens=plan.prefill.chunk * parts.resolved.chunks,
            make_decoder=lambda request: own.texts.make_decoder(request),
            speculation=make_speculation(parts),
            count_reads=parts.count_reads,
        )
        self._driver: Driver | None = None
        self._starting = Lock()

    @property
    def plan(self) -> ResolvedPlan:
        """The resolved plan: ``plan.plan``, ``plan.device``, ``plan.model``, ``plan.digest``."""
        return self._parts.resolved

    @property
    def texts(self) -> ModelTexts:
        """What makes tokens of texts, and texts of tokens."""
        return self._parts.texts

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer (`tokenizers.Tokenizer`); UserError P605 if the plan's store has none.

        One of a GGUF file is made when it is asked for: `encode_text` and `decode` need less."""
        return take_library(self.coder)

    @property
    def coder(self) -> Coder:
        """What makes tokens of texts; UserError P605 as ``tokenizer``."""
        return self.texts.coder

    @property
    def store(self) -> NeuronStore:
        """The open neuron store; UserError P605 where the run needs none."""
        return self.texts.store

    @property
    def load_s(self) -> float:
        """Seconds that loading took."""
        return self._parts.load_s

    @property
    def loaded_bytes(self) -> int:
        """Bytes read from the store while loading, without other units' neurons and gates."""
        return self._parts.loaded_bytes

    @property
    def account(self) -> Account:
        """What reports say of the weights."""
        return self._parts.account

    @property
    def expected(self) -> Expected | None:
        """Measured rates of a model whose weights stream, and the speed to expect of its runs."""
        return self.account.expected

    @cached_property
    def memory_bytes_s(self) -> float | None:
        """Rate at which the compute threads can read weights, measured when it is first asked for;
        None if another unit has the whole model."""
        return measure_reads(self._parts.resident, self.compute_threads)

    @property
    def compute_threads(self) -> int:
        """Threads that kernels run on."""
        return self._parts.compute_threads

    @property
    def fallback(self) -> str | None:
        """Why neurons are not read directly, if the plan asks for it and it cannot be had."""
        return self._parts.reader.fallback

    @property
    def io_engine(self) -> str:
        """What reads neurons: ``pread``, ``io_uring`` or ``mmap``."""
        return self._parts.reader.engine

    @property
    def engine_fallback(self) -> str | None:
        """Why neurons are read by another engine than the plan names, if they are."""
        return self._parts.reader.engine_fallback

    @property
    def lock_fallback(self) -> str | None:
        """Why memory is not locked, if the plan asks for it and the system refuses."""
        return self._parts.lock_fallback

    @property
    def pressure(self) -> Pressure:
        """What the system has taken from this process since loading."""
        now, before = read_pressure(), self._pressure
        faults = None
        if now.major_faults is not None and before.major_faults is not None:
            faults = now.major_faults - before.major_faults
        return replace(now, major_faults=faults)

    @property
    def pool(self) -> MatrixPool:
        """Resident weights that models share."""
        return self._parts.pool

    def measure_segments(self) -> Mapping[str, SegmentUse]:
        """Stated and taken bytes of each segment of memory."""
        return self._parts.measure_segments()

    @property
    def units(self) -> tuple[UnitUse, ...]:
        """The work of each unit but the sparse one since loading."""
        return self._parts.list_units()

    @property
    def lost_units(self) -> Mapping[str, str]:
        """Units that the run goes on without, and why each was lost."""
        return {unit.name: unit.lost for unit in self.units if unit.lost is not None}

    def watch_memory(self, watch: MemoryWatch) -> None:
        """Let ``watch`` end work that makes no progress, until the model is closed."""
        self._scheduler.watch = watch
        pool, resident = self._parts.pool, self._parts.resident

        def protect() -> UserError | None:
            watch.protect(pool.list_unshared(resident))
            return watch.error

        pool.watch(protect, self._parts.release)

    def find_change(self) -> UserError | None:
        """Why the model cannot go on: a file that it reads was cut or changed, its disk failed, or
        memory is short; None if it can."""
        watch = self._scheduler.watch
        if watch is not None and watch.error is not None:
            return watch.error
        try:
            self._parts.check()
        except UserError as error:
            return error
        return None

    @property
    def stats(self) -> RunStatistics:
        """Counters since loading."""
        parts, scheduler = self._parts, self._scheduler
        rounds, speculation = scheduler.rounds, scheduler.speculation
        whole, (read_bytes, waited_s) = rounds.whole, parts.count_reads()
        work: Mapping[str, Any] = parts.model.count_work()
        return RunStatistics(
            flash_read_bytes=read_bytes,
            waited_s=waited_s,
            prefill_s=rounds.prefill_s,
            steps_s=whole.seconds,
            steps_waited_s=whole.waited_s,
            steps_read_bytes=whole.read_bytes,
            step_bytes=0 if parts.account.step_bytes is None else parts.count_touched().memory,
            speculation=SpeculationCounters() if speculation is None else speculation.counters,
            **work,
        )

    def encode(self, prompt: str, *, whole: bool = False) -> list[int]:
        """Token ids of ``prompt``, with the begin token where the model wants one; of a ``whole``
        text that nothing follows, such as one for an embedding, with the tokenizer's end token.

        A dry run has no tokenizer and takes a token for every four bytes."""
        ids = self.texts.encode_text(prompt) + (self.texts.list_endings() if whole else [])
        settings = self.plan.model.tokenizer
        if settings.add_bos and settings.bos is not None:
            ids = [settings.bos, *ids]
        return ids

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        write_calls: WriteCalls | None = None,
    ) -> str:
        """The prompt that the model's chat template makes of ``messages``.

        A message is ``{"role": "user", "content": "..."}``; calls of tools have their arguments as
        objects or as JSON, whichever the template wants.  ``add_generation_prompt`` ends the
        prompt where the answer begins; ``template`` chooses among named templates; ``variables``
        are what else the template reads; ``write_calls`` writes calls into the content, if the
        template would leave them out.  Raises UserError P608 if the template fails or refuses,
        P609 if the model has none.  A dry run has none either: the contents are joined."""
        return self.texts.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            template=template,
            variables=variables,
            write_calls=write_calls,
        )

    def read_chat_template(self, name: str | None = None) -> ChatTemplate:
        """The model's chat template, or the one called ``name``; UserError P608 if a file is
        broken, P609 if there is none."""
        return self.texts.read_chat_template(name)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the answer begins: see `render_chat`.

        The begin token comes first where the model wants one, once: many templates write it."""
        text = self.render_chat(messages, template=template, variables=variables)
        return self.begin(self.encode_text(text))

    def begin(self, ids: list[int]) -> list[int]:
        """Token ids with the begin token before them, if the model wants one and they have none."""
        bos = self.plan.model.tokenizer.bos if self.plan.model.tokenizer.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of ``text`` as it is: no begin token is added."""
        return self.texts.encode_text(text)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        progress: Callable[[float], None] = lambda share: None,
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Generate text after ``prompt`` (text, or token ids).

        The plan's ``[sampling]`` fills in sampling options that are not given; ``temperature=0`` is
        greedy. ``progress`` is told the share of the prompt that is done. Returns an iterator of
        text pieces; its ``result`` is a `GenerationResult`. Raises UserError P601 for a prompt that
        leaves no room in the context, P603 for an empty one, P604 for an option out of range."""
        request = self._make_request(prompt, **options)
        return Generation([request], self._scheduler, lambda: self.stats, progress)

    def generate_async(
        self, prompt: str | Sequence[int], **options: Unpack[GenerationOptions]
    ) -> AsyncGeneration:
        """Generate text after ``prompt`` for ``async for``: a thread of the model computes.

        Options and errors as in ``generate``. If the caller stops iterating, or is cancelled, the
        generation ends before its next token."""
        ticket = Ticket(self._make_request(prompt, **options))

        async def give_texts() -> AsyncIterator[str]:
            async for piece in stream_pieces(self._get_driver(), ticket):
                if piece.text:
                    yield piece.text

        return AsyncGeneration(ticket, give_texts())

    def _get_driver(self) -> Driver:
        with self._starting:
            self._scheduler.check_open()
            if self._driver is None:
                self._driver = Driver(self._scheduler)
                self._driver.start()
            return self._driver

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        scores: bool = False,
        progress: Callable[[float], None] = lambda share: None,
        **options: Unpack[GenerationOptions],
    ) -> BatchGeneration:
        """Generate text after each of ``prompts``, up to the plan's ``decode.batch`` at a time;
        others wait until one of them has ended.

        Options as in ``generate``. Prompt number n, from 0, draws as in a run of its own with
        ``seed + n``; equal prompts that begin at the same time are read once. With ``scores`` the
        results state how likely their tokens were, and the batch which result is the best. Returns
        an iterator of pairs of a prompt's number and a piece of its text; its ``result`` is a
        `BatchResult`. Raises the errors of ``generate``, for any of the prompts, before anything is
        computed."""
        if not prompts:
            raise UserError.of("P603", "there is no prompt", help="give at least one")
        requests = []
        for number, prompt in enumerate(prompts):
            request = self._make_request(prompt, **options)
            if (seed := request.sampling.seed) is not None:
                own = replace(request.sampling, seed=seed + number)
                request = replace(request, sampling=own)
            requests.append(replace(request, alternatives=0) if scores else request)
        return BatchGeneration(requests, self._scheduler, lambda: self.stats, progress)

    def _make_request(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        least: int = 1,
        **sampling: Any,
    ) -> GenerationRequest:
        self._scheduler.check_open()
        if max_tokens < least:
            raise UserError.of("P604", f"max_tokens must be {least} or more, not {max_tokens}")
        given = {name: value for name, value in sampling.items() if value is not None}
        drawn = SamplingOptions(**{**dict(self.plan.plan.sampling), **given})
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_ids(ids, answer=min(max_tokens, 1))
        return GenerationRequest(
            prompt_ids=ids,
            max_tokens=max_tokens,
            stop=[stop] if isinstance(stop, str) else list(stop),
            stop_ids=frozenset(() if ignore_eos else self.plan.model.tokenizer.eos),
            sampling=drawn,
        )

    @property
    def chat_sampling(self) -> dict[str, Any]:
        """How answers of chats and servers are drawn unless a request says otherwise: as the plan
        states, as the model's authors recommend, or with usual values."""
        chosen = choose_chat_sampling(self.plan.plan.sampling, self.plan.model.sampling)
        return {name: value for name, (value, _) in chosen.items()}

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, without special tokens unless ``special``; a dry run has none."""
        return self.texts.decode(ids, special=special)

    def keep_template_process(self) -> None:
        """Keep a process that renders chat templates: its start takes longer than rendering."""
        self.texts.keep_process()

    def keep_prefixes(self) -> None:
        """Let prompts go on from earlier ones that begin with the same tokens, as the plan's
        ``[serve]`` says; nothing may be under way."""
        found = make_kept_prefixes(self._parts)
        if found is not None:
            self._scheduler.prefixes = found

    def release_parts(self) -> None:
        """Give back what computes; `take_parts` follows at once."""
        self._end_parts()
        self._scheduler.watch = None
        for parts in (self._parts, self._parts.draft):
            if parts is not None:
                # Resident matrices are the pool's, which others may use.
                parts.budget.drop(but="hot" if parts.has_pooled_matrices else None)

    def take_parts(self, other: LoadedModel) -> None:
        """Go on with the parts of ``other``, a model that does nothing yet."""
        other.texts.go_on_with(self.texts)
        self._parts = other._parts
        self.__dict__.pop("memory_bytes_s", None)
        self.origin, self._pressure = other.origin, other._pressure
        self._scheduler.take_forward(other._scheduler)

    @property
    def scheduler(self) -> Scheduler:
        """What gives the places of sequences to requests."""
        return self._scheduler

    def describe_request(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        alternatives: int | None = None,
        make_constraint: Callable[[], Constraint] | None = None,
        shown_ids: frozenset[int] = frozenset(),
        scores_prompt: bool = False,
        **options: Any,
    ) -> GenerationRequest:
        """A request for the scheduler; `chat_sampling` has the sampling options that are not given.

        ``options``: as for `generate`, and ``least``, the smallest ``max_tokens``: 0 reads the
        prompt and generates nothing.  Without ``max_tokens`` there may be as many as fit.

        Raises UserError P601, P603, P604, P606 and P615 as `generate` does."""
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("ignore_eos"):
            given.setdefault("end_repeats", False)
        stop = given.get("stop", ())
        given["stop"] = [*([stop] if isinstance(stop, str) else stop), *self.plan.plan.chat.stop]
        most = self.plan.plan.kv.context if max_tokens is None else max_tokens
        return replace(
            self._make_request(prompt_ids, max_tokens=most, **{**self.chat_sampling, **given}),
            alternatives=alternatives,
            make_constraint=make_constraint,
            shown_ids=shown_ids,
            scores_prompt=scores_prompt,
        )

    def logits(
        self, token_ids: Sequence[int], *, mode: Literal["prefill", "decode"] = "prefill"
    ) -> F32:
        """Logits [tokens, vocab], float32, after each of ``token_ids``.

        ``prefill`` runs them through in chunks, every neuron computed; ``decode`` one by one with
        the plan's predictor, as a generation does."""
        return np.concatenate(list(self.iterate_logits(token_ids, mode=mode)))

    def iterate_logits(
        self, token_ids: Sequence[int], *, mode: Literal["prefill", "decode"] = "prefill"
    ) -> Generator[F32, None, None]:
        """Logits as in `logits`, in pieces [n, vocab], n at most a chunk: a long text's logits
        would fill the memory."""
        ids = np.array(token_ids, np.int32)
        self._check_ids(ids.tolist(), answer=0)
        return iterate_logits(self._parts, self._scheduler, ids, mode)

    @property
    def can_embed(self) -> bool:
        """Whether `embed` works: not in a dry run, nor if a unit has the whole model."""
        return self._parts.forward.program is not None and self.account.is_timed

    def embed(
        self, prompt: str | Sequence[int], *, pooling: Literal["mean", "last"] | None = None
    ) -> F32:
        """The embedding of a text, or of token ids: float32 [hidden], of length 1.

        It is the mean of the head's inputs over all tokens, or the last of them; the model document
        states the default. All neurons are computed. Raises UserError P601, P603, P606 and P615 as
        `generate` does, P617 if `can_embed` is false."""
        if not self.can_embed:
            raise UserError.of(
                "P617",
                "the backend of this plan gives no hidden states, which embeddings are made of",
                help="use the cpu or the reference backend",
            )
        ids = self.encode(prompt, whole=True) if isinstance(prompt, str) else list(prompt)
        self._check_ids(ids, answer=0)
        return embed_tokens(self._parts, self._scheduler, ids, pooling or self.plan.model.pooling)

    def _check_ids(self, ids: Sequence[int], *, answer: int = 1) -> None:
        if not ids:
            raise UserError.of("P603", "the prompt is empty", help="give at least one token")
        vocab = self.plan.model.shape.vocab
        for token in ids:
            if not 0 <= token < vocab:
                raise UserError.of("P606", f"token id {token} is not in the vocabulary of {vocab}")
        context = self.plan.plan.kv.context
        if len(ids) + answer > context:
            raise UserError.of(
                "P601",
                # Agents shorten their conversations by these words, as Anthropic's server has them.
                f"prompt is too long: {len(ids)} tokens > {context - answer} maximum",
                help=f"shorten the prompt, or raise kv.context, which is {context}",
            )

    def close(self) -> None:
        """Give back threads, files and memory.  Running generations end (P615)."""
        self._scheduler.close()
        if self._driver is not None:
            self._driver.end()
        self.texts.close()
        self._end_parts()

    def _end_parts(self) -> None:
        if self._scheduler.watch is not None:
            self._scheduler.watch.close()
        with self._parts.release:
            self._parts.model.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
