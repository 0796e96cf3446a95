"""Put the site together in build/docs, and build or serve it: the pages of docs/, four of the root, and the reference.

Links in the sources lead to files of the repository, so that they work where the repository is browsed. Here they
become links between pages; a link to a file that is no page becomes its text, and one to nothing is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath

from docs_reference import SECTIONS

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "docs"
# Pages that stand in the root of the repository, and their names in the site.
FROM_ROOT = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s]+)\)")
_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_LOADED_FROM_ELSEWHERE = re.compile(r"""(?:src|<link[^>]+href)=["']?https?://[^"'\s>]+|@import[^;]+https?://""")
_POLL_SECONDS = 1.0


def sources() -> dict[str, str]:
    """Return every page's path in the site by its path in the repository."""
    folder = ROOT / "docs"
    found = {f"docs/{path.relative_to(folder)}": str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    return found | FROM_ROOT


def pages() -> dict[str, str]:
    """Return the text of every page by its path in the site; raise ValueError for a link that leads nowhere."""
    all_sources = sources()
    broken: list[str] = []
    # README.md is no page, but its links are checked like theirs.
    linked(ROOT, "README.md", all_sources, broken)
    texts = {page: filled(linked(ROOT, source, all_sources, broken)) for source, page in all_sources.items()}
    if broken:
        raise ValueError("links that lead nowhere:\n" + "\n".join(broken))
    return texts


def linked(root: Path, source: str, all_sources: dict[str, str], broken: list[str]) -> str:
    """Return a source with its links as the site needs them; append those that lead nowhere to ``broken``."""
    home = PurePosixPath(source).parent
    from_page = os.path.dirname(all_sources.get(source, ""))  # noqa: PTH120 - a path in the site, not on the disk

    def replaced(link: re.Match[str]) -> str:
        text, target = link.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return link[0]
        wanted = os.path.normpath(home / path)
        if wanted in all_sources:
            there = os.path.relpath(all_sources[wanted], from_page or ".")
            return f"[{text}]({there}{'#' * bool(anchor)}{anchor})"
        if not (root / wanted).exists():
            broken.append(f"{source}: {target}")
        return link[0] if wanted.startswith("docs/") else text

    return _LINK.sub(replaced, (root / source).read_text("utf-8"))


def filled(text: str) -> str:
    """Return the text with the generated sections it asks for."""
    return _GENERATED.sub(lambda mark: SECTIONS[mark[1]](), text)


def assemble() -> None:
    """Write the pages, and whatever else is in docs/, to build/docs."""
    there = BUILT / "pages"
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(ROOT / "docs", there, ignore=shutil.ignore_patterns("*.md", "*.toml"))
    for page, text in pages().items():
        path = there / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    shutil.copy(ROOT / "docs" / "zensical.toml", BUILT)


def build() -> None:
    """Build the site; fail for a warning, or for a page that loads anything from another host."""
    assemble()
    shutil.rmtree(BUILT / "site", ignore_errors=True)
    subprocess.run(["zensical", "build", "--strict", "--clean"], cwd=BUILT, check=True)
    for path in (BUILT / "site").rglob("*.html"):
        if found := _LOADED_FROM_ELSEWHERE.search(path.read_text("utf-8")):
            sys.exit(f"{path} loads something from another host: {found[0]}")


def serve(address: str) -> None:
    """Serve the site, and put it together again whenever a source changes."""
    assemble()
    # A SIGTERM ends the server of the site as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen(["zensical", "serve", "--dev-addr", address], cwd=BUILT) as server:
        seen = _last_change()
        try:
            while server.poll() is None:
                time.sleep(_POLL_SECONDS)
                if (now := _last_change()) != seen:
                    seen = now
                    assemble()
        except KeyboardInterrupt:
            server.terminate()


def _last_change() -> float:
    paths = [*(ROOT / "docs").rglob("*"), *(ROOT / source for source in FROM_ROOT)]
    return max(path.stat().st_mtime for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/docs")
    parser.add_argument("--build", action="store_true", help="build into build/docs/site, and fail for any warning")
    parser.add_argument("--address", default="localhost:8000", help="where to serve (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        build() if arguments.build else serve(arguments.address)
    except ValueError as error:
        sys.exit(f"scripts/docs: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
