"""Routes on their way through verl's agent loops: kept, cut, merged and passed on, whatever the release does.

On the real classes of the verl that is on the path; only the inference engine is a stand-in, which returns
what vLLM does.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf

import npu_replay
from npu_replay import ReplayError
from npu_replay.compat.patching import import_hook
from npu_replay.compat.verl import agent_loop as verl_rollout
from npu_replay.compat.verl import rollout_checks
from npu_replay.compat.verl.tensors import GivenRoutes
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.model_config import RoutedModel
from zoo import qwen

agent_loop: Any = importlib.import_module("verl.experimental.agent_loop.agent_loop")
tool_parser: Any = importlib.import_module("verl.experimental.agent_loop.tool_parser")
replica: Any = importlib.import_module("verl.workers.rollout.replica")

pytestmark = pytest.mark.verl

LAYERS = 3
TOPK = 2
PROMPT_LENGTH = 12
RESPONSE_LENGTH = 16
CALL = 9
"""A token that the scripted model calls a tool with."""


def routes(tokens: Sequence[int], weights: int = 0, experts: int = 64) -> np.ndarray:
    """What an engine with these weights chooses for all tokens but the last: layer 0 is dense."""
    ids = np.zeros((len(tokens) - 1, LAYERS, TOPK), np.uint8 if experts <= 256 else np.uint16)
    for place, token in enumerate(tokens[:-1]):
        for layer in range(1, LAYERS):
            first = (experts - 1 - 5 * token - 7 * place - 3 * layer - 13 * weights) % experts
            ids[place, layer] = first, (first + 1) % experts
    ids.flags.writeable = False  # as it comes out of Ray's store
    return ids


@dataclass
class Turn:
    """What the engine does in one turn: the tokens that it samples, and how it returns routes."""

    sampled: list[int]
    weights: int = 0
    stop: str = "completed"
    change: Callable[[np.ndarray], Any] = field(default=lambda rows: rows)
    experts: int = 64


NO_ROUTES: Callable[[np.ndarray], Any] = lambda rows: None  # noqa: E731


class Engine:
    """Answers one turn after the other, and remembers what it was asked."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(
        self, *, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        turn = self.turns.pop(0)
        self.prompts.append(list(prompt_ids))
        rows = routes([*prompt_ids, *turn.sampled], turn.weights, turn.experts)
        return replica.TokenOutput(
            token_ids=turn.sampled,
            log_probs=[-0.5] * len(turn.sampled),
            routed_experts=turn.change(rows),
            stop_reason=turn.stop,
        )


class ScriptedParser(tool_parser.ToolParser):
    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
        if CALL not in responses_ids:
            return "", []
        return "", [tool_parser.FunctionCall(name="search", arguments="{}")]


tool_parser.ToolParser.register("scripted")(ScriptedParser)


def make_tokenizer() -> Any:
    """Splits at blanks: w3 is token 3, roles and marks have tokens of their own, all else is unknown."""
    words = ["<pad>", "<unk>", "<end>", *(f"w{n}" for n in range(3, 60)), "user", "tool", "assistant", "<go>"]
    tokenizer = qwen.tokenizer(words, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}assistant <go> {% endif %}"
    )
    return tokenizer


TOKENIZER = make_tokenizer()
PROMPT = [60, 11, 12, 2, 62, 63]
"""user w11 w12 <end> assistant <go>"""
MESSAGES = [{"role": "user", "content": "w11 w12"}]


TURNS = {
    **dict.fromkeys(("max_user_turns", "max_assistant_turns", "tool_config_path", "interaction_config_path")),
    "max_parallel_calls": 1,
    "max_tool_response_length": 64,
    "tool_response_truncate_side": "middle",
    "format": "scripted",
    "enable": True,
}
ROLLOUT = {
    "name": "vllm",
    "prompt_length": PROMPT_LENGTH,
    "response_length": RESPONSE_LENGTH,
    "enable_rollout_routing_replay": True,
    "full_determinism": False,
    "multi_turn": TURNS,
}
MODES = {"router_replay": {"mode": "disabled"}, "megatron": {"router_replay": {"mode": "R3"}}}


def make_config(**changed: Any) -> Any:
    model = {"path": "none", "tokenizer_path": "none"}
    data = {"apply_chat_template_kwargs": {}, "mm_processor_kwargs": {}}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": MODES, "model": model, "rollout": ROLLOUT},
            "data": data | {"continuous_token": {"enable": False, "model_family": "auto"}},
            "reward_model": {"enable": False, "enable_resource_pool": False, "use_reward_loop": False},
            "async_training": {"partial_rollout": True},
        }
    )
    for key, value in changed.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    return config


