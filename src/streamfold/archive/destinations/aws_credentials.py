"""Named AWS credentials: each destination and each sink names the profile that it uses.

    credentials = {
        "local":  {"type": "ambient", "region": "eu-west-1"},
        "events": {"type": "assume_role", "role_arn": "arn:aws:iam::…:role/events"},
    }

`ambient` uses the credentials that boto3 finds: variables, shared files, web identity, the
machine's role. `assume_role` uses these to assume a role through STS, and renews it well before it
expires. A profile says where credentials come from and never holds any, so it may be shown and
logged.

Needs boto3: `pip install streamfold[aws]`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from streamfold.blob.aws_identity import (
    CredentialsUnavailableError,
    explained,
    open_session,
    storage_credential,
)
from streamfold.errors import InvalidError

if TYPE_CHECKING:  # these exist only in obstore's stubs
    from obstore.store import S3Credential

AMBIENT = "ambient"
ASSUME_ROLE = "assume_role"
DEFAULT_SESSION_NAME = "streamfold"
#: Seconds to connect, and to wait for a response. Short, because callers retry.
CONNECT_TIMEOUT = 5
READ_TIMEOUT = 15


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source of credentials. `endpoint_url` is for AWS-compatible services."""

    type: str = AMBIENT
    region: str | None = None
    role_arn: str | None = None
    external_id: str | None = None
    session_name: str = DEFAULT_SESSION_NAME
    endpoint_url: str | None = None

    def __repr__(self) -> str:
        # Omits the external id, which is shared between only two parties.
        return f"Profile(type={self.type!r}, region={self.region!r}, role_arn={self.role_arn!r})"


class BlobOptions(TypedDict, total=False):
    """Options for opening a blob store on S3."""

    credential_provider: Callable[[], S3Credential]
    region: str
    endpoint: str


class AwsAccess:
    """A profile in use. Provides clients and storage options that renew their credentials."""

    def __init__(self, name: str, profile: Profile, now: Callable[[], datetime]) -> None:
        _require_boto3()
        self._name = name
        self._profile = profile
        self._now = now
        self._session: Any = None
        # Several sinks may share a profile, and sessions are not thread-safe.
        self._one_at_a_time = threading.Lock()

    def __repr__(self) -> str:
        return f"AwsAccess({self._name!r})"

    def client(self, service: str) -> Any:
        """Return a boto3 client that sends each request once. Safe to use from any thread.

        Slow, and reads files, so do not call it on an event loop.
        """
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=READ_TIMEOUT,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        failure: str
        try:
            with self._one_at_a_time:
                return self._opened().client(
                    service, endpoint_url=self._profile.endpoint_url, config=config
                )
        except (BotoCoreError, ValueError) as error:
            failure = type(error).__name__
        raise InvalidError(
            f"no client for {service} with credentials {self._name!r} ({failure}): give a region, "
            "and check endpoint_url"
        )

    def blob_options(self) -> BlobOptions:
        """Return the options that open a blob store on S3 under this profile."""
        options: BlobOptions = {"credential_provider": self.storage_credentials}
        if self._profile.region:
            options["region"] = self._profile.region
        if self._profile.endpoint_url:
            options["endpoint"] = self._profile.endpoint_url
        return options

    def storage_credentials(self) -> S3Credential:
        """Return current credentials in the form that obstore expects. Called from any thread."""
        with self._one_at_a_time, explained():
            credentials = self._opened().get_credentials()
        if credentials is None:
            raise CredentialsUnavailableError(
                f"credentials {self._name!r}: none were found in the environment, in files or on "
                "the machine; set them, or name another profile"
            )
        return storage_credential(credentials, self._now())

    def _opened(self) -> Any:
        if self._session is None:
            self._session = _open_session(self._name, self._profile, self._now)
        return self._session


