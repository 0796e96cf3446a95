"""Credentials from ~/.aws: obstore reads the environment and asks Amazon's servers, and does not read these files."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from pathlib import Path

from xcache.wire.bounded import text_of

# The files do not count if the environment has credentials or says where they are.
_OTHER_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_CREDENTIALS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}


def settings_of_files(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return obstore's options for the keys, the region and the endpoint of the profile that the environment names."""
    profile = environment.get("AWS_PROFILE") or "default"
    credentials = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
    config = Path(environment.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
    of_config = _section(config, "default" if profile == "default" else f"profile {profile}")
    found = {}
    if not any(environment.get(name) for name in _OTHER_SOURCES):
        known = of_config | _section(credentials, profile)
        if "aws_access_key_id" in known:
            found = {option: known[name] for name, option in _CREDENTIALS.items() if name in known}
    if "region" in of_config and not environment.get("AWS_REGION") and not environment.get("AWS_DEFAULT_REGION"):
        found["region"] = of_config["region"]
    if "endpoint_url" in of_config and not environment.get("AWS_ENDPOINT_URL") and not environment.get("AWS_ENDPOINT"):
        found["endpoint"] = of_config["endpoint_url"]
    return found


def _section(file: Path, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text_of(file))
    except (OSError, ValueError, configparser.Error):
        return {}
    return dict(parser[name]) if parser.has_section(name) else {}