def resuming_class() -> Any:
    """The client that goes on after an abort, where this release has one."""
    for name in ("workers.rollout.llm_server", "experimental.fully_async_policy.fully_async_rollouter"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(f"verl.{name}").FullyAsyncLLMServerClient
    return None


def make_client(engine: Any, config: Any, kind: Any = None) -> Any:
    async def answer(value: Any) -> Any:
        return value

    balancer = SimpleNamespace(
        acquire_server=SimpleNamespace(remote=lambda **_: answer(("a", engine))),
        release_server=SimpleNamespace(remote=lambda **_: None),
        require_acquire_fields=SimpleNamespace(remote=lambda: answer([])),
        require_release_fields=SimpleNamespace(remote=lambda: answer([])),
    )
    if kind is not None:
        return kind(config, load_balancer_handle=balancer)
    manager = getattr(agent_loop, "AsyncLLMServerManager", None)
    if manager is None:
        return importlib.import_module("verl.workers.rollout.llm_server").LLMServerClient(
            config, load_balancer_handle=balancer
        )
    balancer.acquire_server.remote = lambda **_: answer("a")
    return manager(config, [("a", engine)], balancer)


def make_worker(engine: Any, config: Any = None, kind: Any = None, client: Any = None) -> Any:
    """A worker of the real class; what its constructor would read from a checkpoint's folder is set here."""
    config = make_config() if config is None else config
    worker = object.__new__(kind or agent_loop.AgentLoopWorker)
    client = client or make_client(engine, config)
    worker.config = config
    worker.rollout_config = config.actor_rollout_ref.rollout
    worker.llm_client = client
    worker.server_manager = client
    worker.tokenizer = TOKENIZER
    worker.processor = None
    worker.dataset_cls = None
    worker.hf_model_type = None
    worker.mm_processor_kwargs = {}
    worker.tools = []
    worker.distillation_enabled = False
    worker.reward_loop_worker_handles = None
    worker.model_config = SimpleNamespace(hf_config=None)
    return worker


class Handed(agent_loop.AgentLoopWorker):
    """Gives what its agent loop's output is when verl begins to pad it."""

    async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        return output


async def rollout(worker: Any, loop: str = "single_turn_agent", *, validate: bool = False) -> Any:
    trajectory = {"step": 0, "sample_index": 0, "rollout_n": 0, "validate": validate}
    return await worker._run_agent_loop(
        {"temperature": 1.0, "logprobs": True},
        trajectory,
        agent_name=loop,
        trace=False,
        raw_prompt=[dict(message) for message in MESSAGES],
    )


def run(
    *turns: Turn, loop: str = "single_turn_agent", worker: Any = None, kind: Any = None, **how: Any
) -> Any:
    """One sample's output, padded as for the batch."""
    worker = worker or make_worker(Engine(*turns), kind=kind)
    return asyncio.run(rollout(worker, loop, **how))


def rows_of(output: Any) -> tuple[list[int], np.ndarray]:
    """Its tokens without padding, and their rows."""
    mask = output.attention_mask[0].bool()
    assert not output.routed_experts[0][~mask].any(), "padding has routes"
    return output.input_ids[0][mask].tolist(), output.routed_experts[0][mask].numpy()


def check_rows(
    tokens: list[int], rows: np.ndarray, *spans: tuple[int | None, int, int], experts: int = 64
) -> None:
    """Rows from one token to another are of these weights, None: no route; by default all of the first."""
    assert len(rows) == len(tokens)
    assert not rows[-1].any()
    for weights, first, last in spans or [(0, 0, len(tokens) - 1)]:
        if weights is None:
            assert not rows[first:last].any(), "tokens without known routes have some"
        else:
            np.testing.assert_array_equal(
                rows[first:last], routes(tokens, weights, experts)[first:last], f"{weights}"
            )


def resuming(*turns: Turn) -> Any:
    kind = resuming_class()
    if kind is None:
        pytest.skip("this release doesn't resume")
    engine = Engine(*turns)
    return make_worker(engine, client=make_client(engine, make_config(), kind))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    async def at_once(_: float) -> None:
        return None

    kind = resuming_class()
    if kind is not None:
        quick = SimpleNamespace(sleep=at_once, gather=asyncio.gather)
        monkeypatch.setattr(sys.modules[kind.__module__], "asyncio", quick)
    verl_rollout.install()
    yield
    npu_replay.uninstall()


# One turn


@pytest.mark.parametrize("loop", ["single_turn_agent", "tool_agent"])
def test_routes_are_cut_with_the_response_in_memory_of_their_own(loop: str) -> None:  # T10, T12
    sampled = list(range(20, 20 + RESPONSE_LENGTH + 4))
    tokens, rows = rows_of(run(Turn(sampled), loop=loop))
    assert tokens == [*PROMPT, *sampled[:RESPONSE_LENGTH]]
    np.testing.assert_array_equal(rows, routes([*PROMPT, *sampled])[: len(tokens)])
    handed = run(Turn(sampled), loop=loop, kind=Handed)
    assert len(handed.routed_experts) == len(handed.prompt_ids) + len(handed.response_ids)
    assert handed.routed_experts.flags.writeable
    assert handed.routed_experts.flags.owndata


@pytest.mark.parametrize("experts", [64, 300])
def test_ids_keep_their_value(experts: int) -> None:  # T19
    """In a type that torch can work with, in which the trainer packs them."""
    outputs = [run(Turn(sampled, experts=experts)) for sampled in ([20, 21, 22], [30, 31])]
    for output in outputs:
        assert output.routed_experts.dtype in (torch.uint8, torch.int16)  # from 0.9.1 on int16 in any case
        check_rows(*rows_of(output), experts=experts)
    assert experts <= 256 or outputs[0].routed_experts.max() > 255


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: np.full(rows.shape, 40000, np.uint16), "expert id of the rollout engine is too large"),
        (lambda rows: rows.reshape(len(rows), -1), "can't be read"),
        (NO_ROUTES, "returned no routes"),
    ],
    ids=["T19: no type of verl holds this id", "another shape", "no routes"],
)
def test_what_cannot_be_a_route_is_refused(change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplayError, match=words):
        run(Turn([20, 21], change=change))
    if change is NO_ROUTES:
        monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
        assert run(Turn([20, 21], change=NO_ROUTES)).routed_experts is None


