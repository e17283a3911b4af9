"""The container and the Kubernetes example are what their own checkers call sound."""

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pi2.cli.serve import KEY_VARIABLE
from pi2.cli.serve import serve_command as command

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tools" / "deploy"
CONTAINERFILE = FOLDER / "Containerfile"
MANIFEST = FOLDER / "kubernetes.yaml"


def find_program(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def read_instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text("utf-8"), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def test_the_containerfile_has_no_findings() -> None:
    done = subprocess.run(
        [find_program("hadolint"), "--failure-threshold", "style", str(CONTAINERFILE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_container_runs_as_nobody_in_particular_and_copies_what_exists() -> None:
    instructions = list(read_instructions())
    last = {name: rest for name, rest in instructions if name != "RUN"}
    assert last["USER"].isdecimal() and int(last["USER"]) >= 1000
    assert "/health" in last["HEALTHCHECK"]
    assert {"/cache", "/models"} == set(json.loads(last["VOLUME"]))
    copied = [rest.split()[:-1] for name, rest in instructions if name == "COPY"]
    for source in (item for row in copied for item in row if not item.startswith(("-", "/"))):
        assert (ROOT / source).exists(), source
    arguments = [*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])]
    check_arguments(arguments[1:])


def test_kubernetes_would_take_the_manifest() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    documents = list(yaml.safe_load_all(MANIFEST.read_text("utf-8")))
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)
    kinds = {document["kind"] for document in documents}
    assert kinds == {"Deployment", "Service", "PersistentVolumeClaim"}


def test_the_manifest_fits_together() -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text("utf-8")))
    of_kind: dict[str, list[Any]] = {}
    for document in documents:
        of_kind.setdefault(document["kind"], []).append(document)
    pod = of_kind["Deployment"][0]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    service = of_kind["Service"][0]["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    claims = {document["metadata"]["name"] for document in of_kind["PersistentVolumeClaim"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    used = [volumes[name].get("persistentVolumeClaim") for name in ("models", "cache")]
    assert {claim["claimName"] for claim in used} == claims
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert [item["name"] for item in container["env"]] == [KEY_VARIABLE]
    # Kubernetes ends a pod that takes more than it says; what pi2 promises, it asks for.
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    check_arguments(container["args"])


def check_arguments(arguments: list[str]) -> None:
    """The command line is one that pi2 serve understands."""
    assert arguments[0] == "serve"
    assert command.make_context("serve", arguments[1:]).params["host"] == "0.0.0.0"
