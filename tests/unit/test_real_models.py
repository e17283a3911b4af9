"""Figures of real models in the documents are those of the results file."""

from pathlib import Path

import pytest

from real.documents import TABLES, Table, write_documents
from real.results import Machine, ModelResult, Quality, Results, Row, Steps, write_results


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_of_the_documents_is_written_from_its_results(table: Table) -> None:
    """Run `tools/measure_real_models.py --docs` after a change."""
    assert write_documents(table, check=True) == 0


def make_table(folder: Path, decode: float) -> Table:
    write_results(make_results(decode), folder / "results.json")
    return Table("real models", folder / "results.json", folder / "page.md")


def make_results(decode: float) -> Results:
    figures = {"load_s": 1.0, "prompt_128_tokens_s": 90.0, "decode_tokens_s": decode}
    rows = [
        Row.of("pi2", "", 1.0, [{**figures, "peak_bytes": 2**30, "ids": [1]}], None),
        Row.of("llama.cpp", "mapped", 0.6, [], "killed for memory"),
    ]
    quality = Quality(
        perplexity=3.5, peer_perplexity=3.4, kl_nats=0.001, top_equal=0.99, answers=2,
        answers_equal=1, gaps=[0.1],
        peer_steps=Steps(perplexity=3.6, kl_nats=0.002, top_equal=0.98, answers_equal=2),
    )  # fmt: skip
    machine = Machine(processor="2 x CPU", kernel="6", disk_bytes_s=1e9, note="")
    model = ModelResult("a.gguf", 2**30, rows, quality)
    return Results("2026-11-26", machine, {"pi2": "0.1"}, "command", [model])


def test_another_figure_is_refused(tmp_path: Path) -> None:
    table = make_table(tmp_path, 10.0)
    table.page.write_text("before\n<!-- real models: begin -->\n<!-- real models: end -->\nafter\n")
    write_documents(table)
    assert write_documents(table, check=True) == 0
    assert write_documents(make_table(tmp_path, 10.1), check=True) == 1
    text = table.page.read_text()
    assert text.startswith("before") and text.endswith("after\n")
    assert "| a, 1,024 MiB | no limit | 10.0 / - |  | 90 / - | 1.00 / - | 1,024 / - |" in text
    assert "| 60% of the file | - / killed for memory |" in text
    assert "3.400 (3.600) | 0.0010 (0.0020) | 99.0% (98.0%) | 1 of 2 (2)" in text


def test_a_page_without_markers_is_left_as_it_is(tmp_path: Path) -> None:
    table = make_table(tmp_path, 10.0)
    table.page.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no markers"):
        write_documents(table)
    assert table.page.read_text() == "nothing\n"
