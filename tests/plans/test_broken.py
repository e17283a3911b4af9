"""`pi2 validate` over files with one planted mistake each: the right code, line and column.

The table below is the specification and is written by hand; the ``.expected`` files beside the
documents are the full output, written by ``python -m tests.helpers.broken_plans`` and read before
they are committed.
"""

from __future__ import annotations

import json

import pytest

from pi2.fitting.rules import list_rules
from tests.helpers.broken_plans import BROKEN, find_expected, list_names, validate

WARNINGS = {
    "P205",
    "P204",
    "P213",
    "P214",
    "P222",
    "P235",
    "P237",
    "P260",
    "P277",
    "P278",
    "P291",
    "P401",
    "P402",
    "P403",
    "P411",
    "P412",
    "P413",
    "P414",
}

# File: code, line, column, and the file to be changed where it is another one.
PLANTED: dict[str, tuple[str, int, int] | tuple[str, int, int, str]] = {
    "another-unit-in-batches.plan.toml": ("P262", 25, 37),
    "array-for-table.plan.toml": ("P103", 28, 9),
    "attention-too-small.plan.toml": ("P202", 12, 13),
    "backend-of-no-dense-unit.plan.toml": ("P265", 5, 33),
    "backend-of-no-whole-model.plan.toml": ("P265", 5, 20),
    "bad-selector.plan.toml": ("P106", 27, 10),
    "bad-unit-name.plan.toml": ("P106", 28, 11),
    "bare-bytes.plan.toml": ("P105", 8, 10),
    "bare-quantity.plan.toml": ("P010", 13, 6),
    "bare-text.plan.toml": ("P010", 44, 13),
    "batch-of-long-positions.plan.toml": ("P322", 46, 9),
    "batches-out-of-order.plan.toml": ("P266", 25, 68),
    "beyond-64-bits.plan.toml": ("P108", 41, 9),
    "block-of-500.device.toml": ("P251", 19, 14),
    "blocks-and-lists.model.toml": ("P110", 18, 17),
    "blocks-beyond-layers.model.toml": ("P104", 17, 10),
    "blocks-of-experts.model.toml": ("P104", 18, 14),
    "blocks-of-odd-heads.model.toml": ("P240", 21, 1),
    "blocks-with-a-slip.model.toml": ("P101", 17, 27),
    "blocks-with-odd-choice.model.toml": ("P106", 17, 10),
    "blocks-with-two-windows.model.toml": ("P104", 21, 44),
    "broken-device.plan.toml": ("P101", 12, 1, "parts/dented.device.toml"),
    "budget-above-device.plan.toml": ("P203", 8, 10),
    "budget-too-small.plan.toml": ("P201", 8, 10),
    "byte-order-mark.plan.toml": ("P007", 1, 1),
    "chunk-above-context.plan.toml": ("P235", 41, 9),
    "claim-as-measured.device.toml": ("P402", 25, 10),
    "clusters-of-an-npu.device.toml": ("P252", 13, 1),
    "cold-below-a-token.plan.toml": ("P204", 16, 8),
    "cold-too-small.plan.toml": ("P202", 16, 8),
    "comments-only.plan.toml": ("P008", 1, 1),
    "context-too-long.plan.toml": ("P231", 48, 11),
    "core-beyond-all.plan.toml": ("P236", 38, 9),
    "core-named-twice.plan.toml": ("P236", 38, 9),
    "cores-for-fewer-threads.plan.toml": ("P236", 39, 9),
    "cores-reversed.plan.toml": ("P236", 38, 9),
    "date-for-text.plan.toml": ("P103", 4, 11),
    "decimal-comma.plan.toml": ("P010", 24, 7),
    "deep-nesting.plan.toml": ("P012", 24, 31),
    "dense-share-beyond-hot.plan.toml": ("P263", 24, 7),
    "device-as-plan.plan.toml": ("P014", 1, 1),
    "dials-without-a-router.plan.toml": ("P279", 48, 16),
    "dotted-key.plan.toml": ("P101", 2, 9),
    "duplicate-key.plan.toml": ("P011", 16, 1),
    "duplicate-table.plan.toml": ("P011", 47, 1),
    "empty-split.plan.toml": ("P104", 28, 9),
    "empty.plan.toml": ("P008", 1, 1),
    "eos-not-in-vocabulary.model.toml": ("P246", 19, 11),
    "extends-broken.plan.toml": ("P010", 2, 8, "parts/dented-text.toml"),
    "extends-dented.plan.toml": ("P104", 24, 7, "parts/dented-base.plan.toml"),
    "extends-device.plan.toml": ("P014", 2, 36),
    "extends-in-a-circle.plan.toml": ("P021", 2, 12, "parts/dented-circle.plan.toml"),
    "extends-itself.plan.toml": ("P021", 2, 12),
    "extends-newer.plan.toml": ("P107", 1, 18, "parts/dented-newer.toml"),
    "extends-no-shipped.plan.toml": ("P020", 2, 12),
    "extends-nothing.plan.toml": ("P020", 2, 36),
    "extends-number.plan.toml": ("P103", 2, 36),
    "extends-text.plan.toml": ("P103", 2, 11),
    "extends-too-deep.plan.toml": ("P022", 2, 12, "parts/levels/8.toml"),
    "factor-of-plain-rope.model.toml": ("P248", 19, 10),
    "fatrelu-without-threshold.model.toml": ("P245", 15, 1),
    "figure-of-zero.device.toml": ("P261", 14, 8),
    "figure-without-origin.device.toml": ("P102", 18, 1),
    "fraction-for-whole.plan.toml": ("P103", 41, 9),
    "cold-of-dense.plan.toml": ("P205", 16, 8),
    "gate-of-silu.plan.toml": ("P234", 44, 13),
    "gates-missing.model.toml": ("P253", 17, 9),
    "graph-of-three-tokens.plan.toml": ("P276", 11, 25),
    "graphs-beyond-own-memory.plan.toml": ("P277", 11, 1),
    "graphs-of-no-npu.plan.toml": ("P276", 11, 1),
    "guesses-of-a-whole-unit.plan.toml": ("P281", 31, 1),
    "guesses-of-no-plan.plan.toml": ("P284", 46, 26),
    "guesses-of-long-positions.plan.toml": ("P322", 46, 15),
    "guesses-that-leave-nothing-out.plan.toml": ("P281", 45, 26),
    "keys-of-no-layer.model.toml": ("P253", 18, 20),
    "kinds-of-too-few-layers.model.toml": ("P275", 17, 9),
    "gates-too-large.plan.toml": ("P202", 14, 13),
    "half-a-byte.plan.toml": ("P105", 20, 10),
    "heads-not-shared.model.toml": ("P240", 10, 12),
    "home-folder.plan.toml": ("P413", 4, 11),
    "hot-too-small.plan.toml": ("P202", 15, 7),
    "inherit-of-a-number.plan.toml": ("P024", 3, 22),
    "inherit-wrong-word.plan.toml": ("P104", 3, 28),
    "inherited-array.device.toml": ("P104", 7, 9),
    "inherited-rule.plan.toml": ("P235", 41, 9, "parts/base.plan.toml"),
    "inline-and-header.plan.toml": ("P011", 47, 1),
    "key-under-wrong-table.plan.toml": ("P101", 25, 1),
    "kv-too-small.plan.toml": ("P202", 13, 6),
    "latin-1.plan.toml": ("P006", 2, 10),
    "prefixes-kept-for-nobody.plan.toml": ("P278", 52, 16),
    "layer-covered-twice.plan.toml": ("P213", 27, 10),
    "layer-named-twice.plan.toml": ("P213", 27, 10),
    "layer-out-of-range.plan.toml": ("P212", 31, 10),
    "left-to-replace.plan.toml": ("P420", 4, 11),
    "long-line.plan.toml": ("P211", 28, 102),
    "look-ahead-of-gates.plan.toml": ("P254", 45, 14),
    "mail-address.device.toml": ("P412", 26, 10),
    "measured-without-spread.device.toml": ("P401", 25, 10),
    "memory-of-the-sparse-unit.plan.toml": ("P414", 10, 15),
    "misnamed.device.toml": ("P244", 2, 6),
    "misnamed.model.toml": ("P243", 2, 6),
    "missing-device-file.plan.toml": ("P015", 2, 10),
    "missing-in-override.plan.toml": ("P102", 30, 1),
    "missing-key.plan.toml": ("P102", 51, 1),
    "missing-model.plan.toml": ("P102", 1, 1),
    "missing-threshold-too-low.plan.toml": ("P255", 46, 21),
    "leave-out-beside-a-score.plan.toml": ("P292", 46, 13),
    "leave-out-without-scores.plan.toml": ("P292", 45, 13),
    "misspelt-in-base.plan.toml": ("P101", 4, 1, "parts/dented-key.toml"),
    "model-is-device.plan.toml": ("P014", 3, 9),
    "multi-line-value.plan.toml": ("P101", 8, 1),
    "negative-quantity.plan.toml": ("P105", 14, 13),
    "newer-schema-version.plan.toml": ("P107", 1, 18),
    "no-backend.plan.toml": ("P232", 23, 22),
    "no-equals.plan.toml": ("P010", 8, 8),
    "no-predictors.plan.toml": ("P233", 44, 13),
    "no-schema-version.plan.toml": ("P102", 1, 1),
    "no-suffix.toml": ("P009", 1, 1),
    "no-value.plan.toml": ("P010", 24, 6),
    "not-a-number.plan.toml": ("P108", 45, 13),
    "nul-byte.plan.toml": ("P005", 41, 10),
    "null-beside-cpu.plan.toml": ("P265", 5, 33),
    "number-for-text.plan.toml": ("P103", 4, 11),
    "number-too-large.plan.toml": ("P104", 41, 9),
    "odd-head.model.toml": ("P241", 11, 12),
    "odd-share.model.toml": ("P248", 19, 9),
    "override-without-settings.plan.toml": ("P214", 30, 1),
    "predictor-too-small.plan.toml": ("P202", 14, 13),
    "prompts-without-backend.plan.toml": ("P232", 42, 8),
    "quoted-key.plan.toml": ("P101", 44, 1),
    "quoted-wide-key.model.toml": ("P101", 16, 1),
    "rank-not-of-groups.model.toml": ("P242", 19, 8),
    "reads-behind-attention.plan.toml": ("P237", 45, 14),
    "remove-no-path.plan.toml": ("P023", 3, 11),
    "remove-nothing.plan.toml": ("P023", 3, 11),
    "remove-required.plan.toml": ("P102", 1, 1),
    "remove-without-extends.plan.toml": ("P025", 2, 10),
    "rests-on-claims.plan.toml": ("P403", 2, 10),
    "reversed-range.plan.toml": ("P212", 27, 10),
    "router-of-no-experts.plan.toml": ("P268", 44, 13),
    "same-cluster-twice.device.toml": ("P252", 8, 12),
    "same-override-twice.plan.toml": ("P215", 33, 6),
    "same-reads-twice.device.toml": ("P256", 28, 1),
    "rows-of-a-unit-that-may-be-lost.plan.toml": ("P267", 38, 14),
    "rows-without-the-cpu.plan.toml": ("P267", 35, 8),
    "scales-of-halves.plan.toml": ("P223", 21, 10),
    "scales-unknown.plan.toml": ("P104", 21, 10),
    "scales-without-room.plan.toml": ("P202", 12, 13),
    "self-reference.plan.toml": ("P014", 2, 10),
    "serial-number.device.toml": ("P411", 26, 10),
    "settings-of-the-sparse-unit.plan.toml": ("P414", 11, 1),
    "share-above-one.plan.toml": ("P104", 24, 7),
    "shares-above-one.plan.toml": ("P210", 23, 9),
    "shares-below-one-in-override.plan.toml": ("P210", 28, 9),
    "sinks-of-no-model.model.toml": ("P253", 19, 15),
    "sparsity-of-relu.plan.toml": ("P257", 47, 2),
    "sparsity-unused.plan.toml": ("P260", 44, 13),
    "sparsity-without-goal.plan.toml": ("P259", 47, 2),
    "split-over-inherited.plan.toml": ("P210", 5, 9),
    "stride-absurd.plan.toml": ("P220", 20, 10),
    "stride-below-bundle.plan.toml": ("P220", 20, 10),
    "stride-not-of-blocks.plan.toml": ("P221", 20, 10),
    "tab-before.plan.toml": ("P103", 35, 12),
    "table-for-array.plan.toml": ("P103", 26, 1),
    "tensor-without-layer.model.toml": ("P247", 19, 8),
    "text-for-number.plan.toml": ("P103", 41, 9),
    "text-schema-version.plan.toml": ("P103", 1, 18),
    "threshold-without-fatrelu.model.toml": ("P245", 17, 13),
    "thresholds-for-another-goal.plan.toml": ("P258", 50, 14),
    "thresholds-missing.plan.toml": ("P028", 50, 14),
    "thresholds-of-another-model.plan.toml": ("P258", 50, 14),
    "toml-1-1.plan.toml": ("P013", 23, 10),
    "too-many-experts.model.toml": ("P249", 20, 18),
    "too-many-threads.plan.toml": ("P230", 38, 11),
    "true-for-number.plan.toml": ("P103", 38, 11),
    "true-schema-version.plan.toml": ("P103", 1, 18),
    "two-dense-units.plan.toml": ("P262", 23, 9),
    "two-on-a-line.plan.toml": ("P010", 35, 13),
    "two-phases-of-one-block.plan.toml": ("P222", 35, 10),
    "unclosed-array.plan.toml": ("P010", 40, 7),
    "unclosed-header.plan.toml": ("P010", 43, 8),
    "unclosed-text.plan.toml": ("P010", 14, 19),
    "unit-not-there.plan.toml": ("P211", 23, 23),
    "unit-without-room.plan.toml": ("P264", 11, 10),
    "unknown-backend.plan.toml": ("P104", 5, 20),
    "unknown-device-name.plan.toml": ("P015", 2, 10),
    "unknown-feature.device.toml": ("P104", 6, 21),
    "unknown-key.family.toml": ("P295", 5, 6),
    "unknown-key.plan.toml": ("P101", 8, 1),
    "unknown-table.plan.toml": ("P101", 40, 2),
    "unknown-unit-kind.plan.toml": ("P101", 5, 27),
    "unknown-unit.plan.toml": ("P105", 16, 8),
    "unreadable-expression.family.toml": ("P296", 5, 25),
    "usable-above-installed.device.toml": ("P250", 16, 10),
    "utf-16.plan.toml": ("P006", 1, 1),
    "wide-before-place.plan.toml": ("P106", 28, 24),
    "wide-characters.plan.toml": ("P101", 41, 1),
    "wide-values.model.toml": ("P253", 19, 15),
    "window-of-no-layer.model.toml": ("P253", 20, 17),
    "windows-lines.plan.toml": ("P103", 41, 9),
    "workspace-too-small.plan.toml": ("P202", 17, 13),
    "wrong-kind-of-unit.device.toml": ("P104", 12, 8),
    "wrong-word.plan.toml": ("P104", 44, 13),
}


