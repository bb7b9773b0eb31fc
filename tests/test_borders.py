"""Borders inside the code: who may import what, which file may know which library. Read from the sources."""

import ast
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Where a module stands; it imports its own floor and those below. The longest matching name counts.
FLOORS = {
    "clo_jax.config": 0,
    "clo_jax.rivals": 0,
    "clo_jax.errors": 0,
    "clo_jax.versions": 0,
    "clo_jax.memory": 0,
    "clo_jax.interrupt": 0,
    "clo_jax.turns": 0,
    "clo_jax.pictures": 0,
    "clo_jax._host": 0,
    "clo_jax.cache.layout": 0,
    "clo_jax.text": 0,
    "clo_jax.ops": 1,
    "clo_jax.transfer": 1,
    "clo_jax.sampling": 1,
    "clo_jax.cache": 2,
    "clo_jax.cache.calibration": 2,
    "clo_jax.cache.calibration_parts": 2,
    "clo_jax.models": 3,
    "clo_jax.policies": 4,
    "clo_jax.checkpoints": 4,
    "clo_jax.decode_step": 5,
    "clo_jax.generate": 5,
    "clo_jax.results": 5,
    "clo_jax.session": 6,
    "clo_jax.forced": 6,
    "clo_jax.adaptation": 6,
    "clo_jax.planning": 6,
    "clo_jax.preparation": 6,
    "clo_jax.prompts": 5,
    "clo_jax.llm": 7,
    "clo_jax.calibrate": 8,
    "clo_jax.calibrate.collect": 8,
    "clo_jax.calibrate.costs": 8,
    "clo_jax.calibrate.duo_scores": 8,
    "clo_jax.calibrate.gated": 8,
    "clo_jax.calibrate.hashing": 8,
    "clo_jax.calibrate.importance": 8,
    "clo_jax.calibrate.mass": 8,
    "clo_jax.calibrate.objectives": 8,
    "clo_jax.calibrate.parts": 8,
    "clo_jax.calibrate.passkeys": 8,
    "clo_jax.calibrate.quick": 8,
    "clo_jax.calibrate.run": 8,
    "clo_jax.calibrate.similarity": 8,
    "clo_jax.calibrate.text": 8,
    "clo_jax.cli": 8,
    "clo_jax.eval": 8,
    "clo_jax.bench": 8,
}
# The public names live in clo_jax/__init__.py, which may import everything and which nobody inside imports from.
PUBLIC = "clo_jax"
SOURCES = ("clo_jax", "models", "checkpoints")


def python_files():
    return [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path):
    """checkpoints/keys.py -> clo_jax.checkpoints.keys."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "clo_jax" else ("clo_jax", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(name):
    """The floor of a module; KeyError when the table does not know it."""
    parts = name.split(".")
    for n in range(len(parts), 1, -1):
        if ".".join(parts[:n]) in FLOORS:
            return FLOORS[".".join(parts[:n])]
    raise KeyError(name)


def imports(source, package):
    """Every name that the source imports, wherever in the file: "a.b" for `import a.b`, for `from a import b`, and for
    `clo_jax.b` after `import clo_jax`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], base]))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PUBLIC:
            yield f"{PUBLIC}.{node.attr}"


def uses(path):
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(encoding="utf-8"), package))


def upward(name, imported):
    """Those of the imported names that stand above `name`."""
    ours = [other for other in imported if other.startswith(PUBLIC + ".")]
    return [other for other in ours if other != f"{PUBLIC}.__version__" and floor(other) > floor(name)]


@pytest.mark.parametrize("path", python_files(), ids=module_name)
def test_nothing_imports_upward(path):
    if module_name(path) != PUBLIC:
        assert upward(module_name(path), uses(path)) == []


