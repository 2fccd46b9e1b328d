"""Connections to servers that do not answer."""

from __future__ import annotations

import pytest

from streamfold.spark.errors import EndpointUnavailableError
from streamfold.spark.stream.client import ServerConnection, answer_timeout
from streamfold.spark.stream.options import parse_source

from .unreachable import address, connections, dropping_server, silent_server


def test_a_server_whose_silence_uses_up_the_time_is_asked_once() -> None:
    with silent_server() as listening:
        given = {"endpoint": address(listening), "basin": "b", "stream": "s", "retryTimeout": "0.1"}
        with (
            ServerConnection(parse_source(given).endpoint, 0.2) as connection,
            pytest.raises(EndpointUnavailableError, match="timed out"),
        ):
            connection.get("/v1/streams/s/records/tail")
        assert connections(listening) == 1


def test_a_server_that_drops_packets_is_given_up() -> None:
    with dropping_server() as listening:
        given = {"endpoint": address(listening), "basin": "b", "stream": "s", "retryTimeout": "0.1"}
        with (
            ServerConnection(parse_source(given).endpoint, 0.2) as connection,
            pytest.raises(EndpointUnavailableError, match="timed out"),
        ):
            connection.get("/v1/streams/s/records/tail")


@pytest.mark.parametrize(("retried", "waited"), [("1", 3.0), ("5", 5.0), ("60", 20.0)])
def test_a_short_question_waits_for_no_longer_than_failures_are_retried(
    retried: str, waited: float
) -> None:
    given = {"endpoint": "http://host", "basin": "b", "stream": "s", "retryTimeout": retried}
    assert answer_timeout(parse_source(given).endpoint) == waited