def test_every_file_has_its_mistake_listed() -> None:
    assert list_names() == sorted(PLANTED)
    assert len(PLANTED) >= 40


def test_every_rule_has_a_file() -> None:
    assert {rule.code for rule in list_rules()} <= {planted[0] for planted in PLANTED.values()}


@pytest.mark.parametrize("name", list_names())
def test_the_mistake_is_found_at_its_place(name: str) -> None:
    planted = PLANTED[name]
    code, stdout, _ = validate(name, "--output-format", "json")
    findings = json.loads(stdout)
    assert len(findings) == 1, findings
    finding = findings[0]
    span = finding["span"]
    file = planted[3] if len(planted) == 4 else name
    assert (finding["code"], span["file"], span["line"], span["column"]) == (
        planted[0],
        file,
        planted[1],
        planted[2],
    )
    warning = planted[0] in WARNINGS
    assert finding["severity"] == ("warning" if warning else "error")
    assert code == (0 if warning else 1)


@pytest.mark.parametrize("name", list_names())
def test_the_output_is_as_expected(name: str) -> None:
    _, stdout, _ = validate(name)
    assert stdout == find_expected(name).read_text(encoding="utf-8")


def test_all_files_at_once() -> None:
    code, stdout, stderr = validate(*list_names(), "--output-format", "concise")
    assert code == 1
    assert len(stdout.splitlines()) == len(PLANTED)
    errors = len(PLANTED) - sum(planted[0] in WARNINGS for planted in PLANTED.values())
    assert f"{len(PLANTED)} files, {errors} errors, {len(PLANTED) - errors} warnings" in stderr


def test_the_parts_themselves_are_sound() -> None:
    parts = sorted(str(p.relative_to(BROKEN)) for p in (BROKEN / "parts").glob("*.toml"))
    sound = [part for part in parts if "dented" not in part]
    assert validate(*sound)[0] == 0
