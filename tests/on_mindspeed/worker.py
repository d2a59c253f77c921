"""One process with MindSpeed in it: `features` and `orders` are its targets.

What is wrong is an AssertionError here, or shows in what they return. npu_replay is imported where a target
says so, and no earlier: which comes first is a part of what is tried.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import importlib.util
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from on_mindspeed.feature_cases import CASES, EXPERTS, SEQ_MODULE, TOPK, Case
from on_mindspeed.processes import STAND_IN, lent_at_import

BATCH = 2
LENGTH = 12
VOCAB = 64
LAYERS = 3
MICRO_BATCHES = 3
TIMEOUT = timedelta(seconds=60)
DEFAULTS: dict[str, Any] = {
    # Megatron's arguments that MindSpeed reads
    "optimization_level": 2,
    "num_layers": LAYERS,
    "num_experts": EXPERTS,
    "moe_router_topk": TOPK,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_permute_fusion": False,
    "moe_ffn_hidden_size": 32,
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "gradient_accumulation_fusion": False,
    "gemm_gradient_accumulation_fusion": False,
    "fp8": None,
    "use_gmm_fp8": False,
}
OF_CONFIG = (
    *("moe_token_dispatcher_type", "moe_grouped_gemm"),
    *("tensor_model_parallel_size", "sequence_parallel"),
)
"""Of MindSpeed's arguments, those that a config is given too."""
TOLERANCE = 1e-5
"""Of float32 sums in another order, relative to the largest gradient."""

Run = tuple[list[float], list[torch.Tensor]]
Referred = tuple[Run, Any, str]
"""A run, the routes that it replayed (None: none), and which experts its aux losses counted."""


def features(task: dict[str, Any]) -> dict[str, Any]:
    """Runs cases of feature_cases.py: what the model does untouched, recorded and replayed.

    The answer to each is {"absent": why} if this product hasn't the feature, {"unsupported": why} if this
    Megatron hasn't what the feature builds on, {"broken": why} if the model doesn't run even untouched,
    {"raised": error} if anything else goes wrong, else {}. With "untouched" in the task npu_replay changes
    nothing in the process, and the model runs once.
    """
    faulthandler.enable()
    if task.get("untouched"):
        os.environ["NPU_REPLAY_DISABLE"] = "1"
    import_in_turn(["mindspeed"])  # first of all, as in a training script
    put_operators_on_cpu()
    if task["product"] == STAND_IN:
        put_norm_in()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    answer = run_untouched if task.get("untouched") else examine
    answers = {name: answer_to(CASES[name], task["product"], answer) for name in task["cases"]}
    dist.destroy_process_group()
    return answers


IMPORTS = {
    "npu_replay": ["npu_replay"],
    "mindspeed": ["mindspeed.megatron_adaptor"],
    "megatron": ["megatron.core", "megatron.core.transformer.transformer_config", "megatron.core.models.gpt"],
}


