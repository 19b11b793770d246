"""Owns saving and resuming a `transformers.Trainer` as a callback; refuses a step that the Trainer does not go on from.

The Trainer itself reads how far it was, skips the data it has seen and goes on counting; what it holds is loaded here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckptspec.integrations.accelerate import bare
from ckptspec.pytorch.adapters.rng import set_states, states
from ckptspec.pytorch.checkpointer import Checkpointer
from ckptspec.pytorch.wrappers import RNG


class CheckpointerCallback(TrainerCallback):
    """Saves each step for which `Checkpointer.due`, and goes on from the newest good one:

        saver = CheckpointerCallback("run", save_every=500, keep_last=3)
        trainer = Trainer(model, args, callbacks=[saver], ...)        # args: save_strategy="no"
        trainer.train(resume_from_checkpoint=saver.resume(trainer))   # None in an empty run: a fresh start

    `options` are those of `ckptspec.Checkpointer`. DeepSpeed engines keep their state to themselves and are refused.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run, self._options = run, options
        self._checkpointer: Checkpointer | None = None
        self._generators: dict[str, Any] | None = None

    def resume(self, trainer: Trainer) -> str | None:
        """Return a folder that tells the trainer how far it was, None where the run is empty; every rank calls it."""
        if trainer.is_deepspeed_enabled:
            raise ValueError("a DeepSpeed engine keeps its state to itself: use its own checkpoints")
        self._trainer, told = trainer, {"progress": ""}
        self._checkpointer = Checkpointer(self._run, **self._options)
        if self._checkpointer.restore(told, only=["progress"]).step is None:
            return None
        trainer._load_from_checkpoint = lambda *args, **more: None  # no weights are in the folder: see on_train_begin
        self._folder = tempfile.TemporaryDirectory(prefix="ckptspec-")
        Path(self._folder.name, "trainer_state.json").write_text(told["progress"])
        return self._folder.name

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return what is saved; override it to add to it, or to wrap parts in ckptspec.Local or Replicated."""
        scaler, progress = trainer.accelerator.scaler, [json.dumps(dataclasses.asdict(trainer.state))]
        return {
            "model": trainer.model,
            "optimizer": bare(trainer.optimizer),
            "scheduler": bare(trainer.lr_scheduler),
            **({} if scaler is None else {"scaler": scaler}),
            "progress": broadcast_object_list(progress)[0],  # ranks log other times
            "rng": RNG(),
        }

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        if self._checkpointer is None:
            raise RuntimeError("call trainer.train(resume_from_checkpoint=saver.resume(trainer))")
        found = self._checkpointer.restore(self.state(self._trainer), fallback=False, skip=["progress"]).step
        if (found or 0) != state.global_step:
            raise RuntimeError(f"the trainer goes on from step {state.global_step}, but the newest good one is {found}")
        self._generators = states() if found is not None else None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if self._generators is not None:  # what was drawn since, to skip data, was drawn before the save as well
            set_states(self._generators)
            self._generators = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        assert self._checkpointer is not None
        if self._checkpointer.due(state.global_step):
            self._trainer.store_flos()
            self._checkpointer.save(state.global_step, self.state(self._trainer))
        control.should_training_stop = control.should_training_stop or self._checkpointer.stopping

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        assert self._checkpointer is not None
        self._checkpointer.close()
