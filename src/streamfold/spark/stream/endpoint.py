"""Where streams are and with which secrets; secrets never show in a repr, and so in no message."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, urlsplit

from streamfold.spark.errors import OptionError

_PLACEHOLDER = "{basin}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A basin at an S2 endpoint. Pickled with a plan for its tasks, so it holds no connection."""

    #: Origin of the server; where `{basin}` stands in it, the basin is named by the host.
    template: str
    basin: str
    token: str = field(default="", repr=False)
    encryption_key: str = field(default="", repr=False)
    #: Seconds for which a request that failed is repeated.
    retry_timeout: float = 60.0
    #: Certificates (PEM) to trust instead of the system's.
    trusted: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        parts = self._parts()
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise OptionError("endpoint", "must be an origin such as https://host:port, alone")
        if parts.path not in ("", "/", "/v1") or parts.query:
            raise OptionError("endpoint", "must be an origin such as https://host:port, no path")

    @property
    def secure(self) -> bool:
        return self._parts().scheme == "https"

    @property
    def host(self) -> str:
        return self._parts().hostname or ""

    @property
    def port(self) -> int | None:
        return self._parts().port

    @property
    def origin(self) -> str:
        """For messages."""
        return self.template.replace(_PLACEHOLDER, self.basin)

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        found = {}
        if _PLACEHOLDER not in self.template:
            found["s2-basin"] = self.basin
        if self.token:
            found["authorization"] = f"Bearer {self.token}"
        if self.encryption_key:
            found["s2-encryption-key"] = self.encryption_key
        return found

    def _parts(self) -> SplitResult:
        return urlsplit(self.origin)


def stream_path(stream: str, *rest: str) -> str:
    return "/".join(("/v1/streams", quote(stream, safe=""), *rest))
