"""Runs cases on the real vllm-ascend and its real vLLM that are on the path:

    python -m on_vllm_ascend.rig CASES.json RESULTS.json [--device A3]

CASES.json has a list for the release as it is and one for it with the plug-in. A process of each, forked from
one that has imported what comes before plug-ins, imports the rest and forks the ranks of its cases: each is a
new worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import queue
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from on_vllm_ascend import npu_stand_in
from on_vllm_ascend.cases import REGISTERED, WITH_PLUGIN, Case

LIMIT = 40
"""Seconds for a case."""
AFTER_ERROR = 3
"""Seconds that the other ranks have, once one has failed: they may be waiting for it."""
FORK = multiprocessing.get_context("fork")


def import_first() -> None:
    """What a worker has imported before it loads plug-ins: of vLLM no model, of vllm-ascend no patch."""
    import vllm.engine.arg_utils  # noqa: F401


def import_engine(plugin: bool) -> None:
    """In a worker's order: general plug-ins, the platform's patches, the runner."""
    if plugin:
        os.environ["NPU_REPLAY_VLLM_ASCEND"] = "1"
        load_plugin()
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    adapt_patch()
    from on_vllm_ascend import kernels, worker

    worker.runner_class()
    kernels.replace()


def load_plugin() -> None:
    """As vLLM does where npu_replay is installed, else by the function of its entry point."""
    from importlib.metadata import entry_points

    if "npu_replay" in entry_points(group="vllm.general_plugins").names:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
    else:
        from npu_replay.compat.vllm_ascend.plugin import register

        register()


def run(case: Case) -> dict[str, Any]:
    """One result of all ranks: rows counted together, the first error, the seconds."""
    started = time.monotonic()
    ports = [free_port() for _ in range(6)]
    results: Any = FORK.Queue()
    ranks = [FORK.Process(target=rank_life, args=(case, rank, ports, results)) for rank in range(case.world)]
    for rank in ranks:
        rank.start()
    told: list[dict[str, Any]] = []
    try:
        while len(told) < case.world:
            failed = any("error" in one for one in told)
            told.append(results.get(timeout=AFTER_ERROR if failed else LIMIT))
    except queue.Empty:
        told.append({"error": f"{case.world - len(told)} of {case.world} ranks gave no answer"})
    for rank in ranks:
        rank.kill()
        rank.join()
    together: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
    for one in told:
        for name, value in one.items():
            if name == "error":
                together.setdefault("errors", []).append(value)
            else:
                together[name] = together.get(name, 0) + value
    return together


def rank_life(case: Case, rank: int, ports: list[int], results: Any) -> None:
    from on_vllm_ascend import broken
    from on_vllm_ascend.worker import Worker

    try:
        if case.broken:
            getattr(broken, case.broken)()
        if any(case.called):
            call_them(*case.called)
        told = Worker(case, rank, ports).run()
    except BaseException as error:
        traceback.print_exc()
        told = {"error": f"{type(error).__name__}: {error}"[:300]}
    results.put(told)
    results.close()
    results.join_thread()
    sys.stdout.flush()
    time.sleep(LIMIT)  # until it is killed: what ends early breaks a collective of those that don't


def call_them(vllm_ascend: str, vllm: str) -> None:
    """Both products say that they are other releases."""
    from npu_replay.compat import probe

    said = {"vllm-ascend": vllm_ascend, "vllm": vllm}
    probe.installed = said.get


def registered() -> list[str]:
    """Every scheme for experts that this release has, as cases name it."""
    from vllm_ascend.quantization.methods import registry

    kinds = [(name, kind) for name, kind in registry._SCHEME_REGISTRY if kind.endswith("moe")]
    return sorted(name if kind == "moe" else f"{name}/{kind}" for name, kind in kinds)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_all(kind: str, cases: list[dict[str, Any]], results: Path) -> None:
    """In a process of its own: all cases of a kind, into a file of its name."""
    started = time.monotonic()
    import_engine(kind == WITH_PLUGIN)
    gc.freeze()  # what a collection looks at is copied in every rank
    print(f"{kind}: imported in {time.monotonic() - started:.0f} s", flush=True)
    found: dict[str, Any] = {REGISTERED: registered()}
    for one in map(Case.from_json, cases):
        print("==", one.name, flush=True)
        found[one.name] = run(one)
        print(found[one.name], flush=True)
    (results / kind).write_text(json.dumps(found, indent=1))


def main() -> None:
    said = argparse.ArgumentParser()
    said.add_argument("cases", type=Path)
    said.add_argument("results", type=Path, help="a folder")
    said.add_argument("--device", default="A3")
    asked = said.parse_args()
    started = time.monotonic()
    npu_stand_in.stand_in(asked.device)
    import_first()
    gc.freeze()
    print(f"imported in {time.monotonic() - started:.0f} s", flush=True)
    for kind, cases in json.loads(asked.cases.read_text()).items():
        process = FORK.Process(target=run_all, args=(kind, cases, asked.results))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
