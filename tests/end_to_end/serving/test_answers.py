"""What the server answers, through clients that others wrote."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra serve")

import pi2
from tests.helpers.servers import HELLO, post, wait_until_idle


def test_a_chat_is_answered_whole_and_in_pieces(client: Any, plan: Path) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 1, "seed": 7}
    whole = client.chat.completions.create(**asked, n=2)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage.completion_tokens == 24
    chunks = list(
        client.chat.completions.create(
            **asked, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    with pi2.load(plan) as model:
        ids = model.encode_chat(HELLO)
        alone = [
            model.generate(ids, max_tokens=12, temperature=1, seed=seed).result for seed in (7, 8)
        ]
    assert texts == [result.text for result in alone]
    assert whole.usage.prompt_tokens == len(ids)


def test_log_probabilities_are_those_of_the_model(client: Any, plan: Path) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0}
    scores = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    for score in scores.logprobs.content:
        assert len(score.top_logprobs) == 3 and score.top_logprobs[0].token == score.token
        assert score.logprob == score.top_logprobs[0].logprob
        assert 0 >= score.logprob >= score.top_logprobs[1].logprob
    streamed = [
        score
        for chunk in client.chat.completions.create(**asked, logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for score in chunk.choices[0].logprobs.content
    ]
    assert [score.logprob for score in streamed] == [
        score.logprob for score in scores.logprobs.content
    ]
    text = client.completions.create(
        model="tiny", prompt="ab", max_tokens=3, logprobs=2, echo=True, temperature=0
    ).choices[0]
    assert text.text.startswith("ab") and text.logprobs.text_offset == [0, 0, 1, 2, 3, 4]
    assert len(text.logprobs.top_logprobs) == len(text.logprobs.tokens) == 6


def test_a_conversation_reads_only_what_is_new(client: Any) -> None:
    end = {"257": 4.0}
    asked = {"model": "tiny", "temperature": 1, "seed": 3, "logit_bias": end, "max_tokens": 300}
    first = client.chat.completions.create(messages=HELLO, **asked)
    assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens > 3
    said = {"role": "assistant", "content": first.choices[0].message.content}
    second = client.chat.completions.create(
        messages=[*HELLO, said, {"role": "user", "content": "and?"}], **asked
    )
    # All but the end token has gone through the model.
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_tokens_are_drawn_as_it_is_asked(client: Any, address: str) -> None:
    asked = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0}
    plain = client.completions.create(**asked).choices[0].text
    question = {"prompt": plain[0], "add_special_tokens": False}
    (token,) = post(f"{address}/tokenize", json=question).json()["tokens"]
    forbidden = client.completions.create(**asked, logit_bias={str(token): -100}).choices[0].text
    assert plain[0] not in forbidden
    varied = client.completions.create(**asked, frequency_penalty=2, presence_penalty=2)
    assert len(set(varied.choices[0].text)) > len(set(plain))
    stopped = client.completions.create(**asked, stop=[plain[2:4]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert plain[2:4] not in stopped.text
    several = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    best = client.completions.create(
        model="tiny", prompt="a", n=1, best_of=3, temperature=1, max_tokens=2
    )
    assert len(best.choices) == 1
    before = wait_until_idle(address)["rounds"]["prompt_tokens"]
    shared = {"prompt": "a prompt of its own, read once", "n": 3, "max_tokens": 2}
    usage = client.completions.create(model="tiny", **shared).usage
    read = wait_until_idle(address)["rounds"]["prompt_tokens"] - before
    assert read == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens, "once for all"
    ids = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices[0]
    back = post(f"{address}/detokenize", json={"tokens": ids.token_ids}).json()
    assert back["prompt"] == ids.text == plain


def test_messages_and_responses_stream_what_they_answer(client: Any, other: Any) -> None:
    with other.messages.stream(
        model="tiny", max_tokens=6, messages=HELLO, system="Be kind."
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = other.messages.create(model="tiny", max_tokens=6, messages=HELLO, system="Be kind.")
    assert text == final.content[0].text == whole.content[0].text
    assert (final.usage.output_tokens, final.stop_reason) == (6, "max_tokens")
    counted = other.messages.count_tokens(model="tiny", messages=HELLO, system="Be kind.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stopped = other.messages.create(
        model="tiny", max_tokens=6, messages=HELLO, system="Be kind.", stop_sequences=[text[2:4]]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[2:4])
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == client.responses.create(**asked).output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == deltas
