"""The project's own rules: import order, file sizes, nothing that could run code from a model."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "flashdraft"

# docs/design.md, section 3: a module imports only from those before it.
ORDER = [
    "types", "settings", "sampling", "tree", "verify", "cache", "attention", "host", "packing", "model_folder", "gguf_header", "loading", "dequantise", "locate",
    "bridge", "probe", "target", "config_keys", "foreign_config", "draft_config", "draft_folder", "draft_tables", "checkpoint",
    "drafters.drawing", "drafters.dynamic_tree", "drafters.ngram", "drafters.layers", "drafters.dflash", "drafters.dflash_ablations", "drafters.lookup_branch", "drafters.draft_model", "drafters.medusa",
    "drafters.eagle3_folder", "drafters.eagle3", "drafters", "text", "provenance", "session", "engine",
    "training", "training.data", "training.output", "training.tally", "training.endpoints", "training.ways",
    "training.regenerate", "training.config", "training.length", "training.plan", "training.flex", "training.blocks", "training.features", "training.objectives",
    "training.methods.base", "training.methods.initialise", "training.methods.dflash", "training.methods.medusa", "training.methods.eagle3", "training.methods.draft_model", "training.methods",
    "training.parallel", "training.optimizer", "training.checkpoints", "training.validation", "training.progress",
    "training.trainer", "training.run",
    "evaluation", "evaluation.tasks", "evaluation.records", "evaluation.summary", "evaluation.planner", "evaluation.predictions", "evaluation.counters", "evaluation.streams", "evaluation.servers", "evaluation.machine", "evaluation.bench", "evaluation.costs", "evaluation.tables",
    "evaluation.svg", "evaluation.figures", "evaluation.token_view", "evaluation.report", "evaluation.memory", "evaluation.plan_view",
    "engines", "engines.assistant", "engines.gguf_file", "engines.gguf_tokenizer", "engines.gguf_target", "engines.llama_cpp", "engines.target_facts", "engines.rules", "engines.layouts", "engines.launching", "engines.transfer",
    "terminal", "chat", "doctor", "demo", "options", "training.commands", "evaluation.commands", "engines.commands", "cli", "__init__", "__main__",
]  # fmt: skip


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1]) if parts[-1] == "__init__" and len(parts) > 1 else ".".join(parts)


def runtime_imports(file: Path) -> set[str]:
    """Our own modules a file imports, anywhere but under `if TYPE_CHECKING`."""
    tree = ast.parse(file.read_text())
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for part in block.body
        for node in ast.walk(part)
    }
    package = ["flashdraft", *file.relative_to(SOURCE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in hidden:
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [f"{full}.{alias.name}" for alias in node.names] + [full]
            found |= {known for known in ORDER for name in names if name == f"flashdraft.{known}"}
    return found


def test_order_names_every_module() -> None:
    assert {module_name(f) for f in SOURCE.rglob("*.py")} == set(ORDER)


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_imports_follow_the_order(file: Path) -> None:
    own = ORDER.index(module_name(file))
    late = {name for name in runtime_imports(file) if ORDER.index(name) > own}
    assert not late, f"{module_name(file)} imports {late}, which come after it in docs/design.md"


def test_import_finder_sees_imports() -> None:
    assert {"types", "drafters", "target", "verify"} <= runtime_imports(SOURCE / "session.py")
    assert "checkpoint" in runtime_imports(SOURCE / "drafters" / "dflash.py")


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=module_name)
def test_files_fit_a_sitting(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400


def test_nothing_runs_foreign_code() -> None:
    """safetensors and JSON only; shell and pickle have no place in the package or its scripts."""
    banned = re.compile(
        r"torch\.load\(|\bpickle\b|trust_remote_code\s*=\s*True|shell\s*=\s*True|except\s*:|\beval\(|\bexec\("
    )
    for file in [*SOURCE.rglob("*.py"), *(ROOT / "scripts").glob("*")]:
        if file.is_file():
            hits = [line for line in file.read_text().splitlines() if banned.search(line) and ".eval()" not in line]
            assert not hits, f"{file.name}: {hits}"


def test_readme_maps_every_file() -> None:
    readme = (ROOT / "README.md").read_text()
    for file in SOURCE.rglob("*.py"):
        if file.name not in ("__init__.py", "__main__.py"):
            assert file.name in readme, f"README's file map does not mention {file.name}"
