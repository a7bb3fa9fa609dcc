"""The rooms: who may import whom, which stay pure, how large files may get, what is public."""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import weightlift

ROOT = pathlib.Path(weightlift.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

OPEN = {"errors", "config", "observe", "liveness"}
TORCH_VOCABULARY = {"tensors", "modules", "copies", "flat"}
"""Top-level files that speak torch but know no room."""
LAYER = {
    "protocol": set[str](),
    "tensors": {"protocol"},
    "modules": set[str](),
    "flat": set[str](),
    "copies": set[str](),
    "verify": {"protocol", *TORCH_VOCABULARY},
    "sources": {"protocol", "fabric", *TORCH_VOCABULARY},
    "handoff": {"protocol", "loaders", "fabric", *TORCH_VOCABULARY},
    "fabric": set[str](),
    "liveness": set[str](),
    "loaders": {"protocol", *TORCH_VOCABULARY},
    "transports": {"protocol", "loaders", "verify", *TORCH_VOCABULARY},
    "samples": {"protocol"},
    "publishing": {"protocol", "sources", "transports", "verify"},
    "lockstep": {"sources", "publishing"},
    "api": {"protocol", "sources", "loaders", "transports", "verify", "publishing", "lockstep"},
    "rl": {"protocol", "integrations", "sources", "loaders", "samples", "verify", "handoff", "fabric", "api", "weightlift"},
    "integrations": {"protocol", "sources", "loaders", "handoff", "samples", "api", "weightlift", *TORCH_VOCABULARY},
    "testing": {"protocol", "sources", "loaders", "transports", "samples", "verify", "api", *TORCH_VOCABULARY},
    "cli": {"protocol", "sources", "loaders", "transports", "samples", "verify", "handoff", "rl", "api", "weightlift", "fabric"},
    "observe": set[str](),
    "errors": set[str](),
    "config": set[str](),
    "weightlift": {"api", "transports"},
}
ONLY_CONTRACT = {("transports", "loaders"): {"weightlift.loaders.base"}, ("handoff", "loaders"): {"weightlift.loaders.base"}}
"""transports and handoff may know of loaders what base.py says, and nothing else."""
PURE = {
    "protocol": {"torch", "zmq", "asyncio", "time", "threading", "socket", "numpy"},
    "errors": {"torch", "zmq", "asyncio", "time", "threading"},
    "handoff/phases": {"torch", "zmq", "asyncio", "time", "threading", "socket", "numpy"},
    "sources/layout": {"torch", "zmq", "asyncio", "time", "threading", "socket", "numpy"},
}
MAX_LINES = 450


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "weightlift"


def imports(path: pathlib.Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [n if importlib_has(n) else node.module for n in names]
    return found


def importlib_has(name: str) -> bool:
    return name.startswith("weightlift.") and (
        (ROOT.parent / (name.replace(".", "/") + ".py")).exists() or (ROOT.parent / name.replace(".", "/")).is_dir()
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_dependency_arrow(path: pathlib.Path) -> None:
    own = room("weightlift." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    own = "weightlift" if own == "__init__" else own
    assert own in LAYER, f"a new room: say in this test what it may know ({own})"
    for module in imports(path):
        if module.split(".")[0] != "weightlift":
            continue
        other = room(module)
        allowed = LAYER[own] | OPEN | {own}
        assert other in allowed, f"{own} must not know {other} ({module})"
        contract = ONLY_CONTRACT.get((own, other))
        assert contract is None or module in contract, f"{own} may only know {contract} of {other}, imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_other_systems_are_imported_by_integrations_only(path: pathlib.Path) -> None:
    if "integrations" in path.relative_to(ROOT).parts:
        return
    tree = ast.parse(path.read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [alias.name for node in top for alias in node.names] + [n.module or "" for n in top if isinstance(n, ast.ImportFrom)]
    assert not {name.split(".")[0] for name in names} & {"vllm", "sglang", "ray", "trl", "verl", "httpx", "openai"}, path


@pytest.mark.parametrize("name", PURE)
def test_pure_rooms_import_nothing_impure(name: str) -> None:
    files = [path for path in FILES if name in (path.relative_to(ROOT).parts[0], str(path.relative_to(ROOT).with_suffix("")))]
    assert files
    for path in files:
        roots = {module.split(".")[0] for module in imports(path)}
        assert not roots & PURE[name], path


def test_pure_rooms_work_with_torch_and_zmq_blocked() -> None:
    code = """
import sys, types
for name in ("torch", "zmq", "numpy", "asyncio"):
    sys.modules[name] = None
package = types.ModuleType("weightlift"); package.__path__ = [sys.argv[1]]; sys.modules["weightlift"] = package
import weightlift.errors, weightlift.config
from weightlift.protocol import codec, failure, manifest, messages, plan, round, session
m = manifest.Manifest([manifest.Entry("a", "float32", (3, 5))])
assert len(plan.Plan(m, capacity=16)) == 6
assert codec.decode_manifest(codec.encode_manifest(m)) == m
print("pure")
"""
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "pure\n", done.stderr


def test_the_fence_around_the_core() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "protocol").glob("*.py")}
    assert sum(lines.values()) < 1400
    assert len((ROOT / "transports" / "driver.py").read_text().splitlines()) <= 250
    assert len((ROOT / "transports" / "follower.py").read_text().splitlines()) <= 250
    contract = (ROOT / "transports" / "base.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in contract) < 100, "the contract of a transport"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: pathlib.Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            size = (node.end_lineno or 0) - node.lineno
            assert size <= 60, f"{path.name}: {node.name} has {size} lines"


def test_the_main_path_reads_like_a_table_of_contents() -> None:
    tree = ast.parse((ROOT / "api.py").read_text())
    sizes = {n.name: (n.end_lineno or 0) - n.lineno for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert sizes["publish"] <= 40
    assert sizes["pull"] <= 40


def test_all_is_exact_and_small() -> None:
    assert len(weightlift.__all__) <= 30
    missing = [name for name in weightlift.__all__ if not hasattr(weightlift, name)]
    assert missing == []
    tree = ast.parse((ROOT / "__init__.py").read_text())
    bound = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert bound | {"__version__"} == set(weightlift.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_all_names_what_exists(path: pathlib.Path) -> None:
    """Read, not imported: some files need an engine that is not installed everywhere."""
    tree = ast.parse(path.read_text())
    declared = [ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and "__all__" in _bound(n)]
    for names in declared:
        assert len(names) == len(set(names))
        assert set(names) <= {name for node in _top_level(tree.body) for name in _bound(node)}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body)
            yield from _top_level(node.orelse)


def _bound(node: ast.stmt) -> set[str]:
    match node:
        case ast.FunctionDef(name="__getattr__"):  # loads some names when they are asked for
            return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.split(".")[0] for alias in node.names}
        case ast.Assign():
            return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_pickle_no_print_no_full_collection(path: pathlib.Path) -> None:
    where = path.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
            assert not {"pickle", "cloudpickle", "marshal"} & {n.split(".")[0] for n in names}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("gc.collect", "logging.basicConfig"), called
            assert called != "print" or where == "cli", path


def test_importing_the_library_reads_and_installs_nothing() -> None:
    code = (
        "import logging, os, sys; before = dict(os.environ); import weightlift; "
        "assert dict(os.environ) == before; assert logging.root.handlers == []; "
        "assert not {'transformers', 'reasoning_gym', 'matplotlib', 'ray', 'vllm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_docs_are_what_the_tables_say() -> None:
    script = ROOT.parent.parent / "scripts" / "make_docs.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
