"""What the pages for users say of each other and of the program: a link leads somewhere; a command, flag, code, key or message is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from seriatim.cli.main import seriatim

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
DATABASES = (ROOT / "docs/databases.md").read_text()
SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "seriatim").rglob("*.py")))
CODES = set(re.findall(r'^    code(?:: ClassVar\[str\])? = "([a-z-]+)"', SOURCES, re.MULTILINE))
OF_OTHERS = {"Corruption", "No snapshot found, but there are log entries"}
"""Messages of RocksDB's and ZooKeeper's."""


def anchor(heading: str) -> str:
    """As GitHub makes one."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]


def section(heading: str, page: str = OPERATIONS) -> str:
    found = re.search(rf"^(#+) {re.escape(heading)}$\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[2]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of a section's tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if "---" not in line and "---" not in below:
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_each_link_leads_somewhere(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, wanted = target.partition("#")
        leads_to = path.parent / name if name else path
        assert leads_to.exists(), target
        assert not wanted or wanted in anchors(leads_to.read_text()), target


@pytest.mark.parametrize("page", [OPERATIONS, DATABASES], ids=["operations", "databases"])
def test_no_two_sections_of_a_page_have_one_anchor(page: str) -> None:
    found = anchors(page)
    assert sorted(set(found)) == sorted(found)


def test_what_the_program_points_to_is_a_heading() -> None:
    texts = SOURCES.replace("\\'", "'") + "".join(path.read_text() for path in ROOT.glob("compose/*.yaml"))
    pointed = re.findall(r'docs/(\w+)\.md, "(.*?)"', texts)
    assert len(pointed) > 3
    for page, heading in pointed:
        assert anchor(heading) in anchors((ROOT / f"docs/{page}.md").read_text()), heading


def test_each_code_that_is_explained_is_one() -> None:
    cells = [row[0] for row in rows(section("Exit codes and errors"))] + [
        row[1] for row in rows(section("It ended", DATABASES))
    ]
    told = [code for cell in cells for code in re.findall(r"`([a-z-]+)`", cell)]
    assert len(told) > 30
    assert not set(told) - CODES


def test_each_message_that_is_looked_up_is_one() -> None:
    tables = [section("Something is wrong"), section("A server doesn't start, or isn't listed")]
    cells = [row[0] for table in tables for row in rows(table)]
    messages = {message for cell in cells for message in re.findall(r"`([^`]+)`", cell)} - OF_OTHERS
    parts = {part.strip() for message in messages for part in message.split("…")} - {""}
    assert len(parts) > 20
    assert not {part for part in parts if part not in SOURCES}


def test_each_key_that_is_watched_is_one_of_json() -> None:
    keys = [key for row in rows(section("Alerts")) for key in re.findall(r"`([a-z_]+)`", row[1])]
    views = (ROOT / "seriatim/cli/views.py").read_text()
    states = {"lost", "null", "srvr", "chain", "damage"}
    assert len(keys) > 15
    assert not {key for key in {*keys} - states if f'"{key}"' not in views}


def test_each_command_and_flag_is_one() -> None:
    """As they stand in backquotes and in blocks, also of the other pages."""
    text = "\n".join(path.read_text() for path in PAGES if path.name != "CHANGELOG.md")
    said = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (.*)$", text, re.MULTILINE)
    calls = [call for one in said for call in re.findall(r"(?:^|[|] |/)seriatim ([a-z][^|#]*)", one)]
    assert len(calls) > 40
    context = click.Context(seriatim)
    for call in calls:
        words, command = call.split(), seriatim.get_command(context, call.split()[0])
        assert command is not None, call
        if isinstance(command, click.Group):
            command = command.get_command(context, words[1])
            assert command is not None, call
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")}
        assert given <= known | {"--help"}, call


def test_each_test_and_plant_that_is_named_is_one() -> None:
    """What a page names as its evidence, in all pages."""
    text = "\n".join(path.read_text() for path in PAGES if path.name != "CHANGELOG.md")
    tests = [(path, path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))]
    functions = {name for _, code in tests for name in re.findall(r"def (test_\w+)\(", code)}
    named = re.findall(r"`(test_\w+)`", text)
    plants = re.findall(r'"([^"]+)"', "".join(re.findall(r'\bplants? ((?:"[^"|]+"(?:, )?)+)', text)))
    paths = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text)
    planted = "".join(code for path, code in tests if path.parent.name == "plants")
    assert min(len(named), len(plants), len(paths)) > 15
    assert not [one for one in named if one not in functions]
    assert not [one for one in plants if f'"{one}"' not in planted]
    assert not [one for one in paths if not (ROOT / one).exists()]


def test_each_module_of_tests_and_benches_and_its_flags_are_there() -> None:
    """As `python -m` and `make bench` are told to start them."""
    text = "\n".join(path.read_text() for path in PAGES if path.name != "CHANGELOG.md")
    calls = re.findall(r"python -m ((?:tests|bench)[\w.]*)([^`#\n]*)", text)
    calls += [("bench", given) for given in re.findall(r'make bench ARGS="([^"]*)"', text)]
    assert len(calls) > 30
    for module, given in calls:
        path = ROOT / module.replace(".", "/")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        source = "".join(file.read_text() for file in files)
        assert not [flag for flag in re.findall(r"--[a-z][a-z-]*", given) if f'"{flag}"' not in source], (module, given)
