"""AWS credentials where every AWS tool looks for them, fresh for as long as a store is open.

Keys in `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` win. Otherwise botocore looks: a profile
(`AWS_PROFILE`, `~/.aws`) with its keys, SSO session, role or credential process; a web identity; the
container's credentials; the instance's role. It asks again well before what it has expires.

Without botocore (`pip install 'streamfold[aws]'`) obstore and SlateDB still know web identities,
containers and instances, but no files: where files are needed, that is an error.
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

#: How long credentials may be cached: botocore renews them at the latest ten minutes before they
#: expire, so what it returns is valid for this long.
LIFETIME: Final = timedelta(minutes=10)
#: Limits of a request to a service that gives credentials, STS or a sign-in portal: botocore's own are
#: minutes, and a person at a terminal may be waiting. In seconds; one lost packet is not an error.
_REQUEST_LIMITS: Final = {
    "connect_timeout": 3,
    "read_timeout": 10,
    "retries": {"total_max_attempts": 2, "mode": "standard"},
}
#: Loggers on which botocore reports a failed renewal with a traceback, which may quote answers.
_RENEWAL_LOGGERS: Final = ("botocore.credentials", "botocore.tokens")
#: Variables that hold keys, or say that none are wanted: obstore and SlateDB read them themselves.
_DECIDED_BY: Final = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE")
#: Files in which only botocore looks, with the variables that move them.
_FILES: Final = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
#: Variables that name a source which obstore and SlateDB know by themselves.
_KNOWN_SOURCES: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


class CredentialsUnavailableError(RetryLaterError):
    """No credentials were found, so no request was sent."""

    code = "credentials_unavailable"


class AwsIdentity:
    """Credentials, region and endpoint that botocore finds; safe to use from any thread."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._credentials: Any = None
        # A session is not made for several threads, and one request for new credentials is enough.
        self._one_at_a_time = threading.Lock()

    def region(self) -> str | None:
        """Return the region of the profile, if it has one."""
        region: str | None = self._session.get_config_variable("region")
        return region

    def endpoint(self) -> str | None:
        """Return the endpoint of S3 in the profile, if it has one."""
        from botocore.configprovider import ConfiguredEndpointProvider

        provider = ConfiguredEndpointProvider(
            full_config=self._session.full_config,
            scoped_config=self._session.get_scoped_config(),
            client_name="s3",
        )
        endpoint: str | None = provider.provide()
        return endpoint

    def credentials(self) -> S3Credential:
        """Return current credentials in obstore's form; may wait for the network."""
        with self._one_at_a_time:
            return storage_credential(self._load(), datetime.now(UTC))

    def expires(self) -> bool:
        """Return whether the credentials are replaced from time to time."""
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
    """Return the identity of this process for AWS; None if obstore and SlateDB find it on their own.

    Sends no request yet. A profile that does not exist is refused. Stores that a process opens share
    one identity until variables or files change, so that a role is requested once.
    """
    if any(environment.get(name) for name in _DECIDED_BY):
        return None
    if find_spec("botocore") is None:
        _refuse_files(environment)
        return None
    return _shared_identity(_fingerprint(environment))


@lru_cache(maxsize=16)  # more than a process has sets of variables; tests change them
def _shared_identity(_fingerprint: object) -> AwsIdentity:
    with explained():
        session = open_session()
        session.get_scoped_config()
    return AwsIdentity(session)


def _fingerprint(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what an identity depends on: variables, and when the files were last changed."""
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
        return None  # botocore says what is wrong with a file that is there


def _files(environment: Mapping[str, str]) -> list[Path]:
    return [Path(environment.get(name, path)).expanduser() for name, path in _FILES.items()]


def open_session() -> Any:
    """Return a session of botocore that gets credentials, or an error, within seconds."""
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    session.set_default_client_config(Config(**_REQUEST_LIMITS))
    return session


def storage_credential(credentials: Any, now: datetime) -> S3Credential:
    """Return botocore's current credentials, renewed if that is due."""
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
    """Turn botocore's errors into ours: their texts may quote answers, or a process's output."""
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
    """Keep botocore from logging a traceback about what this thread asks it for."""
    asking = threading.get_ident()

    def admit(record: logging.LogRecord) -> bool:
        if record.exc_info and record.thread == asking:
            record.exc_info = None
            # Any other failure is raised, here or when the credentials at hand have expired.
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
