"""The README and the documentation: links resolve, generated parts are current, settings files parse."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from levserve.settings.alias import FLAG_ALIASES
from levserve.settings.command_line import OTHER_FLAGS
from levserve.settings.parse import parse_settings
from levserve.settings.settings import BY_NAME, OWN_SETTINGS, SETTINGS, SHARED_SETTINGS
from tests.documents import DOCUMENTS, PAGES, README, ROOT, Block, anchors, blocks, links
from tests.examples import COMMANDS as EXAMPLE_COMMANDS
from tests.examples import EXAMPLES, HEAVY, RAY

KEY_FILES = ("/etc/levserve/keys", "/etc/levserve/admin-keys")
COMMANDS = (
    "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/levserve\n",
    "python3 -m venv --upgrade-deps .venv-test && .venv-test/bin/pip install -q --no-compile -e '.[test]' && .venv-test/bin/python -m pytest\n",
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(path: Path) -> None:
    for target in links(path):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.is_relative_to(ROOT) and file.exists(), f"{named(path)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{named(path)} links to {target}"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_generated_parts_are_what_the_code_declares(path: Path, generate: ModuleType) -> None:
    page = path.read_text()
    assert generate.render(page) == page, "run python docs/generate.py"


def test_everything_that_can_be_generated_is_on_a_page(generate: ModuleType) -> None:
    pages = "".join(path.read_text() for path in PAGES)
    shown = {name for match in generate.GENERATED.finditer(pages) for name in match[2].split()}
    assert shown == {"fields", *generate.blocks(), *generate.BODIES}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(ROOT / "docs" / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    architecture = (tmp_path / "explanation" / "architecture" / "index.html").read_text()
    assert "architecture.svg" in architecture
    systemd = (tmp_path / "how-to" / "systemd" / "index.html").read_text()
    # The site does not include that folder.
    assert "<code>systemd/</code>" in systemd and "../../../systemd" not in systemd


@pytest.mark.parametrize("block", blocks("ini"), ids=lambda block: block.place)
def test_every_settings_file_can_be_read(block: Block, tmp_path: Path) -> None:
    text = block.text
    for name in KEY_FILES:
        path = tmp_path / Path(name).name
        path.write_text("a-key\n")
        text = text.replace(f"{name}\n", f"{path}\n")
    file = tmp_path / "serve.ini"
    file.write_text(text)
    settings = parse_settings(["--config", str(file)], {})
    keys = re.findall(r"^([a-z-]+) = ", text, re.MULTILINE)
    given = set(settings.sources).union(*(model.sources for model in settings.models.values()))
    assert keys and {key.replace("-", "_") for key in keys} <= given


def test_shell_blocks_are_commands_that_some_test_runs() -> None:
    """Other blocks are marked `console`; the third ring runs curl, and CI the README's second command."""
    others = [block.text for block in blocks("sh") if not block.text.startswith("curl ")]
    assert tuple(others) == COMMANDS
    assert {block.language for block in blocks("", "bash", "shell", "py")} == set()


def test_ci_runs_the_readmes_test_command() -> None:
    assert "README.md" in (ROOT / ".ci" / "run").read_text()
    assert len(re.findall(r"pytest$", README.read_text(), re.MULTILINE)) == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_path_of_the_repository_that_is_named_exists(path: Path) -> None:
    for name in re.findall(r"`((?:levserve|tests|bench|docs|deploy|systemd)/[\w./-]*)`", path.read_text()):
        assert (ROOT / name).exists(), f"{named(path)} names {name}"


def test_the_core_is_as_long_as_is_said() -> None:
    tour = (ROOT / "docs" / "pages" / "explanation" / "reading-tour.md").read_text()
    core = set(re.findall(r"`(levserve/\S+\.py)`", tour.partition("## From here")[0]))
    num_lines = sum(len((ROOT / name).read_text().splitlines()) for name in core)
    for text in (tour, README.read_text()):
        said = re.search(r"about\s+([0-9,]+)\s+lines\s+of\s+Python", text)
        assert said is not None
        assert abs(num_lines / int(said[1].replace(",", "")) - 1) < 0.1, f"the core has {num_lines} lines"


def test_the_functions_that_the_tour_passes_through_are_there() -> None:
    tour = (ROOT / "docs" / "pages" / "explanation" / "reading-tour.md").read_text()
    rows = [
        row.split("|")[2] for row in tour.partition("## One request")[2].splitlines() if row.startswith("| ")
    ]
    assert len(rows) > 10
    for row in rows[1:]:
        sources = [(ROOT / name).read_text() for name in re.findall(r"`(levserve/\S+\.py)`", row)]
        for name in re.findall(r"`([\w.]+)`", row.replace("/", "`")):
            if not name.endswith(".py") and name != "levserve":
                assert any(f"def {name.rpartition('.')[2]}(" in source for source in sources), name


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_every_example_is_run_by_a_test_and_named_on_its_page() -> None:
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert names == {*EXAMPLE_COMMANDS, *HEAVY, *RAY}
    pages = ROOT / "docs" / "pages" / "how-to"
    for page, shown in (("clients.md", names - RAY.keys()), ("ray-serve.md", RAY.keys())):
        text = (pages / page).read_text()
        assert all(f"`{name}`" in text for name in shown)


def test_the_page_on_several_models_names_every_key_of_a_section() -> None:
    page = (ROOT / "docs/pages/how-to/several-models.md").read_text()
    listed = page.partition("A section may set")[2].partition("A section without")[0]
    own, shared = (set(re.findall(r"`([a-z-]+)`", part)) for part in listed.split("- what it otherwise"))
    assert own == {BY_NAME[name].key for name in OWN_SETTINGS}
    assert shared - {"model", "engine", "limits"} == {BY_NAME[name].key for name in SHARED_SETTINGS}


def test_options_on_pages_for_newcomers_exist() -> None:
    known = (
        {setting.flag for setting in SETTINGS}
        | set(OTHER_FLAGS)
        | {alias.flag for alias in FLAG_ALIASES.values()}
    )
    for path in (ROOT / "docs/pages/how-to/choose-a-model.md", ROOT / "docs/pages/how-to/troubleshoot.md"):
        found = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", path.read_text()))
        assert found - known == set(), named(path)
