"""Adds the metrics of a block to what a Trainer of transformers logs; TRL's trainers are such ones.

Asks:     when it is called, transformers' TrainerCallback and the trainer's list of callbacks.
Changes:  that list, of this one trainer.
Undone:   by `trainer.remove_callback` of what it returns.
"""

from __future__ import annotations

from typing import Any

from npu_replay.sessions.session import Session


def log_metrics(trainer: Any, session: Session) -> Any:
    """Log the metrics of an open block as npu_replay/*, with each log of a trainer.

        with npu_replay.follow(trainer.model) as following:
            npu_replay.compat.trainer_log.log_metrics(trainer, following)
            trainer.train()

    They are in `trainer.state.log_history`, and go to whatever the trainer reports to. The callback that adds
    them is returned: `trainer.remove_callback` takes it out.

    Args:
        trainer: a Trainer of transformers or TRL.
        session: what `follow`, `replay`, `record` or `pin_recompute` gave.
    """
    from transformers import TrainerCallback

    callbacks: list[Any] = trainer.callback_handler.callbacks

    class ReplayMetrics(TrainerCallback):  # type: ignore[misc]
        """Adds the figures to each log, before others report it."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **known: Any) -> None:
            figures = {f"npu_replay/{name}": value for name, value in session.metrics().items()}
            for log in (logs, *state.log_history[-1:]):
                log.update(figures)

    callback = ReplayMetrics()
    callbacks.insert(0, callback)  # reporters see what the callbacks before them have added
    return callback
