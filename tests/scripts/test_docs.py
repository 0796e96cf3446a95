"""The documents: the reference lacks nothing, every link leads somewhere, and README repeats only measured figures."""

from __future__ import annotations

import ast
import inspect
import re
import sqlite3
import typing
from pathlib import Path

import docs_reference
import docs_site
import pytest
import sqlite_utils

import xcache
from xcache import errors
from xcache.config.table import SETTINGS
from xcache.wire import protocol
from xcached.store import schema
from xcached.store.tables import MEANINGS

ROOT = Path(docs_site.__file__).parent.parent


@pytest.fixture(scope="module")
def pages():
    return docs_site.pages()


def test_every_generated_section_is_on_a_page():
    asked = {
        name
        for path in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"<!-- generated: (\w+) -->", path.read_text("utf-8"))
    }
    assert asked == set(docs_reference.SECTIONS)


def test_every_command_and_option_is_in_the_reference(pages):
    text = pages["reference/commands.md"]
    contexts = list(docs_reference.all_commands())
    assert {"xcache ls", "xcache service install"} <= {context.command_path for context in contexts}
    for context in contexts:
        _, found, section = text.partition(f"## {context.command_path}\n")
        assert found, context.command_path
        section = section.partition("\n## ")[0]
        for parameter in context.command.get_params(context):
            for option in (*parameter.opts, *parameter.secondary_opts) if parameter.opts[0].startswith("-") else ():
                assert option in section, (context.command_path, option)


def test_every_command_with_json_states_its_shape(pages):
    text = pages["reference/json.md"]
    for context in docs_reference.all_commands():
        if any("--json" in parameter.opts for parameter in context.command.params):
            assert f"## {context.command_path}\n\n```text\nJSON" in text, context.command_path


def test_the_settings_of_the_daemon_are_read_there():
    daemons = {setting.name for setting in SETTINGS if setting.used_by != "program"}
    code = "".join(path.read_text("utf-8") for path in (ROOT / "daemon").rglob("*.py"))
    assert len(daemons) > 10
    assert daemons == {name for name in daemons if re.search(rf"\.{name}\b", code)}


def test_every_setting_is_in_the_reference(pages):
    text = pages["reference/settings.md"]
    for setting in SETTINGS:
        assert f"| `{setting.name}` | `{setting.variable}` |" in text
        assert setting.meaning in text
    # A table's cell ends at the next bar.
    assert {line.count("|") for line in text.splitlines() if line.startswith("| `XCACHE_")} <= {7}


def test_every_message_and_field_is_in_the_reference(pages):
    text = pages["reference/protocol.md"]
    for message in typing.get_args(protocol.Message):
        section = text.partition(f"### {message.__name__}\n")[2].partition("\n### ")[0]
        assert inspect.getdoc(message) in section
        for field in message._fields:
            assert re.search(rf"\b{field}: ", section), (message, field)


def test_every_exception_is_in_the_reference(pages):
    text = pages["reference/exceptions.md"]
    public = [thing for thing in vars(errors).values() if inspect.isclass(thing) and issubclass(thing, Exception)]
    assert len(public) > 10
    for error in public:
        assert text.count(f"* `{error.__name__}`: ") == 1, error


def test_every_public_name_is_in_the_reference(pages):
    for name in xcache.__all__:
        assert f"## xcache.{name}".replace("__", "\\_\\_") in pages["reference/python.md"]


def test_every_table_and_column_is_in_the_reference(pages):
    database = sqlite_utils.Database(sqlite3.connect(":memory:"))
    schema.migrations.apply(database)
    tables = {table.name: table for table in database.tables if not table.name.startswith(("_", "sqlite_"))}
    assert set(tables) == set(MEANINGS)
    for name, table in tables.items():
        section = pages["reference/schema.md"].partition(f"## {name}\n")[2].partition("\n## ")[0]
        for column in table.columns:
            assert f"| `{column.name}` | {column.type} |" in section, (name, column)
    database.conn.close()


def reasons_to_lower() -> set[str]:
    """Return the kind of each reason that the code of skipped lowering gives as text."""
    hook = ROOT / "xcache" / "hook"
    given: list[ast.expr] = []
    files = ("skipping.py", "effects.py", "describing.py")
    for path in (*(hook / name for name in files), *(hook / "structure").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"CannotSkipError", "self._count"}:
                given.append(node.args[0])
            elif isinstance(node, ast.Assign) and path.name == "describing.py" and not node.col_offset:
                # A constant of the module.
                given.append(node.value)
            elif isinstance(node, ast.FunctionDef) and node.name in {"_examine", "reason_to_lower"}:
                given += [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
    texts = [each.values[0] if isinstance(each, ast.JoinedStr) else each for each in given]
    said = [each.value for each in texts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return {each.partition(":")[0] for each in said if each}


def test_every_reason_to_lower_is_explained(pages):
    cells = re.findall(r"^\| ([^|]+) \|", pages["lowered.md"], re.MULTILINE)
    explained = {reason for cell in cells for reason in cell.strip().split(", ")}
    found = reasons_to_lower()
    assert {"rule of jax replaced", "custom call", "large constant", "no entry", "lowering is cheap"} <= found
    assert not found - explained


def test_every_page_is_in_the_navigation_and_every_page_of_it_exists(pages):
    listed = re.findall(r'= "([\w/-]+\.md)"', (ROOT / "docs" / "zensical.toml").read_text("utf-8"))
    assert sorted(listed) == sorted(pages)


def test_the_index_lists_every_page(pages):
    listed = set(re.findall(r"\]\(([\w/-]+\.md)\)", pages["index.md"]))
    assert listed == set(pages) - {"index.md"}


def test_links_become_links_between_pages(pages):
    assert "[security](security.md)" in pages["index.md"]
    assert "(../security.md)" in pages["how-to/shared-machine.md"]
    # The recipe is a file of the repository and no page.
    assert "in `deploy/Containerfile` against" in pages["how-to/docker.md"]


def test_a_link_that_leads_nowhere_is_reported(tmp_path):
    (tmp_path / "there.md").touch()
    (tmp_path / "a.md").write_text("[one](there.md) [two](gone.md) [three](https://example.org/x) [four](#here)")
    broken = []
    assert docs_site.linked(tmp_path, "a.md", {"a.md": "a.md"}, broken) == (
        "one two [three](https://example.org/x) [four](#here)"
    )
    assert broken == ["a.md: gone.md"]


def test_the_readme_is_one_screen_and_its_gains_were_measured():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert len(readme.splitlines()) <= 70
    measured = (ROOT / "docs" / "performance.md").read_text("utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("|") and not line.startswith(("| |", "|---"))]
    assert rows
    for row in rows:
        for figure in re.findall(r"\d+\.\d+", row):
            assert figure in measured, row
    assert re.search(r"at ([0-9a-f]{7}) ", readme)[1] in measured
