"""Azure's blob service on this machine: npm `azurite`, as published, on a port of its own."""

from __future__ import annotations

import base64
import hmac
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

FOLDER = Path(__file__).parent
#: The one account of every emulator, published by its makers.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"


@dataclass(frozen=True, slots=True)
class AzureServer:
    endpoint: str

    def options(self) -> dict[str, str]:
        return {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint}

    def create_container(self, name: str) -> None:
        date = formatdate(usegmt=True)
        resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{VERSION}\n{resource}"
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256")
        headers = {
            "x-ms-date": date,
            "x-ms-version": VERSION,
            "authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "content-length": "0",
        }
        url = f"{self.endpoint}/{name}?restype=container"
        request = urllib.request.Request(url, method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=240) as answer:
            assert answer.status == 201


@contextmanager
def run_azure_server() -> Iterator[AzureServer]:
    """Install the emulator and run it until the block ends; it keeps nothing."""
    install = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(install, cwd=FOLDER, check=True, timeout=300)
    command = [str(FOLDER / "node_modules/.bin/azurite-blob"), "--blobPort", "0"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            found = (re.search(r"listens on (http://\S+)", line) for line in process.stdout)
            address = next(match[1] for match in found if match)
            yield AzureServer(f"{address}/{ACCOUNT}")
        finally:
            process.terminate()
            process.stdout.read()
