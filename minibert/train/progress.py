"""What a person sees of a run while it goes on: loss, F1, and how long it will still take."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import transformers
from tqdm import tqdm


class Progress(transformers.TrainerCallback):
    """A bar on a terminal, and a line on standard error after every epoch, terminal or not.

    It also has the loss logged at the end of every epoch, so that a run that was stopped there and resumed logs what
    a run without a stop does.
    """

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None
        self.loss = self.best = float("nan")
        self.started, self.first_step = time.monotonic(), 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock."""
        self.started, self.first_step = time.monotonic(), state.global_step
        if state.best_metric is not None:
            self.best = state.best_metric
        if state.is_world_process_zero:
            hidden = not sys.stderr.isatty()
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit=" steps", disable=hidden)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the bar."""
        if self.bar is not None:
            self.bar.update()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for the loss to be logged."""
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Shows the loss."""
        if "loss" not in (logs or {}):
            return
        self.loss = logs["loss"]
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {self.loss:.4f}")
        if args.eval_strategy == "no" and abs(state.epoch - round(state.epoch)) < 1e-9:
            self._write(args, state, "")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Shows the F1 of the epoch."""
        score = (metrics or {}).get("eval_f1", float("nan"))
        self.best = score if not self.best >= score else self.best
        self._write(args, state, f", F1 {score:.4f} (best {self.best:.4f})")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the bar."""
        if self.bar is not None:
            self.bar.close()

    def _write(self, args: Any, state: Any, score: str) -> None:
        if self.bar is None:
            return
        gone = time.monotonic() - self.started
        steps = max(state.global_step - self.first_step, 1)
        left = gone / steps * (state.max_steps - state.global_step)
        times = [str(timedelta(seconds=round(seconds))) for seconds in (gone, left)]
        epochs = f"epoch {state.epoch:.4g} of {args.num_train_epochs:.4g}"
        line = f"{epochs}: loss {self.loss:.4f}{score}, {times[0]} gone, {times[1]} left"
        self.bar.write(line, file=sys.stderr)