@pytest.mark.parametrize("kind", [torch.from_numpy, lambda rows: rows.astype(np.int32), np.ndarray.tolist])
def test_routes_may_come_as_a_tensor_or_in_wide_integers(kind: Any) -> None:  # T15
    check_rows(*rows_of(run(Turn([20, 21, 22], change=lambda rows: kind(rows.copy())))))


def test_a_row_with_one_id_below_zero_stays_for_the_trainer_to_refuse() -> None:
    """Only a row of -1 alone has no route."""

    def damaged(rows: np.ndarray) -> np.ndarray:
        rows = rows.astype(np.int16)
        rows[0, 0, 0] = -1
        rows[1] = -1
        return rows

    _, rows = rows_of(run(Turn([20, 21, 22], change=damaged)))
    assert rows[0, 0, 0] == -1
    assert not rows[1].any()
    assert rows[2].any()


def test_rows_that_cannot_be_placed_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """vllm 0.21 returned the sampled tokens' rows alone: at the prompt's place they would be wrong."""
    rollout_checks._warned.clear()
    worker = make_worker(Engine(Turn([20, 21, 22]), Turn([20, 21, 22], change=lambda rows: rows[6:])))
    with caplog.at_level(logging.WARNING):
        batch = batch_of(worker, 2)["routed_experts"]
    assert [bool(sample.any()) for sample in batch] == [True, False]
    assert "too few routes" in caplog.text


# What an engine returns, checked


DEEP = SimpleNamespace(
    num_hidden_layers=5, first_k_dense_replace=1, n_routed_experts=64, num_experts_per_tok=8
)
"""A model with so many choices that two tokens don't agree by chance; its layer 0 is dense."""
SAMPLED = list(range(20, 20 + RESPONSE_LENGTH))


def deep(rows: np.ndarray) -> np.ndarray:
    """Routes of that model, for as many tokens as these are for."""
    drawn = np.random.default_rng(3).random((len(rows), 5, 64)).argsort(axis=-1)[..., :8].astype(np.uint8)
    drawn[:, 0] = 0
    return drawn


