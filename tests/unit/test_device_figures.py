"""What device files may state: sizes that are no whole bytes, versions of NPUs that are new."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pi2.backends.hexagon.library import choose_version
from pi2.plan.documents.device import Hexagon, Memory, Unit


@pytest.mark.parametrize(
    ("text", "size"),
    [("14.8 GiB", 15_891_378_995), ("15.9GB", 15_900_000_000), ("7.1 KiB", 7270), ("512 B", 512)],
)
def test_a_size_is_rounded_to_bytes(text: str, size: int) -> None:
    values: dict[str, Any] = {"usable": text}
    assert Memory.model_validate(values).usable == size


def test_a_part_of_a_byte_is_no_size() -> None:
    values: dict[str, Any] = {"usable": "0.4 B"}
    with pytest.raises(ValidationError, match="not a whole number"):
        Memory.model_validate(values)


@pytest.mark.parametrize(
    ("stated", "compiled"),
    [(None, "v66"), ("v66", "v66"), ("v71", "v69"), ("v75", "v75"), ("v79", "v75"), ("v81", "v75")],
)
def test_programs_are_for_the_newest_version_that_an_npu_runs(
    stated: str | None, compiled: str
) -> None:
    unit = Unit(kind="npu", architecture="hexagon", hexagon=Hexagon(version=stated))
    assert choose_version(unit) == compiled


@pytest.mark.parametrize("stated", ["v65", "75", "v7", "hexagon v79"])
def test_what_is_no_version_is_refused(stated: str) -> None:
    with pytest.raises(ValidationError):
        Hexagon(version=stated)
