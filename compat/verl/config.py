"""Reads a verl job's config, and checks when its workers are built that it can replay.

verl reads one key for the mode and ignores all others; which one depends on the release and on the workers:

    0.7.x, legacy workers                    actor.router_replay.mode
    0.7.1 on, engine workers                 actor.megatron.router_replay.mode
    0.7.1 on, engine workers, fsdp, fsdp2    actor.fsdp_config.router_replay.mode, read by npu_replay alone

Asks:     the config, and verl's source where releases differ; never which release it is.
Changes:  the constructor of verl's ActorRolloutRefWorker and its first method called; `enable_routing_replay`
          of a worker whose mode is on.
Undone:   by `npu_replay.uninstall()`; with NPU_REPLAY_STRICT=off by a config that can't replay.
"""

from __future__ import annotations

import difflib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from npu_replay import environment
from npu_replay.compat import engines, probe
from npu_replay.compat.engines import setting
from npu_replay.compat.patching import import_hook, patches
from npu_replay.compat.patching.install import install as install_everything
from npu_replay.compat.patching.install import undo_everything
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.verl.metrics import announce
from npu_replay.errors import ReplayError
from npu_replay.rollout.release_rules import release

logger = logging.getLogger(__name__)

ROOT = "actor_rollout_ref"
OFF = "disabled"
FSDP = ("fsdp", "fsdp2")
"""The strategies whose mode npu_replay reads: verl's engines carry the key, and do nothing with it."""
FLAG = "enable_rollout_routing_replay"
"""The rollout's key that asks the engine for routes."""

ENGINE_WORKERS = "verl.workers.engine_workers"
LEGACY_WORKERS = ("verl.workers.megatron_workers", "verl.workers.fsdp_workers")

_MODE = "router_replay"
_ENGINES = ("megatron", "mindspeed", "veomni", "fsdp", "fsdp_config", "torchtitan", "automodel")
"""The sections below `actor` that belong to an engine."""
_OWN_REPLAY = ("megatron", "veomni")
"""The strategies whose mode verl's engine workers read. VeOmni's replay is its own."""
_LEGACY_KEY = ("actor", _MODE)
_FSDP_KEY = ("actor", "fsdp_config", _MODE)
_ONE_SEQUENCE: dict[str, tuple[object, ...]] = {
    "actor.ppo_micro_batch_size_per_gpu": (1,),
    "rollout.log_prob_micro_batch_size_per_gpu": (1,),
    "actor.use_dynamic_bsz": (False, None),
    "rollout.log_prob_use_dynamic_bsz": (False, None),
    "actor.megatron.pad_bshd_to_minibatch_max": (False, None),
    "actor.megatron.override_transformer_config.fp8": (None,),
}
"""The values of settings with which a padded micro-batch of Megatron has the rows of a packed one."""
_NO_LEGACY = "trainer.use_legacy_worker_impl=disable"

_WHAT = "the check of verl's config"
_WHY = "refuses a config that replay would be off with in silence, or wrong"


class ReplaySettings(NamedTuple):
    """Holds a section router_replay, with the keys of verl's EngineRouterReplayConfig."""

    mode: str
    record_file: str | None
    replay_file: str | None

    @classmethod
    def of(cls, section: Any) -> ReplaySettings:
        """Read a section: a dict, a DictConfig, verl's dataclass, or None. A mode is read here alone."""
        mode, record_file, replay_file = (setting(section, name) for name in cls._fields)
        return cls(str(mode or OFF), record_file, replay_file)


def install() -> None:
    """Have verl's workers refuse a config that can't replay, now or when they are imported."""
    for module in (ENGINE_WORKERS, *LEGACY_WORKERS):
        import_hook.when_imported(module, _WHAT, _guard_workers)


def check_actor(config: Any, *, legacy: bool = False) -> str:
    """Return the mode that verl's Megatron or FSDP workers act on: "disabled", "R2" or "R3".

    Refuses a config with which replay would be off in silence, or wrong.

    With NPU_REPLAY_STRICT=off each problem is one ERROR in the log, npu_replay undoes all that it has changed
    in this process, and the job goes on without it.

    Args:
        config: the worker's whole `actor_rollout_ref`: a DictConfig, dict or dataclass. The job's whole
            config is read too where this one is a part of it.
        legacy: whether the workers are 0.7's legacy ones.

    Raises:
        ReplayError: says which keys, what is wrong with them, and what to set instead.
    """
    key = _key_that_is_read(config, legacy)
    mode = OFF if key is None else ReplaySettings.of(setting(config, *key)).mode
    problems = [*_misspelt_keys(config), *_misplaced_modes(config, key, mode)]
    if mode != OFF and key is not None:
        problems += _unfit_settings(config, key, mode)
    elif not problems:
        problems += _routes_without_a_mode(config, key)
    if problems and environment.strict():
        raise problems[0]
    for problem in problems:
        logger.error("%s", problem)
    if problems:
        undo_everything()
    return OFF if key is not None and "veomni" in key else mode


