"""Host keys: only the pinned one is talked to, and no credential is sent before it was checked."""

from __future__ import annotations

import base64
import hashlib

import paramiko

# Families of host key algorithms, the preferred first. A server has one key of each.
KEY_FAMILIES: tuple[tuple[str, ...], ...] = (
    ("ssh-ed25519",),
    ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa"),
)


def fingerprint(key: paramiko.PKey) -> str:
    """`SHA256:` and unpadded base64, as `ssh-keygen -l` prints it."""
    digest = hashlib.sha256(key.asbytes()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class WrongHostKey(paramiko.SSHException):
    """The server's key is not the pinned one."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(f"host key {found}")


class PinnedKey(paramiko.MissingHostKeyPolicy):
    """Called after the key exchange, in which the server proved to own the key, before log-in."""

    def __init__(self, pinned: str | None) -> None:
        self.pinned = pinned

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        found = fingerprint(key)
        if found != self.pinned:
            raise WrongHostKey(found)
