"""Azure as a destination of archives: the kit of destinations, against npm `azurite`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.testing.destination_kit import DestinationConformance
from tests.archive.azure.emulator import AzureServer, run_azure_server

CONTAINER = "archives"


@pytest.fixture(scope="module")
def azure_server() -> Iterator[AzureServer]:
    with run_azure_server() as server:
        server.create_container(CONTAINER)
        yield server


class TestAzure(DestinationConformance):
    @pytest.fixture
    def destination(self, azure_server: AzureServer) -> Destination:
        url = f"az://{CONTAINER}/{uuid.uuid4().hex}"
        return Destination.open(url, **azure_server.options())