def _misspelt_keys(config: Any) -> Iterator[ReplayError]:
    """Yield keys that are nearly router_replay or one of its own: a line with + adds any name."""
    for section in [(), *((engine,) for engine in _ENGINES)]:
        for path, known in ((section, (_MODE,)), ((*section, _MODE), ReplaySettings._fields)):
            section_there = setting(config, "actor", *path)
            is_mapping = isinstance(section_there, Mapping)
            for name in map(str, section_there if is_mapping else getattr(section_there, "__dict__", ())):
                if name not in known and (meant := difflib.get_close_matches(name, known, 1, 0.75)):
                    where = ".".join((ROOT, "actor", *path))
                    yield refused(
                        f"{where}.{name} is set, and nothing reads it",
                        expected=f"{where}.{meant[0]}",
                        got=name,
                        cause="a slip of the pen; a line that begins with + adds any name to the config",
                    )


def _misplaced_modes(config: Any, key: tuple[str, ...] | None, mode: str) -> Iterator[ReplayError]:
    """Yield modes that nothing reads: replay would be off, or another mode than asked for."""
    strategy = setting(config, "actor", "strategy")
    for place in _sections(config):
        section = setting(config, *place)
        asked = ReplaySettings.of(section).mode
        has_mode = "mode" in section if isinstance(section, Mapping) else hasattr(section, "mode")
        if section is not None and not has_mode:
            name = ".".join((ROOT, *place))
            yield refused(
                f"{name} sets no mode",
                expected=f"{name}.mode=R2 (or R3)",
                got=f"{name}={section}",
                cause="the line lacks .mode, or misspells it",
            )
        if place == key or asked in (OFF, mode):
            continue
        if key is None:
            yield refused(
                f"{_dotted(place)}={asked} is set, and nothing reads it: these workers know no replay "
                f"for actor.strategy={strategy}",
                expected=f"strategy megatron; or fsdp or fsdp2, engine workers ({_NO_LEGACY} in 0.7), and "
                f"+{_dotted(_FSDP_KEY)}={asked}",
                got=f"strategy {strategy}",
                cause="0.7's default workers, which drop routes on FSDP; or the lines of another strategy's "
                "recipe. Take this one out, or train with a strategy that replays (fsdp_turbo cuts its "
                "batches in a way of its own; verl 0.7.0 replays in its legacy workers alone)",
            )
        else:
            yield refused(
                f"{_dotted(place)}={asked} is set, and these workers don't read it",
                expected=f"{_dotted(key)}={asked}",
                got=f"{_dotted(key)}={mode}",
                cause="a line of another verl release or strategy, or of the reference, which never replays. "
                f"Set {'+' * (key == _FSDP_KEY)}{_dotted(key)}={asked}",
            )


def _sections(config: Any) -> Iterator[tuple[str, ...]]:
    """Yield the places of all sections router_replay, where some release, strategy or recipe puts a mode."""
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        path = waiting.pop()
        try:
            section = setting(config, *path)
        except Exception:  # noqa: BLE001  omegaconf's, of a value that refers to what isn't there
            continue
        if path[-1:] == (_MODE,):
            yield path
        elif isinstance(section, Mapping) or is_dataclass(section):
            names = section if isinstance(section, Mapping) else vars(section)
            waiting += [(*path, str(name)) for name in names]


def _routes_without_a_mode(config: Any, key: tuple[str, ...] | None) -> Iterator[ReplayError]:
    """Yield the error of a rollout that is asked for routes which no pass replays."""
    flag = f"{ROOT}.rollout.{FLAG}"
    rollout = functools.partial(setting, config, "rollout")
    if not rollout(FLAG) or rollout("moe_load_balance_metrics_interval"):  # 0.9 makes metrics of them
        return
    line = "a strategy that replays" if key is None else f"{'+' * (key == _FSDP_KEY)}{_dotted(key)}=R3"
    yield refused(
        f"{flag}=True asks the rollout for routes, and no mode replays them",
        expected=f"{line}; or {flag}=False",
        got="no mode",
        cause="the line of the mode is missing",
    )


