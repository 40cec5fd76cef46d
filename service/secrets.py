"""Checks certificates, keys and tokens before anything is started, with messages that name the flag at fault.

gRPC itself only says that it could not bind. Knows files, and no RPC.
"""

from __future__ import annotations

import ssl

from service.options import ServeOptions
from service.rpc.security import read_tokens
from service.shutdown import ServerFailed


def check_secrets(options: ServeOptions) -> None:
    """Raises ServerFailed for the first file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if options.tls_cert is not None and options.tls_key is not None:
        try:
            context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise _unusable(
                f"--tls-cert {options.tls_cert} with --tls-key {options.tls_key}", error
            ) from error
    if options.tls_client_ca is not None:
        try:
            context.load_verify_locations(options.tls_client_ca)
        except OSError as error:
            raise _unusable(f"--tls-client-ca {options.tls_client_ca}", error) from error
    if options.auth_token_file is not None:
        try:
            read_tokens(options.auth_token_file)
        except (OSError, ValueError) as error:
            raise _unusable(f"--auth-token-file {options.auth_token_file}", error) from error


def _no_password() -> str:
    """Called for an encrypted key; without it, OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted; give one without a password")


def _unusable(what: str, error: Exception) -> ServerFailed:
    reason = str(error)
    if isinstance(error, ssl.SSLError):
        # OpenSSL's names, such as KEY_VALUES_MISMATCH; without one, no PEM block was found at all.
        reason = error.reason.lower().replace("_", " ") if error.reason else "no PEM block in it"
    return ServerFailed(f"cannot use {what}: {reason}")
