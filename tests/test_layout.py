"""Rules for the whole project: packages, imports, documents and names."""

import ast
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from lorikeet.settings import Settings

ROOT = Path(__file__).parents[1]
# The log is left out, as it describes the past.
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md"),
]
PAGES = [*DOCUMENTS, ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md"] + [
    ROOT / folder / "README.md" for folder in ("k8s", "loadtest", "demo")
]
PACKAGES = (ROOT / "engine" / "lorikeet_engine", ROOT / "platform" / "lorikeet")
MODULES = [
    (path, ast.parse(path.read_text()))
    for package in PACKAGES
    for path in sorted(package.rglob("*.py"))
]


def test_the_platform_folder_is_no_package_as_it_would_shadow_the_standard_library():
    assert not (ROOT / "platform" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [
        "lorikeet_engine",
        "lorikeet_engine.adapter",
        "lorikeet_engine.adapter_format",
        "lorikeet_engine.request",
        "lorikeet_engine.residency.eviction_score",
        "lorikeet.gateway.app",
        "lorikeet.cli",
        "lorikeet.placement.pin_placement",
        "lorikeet.placement.prefetcher",
        "lorikeet.placement.scaling",
        "lorikeet.routing.fleet",
        "lorikeet.simulator.capacity",
        "lorikeet.simulator.workload_models",
    ],
)
def test_modules_without_tensors_import_no_torch_ray_or_telemetry(module):
    heavy = {"torch", "ray", "opentelemetry.sdk"}
    code = f"import sys, {module}; print({heavy} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_every_setting_that_a_document_names_exists():
    known = {f"LORIKEET_{field.upper()}" for field in Settings.model_fields}
    known |= {"LORIKEET_", "LORIKEET_ADMIN_KEY", "LORIKEET_SERVER"}
    for document in DOCUMENTS:
        named = set(re.findall(r"LORIKEET_[A-Z_]*", document.read_text()))
        assert named <= known, document.name


@pytest.mark.parametrize("document", ["architecture.md", "glossary.md", "ideas.md"])
def test_every_file_and_symbol_that_a_document_names_exists(document):
    text = (ROOT / "docs" / document).read_text()
    named = re.findall(r"`([a-z0-9_./]+(?:\.py|/))(?::(\w+))?`", text)
    assert len(named) > 10
    for name, symbol in named:
        places = [root / name for root in (ROOT, *PACKAGES) if (root / name).exists()]
        assert places, name
        defined = rf"^ *(?:class|def|async def) {symbol}\b"
        assert not symbol or any(
            re.search(defined, place.read_text(), re.MULTILINE) for place in places
        ), f"{name}:{symbol}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_and_program_that_a_document_names_exists(document):
    text = document.read_text()
    named = re.findall(r"`((?:engine|loadtest|platform|tests)/[\w./-]+)`", text)
    for program in re.findall(r"-m ((?:engine|loadtest)[\w.]*\w)", text):
        folder = program.replace(".", "/")
        named.append(folder if (ROOT / folder).is_dir() else f"{folder}.py")
    gone = [name for name in named if not (ROOT / name).exists()]
    assert gone == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_that_a_document_names_exists(document):
    named = set(re.findall(r"(?:`|^    )make ([a-z-]+)", document.read_text(), re.MULTILINE))
    assert named <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_an_existing_file_and_heading(page):
    lost = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert lost == []


def anchors(page):
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_the_architecture_page_is_short_and_names_code_for_each_subject():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.split()) < 1200
    assert len(re.findall(r"^\| .* \| `.*:\w+`", text, re.MULTILINE)) >= 20


def test_no_two_public_classes_of_the_packages_share_a_name():
    names = Counter(
        node.name
        for _, module in MODULES
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, classes in names.items() if classes > 1] == []


OPENINGS = re.compile(
    r"(What|Whether|Who|Whose|How|Where|Which|That|When|Of|The same|It|So|As|By|For|These|Those"
    r"|With)\b"
)


def test_docstrings_open_with_a_verb_or_a_noun_and_whether_documents_only_bools():
    bad = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path, module in MODULES
        for parent in ast.walk(module)
        if isinstance(body := getattr(parent, "body", None), list)
        for before, node in pairwise([None, *body])
        if (text := documentation(node))
        and (opening := OPENINGS.match(text))
        and not (opening[1] == "Whether" and is_bool(before or parent))
    ]
    assert bad == []


def is_bool(documented: ast.AST) -> bool:
    """Whether a function returns bool, or an assignment is annotated as bool."""
    annotation = getattr(documented, "returns", None) or getattr(documented, "annotation", None)
    return annotation is not None and "bool" in ast.unparse(annotation)


def documentation(node: ast.AST) -> str:
    """Return the text of a docstring, also of one behind an assignment; empty for other nodes."""
    text = node.value if isinstance(node, ast.Expr) else None
    is_text = isinstance(text, ast.Constant) and isinstance(text.value, str)
    return str(text.value) if is_text else ""
