"""Predictions against speeds that others measured with other engines: tools/outside/rows.toml."""

import tomllib

import numpy as np
import pytest

from tools.validate_outside import DOCUMENT, ROWS, Row, leave_out_rows, list_samples, write_table


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows by constants that were fitted without their devices."""
    return list(leave_out_rows())


def test_devices_that_nothing_was_fitted_to_are_predicted(rows: list[Row]) -> None:
    errors = [abs(row.error) for row in rows]
    assert np.mean(errors) <= 0.18 and np.median(errors) <= 0.12
    assert np.mean([row.is_inside for row in rows]) >= 0.9


def test_ranges_say_something(rows: list[Row]) -> None:
    widths = [row.range.high / row.range.low for row in rows if row.kind != "prompts"]
    assert np.mean([width <= 2.0 for width in widths]) > 0.9 and max(widths) < 2.4


def test_every_row_and_setting_is_used(rows: list[Row]) -> None:
    data = tomllib.loads(ROWS.read_text("utf-8"))
    assert set(data["settings"]) <= {row.id for row in rows}
    assert len({row.id for row in rows}) == len(rows) == len(list(list_samples())) > 60
    used = {item[1] for kind in data["kinds"] for item in kind["rows"]}
    assert set(data["devices"]) == used


def test_the_document_shows_them(rows: list[Row]) -> None:
    text = DOCUMENT.read_text("utf-8")
    for line in write_table(rows):
        assert line in text, "python tools/validate_outside.py"
