"""Files of `deploy/`, checked without an engine that runs them.

What is parsed: YAML, JSON, TOML, the unit, the instructions of the Dockerfile. Templates of the chart
are read with all their branches, and values that they name are compared with `values.yaml`.
`prove_chart.py` renders the chart with helm, and `prove_unit.py` has systemd verify the unit. No image
is built here.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamfold import __version__
from streamfold.cli.exit_status import ExitStatus
from streamfold.cli.servers.serve import serve
from streamfold.cli.servers.snapshotter import snapshotter
from streamfold.model.resource_spec import read_resource_spec
from streamfold.snapshotter.config.files import load_configuration

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/streamfold"
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
UNIT = DEPLOY / "systemd/streamfold.service"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
#: A host before a path, as in registry.example/image.
HOST = re.compile(r"^[\w-]+(?:\.[\w-]+)+(?::\d+)?/")


def serve_options() -> set[str]:
    return {option for known in serve.params for option in known.opts}


def check_serve(arguments: list[str]) -> None:
    """Refuse options that `serve` does not have."""
    assert arguments[0] == "serve"
    named = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    assert named
    assert named <= serve_options(), named - serve_options()


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def test_the_image_has_two_stages_and_runs_as_a_numbered_user_with_a_health_check() -> None:
    found = instructions()
    stages = [rest for name, rest in found if name == "FROM"]
    assert len(stages) == 2
    for stage in stages:
        assert not HOST.match(stage), "the registry is the builder's choice"
        assert "latest" not in stage
    last = found[max(at for at, (name, _) in enumerate(found) if name == "FROM") :]
    (user,) = [rest for name, rest in last if name == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert not any("pip install" in rest for name, rest in last if name == "RUN")
    (health,) = [rest for name, rest in last if name == "HEALTHCHECK"]
    script = json.loads(health[health.index("[") :])[2]
    compile(script, "HEALTHCHECK", "exec")
    assert "/health" in script
    command = [json.loads(rest) for name, rest in last if name in ("ENTRYPOINT", "CMD")]
    assert command[0] == ["streamfold"]
    check_serve(command[1])


def test_what_the_image_is_built_from_exists_and_is_sent_to_the_builder() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split("\n")
    sent = {line[1:] for line in ignored if line.startswith("!")}
    build = [
        rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest
    ]
    copied = {source for sources in build for source in sources[:-1]}
    assert copied == sent
    assert all((DEPLOY.parent / source).exists() for source in copied)


def test_services_of_compose_start_commands_that_exist_in_an_order_that_exists() -> None:
    services = COMPOSE["services"]
    check_serve(services["server"]["command"])
    run = snapshotter.commands["run"]
    known = {option for parameter in run.params for option in parameter.opts}
    command = services["snapshotter"]["command"]
    assert command[:2] == ["snapshotter", "run"]
    assert {word for word in command if word.startswith("--")} <= known
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert not HOST.match(service.get("image", "")), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "what asks for no token is for this machine alone"
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), volume
            else:
                assert source in COMPOSE["volumes"], volume


def test_the_files_that_compose_mounts_are_valid() -> None:
    assert read_resource_spec(DEPLOY / "compose/init.json", "init file").basins
    (table,) = load_configuration(DEPLOY / "compose/snapshotter.toml").tables
    server = COMPOSE["services"]["server"]
    assert table.source.server == f"http://server:{server['command'][4]}"
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    assert all((DEPLOY / "prometheus" / rules).exists() for rules in scraped["rule_files"])
    targets = {
        target.partition(":")[0]
        for job in scraped["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    assert targets <= set(COMPOSE["services"])


def test_the_unit_starts_serve_with_options_that_exist_as_a_user_without_rights() -> None:
    settings = [line.partition("=")[::2] for line in UNIT.read_text().splitlines() if "=" in line]
    first = dict(reversed(settings))
    _, *command = shlex.split(first["ExecStart"])
    check_serve(command)
    options = re.findall(r"^#?STREAMFOLD_OPTIONS=(.*)$", example_env(), re.MULTILINE)
    check_serve(["serve", *shlex.split(" ".join(options))])
    assert first["DynamicUser"] == first["NoNewPrivileges"] == "yes"
    assert first["ProtectSystem"] == "strict"
    assert int(first["RestartPreventExitStatus"]) == ExitStatus.FENCED
    # The server must see the id of the boot, or it does not notice a power cut.
    assert "ProcSubset" not in first


def example_env() -> str:
    return (DEPLOY / "systemd/serve.env").read_text()


def test_variables_of_the_unit_are_those_of_serve() -> None:
    known = {str(parameter.envvar) for parameter in serve.params if parameter.envvar}
    own = {"STREAMFOLD_HOST", "STREAMFOLD_PORT", "STREAMFOLD_OPTIONS", "STREAMFOLD_ROOT_TOKEN"}
    assert set(re.findall(r"^#?(STREAMFOLD_\w+)=", example_env(), re.MULTILINE)) <= known | own


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["name"], chart["appVersion"]) == ("streamfold", __version__)


def leaves(values: Any, path: str = "") -> set[str]:
    if not isinstance(values, dict) or not values or path == ".resources":
        return {path}
    return {leaf for name, value in values.items() for leaf in leaves(value, f"{path}.{name}")}


def test_templates_use_every_value_and_no_other() -> None:
    named = {
        name
        for template in (CHART / "templates").iterdir()
        for name in re.findall(r"\.Values((?:\.\w+)+)", template.read_text())
    }
    assert named == leaves(VALUES)


def all_branches(template: str) -> list[dict[str, Any]]:
    """The documents of a template with all its branches, and text where values would be."""
    assert len(re.findall(r"{{-? (?:if|range|with|define)\b", template)) == len(
        re.findall(r"{{-? end\b", template)
    )
    text = re.sub(
        r"^( *){{-? (?:toYaml|include|\.Files)\b.*}}$", r"\1value: a", template, flags=re.M
    )
    text = re.sub(r"^ *{{-? *(?:if|else|end|range|with|fail)\b.*}}\n", "", text, flags=re.MULTILINE)
    return [found for found in yaml.safe_load_all(re.sub(r"{{.*?}}", "a", text)) if found]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_template_with_all_its_branches_is_yaml_of_kubernetes(template: Path) -> None:
    for document in all_branches(template.read_text()):
        assert {"apiVersion", "kind", "metadata"} <= document.keys()


def test_the_pod_of_the_chart_has_no_rights() -> None:
    (stateful,) = all_branches((CHART / "templates/statefulset.yaml").read_text())
    pod = stateful["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    check_serve(container["args"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = stateful["spec"]["volumeClaimTemplates"]
    given = {volume["name"] for volume in pod["volumes"]} | {c["metadata"]["name"] for c in claims}
    assert mounted == given


def test_a_standby_of_the_chart_is_sent_no_clients_and_holds_up_no_update() -> None:
    """It is not ready until it is active, so an update must not wait for that."""
    text = (CHART / "templates/statefulset.yaml").read_text()
    assert VALUES["standby"] is False
    choices = dict(re.findall(r"(\w+): {{ ternary (\S+) \S+ .Values.standby }}", text))
    assert choices == {
        "replicas": "2",
        "type": '"OnDelete"',
        "path": '"/ready"',
        "periodSeconds": "1",
        "failureThreshold": "1",
    }


def test_options_in_templates_exist() -> None:
    text = (CHART / "templates/statefulset.yaml").read_text()
    assert set(re.findall(r"(?<=[ \"])--[a-z][a-z-]+", text)) <= serve_options()


def test_the_chart_has_the_alerts_of_prometheus() -> None:
    linked = CHART / "files/alerts.yaml"
    assert linked.resolve() == (DEPLOY / "prometheus/alerts.yaml").resolve()
