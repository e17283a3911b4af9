"""Predictions against speeds that others measured with other engines: tools/outside/rows.toml."""

import statistics
import tomllib

import pytest

from tools.validate_outside import DOCUMENT, ROWS, Row, main, predict_rows, write_table

MEDIAN_ERROR, MEAN_ERROR, WORST_ERROR = 0.10, 0.15, 0.35
"""Bounds of the rows' errors; docs/howto/simulate.md names the worst rows."""


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(predict_rows())


def test_errors_stay_where_they_are(rows: list[Row]) -> None:
    errors = [abs(row.error) for row in rows]
    assert statistics.median(errors) < MEDIAN_ERROR
    assert statistics.fmean(errors) < MEAN_ERROR
    assert max(errors) < WORST_ERROR
    streamed = [abs(row.error) for row in rows if row.kind == "mixtures streamed"]
    assert statistics.fmean(streamed) < 0.16, "they were 0.83"


def test_every_row_and_setting_is_used(rows: list[Row]) -> None:
    data = tomllib.loads(ROWS.read_text("utf-8"))
    assert set(data["settings"]) <= {row.id for row in rows}
    assert len({row.id for row in rows}) == len(rows) > 50
    assert set(data["devices"]) == {row.device for row in rows}


def test_the_document_shows_them(rows: list[Row]) -> None:
    text = DOCUMENT.read_text("utf-8")
    for line in write_table(rows):
        assert line in text, "python tools/validate_outside.py"
    assert main(["--check"]) == 0
