"""Variables that operators of s2-lite have set."""

from __future__ import annotations

import pytest

from streamfold.cli.servers.serve import flush_interval, unused
from streamfold.errors import InvalidError

OPTIONS = ("--append-inflight-bytes", "--commit-timeout", "--bucket", "--port")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10ms", 0.01), ("1s", 1.0), ("1m 30s", 90.0), ("500us", 0.0005), ("0.5s", 0.5)],
)
def test_the_flush_interval_is_written_as_slatedb_has_it(text: str, seconds: float) -> None:
    assert flush_interval({"SL8_FLUSH_INTERVAL": text}) == pytest.approx(seconds)


def test_without_the_variable_no_interval_is_set() -> None:
    assert flush_interval({}) is None
    assert flush_interval({"SL8_FLUSH_INTERVAL": ""}) is None


@pytest.mark.parametrize("text", ["10", "ms", "10 parsecs", "-5ms", "null", "5ms,"])
def test_an_interval_that_is_not_a_duration_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(InvalidError, match=r"SL8_FLUSH_INTERVAL.*like 10ms.*--commit-interval"):
        flush_interval({"SL8_FLUSH_INTERVAL": text})


def test_variables_without_effect_are_named_with_the_option_that_has_it() -> None:
    environment = {
        "SL8_FLUSH_INTERVAL": "10ms",
        "SL8_MAX_UNFLUSHED_BYTES": "1",
        "SL8_L0_SST_SIZE_BYTES": "secret-value",
        "S2LITE_INIT_FILE": "/init.json",
        "S2LITE_PORT": "80",
        "S2_ACCESS_TOKEN": "secret-value",
        "PATH": "/bin",
    }
    said = list(unused(environment, OPTIONS))
    assert said == [
        "S2LITE_PORT is not used: give --port instead",
        "SL8_L0_SST_SIZE_BYTES is not used, and no option replaces it: see "
        "'streamfold serve --help'",
        "SL8_MAX_UNFLUSHED_BYTES is not used: give --append-inflight-bytes instead",
    ]
