"""What the engine has compiled for the machine that it runs on, whatever computes the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pi2.arrays import F32, I32, I64, U8, U32, Bits


class HostLoops(Protocol):
    """Compiled loops over the arrays of `pi2.memory`: the neuron cache, reads, io_uring's rings.

    They belong to no compute unit.  `pi2.memory` does the same with numpy, several times as slowly,
    where nothing is compiled (plans that compute nothing) and for tests to compare with.

    Order of calls for the neurons that a layer needs, as `NeuronCache` and `FlashReader` make
    them::

        find_neurons        wanted neurons -> those in memory, and those that are missing
        place_neurons       cold slots for the missing ones
        plan_reads          where their bytes lie -> requests
        read_runs           reads the requests, in threads of the reader;  or, with io_uring,
        fill_entries        requests -> entries of its submission ring
        note_results        completions -> results of the requests
        compute_checks      what was read for the first time -> CRC-32

    Arrays are C-contiguous and of exactly the types that are named; numbers of neurons, keys and
    slots fit an int32, offsets, addresses and sizes are bytes.  The caller owns every array that it
    passes, and loops keep none.  A *key* is layer x neurons per layer + stored index; cold slots
    are counted from the first.

    `read_runs` and `compute_checks` may be called from any thread at any time, and let go of
    Python's lock.  All other methods share a small array for what they return: one thread at a
    time.
    """

    def read_runs(
        self,
        fd: int,
        vectors: I64,
        firsts: I32,
        counts: I32,
        offsets: I64,
        results: I64,
        start: int,
        step: int,
    ) -> None:
        """Read requests i = start, start + step, ...: from byte ``offsets[i]`` on into the
        ``counts[i]`` vectors from ``firsts[i]`` on, each an address and a length of ``vectors``
        [v, 2]; ``results[i]`` becomes the bytes read, or -1 where the system
        reports an error."""

    def find_neurons(
        self,
        row: I32,
        indices: I32,
        *,
        first_key: int,
        first_cold: int,
        clock: int,
        weight: float,
        counts: F32,
        scores: F32,
        used_at: I64,
    ) -> tuple[I32, I32]:
        """Divide ``indices`` [n] (distinct, none of them hot) by ``row`` [neurons], their slots or
        -1: return cold slots [h] of those in memory, and stored indices [n - h] of the others.

        Of the former ``weight`` is added to ``counts`` [keys], and ``scores`` [cold] becomes that
        count, ``used_at`` [cold] ``clock``.  ``first_key`` is the layer's, ``first_cold`` the slot
        of the first cold one.
        """

    def place_neurons(
        self,
        missing: I32,
        candidates: I32,
        held: Bits,
        given: I32,
        *,
        first_key: int,
        first_cold: int,
        clock: int,
        listed_at: int,
        weight: float,
        slot_of: I32,
        owner: I64,
        counts: F32,
        scores: F32,
        used_at: I64,
    ) -> tuple[int, int, int]:
        """Give ``missing`` [m] those cold slots of ``candidates`` [k], in their order, that have
        not been used since ``listed_at`` and are not ``held`` [cold]; write them to ``given`` [m].

        Brings ``slot_of`` [keys] and ``owner`` [cold] (keys, or -1) up to date, and counts uses as
        `find_neurons` does.  Returns how many have a slot now, how many candidates were looked at,
        and how many neurons left.
        """

    def plan_reads(
        self,
        indices: I32,
        slots: I32,
        *,
        most: int,
        base: int,
        stride: int,
        address: int,
        pending: int,
    ) -> tuple[I64, I32, I32, I64, I64, I32, I64]:
        """Plan reads of bundles ``indices`` [b] (ascending), which lie at ``base + i stride`` of a
        file, into ``slots`` [b] at ``address + slot stride``: neighbours, up to ``most`` of them,
        are one request.

        Returns vectors [b, 2], firsts [n], counts [n] and offsets [n] as `read_runs`
        takes them, bytes [n], the request of each bundle [b], and results [n], all ``pending``.
        """

    def fill_entries(
        self,
        entries: I64,
        *,
        head: int,
        first_name: int,
        vectors: I64,
        firsts: I32,
        counts: I32,
        offsets: I64,
    ) -> None:
        """Write entries of io_uring's ring, [n, 8], for n requests as `read_runs` takes
        them: ``head`` is the first word of each, names are ``first_name``, and so on."""

    def note_results(
        self, events: I64, results: I64, *, head: int, count: int, first_name: int
    ) -> int:
        """Write ``results`` [n] of the requests named ``first_name``, and so on, out of ``count``
        completions in ``events`` [2^k, 2], the ring of io_uring, from number ``head`` on; return
        how many of them there were."""

    def compute_checks(self, arena: U8, slots: I32) -> U32 | None:
        """CRC-32 [n] (as `zlib.crc32`) of bundles ``slots`` [n] of ``arena`` [slots, stride]; None
        where the processor has no instruction for it."""
