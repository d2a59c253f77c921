"""Every page in docs/ and every README: its examples run, its commands exist, it is short, it is true.

A block of Python that can't run here has a comment before it that says why: <!-- not run: ... -->.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import npu_replay
from answering_engine import Engine, served
from command_line import invoke
from npu_replay import ParallelLayout, Rollout, RoutedExperts, TokenLayout, routers
from npu_replay.compat.vllm import engine_arguments
from npu_replay.rollout.engine_plan import EngineArguments
from npu_replay.routes.mismatch import LogProbDifference, RoutingDifference
from npu_replay.routes.store import RouteWriter
from zoo.outcome import random_routes

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?```python\n(.*?)```", re.DOTALL)
WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]
ELSEWHERE = ("megatron", "upstream", "delivery", "routers")
"""Their examples run in test_megatron_pages.py, delivery/test_ray.py and with `of_routers`."""
RUNS = [
    page
    for page in WITH_EXAMPLES
    # A page in Chinese has the same code, to the comments: test_chinese.py.
    if page.stem not in ELSEWHERE and page.parent.name != "zh" and not page.stem.endswith(".zh")
]
LONGER = {"api", "errors", "models"}
"""Looked things up in; the others are read."""
MOST_WORDS = 900


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[str]:
    with served(engine) as address:
        yield address


@pytest.fixture
def names(engine: Engine, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples leave to the reader: a model, its batches, an engine."""
    monkeypatch.chdir(tmp_path)
    model = engine.model
    for folder in (tmp_path, tmp_path / "Qwen3-30B-A3B"):
        model.save_pretrained(folder)
    boards: Any = ModuleType("torch.utils.tensorboard")
    boards.SummaryWriter = lambda _: SimpleNamespace(add_scalar=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "vllm", engine.as_vllm())
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", boards)
    prompt = [(17 * number) % 512 for number in range(70)]
    tokens, _ = engine.run(prompt)
    batch = torch.tensor([prompt + tokens])
    with torch.no_grad(), npu_replay.record(model) as recording:
        scores = model(batch).logits.log_softmax(-1)
    (routes,) = recording.routes
    rollout = Rollout(model.config)
    rollout.extend(npu_replay.Turn(prompt=prompt, sampled=tokens, routes=routes))
    small = TokenLayout.padded([4, 3], 4, order="batch")

    def train() -> None:
        with torch.no_grad():
            model(batch)
        model(batch).logits.float().mean().backward()

    return {
        "torch": torch,
        "npu_replay": npu_replay,
        "TokenLayout": TokenLayout,
        "ParallelLayout": ParallelLayout,
        "DecoderLayers": npu_replay.DecoderLayers,
        "model": model.train(),
        "batch": batch,
        "recording": recording,
        "routes": recording.routes,
        "rollout": rollout,
        "old_log_probs": scores[0, :, 0],
        "new_log_probs": scores[0, :, 0] + 0.01,
        "step": 3,
        "wandb": SimpleNamespace(log=lambda *_, **__: None),
        "prompt": prompt,
        "tool_tokens": [5, 6, 7],
        "vllm_server": server,
        "sglang_server": server,
        "log_probs": lambda model, tokens: (
            model(tokens).logits.float().log_softmax(-1).gather(2, tokens[..., None])
        ),
        "lengths": [4, 3],
        "parallel": ParallelLayout(),
        "preprocess": lambda sequences: {"input_ids": torch.cat(list(sequences))},
        "layout": small,
        "samples": [routes.take(torch.arange(count)) for count in (4, 3)],
        "trainer": SimpleNamespace(model=model, train=train, callback_handler=SimpleNamespace(callbacks=[])),
        "self": SimpleNamespace(actor=SimpleNamespace(model=SimpleNamespace(module=model))),
    }


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if name_of(page) == "README.md" else pytest.mark.slow) for page in RUNS],
    ids=name_of,
)
def test_the_examples_of_a_page_run_one_after_the_other(page: Path, names: dict[str, Any]) -> None:
    try:
        for why, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if not why:
                exec(compile(block, name_of(page), "exec"), names)
        if hasattr(names["self"], "following"):
            names["trainer"].train()
        for model in filter(lambda value: isinstance(value, torch.nn.Module), names.values()):
            for router in routers.find([model])[0]:
                assert router.topk < router.num_experts, "a token that takes every expert shows no replay"
    finally:
        if hasattr(names["self"], "following"):
            names["self"].following.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/fsdp2.md", "docs/vllm.md"])