def changed(place: Any, what: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Those routes with something else in one place."""

    def change(rows: np.ndarray) -> np.ndarray:
        ids = deep(rows)
        ids[place] = what(ids) if callable(what) else what
        return ids

    return change


shifted: Callable[[np.ndarray], np.ndarray] = lambda rows: np.roll(deep(rows), 1, axis=1)  # noqa: E731
stale = changed(slice(5, None), lambda rows: rows[4])
FAULTY = {
    "a dense layer has experts": shifted,
    "rows are another token's in all layers": stale,
    "name an expert twice": changed((7, 2), lambda rows: rows[7, 2, 0]),
    "an id is out of range": changed((7, 2, 0), 64),
    "rows for more tokens than it ran": lambda rows: np.concatenate([deep(rows), deep(rows)[:1]]),
    "top-k isn't the model's": lambda rows: deep(rows)[..., :4],
    "neither all decoder layers nor the MoE layers": lambda rows: deep(rows)[:, :3],
}


def guarded(*turns: Turn, **changed: Any) -> Any:
    worker = make_worker(Engine(*turns), make_config(**changed) if changed else None)
    worker.model_config = SimpleNamespace(hf_config=DEEP)
    return worker


@pytest.mark.parametrize("words", FAULTY)
def test_what_from_vllm_refuses_is_refused_here_in_the_same_words(words: str) -> None:
    with pytest.raises(InvalidRoutes, match=rf"vLLM.*{words}"):
        run(worker=guarded(Turn(SAMPLED, change=FAULTY[words])))


@pytest.mark.parametrize("fill", [0, -1, [*range(8)]], ids=str)
def test_good_routes_pass_as_they_are_and_rows_that_were_never_written_are_the_trainers(fill: Any) -> None:
    good = changed(slice(3), 0)

    def filled(rows: np.ndarray) -> np.ndarray:
        ids = good(rows).astype(np.int16)
        ids[:3] = fill
        return ids

    tokens, rows = rows_of(run(worker=guarded(Turn(SAMPLED, change=filled))))
    np.testing.assert_array_equal(rows[:-1], good(np.empty(len(tokens) - 1)))


@pytest.mark.parametrize("words", [*FAULTY][:2])
def test_a_bad_turn_after_many_good_ones_goes_without_its_bad_rows(
    words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_checks, "PROOF", 2)
    rollout_checks._warned.clear()
    turns = [Turn(SAMPLED, change=deep), Turn(SAMPLED, change=deep), Turn(SAMPLED, change=FAULTY[words])]
    batch = batch_of(guarded(*turns), 3)["routed_experts"]
    assert words in caplog.text
    kept = batch[2].any(dim=-1).any(dim=-1).sum()
    assert kept == (5 if words.startswith("rows are another") else 0)
    assert batch[1].any(dim=-1).any(dim=-1).sum() == len(PROMPT) + len(SAMPLED) - 1


def test_without_strictness_a_bad_turn_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    worker = guarded(Turn(SAMPLED, change=shifted), Turn(SAMPLED, change=deep))
    batch = batch_of(worker, 2)["routed_experts"]
    assert [bool(sample.any()) for sample in batch] == [False, True]


@pytest.mark.parametrize(
    ("loop", "turns"),
    [
        ("single_turn_agent", [Turn(SAMPLED, 0, "aborted", lambda rows: stale(rows)[:12])]),
        ("tool_agent", [Turn([20, 21, CALL, 2], change=deep), Turn([30, 31], change=stale)]),
    ],
    ids=["aborted, as far as it ran", "the tool loop's second"],
)
def test_each_turn_is_checked(loop: str, turns: list[Turn]) -> None:
    with pytest.raises(InvalidRoutes, match="another token's"):
        run(loop=loop, worker=guarded(*turns))


# Several turns


@pytest.mark.parametrize(
    ("second", "weights"),
    [
        pytest.param(Turn([30, 31], weights=2), 2, id="T11, T14, T42: a turn after the tool"),
        pytest.param(Turn([], stop="aborted", change=NO_ROUTES), None, id="T42: none that ran its tokens"),
    ],
)
def test_each_row_of_the_tool_loop_is_of_the_turn_that_first_ran_its_token(
    second: Turn, weights: int | None
) -> None:
    engine = Engine(Turn([20, 21, CALL, 2], weights=1), second)
    tokens, rows = rows_of(run(loop="tool_agent", worker=make_worker(engine)))
    assert tokens == [*engine.prompts[1], *second.sampled], "the turns don't hang together"
    ran = len(PROMPT) + 4 - 1
    assert len(engine.prompts[1]) > ran + 1, "no tool has answered"
    check_rows(tokens, rows, (1, 0, ran), (weights, ran, len(tokens) - 1))


@agent_loop.register("forgetful")
class Forgetful(agent_loop.AgentLoopBase):
    """A user's own loop, which doesn't hand on what the engine returned beside tokens."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await self.server_manager.generate(
            request_id="1", prompt_ids=list(PROMPT), sampling_params=sampling_params
        )
        response = list(output.token_ids)
        mask = [1] * len(response)
        return agent_loop.AgentLoopOutput(
            prompt_ids=PROMPT, response_ids=response, response_mask=mask, metrics={}
        )


