"""Runs cases on the real vllm-ascend and its real vLLM that are on the path:

    python -m on_vllm_ascend.rig CASES RESULTS.json DEVICE

CASES is a pickled list. This process imports what a worker imports, the plug-in of npu_replay with it, and
forks the ranks of each case: each is a new worker.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import pickle
import queue
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from on_vllm_ascend import npu_stand_in
from on_vllm_ascend.cases import REGISTERED, Case

LIMIT = 40
"""Seconds for a case."""
AFTER_ERROR = 3
"""Seconds that the other ranks have, once one has failed: they may be waiting for it."""
IN_EACH_RANK = (
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3_moe.configuration_qwen3_moe"),
    *("npu_replay.compat.vllm.decode", "npu_replay.sessions.session", "vllm.outputs"),
)
"""What a rank's steps import: here once, and not in each of them, where it would be half of the time."""
FORK = multiprocessing.get_context("fork")


def import_engine() -> None:
    """In a worker's order: general plug-ins, the platform's patches, the runner."""
    import vllm.engine.arg_utils  # noqa: F401  of vLLM no model, of vllm-ascend no patch

    from npu_replay.compat.vllm_ascend.plugin import register

    os.environ["NPU_REPLAY_VLLM_ASCEND"] = "1"
    register()
    from vllm_ascend.utils import adapt_patch

    adapt_patch(is_global_patch=True)
    adapt_patch()
    from on_vllm_ascend import kernels, worker

    worker.runner_class()
    kernels.replace()
    for name in IN_EACH_RANK:
        importlib.import_module(name)


def run(case: Case) -> dict[str, Any]:
    """One result of all ranks: rows counted together, the first error, the seconds."""
    started = time.monotonic()
    ports = [free_port() for _ in range(6)]
    results: Any = FORK.Queue()
    ranks = [FORK.Process(target=rank_life, args=(case, rank, ports, results)) for rank in range(case.world)]
    for rank in ranks:
        rank.start()
    answers: list[dict[str, Any]] = []
    try:
        while len(answers) < case.world:
            failed = any("error" in answer for answer in answers)
            answers.append(results.get(timeout=AFTER_ERROR if failed else LIMIT))
    except queue.Empty:
        answers.append({"error": f"{case.world - len(answers)} of {case.world} ranks gave no answer"})
    for rank in ranks:
        rank.kill()
        rank.join()
    together: dict[str, Any] = {"seconds": round(time.monotonic() - started, 1)}
    for answer in answers:
        for name, value in answer.items():
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
        answer = Worker(case, rank, ports).run()
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    results.put(answer)
    results.close()
    results.join_thread()
    sys.stdout.flush()
    time.sleep(LIMIT)  # until it is killed: what ends early breaks a collective of those that don't


def registered() -> list[str]:
    """Every scheme for experts that this release has, as cases name it."""
    from vllm_ascend.quantization.methods import registry

    kinds = [(name, kind) for name, kind in registry._SCHEME_REGISTRY if kind.endswith("moe")]
    return sorted(name if kind == "moe" else f"{name}/{kind}" for name, kind in kinds)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    cases, results, device = sys.argv[1:]
    started = time.monotonic()
    npu_stand_in.stand_in(device)
    import_engine()
    gc.freeze()  # what a collection looks at is copied in every rank
    print(f"imported in {time.monotonic() - started:.0f} s", flush=True)
    answers: dict[str, Any] = {REGISTERED: registered()}
    for case in pickle.loads(Path(cases).read_bytes()):
        print("==", case.name, flush=True)
        answers[case.name] = run(case)
        print(answers[case.name], flush=True)
        Path(results).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
