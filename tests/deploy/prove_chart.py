"""The Helm chart, linted and rendered. Needs helm. Run by `make prove`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_manifests import CHART, DEPLOY, check_serve, run

SETTINGS = [
    {},
    {"storage": {"kind": "s3", "s3": {"bucket": "b", "existingSecret": "k", "endpoint": "http://s"}}},
    {"auth": {"existingSecret": "a"}, "tls": {"existingSecret": "t"}, "console": False,
     "publicUrl": "https://a.example", "extraArgs": ["--commit-interval=0.1"],
     "extraEnv": [{"name": "A", "value": "b"}],
     "monitoring": {"serviceMonitor": True, "rules": True}},
    {"standby": True, "storage": {"kind": "s3", "s3": {"bucket": "b"}}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=["local", "s3", "everything", "standby"])
def test_helm_renders_the_chart(settings: dict[str, Any], tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(settings))
    run("helm", "lint", "--strict", str(CHART), "--values", str(values))
    rendered = run("helm", "template", "demo", str(CHART), "--values", str(values)).stdout
    documents = [found for found in yaml.safe_load_all(rendered) if found]
    kinds = {document["kind"]: document for document in documents}
    assert {"ServiceAccount", "Service", "StatefulSet"} <= kinds.keys()
    (container,) = kinds["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    check_serve(container["args"])
    assert kinds["StatefulSet"]["spec"]["replicas"] == (2 if settings.get("standby") else 1)
    if settings.get("monitoring"):
        alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
        assert kinds["PrometheusRule"]["spec"] == alerts
        assert kinds["ServiceMonitor"]