def _unfit_settings(config: Any, key: tuple[str, ...], mode: str) -> Iterator[ReplayError]:
    """Yield settings that this mode doesn't work with."""
    where = _dotted(key)
    flag = f"{ROOT}.rollout.{FLAG}"
    if mode not in ("R2", "R3"):
        yield refused(
            f"there is no mode {mode}",
            expected="disabled, R2 or R3",
            got=f"{where}={mode}",
            cause="a slip; verl itself checks no key that its own yaml hasn't",
        )
        return
    sent = bool(setting(config, "rollout", FLAG))
    settings = ReplaySettings.of(setting(config, *key))
    if mode == "R3" and not sent and not settings.replay_file:
        yield refused(
            f"{where}=R3 needs the rollout's routes, and the rollout isn't asked for them",
            expected=f"{flag}=True",
            got=f"{flag}=False",
            cause=f"one of the two lines is missing. Set {flag}=True, or {where}=R2",
        )
    if mode == "R2" and sent:
        yield refused(
            f"{where}=R2 records its own routes, and the rollout sends others",
            expected=f"{flag}=False",
            got=f"{flag}=True",
            cause=f"R3 is meant: set {where}=R3. Or R2 is: set {flag}=False",
        )
    if mode == "R3" and sent:
        yield from _engine_without_routes(config)
    root = getattr(config, "_get_root", None)  # the job's config, where this one is a part of it
    bypass = setting(config if root is None else root(), "algorithm", "rollout_correction", "bypass_mode")
    if mode == "R2" and (bypass or setting(config, "actor", "policy_loss", "loss_mode") == "bypass_mode"):
        yield refused(  # T20
            f"{where}=R2 records while old log-probs are computed, and bypass mode leaves that pass out",
            expected="algorithm.rollout_correction.bypass_mode=False",
            got="True",
            cause="R2 together with the rollout's own log-probs. Use R3, or switch bypass mode off",
        )
    legacy = key == _LEGACY_KEY
    unread = (settings.record_file, settings.replay_file, environment.read(environment.DELIVERY))
    if legacy and any(unread):
        yield refused(
            "these workers don't write or read routes, nor keep any out of the batch",
            expected=f"no record_file, replay_file or {environment.DELIVERY}; or engine workers",
            got=", ".join(filter(None, unread)),
            cause="0.7's legacy workers; trainer.use_legacy_worker_impl=disable takes the others",
        )
    elif settings.replay_file and mode != "R3":
        yield refused(
            f"{where}={mode} records anew, and replay_file asks for a replay",
            expected=f"{where}=R3",
            got=mode,
            cause=f"set {where}=R3 to replay the file's routes, or take replay_file out",
        )
    if legacy or "megatron" in key:
        yield from _unfit_on_megatron(config, where, mode, legacy)


def _unfit_on_megatron(config: Any, where: str, mode: str, legacy: bool) -> Iterator[ReplayError]:
    """Yield how verl cuts and pads batches on Megatron that its routes aren't laid out for."""
    engine = functools.partial(setting, config, "actor", "megatron")
    # Legacy workers read the engine's config; the others overwrite that with the model's.
    unpad = (*(("actor", "megatron") if legacy else ("model",)), "use_remove_padding")
    padded = setting(config, *unpad) is False
    others = {name: setting(config, *name.split(".")) for name in _ONE_SEQUENCE}
    unfit = {name: value for name, value in others.items() if value not in _ONE_SEQUENCE[name]}
    if padded and (legacy or unfit):
        name = ".".join((ROOT, *unpad))
        instead = ", ".join(
            f"{ROOT}.{setting_name}={_ONE_SEQUENCE[setting_name][0]}" for setting_name in unfit
        )
        here = ", ".join(f"{ROOT}.{setting_name}={value}" for setting_name, value in unfit.items())
        yield refused(
            f"{where}={mode} needs packed sequences",
            expected=f"{name}=True" + ("" if legacy else f", or also {instead}"),
            got="False" + ("" if legacy else f", and {here}"),
            cause="the default of 0.7's Megatron trainer. verl lays routes out for packed sequences alone; "
            "padded rows are the same only where each micro-batch of an engine worker is one sequence, and "
            f"would get other tokens' routes elsewhere. Set {name}=True",
        )
    if engine("pad_to_length") and not padded:  # verl raises in the first forward, after a whole rollout
        name = f"{ROOT}.actor.megatron.pad_to_length"
        yield refused(
            f"{where}={mode} knows no micro-batches of a padded length",
            expected=f"{name}=False",
            got="True",
            cause="a setting for jobs without replay: verl's forward step refuses the two together",
        )
    stages = engine("virtual_pipeline_model_parallel_size")
    if engine("dynamic_context_parallel") and stages not in (None, 1):
        yield refused(
            f"{where}={mode} knows no dynamic context parallelism over virtual pipeline stages",
            expected="one of actor.megatron.dynamic_context_parallel and "
            "actor.megatron.virtual_pipeline_model_parallel_size at most",
            got=f"True and {stages}",
            cause="each micro-batch has a split of its own there, and verl merges stages by one. "
            "Take one of them out",
        )


