"""Figures of real models in the documents are those of the results file."""

from pathlib import Path

import pytest

from real.documents import BEGIN, END, write_documents
from real.results import Machine, ModelResult, Quality, Results, Row, Steps, read_results


def test_the_table_of_real_models_is_written_from_the_results() -> None:
    """Run `tools/measure_real_models.py --docs` after a change."""
    assert write_documents(read_results(), check=True) == 0


def make_results(decode: float) -> Results:
    figures = {"load_s": 1.0, "prompt_128_tokens_s": 90.0, "decode_tokens_s": decode}
    rows = [
        Row.of("pi2", 1.0, [{**figures, "peak_bytes": 2**30, "ids": [1]}], None),
        Row.of("llama.cpp", 0.6, [], "killed for memory"),
    ]
    quality = Quality(
        perplexity=3.5,
        peer_perplexity=3.4,
        kl_nats=0.001,
        top_equal=0.99,
        answers=2,
        answers_equal=1,
        gaps=[0.1],
        peer_steps=Steps(perplexity=3.6, kl_nats=0.002, top_equal=0.98, answers_equal=2),
    )
    machine = Machine(processor="2 x CPU", kernel="6", disk_bytes_s=1e9, note="")
    model = ModelResult("a.gguf", 2**30, rows, quality)
    return Results("2026-11-26", machine, {"pi2": "0.1"}, "command", [model])


def test_another_figure_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    write_documents(make_results(10.0), page=page)
    assert write_documents(make_results(10.0), check=True, page=page) == 0
    assert write_documents(make_results(10.1), check=True, page=page) == 1
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n")
    assert "10.0 tok/s" in text and "killed for memory" in text
    assert "3.400 (3.600) | 0.0010 (0.0020) | 99.0% (98.0%) | 1 of 2 (2)" in text


def test_a_page_without_markers_is_left_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no markers"):
        write_documents(make_results(10.0), page=page)
    assert page.read_text() == "nothing\n"
