"""Checks that verl's rollout engine gives routes for R3, and those of the right step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npu_replay.compat import probe
from npu_replay.compat.sglang import launch as sglang
from npu_replay.compat.verl.settings import FLAG, ROOT, refused, setting
from npu_replay.compat.vllm import launch as vllm
from npu_replay.compat.vllm import releases as vllm_releases
from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend import releases as vllm_ascend
from npu_replay.errors import ReplayError
from npu_replay.rollout.launch import number
from npu_replay.rollout.release_rules import release


def engine_without_routes(config: Any) -> Iterator[ReplayError]:
    """Yield an error for a rollout engine, or a release of it, that gives no routes."""
    name = str(setting(config, "rollout", "name"))
    # The source of each of verl's rollout servers tells whether it asks its engine for routes.
    where = next((product.where for product in probe.products() if product.name == "verl"), "")
    asked = {"hf": False, "naive": False}
    for folder in Path(where, "workers", "rollout").glob("*_rollout") if where else ():
        sources = (file.read_text(encoding="utf-8", errors="replace") for file in folder.rglob("*.py"))
        asked[folder.name.removesuffix("_rollout")] = any(FLAG in source for source in sources)
    if asked.get(name, True) is False:  # an engine that isn't verl's own is accepted
        yield refused(
            f"{ROOT}.rollout.name={name} gives no routes: this verl never asks {name} for them",
            expected="a rollout that verl asks for routes: " + " or ".join(sorted(filter(asked.get, asked))),
            got=name,
            cause="R3 with an engine that can't. Use R2, or another rollout engine",
        )
        return
    found = {product.name: product for product in probe.products() if product.found}
    for product in found.values():
        serves = product.name == name or (name == "vllm" and product.name == "vllm-ascend")
        problem = _release_without_routes(config, product, found) if serves and product.version else None
        if problem is None:
            continue
        yield refused(
            f"{product.name} {product.version} gives no routes that verl can use",
            expected=problem.expected,
            got=f"{problem.got} ({product.where})",
            cause=f"{problem.cause}. R2 needs no routes of the engine",
        )


def late_rows(config: Any) -> Iterator[ReplayError]:
    """Yield an error for a vLLM or vllm-ascend whose rows are wrong under asynchronous scheduling.

    vLLM switches it on by itself; verl passes on a key that is True, and drops one that is False.
    """
    found = {product.name: product.version for product in probe.products() if product.found}
    engine, version = "vllm", found.get("vllm", "")
    late = version and vllm_releases.needs_sync(version)
    if found.get("vllm-ascend"):
        engine, version = "vllm-ascend", vllm_ascend.of_release(found["vllm-ascend"], version)
        late = vllm_ascend.needs_sync(version)
    given = functools.partial(setting, config, "rollout", "engine_kwargs", "vllm")
    off = given("no_async_scheduling") or given("no-async-scheduling")
    if setting(config, "rollout", "name") == "vllm" and late and not off:
        yield refused(
            f"{engine} {version} hands out other rows than the request's under asynchronous scheduling, "
            "which is on by itself",
            expected=f"+{ROOT}.rollout.engine_kwargs.vllm.no_async_scheduling=True",
            got=f"async_scheduling={given('async_scheduling')}",
            cause="rows are read from a buffer that the next step fills again. verl drops "
            "async_scheduling=False. From vLLM 0.22.0 and vllm-ascend 0.23.0 on this isn't needed",
        )


def _release_without_routes(
    config: Any, product: probe.Product, found: Mapping[str, probe.Product]
) -> ReplayError | None:
    if product.name == "vllm-ascend":
        beside = found["vllm"].version if "vllm" in found else ""
        known = vllm_ascend.of_release(product.version, beside)
        rollout = functools.partial(setting, config, "rollout")
        told = {  # the settings that decide whether its routes are right
            "model": setting(config, "model", "path"),
            "quantization": rollout("quantization"),
            "data_parallel_size": rollout("data_parallel_size"),
            "tensor_parallel_size": rollout("tensor_model_parallel_size"),
            "enable_expert_parallel": number(rollout("expert_parallel_size")) > 1,
            "additional_config": rollout("engine_kwargs", "vllm", "additional_config"),
        }
        refusal = vllm_ascend.refusal(known, told, beside, capture=plugin.wanted())
        return plugin.left_out() or refusal
    if product.name == "sglang":
        return sglang.refusal(product.version, "npu" if "torch_npu" in found else "cuda")
    ascend = found["vllm-ascend"].version if "vllm-ascend" in found else ""
    if release(product.version)[:2] == (0, 21):
        return ReplayError(
            "no routes",
            expected="vllm 0.18 to 0.20, or 0.22 and later",
            got=f"vllm {product.version}",
            cause="0.21 splits what verl takes for one array",  # from_vllm reads it, so it is no fault there
        )
    return vllm.refusal(product.version, vllm_ascend.of_release(ascend, product.version))