def test_the_check_sees_upward_imports():
    source = "import jax\ndef f():\n  from clo_jax.llm import LLM\nfrom clo_jax import ops\nfrom .. import policies\n"
    source += "import clo_jax\nx = clo_jax.session.Session\n"
    found = set(imports(source, "clo_jax.cache"))
    above = {"clo_jax.policies", "clo_jax.llm.LLM", "clo_jax.session"}
    assert found == {"jax", "clo_jax", "clo_jax.ops"} | above
    assert set(upward("clo_jax.cache.state", found)) == above
    assert upward("clo_jax.cache.state", ["clo_jax.__version__"]) == []
    with pytest.raises(KeyError):
        floor("clo_jax.cellar")
    with pytest.raises(KeyError):
        floor("clo_jax.LLM")  # a public name: import it from its module


def importers(library):
    return {
        module_name(path)
        for path in python_files()
        if any(name == library or name.startswith(library + ".") for name in uses(path))
    }


def test_orbax_is_known_to_one_file():
    assert importers("orbax") <= {"clo_jax.checkpoints.orbax_io"}


@pytest.mark.parametrize("library", ["torch", "transformers", "accelerate", "huggingface_hub", "pytest", "hypothesis"])
def test_no_such_library_at_run_time(library):
    """Benchmarks may compare with torch and transformers, where the user has them: imported inside a function."""
    found = importers(library)
    assert all(name.startswith("clo_jax.bench.") for name in found)
    for name in found:
        text = (ROOT / (name.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert not re.search(rf"^(import|from) {library}\b", text, re.MULTILINE)


def test_jax_ffi_only_in_ops():
    calling = {
        module_name(path)
        for path in python_files()
        if re.search(r"\bjax\.ffi\b|\bffi_call\b", path.read_text(encoding="utf-8"))
    }
    assert calling and all(name.startswith("clo_jax.ops.") for name in calling)


def native_files():
    return [path for path in sorted((ROOT / "ffi").rglob("*")) if path.suffix in (".cc", ".h", ".cu", ".cuh")]


def including(pattern):
    return {
        str(path.relative_to(ROOT / "ffi"))
        for path in native_files()
        if re.search(rf"^\s*#\s*include\s*[<\"]({pattern})", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_xla_headers_only_under_ffi_xla():
    files = including("xla/ffi/api")
    assert files and all(name.startswith("xla/") for name in files)


def test_python_headers_only_in_the_module():
    files = {"python/module.cc", "python/engine_bindings.cc", "python/engine_bindings.h"}
    assert including(r"nanobind|Python\.h") == files


def test_device_libraries_only_under_host_and_cuda():
    files = including(r"cuda\.h|gdrapi|vulkan")
    assert all(name.startswith(("host/", "cuda/")) for name in files)
    # Handlers take a stream and call launchers.
    files = including("cuda")
    assert files and all(name.startswith(("host/", "cuda/", "xla/", "python/", "tests/cuda/")) for name in files)


def test_nothing_is_left_to_do():
    words = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK:"]))
    texts = [
        *python_files(),
        *native_files(),
        *sorted((ROOT / "tests").rglob("*.py")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    texts += [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml", "ffi/CMakeLists.txt")
    ]
    assert [str(path.relative_to(ROOT)) for path in texts if words.search(path.read_text(encoding="utf-8"))] == []


def test_every_import_from_another_package_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[\w-]+", item)[0].replace("-", "_") for item in project["dependencies"]}
    declared = declared - {"orbax_checkpoint"} | {"orbax", "clo_jax"}
    compared = {"torch", "transformers"}  # by benchmarks, where installed; see above
    optional = [item for extra in ("plot", "longbench", "lm-eval") for item in project["optional-dependencies"][extra]]
    # Imported in a function, with an error that names the extra.
    extras = {re.match(r"[\w-]+", item)[0].replace("-", "_") for item in optional}
    assert extras == {"matplotlib", "jieba", "lm_eval"}
    compared |= extras
    used = {name.split(".")[0] for path in python_files() for name in uses(path)} - compared
    assert used - declared - sys.stdlib_module_names == set()
