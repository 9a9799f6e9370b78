"""What an object store says when it fails, in few words. Torch-free."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

_SHOWN = 200
_SENT_IN_VAIN = "error sending request"
"""Of a request without an answer; why is in what comes after `Debug source` alone."""


@contextmanager
def failing() -> Iterator[None]:
    """Raise what the store says as an OSError of one line."""
    from obstore import exceptions

    refused = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    try:
        yield
    except exceptions.BaseError as error:
        if missing := _lacks_credentials(str(error)):
            answered = re.search(r"\b40[0-9]\b", str(error))  # else it may be out of order for a moment
            raise OSError(errno.EACCES if answered else errno.EIO, missing) from None
        number = errno.EACCES if isinstance(error, refused) else errno.EIO
        raise OSError(number, cause(error)) from None
    except FileNotFoundError as error:  # no object: here it is the bucket
        raise OSError(errno.ENOENT, cause(error)) from None


def _lacks_credentials(text: str) -> str:
    """What to set, where a store was asked without credentials; empty: it was asked with some, as far as is known.
    Without any in the environment the machine is asked for them, at an address that is the same in all clouds.
    """
    if "http://169.254.169.254/" not in text and "http://metadata.google.internal/" not in text:
        return ""
    cure = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    if "computeMetadata" in text:
        cure = "GOOGLE_SERVICE_ACCOUNT to the file of a service account, or give the machine one"
    return f"no credentials found: set {cure}"


def cause(error: Exception) -> str:
    """The cause, in one line: what the store or the system says, without address and counts of tries."""
    text, _, source = str(error).partition("Debug source")
    found = [re.search(rf"<{tag}>([^<]{{1,200}})</{tag}>", text) for tag in ("Code", "Message")]
    said = ": ".join(match[1] for match in found if match)
    if not said:
        first = " ".join(text.split())
        said = first.partition(" - ")[2] or first
        said = said.removeprefix("Server returned non-2xx status code: ")
        if _SENT_IN_VAIN in said:
            said = _inner(source) or said
    return ascii(said)[1:-1][:_SHOWN]


def _inner(source: str) -> str:
    """The innermost cause in what Rust prints of an error. Empty: none that is known."""
    if words := re.findall(r'(?:message|error): "([^"]+)"', source):
        return words[-1]
    if certificate := re.search(r"InvalidCertificate\(\s*(\w+)", source):
        return f"its certificate is refused ({certificate[1]})"
    return "no answer in time" if re.search(r"kind: Timeout|TimedOut", source) else ""
