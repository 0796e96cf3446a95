"""Fill the template: one file, with its style and script in it, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcache.cli import Failure
from xcache.wire.bounded import text_of

_MISSING = "a report needs jinja2, which is not installed here; install the extra: pip install 'jax-xcache[report]'"


def need_template_engine() -> None:
    """Raise Failure if the optional extra is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise Failure(_MISSING) from None


def rendered(content: Mapping[str, Any]) -> str:
    """Return the page."""
    import jinja2
    import markupsafe

    style, script = _file("style.css"), _file("script.js")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        # The names, arguments and paths of programs are anybody's text.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda amount: f"{amount:.2f}%"
    environment.filters["px"] = lambda amount: f"{amount:.1f}"
    # No style or script but these two runs, whatever a text in the page may hold; nothing is loaded.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none';"
        " form-action 'none'"
    )
    own = {"style": markupsafe.Markup(style), "script": markupsafe.Markup(script)}  # noqa: S704 - files of this package
    return str(environment.get_template("template.html").render(**content, **own, policy=policy))


def _file(name: str) -> str:
    return text_of(Path(__file__).with_name(name))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
