"""What was sampled is remembered, so that conversations go on with the same tokens."""

from __future__ import annotations

from pi2.serving.hosts import Replay


def test_a_conversation_that_goes_on_has_the_tokens_that_were_sampled() -> None:
    def encode(text: str) -> list[int]:
        return [ord(sign) for sign in text]

    replay = Replay()
    assert replay.encode("ab", encode) == [97, 98]
    # The model has drawn one token for both letters.
    replay.note("ab", [1])
    replay.note("abcd", [1, 2])
    assert replay.encode("abc", encode) == [1, 99]
    assert replay.encode("abcde", encode) == [1, 2, 101]
    assert replay.encode("abcd", encode) == [1, 2]
    assert replay.encode("xab", encode) == [120, 97, 98]
    for number in range(64):
        replay.note(f"other {number}", [number])
    assert replay.encode("abc", encode) == [97, 98, 99], "only the latest are remembered"


def test_calls_are_remembered_by_what_they_call() -> None:
    replay = Replay()
    one, two = {"b": 1, "a": [2]}, {"a": [2], "b": 2}
    replay.note_calls("well\n", [("get", one)], "well\n<tool_call>{...}")
    assert replay.recall([("well", [("get", {"a": [2], "b": 1})])]) == ["well\n<tool_call>{...}"]
    assert replay.recall([("well", [("get", two)]), ("", [("get", one)])]) == [None, None]
    replay.note_calls("well", [("get", one)], "well <tool_call>{ ...}")
    asked = ("well", [("get", one)])
    assert replay.recall([asked, asked]) == ["well\n<tool_call>{...}", "well <tool_call>{ ...}"]
    assert replay.recall([asked]) == ["well <tool_call>{ ...}"]
    for number in range(1024):
        replay.note_calls("", [("get", number)], "x")
    assert replay.recall([asked]) == [None]