class Profiles:
    """The profiles of a configuration, by name."""

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        *,
        path: str = "credentials",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        for name, profile in profiles.items():
            _check(profile, f"{path}.{name}")
        self._profiles = dict(profiles)
        self._path = path
        self._now = now
        # Users of the same profile in the same region share one session, and thus one assumed role.
        self._accesses: dict[tuple[str | None, str | None], AwsAccess] = {}

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, object],
        *,
        path: str = "credentials",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> Profiles:
        """Parse the profiles in plain configuration values. `path` is where they were found."""
        profiles = {name: _parse(value, f"{path}.{name}") for name, value in raw.items()}
        return cls(profiles, path=path, now=now)

    def access(self, name: str | None, *, path: str, region: str | None = None) -> AwsAccess:
        """Return access under the named profile, or the ambient one for None.

        `region` overrides the profile's. `path` is where the name was found, for the error message
        if the profile does not exist.
        """
        if name is not None and name not in self._profiles:
            raise InvalidError(
                f"{path} names credentials {name!r}, which are not under {self._path}: "
                f"use one of {sorted(self._profiles)}"
            )
        key = (name, region)
        if key not in self._accesses:
            profile = Profile() if name is None else self._profiles[name]
            located = msgspec.structs.replace(profile, region=region or profile.region)
            self._accesses[key] = AwsAccess(name or AMBIENT, located, self._now)
        return self._accesses[key]


def _parse(raw: object, path: str) -> Profile:
    try:
        return msgspec.convert(raw, Profile)
    except msgspec.ValidationError as error:
        raise InvalidError(f"{path}: {error}") from None


def _check(profile: Profile, path: str) -> None:
    if profile.type not in ("", AMBIENT, ASSUME_ROLE):
        raise InvalidError(f"{path}.type is {profile.type!r}: use {AMBIENT!r} or {ASSUME_ROLE!r}")
    if profile.type != ASSUME_ROLE:
        if profile.role_arn or profile.external_id:
            raise InvalidError(f"{path} has a role, but its type is not {ASSUME_ROLE!r}: set it")
        return
    if not re.fullmatch(r"arn:[^:\s]+:[^:\s]*:[^:\s]*:[^:\s]*:\S+", profile.role_arn or ""):
        raise InvalidError(
            f"{path}.role_arn is {profile.role_arn!r}: {ASSUME_ROLE!r} needs the ARN of a role, as "
            "arn:aws:iam::123456789012:role/name"
        )
    if not re.fullmatch(r"[\w+=,.@-]{2,64}", profile.session_name, re.ASCII):
        raise InvalidError(
            f"{path}.session_name is {profile.session_name!r}: STS takes 2 to 64 letters, digits "
            "and any of _+=,.@-"
        )


class _RoleSource:
    """A credential source with the interface that botocore's resolver expects."""

    METHOD = "assume-role"
    CANONICAL_NAME = None

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    def load(self) -> Any:
        return self._credentials


def _open_session(name: str, profile: Profile, now: Callable[[], datetime]) -> Any:
    import boto3
    from botocore.credentials import CredentialResolver, DeferredRefreshableCredentials

    core = open_session()
    if profile.type == ASSUME_ROLE:
        role = DeferredRefreshableCredentials(
            _role_request(name, profile), _RoleSource.METHOD, time_fetcher=now
        )
        core.register_component("credential_provider", CredentialResolver([_RoleSource(role)]))
    return boto3.Session(botocore_session=core, region_name=profile.region)


def _role_request(name: str, profile: Profile) -> Callable[[], dict[str, str]]:
    base = AwsAccess(
        name, msgspec.structs.replace(profile, type=AMBIENT), lambda: datetime.now(UTC)
    )
    role = {"RoleArn": profile.role_arn, "RoleSessionName": profile.session_name}
    if profile.external_id:
        role["ExternalId"] = profile.external_id

    def fetch() -> dict[str, str]:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        failure: str
        try:
            credentials = base.client("sts").assume_role(**role)["Credentials"]
            return {
                "access_key": credentials["AccessKeyId"],
                "secret_key": credentials["SecretAccessKey"],
                "token": credentials["SessionToken"],
                "expiry_time": credentials["Expiration"].isoformat(),
            }
        except ClientError as error:
            # The text of a rejection may quote signed headers, so only its code is shown.
            failure = str(error.response.get("Error", {}).get("Code", "unknown"))
        except (BotoCoreError, ResponseParserError) as error:
            failure = type(error).__name__
        raise CredentialsUnavailableError(
            f"credentials {name!r}: STS did not grant role {profile.role_arn} ({failure}); check its "
            "trust policy, the external_id, and the credentials that request it"
        )

    return fetch


def _require_boto3() -> None:
    # Imported only where it is used, because it is slow to load and only AWS needs it.
    try:
        import boto3  # noqa: F401
    except ImportError:
        raise InvalidError(
            "AWS sinks and named credentials need boto3: pip install 'streamfold[aws]'"
        ) from None
