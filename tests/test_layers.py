"""The shape of the house: who may import whom, and which doors lead into torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the ground up: a module imports from lines below its own, and from its own package.
LAYERS = (
    {"errors"},
    {"run", "slurm", "config"},
    {"plan"},
    {"checkpoint", "models", "data"},
    {"core"},
    {"selftest"},  # layouts against a concrete model, which core must not know
    {"launch", "report", "export"},
    {"doctor"},
    {"planning", "usage"},
    {"cli"},
    {"__main__", "__init__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Modules that may load torch when they are imported: the doors, and what lies behind them.
BEHIND_THE_DOORS = (
    *("launch/rank.py", "launch/trace_place.py", "core/", "checkpoint/", "models/", "data/", "export/"),
    *("selftest/job.py", "selftest/compare.py"),  # behind launch/rank.py; its cells and table are light
)
HYDRA_USERS = ("hpctrain/cli.py", "hpctrain/config/compose.py", "hydra_plugins/")
RANK_FACT = re.compile(r"(SLURM|MASTER|HPCTRAIN_RANK)\w*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE")


def sources() -> dict[str, str]:
    """Every module of the package and the plug-in, by its path from the root."""
    paths = [p for top in ("hpctrain", "hydra_plugins") for p in sorted((ROOT / top).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def imports(path: str, text: str, top_level_only: bool = False) -> list[str]:
    """Dotted names that a module imports; `from a import b` counts as a and as a.b."""
    tree = ast.parse(text)
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def layer_of(path: str) -> str:
    return path.removeprefix("hpctrain/").split("/")[0].removesuffix(".py")


def layer_breaches(modules: dict[str, str]) -> list[str]:
    breaches = []
    for path, text in modules.items():
        if not path.startswith("hpctrain/"):
            continue
        own = layer_of(path)
        for name in imports(path, text):
            parts = name.split(".")
            if parts[0] != "hpctrain" or len(parts) < 2 or parts[1] == own or parts[1] == "__version__":
                continue
            if LEVEL[parts[1]] >= LEVEL[own]:
                breaches.append(f"{path} imports {name}")
    return breaches


def importers(modules: dict[str, str], pattern: str) -> set[str]:
    return {path for path, text in modules.items() if any(re.match(pattern, n) for n in imports(path, text))}


def rank_fact_readers(modules: dict[str, str]) -> set[str]:
    """Modules that look a rank fact up: `x["RANK"]`, `x.get("RANK")`, `"RANK" in x`, `getenv("RANK")`."""
    readers = set()
    for path, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            looked_up: list[ast.expr] = []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                looked_up = [node.slice]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                looked_up = node.args[:1] if node.func.attr in ("get", "getenv", "pop") else []
            elif isinstance(node, ast.Compare):
                looked_up = [node.left]
            for key in looked_up:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    readers |= {path} if RANK_FACT.fullmatch(key.value) else set()
    return readers


def test_modules_import_only_from_layers_below_their_own() -> None:
    assert layer_breaches(sources()) == []


def test_every_package_has_its_layer() -> None:
    found = {layer_of(path) for path in sources() if path.startswith("hpctrain/")}
    assert found - LEVEL.keys() == set()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("hpctrain/plan/batch.py", "from hpctrain.launch import submit"),
        ("hpctrain/run/ledger.py", "import hpctrain.config.schema"),
        ("hpctrain/core/step.py", "def f():\n    from hpctrain.launch.rank import Rank"),
        ("hpctrain/report/status.py", "from hpctrain import launch"),
    ],
)
def test_a_planted_import_from_above_is_found(path: str, line: str) -> None:
    modules = sources()
    modules[path] = f"{modules[path]}\n{line}\n"
    assert {breach.split()[0] for breach in layer_breaches(modules)} == {path}


def test_core_knows_no_concrete_model() -> None:
    parts = {"dropout", "lora", "token_loss"}  # that tensor parallelism has to know, whatever model has them
    known = {n for path, text in sources().items() if "/core/" in path for n in imports(path, text)}
    models = {".".join(name.split(".")[:3]) for name in known if name.startswith("hpctrain.models")}
    allowed = {"spec", "registry"} | parts
    assert models <= {"hpctrain.models", *(f"hpctrain.models.{name}" for name in allowed)}


def test_models_and_data_know_nothing_of_process_groups() -> None:
    users = importers(sources(), r"torch\.distributed")
    assert {path for path in users if path.startswith(("hpctrain/models/", "hpctrain/data/"))} == set()


def test_hydra_is_imported_by_the_command_line_and_the_plugin_alone() -> None:
    users = importers(sources(), r"hydra(\.|$)")
    assert users and {path for path in users if not path.startswith(HYDRA_USERS)} == set()


def test_rank_facts_are_read_in_one_file() -> None:
    assert rank_fact_readers(sources()) == {"hpctrain/launch/environment.py"}


def test_a_planted_reader_of_rank_facts_is_found() -> None:
    modules = sources()
    modules["hpctrain/core/mesh.py"] += '\nrank = int(os.environ.get("SLURM_PROCID", 0))\n'
    assert "hpctrain/core/mesh.py" in rank_fact_readers(modules)


def test_modules_outside_the_doors_import_no_torch_at_module_level() -> None:
    heavy = r"(torch|torchvision|timm|tensorboard)(\.|$)"
    users = {
        path
        for path, text in sources().items()
        if any(re.match(heavy, name) for name in imports(path, text, top_level_only=True))
    }
    behind = tuple(f"hpctrain/{door}" for door in BEHIND_THE_DOORS)
    assert {path for path in users if not path.startswith(behind)} == set()


# Fails at the import itself, so that the traceback names the importer.
REFUSE_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "timm"):
            raise RuntimeError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
"""


def without_torch(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REFUSE_TORCH + code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


LIGHT = (
    "hpctrain.cli",
    "hpctrain.config.compose",
    "hpctrain.launch.selftest",
    "hpctrain.launch.submit",
    "hpctrain.launch.supervise",
    "hpctrain.launch.sweep",
    "hpctrain.plan.plan",
    "hpctrain.report.verbs",
    "hpctrain.slurm",
)


def test_what_a_login_node_imports_loads_no_torch(tmp_path: Path) -> None:
    done = without_torch(f"import {', '.join(LIGHT)}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_door_loads_torch(tmp_path: Path) -> None:
    """The refusal above would pass if it refused nothing."""
    done = without_torch("import hpctrain.core.training", tmp_path)
    assert done.returncode != 0 and "torch was imported" in done.stderr


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["plan", "+exp=vision_city_laptop"], 0),
        (["plan", "+exp=vision_city_laptop", "optim.lr=fast"], 2),
        (["+exp=vision_city_laptop", "optim.global_batch_size=63"], 3),
        (["selftest", "cluster.ranks_per_node=5"], 3),
        (["render", "+exp=vision_city", "data.root=/data"], 0),
        (["status", "no_such_run"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_verbs_of_a_login_node_load_no_torch(argv: list[str], code: int, tmp_path: Path) -> None:
    done = without_torch(f"from hpctrain.cli import main; sys.exit(main({argv!r}))", tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