def test_a_users_own_loop_that_forgets_routes_keeps_them() -> None:  # T11
    check_rows(*rows_of(run(Turn([20, 21, 22]), loop="forgetful")))


def test_turns_of_another_client_are_none_of_the_samples() -> None:
    """A judge or a teacher has routes too, of another model."""
    config = make_config()
    other = make_client(Engine(Turn([20, 21, 22], weights=7)), config)

    class Judged(Engine):
        async def _generate(self, **asked: Any) -> Any:
            await other.generate("2", prompt_ids=PROMPT, sampling_params={})
            return await super()._generate(**asked)

    check_rows(*rows_of(run(worker=make_worker(Judged(Turn([20, 21, 22])), config))))


@pytest.mark.parametrize("kind", [dict, transformers.BatchEncoding])
def test_a_prompt_may_be_what_a_chat_template_returns(kind: Any) -> None:
    """As an agent loop of somebody's own hands it on; verl's server takes its input_ids."""

    class Normalising(Engine):
        async def _generate(self, *, prompt_ids: Any, **asked: Any) -> Any:
            return await super()._generate(prompt_ids=prompt_ids["input_ids"], **asked)

    client = make_client(Normalising(Turn([20, 21, 22])), make_config())
    prompt = kind({"input_ids": list(PROMPT)})
    output = asyncio.run(client.generate("1", prompt_ids=prompt, sampling_params={}))
    assert len(output.routed_experts) == len(PROMPT) + 2


# Resumed after an abort


def copied(kind: Any) -> Any:
    return lambda rows: kind(rows.copy())


@pytest.mark.parametrize(
    ("turns", "spans"),
    [
        pytest.param(
            [Turn([20, 21, 22], 1, "aborted"), Turn([23, 24], 2, "aborted"), Turn([25], 3)],
            [(1, 0, 8), (2, 8, 10), (3, 10, 11)],
            id="T13, T14: rows are neither doubled nor replaced",
        ),
        *(
            pytest.param(
                [Turn([20, 21], 0, "aborted", copied(first)), Turn([22], 0, change=copied(second))],
                [(0, 0, 8)],
                id="T15: tensors and arrays are mixed",
            )
            for first, second in ((torch.from_numpy, np.copy), (np.copy, torch.from_numpy))
        ),
        pytest.param(
            [Turn([20, 21], 1, "aborted"), Turn([22, 23, 24], 2, "abort", NO_ROUTES), Turn([25, 26], 3)],
            [(1, 0, 7), (None, 7, 10), (3, 10, 12)],
            id="T28: an aborted turn without routes shifts nothing",
        ),
        pytest.param(
            [Turn([20, 21], 1, "aborted", NO_ROUTES), Turn([22], 2)],
            [(2, 0, 5), (None, 5, 7), (2, 7, 8)],
            id="T28: the rows of new weights don't stand for tokens of the old",
        ),
        pytest.param(
            [Turn([], 0, "aborted", NO_ROUTES), Turn([20, 21], 2)],
            [(2, 0, 7)],
            id="T28: an abort before the first token changes nothing",
        ),
    ],
)
def test_a_resumed_sample_has_each_row_of_its_own_turn(turns: list[Turn], spans: list[Any]) -> None:
    sampled = [token for turn in turns for token in turn.sampled]
    tokens, rows = rows_of(run(worker=resuming(*turns)))
    assert tokens == [*PROMPT, *sampled]
    check_rows(tokens, rows, *spans)


# The batch


def postprocessed(worker: Any, count: int) -> Any:
    async def samples() -> list[Any]:
        return [await rollout(worker) for _ in range(count)]

    return worker._postprocess(asyncio.run(samples()))


def batch_of(worker: Any, count: int) -> Any:
    return postprocessed(worker, count).batch