def import_in_turn(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        with nullcontext() if name == "npu_replay" else lent_at_import():
            for module in IMPORTS[name]:
                importlib.import_module(module)


def answer_to(case: Case, product: str, answer: Callable[[Case], dict[str, Any]]) -> dict[str, Any]:
    import npu_replay

    if case.flag and case.flag not in known_arguments():
        return {"absent": f"its arguments have no {case.flag}"}
    if case.module and importlib.util.find_spec(case.module) is None:
        return {"unsupported": f"this Megatron has no {case.module}"}
    if product == STAND_IN and case.schedule == "overlap" and importlib.util.find_spec(SEQ_MODULE) is None:
        return {"unsupported": "MindSpeed's overlapping schedule fails on Megatron after 0.12"}
    try:
        turn_on(arguments(case))
    except Exception:
        return {"broken": traceback.format_exc()}
    with npu_replay.compat.cpu.lend(), parallel(case):
        try:
            return answer(case)
        except Exception:
            return {"raised": traceback.format_exc()}


def known_arguments() -> dict[str, Any]:
    """MindSpeed's own arguments with their defaults."""
    from mindspeed.args_utils import get_mindspeed_args

    return vars(get_mindspeed_args(get_defaults=True))


def arguments(case: Case) -> dict[str, Any]:
    sizes = {"expert_model_parallel_size": case.expert, "expert_tensor_parallel_size": case.expert_tensor}
    return DEFAULTS | sizes | case.args


def turn_on(values: dict[str, Any]) -> None:
    """MindSpeed's arguments, which are Megatron's global ones too where it has them; and patch anew."""
    from megatron.training.global_vars import set_args
    from mindspeed.args_utils import get_mindspeed_args
    from mindspeed.megatron_adaptor import repatch

    args = get_mindspeed_args()
    set_args(args)
    repatch(known_arguments() | values)


def put_operators_on_cpu() -> None:
    """MindSpeed compiles some operators against CANN when they are first called: give it the stub's."""
    try:
        from mindspeed.op_builder.builder import AS_LIBRARY, MindSpeedOpBuilder
        from mindspeed.ops import gmm
    except ImportError:
        return  # the stand-in needs none
    from torch_npu import compiled

    MindSpeedOpBuilder.load = lambda builder, verbose=True: compiled
    for name in ("npu_gmm.Tensor", "npu_gmm.List"):
        torch.library.impl(AS_LIBRARY, name, "CPU")(gmm._npu_gmm)
    torch.library.impl(AS_LIBRARY, "npu_gmm_v2.Tensor", "CPU")(gmm._npu_gmm_v2)


def put_norm_in() -> None:
    """Megatron's norm without Apex refuses sequence parallelism; real MindSpeed replaces it."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from zoo.gpt_split import Norm

    WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: Norm(*args, **kwargs)


@contextlib.contextmanager
def parallel(case: Case) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def run_untouched(case: Case) -> dict[str, Any]:
    """What the model does in a process that npu_replay has changed nothing in."""
    try:
        Trainer(case, recompute=case.recompute).run()
    except Exception:
        return {"broken": traceback.format_exc()}
    return {}


def examine(case: Case) -> dict[str, Any]:
    """Recorded and replayed, the feature on, beside the same without recompute and without the feature."""
    import npu_replay

    try:
        trainer = Trainer(case, recompute=case.recompute)
        plain = Trainer(case, recompute=False)
        plain.model.load_state_dict(trainer.model.state_dict(), strict=False)
        untouched = trainer.run()
        expected = plain.run()
    except Exception:
        return {"broken": traceback.format_exc()}
    assert case.shows in " ".join(parts(trainer.model)), "the feature wasn't on"
    if not case.own_gradients:
        assert distance(untouched, expected) == 0, "recompute gives other gradients by itself"
    foreign, replayed = follows(trainer, plain)
    runs: list[Referred] = [(untouched, None, "live")]
    if case.config.get("moe_aux_loss_coeff"):
        with npu_replay.replay(plain.model, foreign, aux_loss="replayed"):
            counted = plain.run()
        assert distance(counted, replayed) > 1e-3, "which experts the aux loss counts made no difference"
        runs += [(replayed, foreign, "live"), (counted, foreign, "replayed")]
    check_against_reference(case, trainer, runs)
    return {}


def follows(trainer: Trainer, plain: Trainer, between: Callable[[], object] = lambda: None) -> Any:
    """A record, its replay, and routes of nobody's choice, with recompute and without, to the last bit.

    Returns:
        Those routes, and the run of `plain` that replayed them.
    """
    import npu_replay
    from zoo.gpt import random_routes
    from zoo.gpt_split import witnessed

    untouched = trainer.run()
    with npu_replay.record(trainer.model) as recording, witnessed([trainer.model], recomputes=True) as maps:
        assert distance(trainer.run(), untouched) == 0, "recording changed a loss or a gradient"
    often = MICRO_BATCHES * (1 if trainer.config.recompute_granularity is None else 2)
    routes = recording.routes
    calls = {layer: len(shown) for layer, shown in maps.items()}
    assert calls == dict.fromkeys(routes[0].layers, often), "not once in each forward and each recompute"
    between()
    with npu_replay.replay(trainer.model, routes):
        assert distance(trainer.run(), untouched) == 0, "replaying the record changed a loss or a gradient"
    foreign = random_routes(routes)
    with npu_replay.replay(plain.model, foreign):
        expected = plain.run()
    assert distance(expected, untouched) > 1e-3, "foreign routes moved no gradient"
    with npu_replay.observe(trainer.model) as seen, npu_replay.replay(trainer.model, foreign):
        replayed = trainer.run()
    assert npu_replay.compare(seen.shown, foreign).differing == 0, "a replay chose other experts"
    if not trainer.case.own_gradients:
        assert distance(replayed, expected) == 0, "foreign routes give other gradients with recompute"
    assert distance(trainer.run(), untouched) == 0, "after the blocks the model is another"
    return foreign, expected


def parts(model: Any) -> list[str]:
    """What the last layer's MoE is made of: a feature that was not turned on would show here."""
    mlp = model.decoder.layers[-1].mlp
    from megatron.core.transformer.moe import moe_utils

    members = [type(part) for part in (mlp, mlp.experts, mlp.token_dispatcher)]
    names = (
        "permute",
        "topk_softmax_with_capacity",
        "topk_routing_with_score_function",
        "apply_router_token_dropping",
    )
    functions = [getattr(moe_utils, name, None) for name in names]
    functions += [type(mlp.router).routing, type(mlp).forward]
    members += [function for function in functions if function is not None]
    names = [f"{part.__module__}.{part.__qualname__}" for part in members]
    return [*names, *(name for function in functions for name in wrappers(function))]


def wrappers(function: Any) -> Iterator[str]:
    """The functions that lie over another, which hide behind its name."""
    while hasattr(function, "__wrapped__"):
        yield f"{function.__globals__['__name__']}.{function.__code__.co_qualname}"
        function = function.__wrapped__


def check_against_reference(case: Case, trainer: Trainer, runs: list[Referred]) -> None:
    """Each run is that of the same weights, and of the same routes, without the feature."""
    import npu_replay

    defaults = known_arguments() | DEFAULTS
    # MindSpeed 2.3.0, which lacks mc2, gives with this one other gradients than Megatron, by some 4 %.
    own = case.flag == "moe_allgather_overlap_comm" and "moe_alltoall_mc2" not in defaults
    if not case.reference or case.own_gradients or own:
        return
    turned_off = {name: defaults[name] is not True and defaults[name] for name in case.reference}
    turn_on(arguments(case) | turned_off)
    plain = dataclasses.replace(case, args=case.args | turned_off, schedule="plain", reference=())
    reference = Trainer(plain, recompute=False)
    reference.model.load_state_dict(trainer.model.state_dict(), strict=False)
    for ours, routes, counted in runs:
        with npu_replay.replay(reference.model, routes, aux_loss=counted) if routes else nullcontext():
            theirs = reference.run()
        apart = [
            name
            for name, our, their in zip(trainer.names, ours[1], theirs[1], strict=True)
            if not torch.allclose(our, their, rtol=1e-3, atol=1e-6)
        ]
        assert distance(ours, theirs) < TOLERANCE, f"not as without {case.reference}: {apart}"
    turn_on(arguments(case))


class Trainer:
    """A model, its micro-batches, and one step over them."""

    def __init__(self, case: Case, *, recompute: bool) -> None:
        from npu_replay.smoke import megatron_model

        self.case = case
        torch.manual_seed(7)
        sizes: dict[str, Any] = {"expert_model_parallel_size": case.expert, "num_layers": LAYERS}
        # As Megatron's own arguments have it; the schedule wants it.
        sizes["deallocate_pipeline_outputs"] = case.schedule == "overlap"
        sizes |= {name: case.args[name] for name in OF_CONFIG if name in case.args}
        full = megatron_model.FULL_RECOMPUTE if recompute else {}
        self.config = megatron_model.config(**sizes | case.config | full)
        self.model = megatron_model.model(self.config)
        # Without balanced_moe's copies of busy experts, which hand their gradients on to the originals.
        lasting = {name: p for name, p in self.model.named_parameters() if "hot_experts" not in name}
        self.names = list(lasting)
        self.parameters = list(lasting.values())
        generator = torch.Generator().manual_seed(3 + dist.get_rank() // case.tensor)
        tokens = torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, LENGTH), generator=generator)
        self.batches = list(tokens)

    def run(self) -> Run:
        """Losses of the micro-batches, and the gradients after all of them."""
        self.model.zero_grad()
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter)  # Megatron's buffer, which MindSpeed adds to
        losses = self._plain() if self.case.schedule == "plain" else self._overlapped()
        return losses, [p.main_grad if p.grad is None else p.main_grad + p.grad for p in self.parameters]

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        from npu_replay.smoke import megatron_model

        return self.model(input_ids=tokens, labels=tokens.roll(-1, 1), **megatron_model.causal(tokens)).mean()

    def _plain(self) -> list[float]:
        losses = [self.loss(tokens) for tokens in self.batches]
        (sum(losses) / len(losses)).backward()
        return [loss.item() for loss in losses]

    def _overlapped(self) -> list[float]:
        """MindSpeed's schedule: the forward of a micro-batch in between the backward of the one before."""
        from megatron.core.pipeline_parallel import schedules

        def step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            loss = self.loss(next(batches))
            # Cloned: the schedule divides what it is given in place.
            return loss, lambda output: (output.clone(), output.detach().clone())

        losses = schedules.get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(self.batches),
            model=self.model,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        return [loss.item() for loss in losses]


