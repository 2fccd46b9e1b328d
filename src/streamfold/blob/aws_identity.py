"""Finds AWS credentials where every AWS tool does, and keeps them fresh while a store is open.

Keys in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` win. Otherwise botocore searches: a profile
(`AWS_PROFILE`, `~/.aws`) with its keys, SSO session, role or credential process; a web identity;
the container's credentials; the instance's role. It renews credentials well before they expire.

Without botocore (`pip install 'streamfold[aws]'`), obstore and SlateDB still find web identities
and the credentials of containers and instances, but they read no files. If files are needed, that
is an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamfold.errors import InvalidError, RetryLaterError

if TYPE_CHECKING:  # exists only in obstore's stubs
    from obstore.store import S3Credential

#: How long credentials may be cached. botocore renews them at least ten minutes before they expire,
#: so the credentials it returns are valid for this long.
LIFETIME: Final = timedelta(minutes=10)
#: Limits in seconds for requests to services that issue credentials, such as STS or a sign-in
#: portal. botocore's own limits are minutes, and a person at a terminal may be waiting. Two
#: attempts, so that one lost packet is not an error.
_REQUEST_LIMITS: Final = {
    "connect_timeout": 3,
    "read_timeout": 10,
    "retries": {"total_max_attempts": 2, "mode": "standard"},
}
#: Loggers to which botocore writes a traceback when a renewal fails. It may quote responses.
_RENEWAL_LOGGERS: Final = ("botocore.credentials", "botocore.tokens")
#: Variables that hold keys or disable signing. obstore and SlateDB read them directly.
_DECIDED_BY: Final = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
#: Files that only botocore reads, with the variables that change their paths.
_FILES: Final = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
#: Variables for credential sources that obstore and SlateDB support without botocore.
_KNOWN_SOURCES: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


class CredentialsUnavailableError(RetryLaterError):
    """No credentials were found, so no request was sent."""

    code = "credentials_unavailable"


class AwsIdentity:
    """The credentials, region and endpoint that botocore finds. Safe to use from any thread."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._credentials: Any = None
        # A botocore session is not thread-safe, and one request for new credentials is enough.
        self._one_at_a_time = threading.Lock()

    def region(self) -> str | None:
        """Return the region of the profile, if it has one."""
        region: str | None = self._session.get_config_variable("region")
        return region

    def endpoint(self) -> str | None:
        """Return the S3 endpoint of the profile, if it has one."""
        from botocore.configprovider import ConfiguredEndpointProvider

        provider = ConfiguredEndpointProvider(
            full_config=self._session.full_config,
            scoped_config=self._session.get_scoped_config(),
            client_name="s3",
        )
        endpoint: str | None = provider.provide()
        return endpoint

    def credentials(self) -> S3Credential:
        """Return current credentials in obstore's form. May wait for the network."""
        with self._one_at_a_time:
            return storage_credential(self._load(), datetime.now(UTC))

    def expires(self) -> bool:
        """Return whether the credentials expire and are renewed."""
        from botocore.credentials import RefreshableCredentials

        with self._one_at_a_time:
            return isinstance(self._load(), RefreshableCredentials)

    def _load(self) -> Any:
        if self._credentials is None:
            with explained():
                self._credentials = self._session.get_credentials()
        if self._credentials is None:
            raise CredentialsUnavailableError(
                "there are no AWS credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the machine a role"
            )
        return self._credentials


def find_identity(environment: Mapping[str, str]) -> AwsIdentity | None:
    """Return this process's AWS identity, or None if obstore and SlateDB find it on their own.

    Sends no request yet. Rejects a profile that does not exist. All stores in a process share one
    identity until variables or files change, so a role is requested only once.
    """
    if any(environment.get(name) for name in _DECIDED_BY):
        return None
    if find_spec("botocore") is None:
        _refuse_files(environment)
        return None
    return _shared_identity(_fingerprint(environment))


@lru_cache(maxsize=16)  # more than a process's distinct environments, which only tests change
def _shared_identity(_fingerprint: object) -> AwsIdentity:
    with explained():
        session = open_session()
        session.get_scoped_config()
    return AwsIdentity(session)


def _fingerprint(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return everything an identity depends on: variables, and modification times of the files."""
    variables = sorted(
        (name, value)
        for name, value in environment.items()
        if name.startswith("AWS_") or name == "HOME"
    )
    return (*variables, *((file, _changed_at(file)) for file in _files(environment)))


def _changed_at(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None  # botocore reports what is wrong with an existing file


def _files(environment: Mapping[str, str]) -> list[Path]:
    return [Path(environment.get(name, path)).expanduser() for name, path in _FILES.items()]


def open_session() -> Any:
    """Return a botocore session that obtains credentials, or fails, within seconds."""
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    session.set_default_client_config(Config(**_REQUEST_LIMITS))
    return session


def storage_credential(credentials: Any, now: datetime) -> S3Credential:
    """Return botocore's current credentials, renewing them first if that is due."""
    with explained():
        frozen = credentials.get_frozen_credentials()
    ends: datetime | None = getattr(credentials, "_expiry_time", None)
    lasts = now + LIFETIME
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": lasts if ends is None else min(lasts, ends.astimezone(UTC)),
    }


@contextmanager
def explained() -> Iterator[None]:
    """Translate botocore's errors into ours. Drops their text, which may quote responses."""
    from botocore import exceptions

    failure: str
    try:
        with _renewals_in_one_line():
            yield
        return
    except exceptions.ProfileNotFound as error:
        raise InvalidError(f"{error}: correct AWS_PROFILE, or add it to ~/.aws/config") from None
    except exceptions.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        failure = f"({code}): check the role, and who may assume it"
    except (exceptions.SSOError, exceptions.TokenRetrievalError) as error:
        failure = f"({type(error).__name__}): the login is over or missing; run `aws sso login`"
    except (exceptions.ConnectionError, exceptions.HTTPClientError) as error:
        failure = f"({type(error).__name__}): check the network to the service that gives them"
    except exceptions.BotoCoreError as error:
        failure = f"({type(error).__name__}): check the profile in ~/.aws"
    raise CredentialsUnavailableError(f"AWS credentials cannot be obtained {failure}")


@contextmanager
def _renewals_in_one_line() -> Iterator[None]:
    """Stop botocore from logging tracebacks for this thread's renewals."""
    asking = threading.get_ident()

    def admit(record: logging.LogRecord) -> bool:
        if record.exc_info and record.thread == asking:
            record.exc_info = None
            # Any other failure is raised, either now or once the current credentials have expired.
            return "advisory" in record.getMessage()
        return True

    loggers = [logging.getLogger(name) for name in _RENEWAL_LOGGERS]
    for logger in loggers:
        logger.addFilter(admit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(admit)


def _refuse_files(environment: Mapping[str, str]) -> None:
    if any(environment.get(name) for name in _KNOWN_SOURCES) and "AWS_PROFILE" not in environment:
        return
    if environment.get("AWS_PROFILE") or any(file.exists() for file in _files(environment)):
        raise InvalidError(
            "AWS profiles and the files in ~/.aws need boto3: run pip install 'streamfold[aws]', "
            "or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