def test_r3_replays_the_old_log_probs_too(
    page: str, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that chooses quite otherwise: with one pass replayed, the first update's ratio isn't 1."""
    replay = npu_replay.replay

    def otherwise(model: Any, routes: list[RoutedExperts], **options: Any) -> Any:
        like = routes[0]
        others = random_routes(map(len, routes), like.layers, like.num_experts, like.topk, seed=5)
        return replay(model, others, **options)

    monkeypatch.setattr(npu_replay, "replay", otherwise)
    text = (ROOT / page).read_text(encoding="utf-8").partition("\n## R2 with other micro-batches")[0]
    for _, block in BLOCK.findall(text):
        exec(compile(block, page, "exec"), names)
    assert (names["ratio"] == 1).all()


@pytest.fixture
def of_routers() -> Iterator[dict[str, Any]]:
    """What the examples of docs/routers.md leave behind."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for _, block in BLOCK.findall((ROOT / "docs" / "routers.md").read_text(encoding="utf-8")):
        exec(compile(block, "docs/routers.md", "exec"), names)
    yield names
    routers.unregister("my model")


def test_layers_that_differ_are_recorded_and_replayed_part_by_part(of_routers: dict[str, Any]) -> None:
    recorded = [part.routes[0] for part in of_routers["parts"]]
    assert [(routes.topk, routes.num_experts) for routes in recorded] == [(2, 8), (3, 8), (2, 4)]
    assert all(weight.grad is not None for weight in of_routers["pruned"].parameters())
    with (
        pytest.raises(npu_replay.RouterError, match="part by part"),
        npu_replay.record(of_routers["pruned"]),
    ):
        pass


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = {link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    for path, _, anchor in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"
    scripts = set(re.findall(r"\bci/[\w/]+\.(?:sh|py|toml|txt)\b", page.read_text(encoding="utf-8")))
    assert {script for script in scripts if not (ROOT / script).is_file()} == set()


def anchors(page: Path) -> set[str]:
    """Of the headings, as forges and the site make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_every_command_that_is_named_is_one_and_takes_these_options() -> None:
    options = {
        name: set(re.findall(r"--[\w-]+", invoke(name, "--help").stdout))
        for name in ("doctor", "inspect", "compare", "smoke")
    }
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
            for name, arguments in re.findall(r"(?:npu-replay|-m npu_replay) (\w+)([^\n#]*)", block):
                assert name in options, f"{page.name}: npu-replay {name}"
                assert set(re.findall(r"(?<!\S)--[\w-]+", arguments)) <= options[name], (
                    f"{page.name}: {name}{arguments}"
                )


@pytest.mark.parametrize("page", [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/zh/*.md")], ids=name_of)
def test_a_page_is_short_enough_to_be_read(page: Path) -> None:
    if page.stem not in LONGER:
        assert words(page.read_text(encoding="utf-8")) < MOST_WORDS


def words(text: str) -> int:
    """Two Chinese characters count as one."""
    chinese = re.findall(r"[\u4e00-\u9fff]", text)
    others = re.sub(r"[\u4e00-\u9fff]", " ", text).split()
    return len(chinese) // 2 + sum(bool(re.search(r"\w", word)) for word in others)


def test_a_block_that_does_not_run_says_why() -> None:
    reasons = [
        why for page in WITH_EXAMPLES for why, _ in BLOCK.findall(page.read_text(encoding="utf-8")) if why
    ]
    assert all(len(why.split()) > 3 for why in reasons)
    assert len(reasons) <= 2, "nearly all examples run"


SOURCES = "".join(
    path.read_text(encoding="utf-8")
    for folder in ("npu_replay", "compat")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/zh/troubleshooting.md"])
def test_a_symptom_is_what_an_error_says(page: str) -> None:
    """In the sections about npu_replay's own errors, a symptom in code is text of some error."""
    own = (ROOT / page).read_text(encoding="utf-8").split("\n## ")[1:4]
    symptoms = [
        line.split("|")[1] for part in own for line in part.splitlines() if re.match(r"\| [^|]*`", line)
    ]
    assert len(symptoms) > 15
    for symptom in re.findall(r"`([^`]+)`", "".join(symptoms)):
        assert symptom in SOURCES or symptom.startswith("[npu_replay] R2"), symptom


def test_what_the_chinese_page_of_errors_quotes_is_what_an_error_says() -> None:
    """Messages are English alone: a reader looks for the text that he has."""
    text = (ROOT / "docs" / "zh" / "errors.md").read_text(encoding="utf-8")
    quoted = re.findall(r"“([^”]*[a-z]{3}[^”]*)”", text)
    assert len(quoted) > 40
    literals = re.sub(r'"\s+f?"', "", SOURCES)  # a text that goes on in the next line
    assert [words for words in quoted if words not in literals] == []


FIELDS_OF: dict[str, Any] = {
    "RoutedExperts": RoutedExperts,
    "`compare` of routes": RoutingDifference,
    "`compare` of log-probs": LogProbDifference,
    "every error": npu_replay.ReplayError("a slip"),
    "TokenLayout": TokenLayout([0], [1]),
    "Rollout": Rollout,
    "EngineArguments": EngineArguments({}),
}
TAKING: dict[str, list[Any]] = {
    "record": [npu_replay.record],
    "replay": [npu_replay.replay],
    "follow": [npu_replay.follow],
    "put": [npu_replay.Following.put],
    "of": [npu_replay.RouteStore.of],
    "writer.add": [RouteWriter.add],
    "Rollout": [Rollout],
    "TokenLayout": [TokenLayout, TokenLayout.padded, TokenLayout.packed],
    "gather": [TokenLayout.gather],
    "fetch": [npu_replay.delivery.fetch],
    "collect": [npu_replay.collect],
    "from_vllm": [npu_replay.from_vllm],
    "from_sglang": [npu_replay.from_sglang],
    "engine_arguments": [engine_arguments],
}


def table_of_api(title: str) -> Iterator[tuple[str, list[str]]]:
    """First cell, of the rows above where it is empty, and the names in the second."""
    section = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split(f"\n## {title}\n")[1]
    first = ""
    for line in section.split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        names = re.findall(r"`(\w+)", line.split("|")[2]) if len(cells) == 5 else []
        if names:
            first = cells[1] or first
            yield first, names


def test_the_fields_of_the_api_page_are_those_of_the_code() -> None:
    there: dict[str, set[str]] = {}
    for owner, names in table_of_api("Fields"):
        there.setdefault(owner, set()).update(names)
    assert there.keys() == FIELDS_OF.keys()
    for owner, names in there.items():
        of = FIELDS_OF[owner]
        known = {field.name for field in fields(of)} if is_dataclass(of) else set()
        assert all(name in known or hasattr(of, name) for name in names), owner
        if owner not in ("Rollout", "EngineArguments"):  # some of whose fields are how they are built
            assert known <= names, owner


def test_the_arguments_of_the_api_page_are_those_of_the_code() -> None:
    rows = [*table_of_api("Arguments")]
    assert len(rows) > 15
    for function, names in rows:
        taking = [part for name in function.split(", ") for part in TAKING[name]]
        known = {name for part in taking for name in inspect.signature(part).parameters}
        assert set(names) <= known, (function, names)


def test_the_api_page_has_every_public_name_with_the_first_line_of_its_docstring() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    summaries = dict(re.findall(r"(?m)^\| `([\w.]+)` \| (.+) \|$", text))
    there = {}
    for name in {*npu_replay.__all__, *filter(lambda name: "." in name, summaries)}:
        words = (pkgutil.resolve_name(f"npu_replay.{name}").__doc__ or "").split("\n\n")[0]
        there[name] = " ".join(words.split()).replace("|", "/")
    assert summaries == there
