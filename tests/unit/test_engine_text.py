"""Text out of tokens: whole characters, and stop strings across pieces."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pi2.engine.answer import MAX_HELD, StopFilter, TokenDecoder


def test_text_before_a_stop_string_is_all_that_comes_out() -> None:
    stop_filter = StopFilter(["\n\n"])
    pieces = [stop_filter.push(piece) for piece in ["a\n", "b\n", "\nc", "d"]]
    assert "".join(pieces) == "a\nb"
    assert stop_filter.stopped


def test_what_only_looked_like_a_stop_string_is_given_back_at_the_end() -> None:
    stop_filter = StopFilter(["END"])
    assert (stop_filter.push("xEN"), stop_filter.flush()) == ("x", "EN")


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopFilter([]).push("abc") == "abc"


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
)
def test_any_cut_of_the_text_gives_the_same_output(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    expected = text[: min(found)] if found else text
    stop_filter = StopFilter(stops)
    output = "".join([stop_filter.push(piece) for piece in pieces])
    output += "" if stop_filter.stopped else stop_filter.flush()
    # A stop string may complete earlier than another one that begins before it.
    assert text.startswith(output)
    assert len(output) >= len(expected)
    if len(stops) < 2:
        assert output == expected


# Characters of several tokens

WORDS = ("a", "b c", "é", "漢字", "🙂", " ", "  ", "\n", "naïve", "👩\u200d💻")
CUT = "\N{REPLACEMENT CHARACTER}"
LLAMA_PIECES = ("▁", "▁a", "a", "▁▁", "b", "c", "v", "na", "\n")


@cache
def make_tokenizer(kind: str) -> Tokenizer:
    """``bytes`` as in GPT-2 and Llama 3, ``fallback`` as in Llama 2: pieces, else bytes."""
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {token: index for index, token in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *LLAMA_PIECES]
        vocab = {token: index for index, token in enumerate(pieces)}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    decoder = TokenDecoder(lambda some: tokenizer.decode(list(some), skip_special_tokens=True))
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_a_character_of_several_tokens_comes_out_whole(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    assert stream(tokenizer, tokenizer.encode("a🙂").ids)[-6:] == ["a", "", "", "", "🙂", ""]


def read_continuation(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    before = tokenizer.encode("x").ids
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]


def test_the_first_space_of_a_continuation_stays() -> None:
    """Llama 2's decoder takes it away where a text begins."""
    tokenizer = make_tokenizer("fallback")
    ids = tokenizer.encode("is it").ids
    assert tokenizer.decode(ids) == "is it"
    assert "".join(stream(tokenizer, ids)) == " is it"


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@settings(max_examples=40)
@given(words=st.lists(st.sampled_from(WORDS), max_size=8), cut=st.integers(0, 60))
def test_pieces_make_the_text_that_tokenizer_decodes(kind: str, words: list[str], cut: int) -> None:
    tokenizer = make_tokenizer(kind)
    whole = tokenizer.encode("".join(words)).ids
    # A special token is no text, wherever it stands.
    end = tokenizer.token_to_id("<end>")
    assert end is not None
    ids = [*whole[:cut], end, *whole[cut:]]
    text = read_continuation(tokenizer, whole)
    assert "".join(stream(tokenizer, ids)) == text
    # A character that is cut off shows at the end alone, and takes no other with it.
    pieces = stream(tokenizer, whole[:cut])
    assert CUT not in "".join(pieces[:-1])
    assert text.startswith("".join(pieces).rstrip(CUT))


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
@example(ids=[33])
def test_bytes_that_are_no_characters_are_neither_lost_nor_held_forever(
    kind: str, ids: list[int]
) -> None:
    pieces = stream(make_tokenizer(kind), ids)
    assert bool("".join(pieces)) == bool(ids)
    steps = [-1, *(index for index, piece in enumerate(pieces) if piece), len(ids)]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= MAX_HELD + 1