@pytest.mark.parametrize("without", [0, 1])
def test_a_sample_without_routes_takes_none_from_the_others(without: int) -> None:  # T28
    """Each other one has its rows where its tokens are."""
    turns = [Turn([20 + n, 21 + n]) for n in range(3)]
    turns[without] = Turn([20 + without], stop="aborted", change=NO_ROUTES)
    batch = batch_of(make_worker(Engine(*turns)), 3)
    assert batch["routed_experts"].shape == (3, PROMPT_LENGTH + RESPONSE_LENGTH, LAYERS, TOPK)
    for sample in range(3):
        places = batch["attention_mask"][sample].bool()
        tokens = batch["input_ids"][sample][places].tolist()
        rows = batch["routed_experts"][sample]
        check_rows(tokens, rows[places].numpy(), *([(None, 0, len(tokens))] if sample == without else []))


def test_the_transfer_queues_form_has_a_row_a_token() -> None:  # T12
    """verl's trainer on TransferQueue takes `as_dict` of the output, in a worker that overrides this."""
    if not hasattr(agent_loop.AgentLoopOutput, "as_dict"):
        pytest.skip("this release has no TransferQueue trainer")

    class Queued(agent_loop.AgentLoopWorker):
        async def _agent_loop_postprocess(self, output: Any, *args: Any, **kwargs: Any) -> Any:
            return output.as_dict()

    fields = run(Turn([20, 21, 22]), kind=Queued)
    tokens = torch.cat([fields["prompts"], fields["responses"]]).tolist()
    check_rows(tokens, fields["routed_experts"].numpy())


@pytest.mark.parametrize("resumes", [None, resuming_class()], ids=["client", "client that resumes"])
def test_a_queue_that_would_lose_an_error_hands_it_to_the_trainer(
    resumes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """verl's TransferQueue logs the error of an agent loop, and trains on the samples that are left."""

    class AgentLoopWorkerTQ(Handed):
        """Known by its name."""

    def handed(change: Callable[[np.ndarray], Any], model: Any = DEEP) -> Any:
        engine = Engine(Turn(SAMPLED, change=change))
        client = None if resumes is None else make_client(engine, make_config(), resumes)
        worker = make_worker(engine, kind=AgentLoopWorkerTQ, client=client)
        worker.model_config = SimpleNamespace(hf_config=model)
        return run(worker=worker)

    def read(rows: torch.Tensor) -> tuple[Any, Any]:
        jagged = torch.nested.as_nested_tensor([rows], layout=torch.jagged)
        return GivenRoutes.of(jagged, None, model).routes(from_rollout=True)

    model = RoutedModel.of(DEEP)
    faults = {"returned no routes": NO_ROUTES, "out of range": FAULTY["an id is out of range"]}
    for words, change in faults.items():
        rows = torch.as_tensor(handed(change).routed_experts)
        assert rows.shape == (len(PROMPT) + len(SAMPLED), model.num_layers, model.topk)
        assert words in caplog.text
        good, bad = read(rows)
        assert not good
        assert "refused when the rollout handed them over" in str(bad[0])
    good, _ = read(torch.as_tensor(handed(deep).routed_experts))
    assert list(good) == [0]
    with pytest.raises(ReplayError, match="returned no routes"):  # nothing tells the form of a row
        handed(NO_ROUTES, None)


def test_the_class_of_an_actor_that_was_made_before_is_corrected_too() -> None:
    """Ray copies the methods that an actor's class inherits, before its constructor reads the config."""
    ray = pytest.importorskip("ray")
    npu_replay.uninstall()
    kind = ray.remote(agent_loop.AgentLoopWorker).__ray_metadata__.modified_class
    npu_replay.install()
    with pytest.raises(ReplayError, match="returned no routes"):
        run(Turn([20, 21], change=NO_ROUTES), kind=kind)


# Leaving no trace


def test_a_job_without_routes_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(actor_rollout_ref__rollout__enable_rollout_routing_replay=False)
    worker = make_worker(Engine(Turn([20, 21], change=NO_ROUTES)), config)
    assert run(worker=worker).routed_experts is None
    assert "_agent_loop_postprocess" not in vars(worker)


def test_an_unknown_release_is_said_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    npu_replay.uninstall()
    strange = types.ModuleType(verl_rollout.AGENT_LOOP)
    import_hook.forget()
    with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, verl_rollout.AGENT_LOOP, strange)
        verl_rollout.install()
    assert "agent loop worker isn't there" in caplog.text
    with pytest.raises(ReplayError, match="agent loop worker isn't there"):
        import_hook.refuse_failures()