def _engine_without_routes(config: Any) -> Iterator[ReplayError]:
    """Yield errors for a rollout engine, or a release of it, that gives no routes or another step's."""
    rollout = functools.partial(setting, config, "rollout")
    name = str(rollout("name"))
    # The source of each of verl's rollout servers tells whether it asks its engine for routes.
    asked = {"hf": False, "naive": False}
    for folder in _of_verl("workers/rollout/*_rollout"):
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
    versions = {product.name: product.version for product in probe.products() if product.installed}
    beside = versions.get("vllm", "")
    if name == "vllm" and release(beside)[:2] == (0, 21):
        problem: ReplayError | None = ReplayError(
            "no routes that verl can use",
            expected="vllm 0.18 to 0.20, or 0.22 and later",
            got=f"vllm {beside}",
            cause="0.21 splits what verl takes for one array",  # no fault elsewhere: from_vllm reads it
        )
    else:
        problem = engines.refusal(engines.plan_of("verl", config))
    if problem is not None:
        yield refused(
            problem.problem,
            expected=problem.expected,
            got=problem.got,
            cause=f"{problem.cause}. R2 needs no routes of the engine",
        )


def refused(problem: str, *, expected: object, got: object, cause: str) -> ReplayError:
    return ReplayError(problem, where="verl's config", expected=expected, got=got, cause=cause)


def _key_that_is_read(config: Any, legacy: bool) -> tuple[str, ...] | None:
    """Return the section where these workers read the mode; None if they can't replay."""
    strategy = setting(config, "actor", "strategy")
    if strategy in FSDP:
        # The engine workers of 0.7.0 don't tell their engines of a replay.
        sources = (file.read_text(encoding="utf-8") for file in _of_verl("workers/engine_workers.py"))
        carried = any("enable_routing_replay" in source for source in sources)
        return _FSDP_KEY if carried and not legacy else None
    if legacy:
        key: tuple[str, ...] = _LEGACY_KEY
        reads = strategy == "megatron"
    else:
        key = ("actor", strategy, _MODE)
        reads = strategy in _OWN_REPLAY
    return key if reads and setting(config, *key) is not None else None


def _of_verl(pattern: str) -> list[Path]:
    """Return the files or folders of verl's source that match; none where verl isn't found."""
    where = next((product.where for product in probe.products() if product.name == "verl"), "")
    return [*Path(where).glob(pattern)] if where else []


def _dotted(key: tuple[str, ...]) -> str:
    return ".".join((ROOT, *key, "mode"))


def _guard_workers(module: Any) -> None:
    """Check workers when they are made, and at the first call of one of their methods."""
    cls = module.ActorRolloutRefWorker
    legacy = module.__name__ != ENGINE_WORKERS

    def checked(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        _check_worker(self, legacy)  # it has no config before its constructor
        output = original(self, *args, **kwargs)
        _check_worker(self, legacy)
        return output

    # The methods are for a job with npu_replay as its external_lib, which workers import in `init_model`.
    for name in ("__init__", "_build_model_optimizer", "set_dispatch_collect"):
        if hasattr(cls, name):
            _patches.wrap(cls, name, checked, _WHY)


def _check_worker(worker: Any, legacy: bool) -> None:
    config = getattr(worker, "config", None)
    if not any(_patches) or worker in _checked or config is None or "actor" not in str(worker.role):
        return
    mode = check_actor(config, legacy=legacy)
    if mode != OFF and any(_patches):  # else NPU_REPLAY_STRICT=off has turned all of it off
        install_everything()  # an entry point has installed this check alone
        import_hook.refuse_failures()
        _say_asked(mode)
        if not legacy:
            worker.enable_routing_replay = True  # verl sets it for its own strategies only
    _checked.add(worker)


@functools.cache
def _say_asked(mode: str) -> None:
    """Log one INFO line, once for the first rank of each node: a node's log shows that replay was asked for.

    verl tells a worker how many of its group are on a node, and ranks count through a node before the next.
    """
    ranks = int(os.environ.get("RAY_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
    rank = int(os.environ.get("RANK") or 0)
    if rank % ranks == 0:
        release = vars(sys.modules["npu_replay"])["__version__"]
        attached = ", ".join(dict.fromkeys(reason for reason, _ in patches.applied()))
        off = f"{environment.DISABLE}=on leaves it out"
        announce(f"{release}: {mode} is asked for on rank {rank}; attached: {attached}; {off}")


_checked: weakref.WeakSet[Any] = weakref.WeakSet()
_patches = Patches("a verl job whose replay is off in silence")