def distance(run: Run, other: Run) -> float:
    """The largest difference of a loss, or of a gradient relative to the largest; 0 is to the last bit."""
    apart = max(float((a - b).abs().max()) for a, b in zip(run[1], other[1], strict=True))
    largest = max(float(grad.abs().max()) for grad in other[1])
    return max(apart / largest, *(abs(a - b) for a, b in zip(run[0], other[0], strict=True)))


# Orders of imports and repatches

FLAGS = ("enable_routing_replay", "moe_enable_routing_replay", "moe_router_fusion")
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
CLASSES = ("TransformerConfig", "MLATransformerConfig")


def orders(task: dict[str, Any]) -> dict[str, Any]:
    """One order of imports and repatches: are flags kept, and the right experts recorded and replayed?

    Its task holds "order", the imports in turn, and "early": does a repatch follow MindSpeed's import at
    once? Then come record and replay without a further repatch, after one, and with one in between.
    """
    top_k = torch.topk
    order = task["order"]
    kept = {}
    for place, name in enumerate(order):
        import_in_turn([name])
        if name == "mindspeed" and task["early"]:
            repatch()
        if {"npu_replay", "megatron"} <= set(order[: place + 1]):
            kept[f"after {name}"] = flags_kept()

    import npu_replay

    dist.init_process_group("gloo", timeout=TIMEOUT)
    with npu_replay.compat.cpu.lend(), parallel(CASES["none"]):
        plain = Trainer(CASES["none"], recompute=False)
        trainer = Trainer(CASES["none"], recompute=True)
        follows(trainer, plain)
        repatch()
        kept["after repatch"] = flags_kept()
        follows(trainer, plain)
        trainer = Trainer(CASES["none"], recompute=True)
        follows(trainer, plain, lambda: repatch(a_name=7, moe_router_topk=2))
        kept["after another repatch"] = flags_kept()
        follows(Trainer(CASES["none"], recompute=True), plain)
    results: dict[str, Any] = {"flags": kept} | {name: ways(name) for name in CLASSES}
    npu_replay.uninstall()
    results["torch restored"] = torch.topk is top_k
    results["undone"] = []  # MindSpeed has what lay there before, and keeps it through a repatch
    for _ in range(2):
        results["undone"].append(hasattr(config_class(CLASSES[0])(**SMALL), FLAGS[0]))
        repatch()
    return results


