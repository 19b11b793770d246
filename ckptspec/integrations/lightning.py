"""Owns saving and resuming a `lightning.pytorch.Trainer` as a callback; refuses to go on from anything but its own."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ckptspec.pytorch.adapters.rng import set_states, states
from ckptspec.pytorch.checkpointer import Checkpointer
from ckptspec.pytorch.wrappers import RNG, Local


class CheckpointerCallback(Callback):
    """Saves each step for which `Checkpointer.due`, and begins the first fit where the newest good step left off.

    `options` are those of `ckptspec.Checkpointer`: save_every=100, keep_last=3, save_on=[signal.SIGTERM], ... Within an
    epoch the data go on exactly where the loader has a state, as torchdata's StatefulDataLoader has.
    """

    def __init__(self, run: str | os.PathLike[str], **options: Any) -> None:
        self._run, self._options = run, options
        self._checkpointer: Checkpointer | None = None
        self._generators: dict[str, Any] | None = None
        self._step = -1

    def state(self, trainer: Trainer) -> dict[str, Any]:
        """Return what is saved; override it to add to it, or to wrap parts in ckptspec.Local or Replicated."""
        callbacks = [c for c in trainer.callbacks if type(c).state_dict is not Callback.state_dict]
        return {
            "model": trainer.lightning_module,
            "optimizers": list(trainer.optimizers),
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "callbacks": {c.state_key: c for c in callbacks},
            "progress": _Progress(trainer.fit_loop),
            "data": Local(_Data(trainer.fit_loop)),
            "rng": RNG(),
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first, self._checkpointer = self._checkpointer is None, Checkpointer(self._run, **self._options)
        if first and self._checkpointer.restore(self.state(trainer)).step is not None:
            self._generators = states()
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._generators is not None:  # what was drawn since, to set the data up, was drawn before the save as well
            set_states(self._generators)
            self._generators = None

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        if step == self._step or self._checkpointer is None:  # gradients still accumulate
            return
        self._step = step
        if self._checkpointer.due(step):
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._checkpointer.save(step, self.state(trainer), metrics=metrics)
        trainer.should_stop = trainer.should_stop or self._checkpointer.stopping

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, exception.__traceback__)


class _Progress:
    """How far the loops are: the same on every rank."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return {**self._loop.state_dict(), "state_dict": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)


class _Data:
    """Where the data loaders are: each rank's own, and given back after the progress, which forgets it."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loop.on_save_checkpoint())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.on_load_checkpoint(state)