def repatch(**arguments: Any) -> None:
    importlib.import_module("mindspeed.megatron_adaptor").repatch(arguments)


def config_class(name: str) -> Any:
    from megatron.core.transformer import transformer_config

    return getattr(transformer_config, name)


def flags_kept() -> dict[str, Any]:
    """Of each flag given to each class of config: what the instance has, or the error."""
    return {
        f"{name} {flag}": tried_flag(
            lambda name=name, flag=flag: config_class(name)(**SMALL, **{flag: True}), flag
        )
        for name in CLASSES
        for flag in FLAGS
    }


def ways(name: str) -> dict[str, Any]:
    """The flag after each thing that MindSpeed and people do to a config: its value, or the error."""
    cls = config_class(name)
    flag = {FLAGS[0]: True}
    config, fields = cls(**SMALL, **flag), dataclasses.fields(cls)
    outcomes = {
        "not given": tried_flag(lambda: cls(**SMALL)),
        "given": tried_flag(lambda: config),
        "the other name": getattr(config, FLAGS[1], None),
        "copy": tried_flag(lambda: copy.copy(config)),
        "deepcopy": tried_flag(lambda: copy.deepcopy(config)),
        "asdict": dataclasses.asdict(config).get(FLAGS[0]),
        "signature": sorted(inspect.signature(cls).parameters) == sorted(f.name for f in fields if f.init),
        "on the class": FLAGS[0] in vars(cls),
        "subclass": tried_flag(lambda: provider(cls)(**SMALL, **flag)),
        "subclass, nothing given": tried_flag(lambda: provider(cls)(**SMALL)),
    }
    repatch()
    outcomes["repatch"] = tried_flag(lambda: cls(**SMALL, **flag))
    repatch(moe_router_topk=4)
    outcomes["repatch with arguments"] = tried_flag(lambda: cls(**SMALL, **flag))
    outcomes["the arguments too"] = tried_flag(lambda: cls(**SMALL), "moe_router_topk")
    return outcomes


def provider(cls: type) -> Any:
    @dataclasses.dataclass
    class Provider(cls):  # type: ignore[misc, valid-type]
        enable_routing_replay: bool = False

    return Provider


def tried_flag(make: Callable[[], Any], name: str = FLAGS[0]) -> Any:
    try:
        return getattr(make(), name, "absent")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
