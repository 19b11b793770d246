"""What each rank does in tests/test_integrations.py: loops of other libraries, straight, stopped and resumed."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo  # what optimizers load at their first step: here it is loaded once, not by each rank
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import ckptspec
from ckptspec.integrations.accelerate import bare
from ckptspec.integrations.lightning import CheckpointerCallback as LightningSaver
from ckptspec.integrations.transformers import CheckpointerCallback as TransformersSaver

STEPS, SAVED, SAMPLES = 8, 3, 32
Found = dict[str, Any]


class Numbers(Dataset[Any]):
    """Samples that note when they are asked for; `make` gives one by its number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.asked = make, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        self.asked.append(i)
        return self.make(i)


def vector(i: int) -> Tensor:
    return torch.sin(torch.arange(4.0) * (i + 1))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def found(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int, losses: list[float]) -> Found:
    """Return everything that must be equal to that of a run that was never stopped, part by part, to the bit."""
    return {
        "parameters": [p.detach().numpy().tobytes() for p in model.parameters()],
        "moments": [[(k, v.numpy().tobytes()) for k, v in s.items()] for s in optimizer.state.values()],
        "rates": [g["lr"] for g in optimizer.param_groups],
        "scheduler": scheduler.state_dict(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "step": step,
        "losses": losses,
    }


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), list[float]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = (self.net(batch) - random.random()).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def lightning(run: Path, rank: int, world: int, seed: int, steps: int, saves: bool) -> Found:
    """Two batches a step, four steps an epoch; every other of its data loader's batches is this rank's."""
    pl.seed_everything(seed + rank, verbose=False)
    data, module = Numbers(vector), Module()
    sampler = StatefulDistributedSampler(data, world, rank, seed=5)
    callbacks: list[Any] = [LightningSaver(run, save_every=SAVED)] if saves else []
    trainer = pl.Trainer(
        max_steps=steps, accelerator="cpu", strategy="ddp" if world > 1 else "auto", devices=world, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, use_distributed_sampler=False,
    )  # fmt: skip
    loader = StatefulDataLoader(data, SAMPLES // world // 8, sampler=sampler, generator=torch.Generator())
    trainer.fit(module, loader)
    config = trainer.lr_scheduler_configs[0]
    return found(module, trainer.optimizers[0], config.scheduler, trainer.global_step, module.losses)


class Stop(TrainerCallback):
    """Ends the training at a step, and keeps the losses."""

    def __init__(self, step: int) -> None:
        self.step, self.losses = step, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == self.step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def tokens(i: int) -> dict[str, Tensor]:
    text = torch.arange(i, i + 6) % 20
    return {"input_ids": text, "labels": text}


def transformers(run: Path, rank: int, world: int, seed: int, steps: int, saves: bool) -> Found:
    """Two batches a step, four steps an epoch."""
    set_seed(seed)
    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        str(run), max_steps=STEPS, per_device_train_batch_size=SAMPLES // world // 8, gradient_accumulation_steps=2,
        save_strategy="no", report_to=[], logging_steps=1, seed=5, learning_rate=0.1, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    stop = Stop(steps)
    saver = TransformersSaver(run, save_every=SAVED if saves else 1000)
    model = GPT2LMHeadModel(config)
    set_seed(seed + rank)
    trainer = Trainer(model, arguments, train_dataset=Numbers(tokens), callbacks=[saver, stop])
    trainer.train(resume_from_checkpoint=saver.resume(trainer))
    return found(trainer.model, bare(trainer.optimizer), trainer.lr_scheduler, trainer.state.global_step, stop.losses)


def accelerate(run: Path, rank: int, world: int, seed: int, steps: int, saves: bool) -> Found:
    """A loop by hand around what an Accelerator prepared, as the README has it."""
    set_seed(seed)
    accelerator, model, losses = Accelerator(cpu=True), net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = Numbers(vector)
    sampler = StatefulDistributedSampler(data, world, rank, seed=5)
    loader = StatefulDataLoader(data, 2, sampler=sampler, generator=torch.Generator())
    set_seed(seed + rank)
    state = {
        "model": accelerator.unwrap_model(model),
        "optimizer": bare(optimizer),
        "scheduler": bare(scheduler),
        "data": ckptspec.Local(loader),
        "rng": ckptspec.RNG(),
        "step": 0,
    }
    with ckptspec.Checkpointer(run, save_every=SAVED if saves else 1000) as saver:
        saver.restore(state)
        batches = iter(loader)
        while state["step"] < steps:
            loss = (model(next(batches)) - random.random()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            state["step"] += 1
            if saver.due(state["step"]):
                saver.save(state["step"], state)
    return found(model, bare(optimizer), bare(scheduler), state["step"], losses)


LOOPS = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate}


def straight(name: str, rank: int, world: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    expected = LOOPS[name](folder / f"{name}.none", rank, world, 1, STEPS, False)
    (folder / f"{name}.straight.{rank}").write_bytes(pickle.dumps(expected))


def begun(name: str, rank: int, world: int, folder: Path) -> None:
    """Save at the third step, take one more, which is lost, and end."""
    os.environ["LOCAL_RANK"] = str(rank)
    LOOPS[name](folder / f"{name}.run", rank, world, 1, SAVED + 1, True)


def resumed(name: str, rank: int, world: int, folder: Path) -> None:
    """In new processes, with other seeds."""
    os.environ["LOCAL_RANK"] = str(rank)
    after = LOOPS[name](folder / f"{name}.run", rank, world, 9, STEPS, True)
    expected = pickle.loads((folder / f"{name}.straight.{rank}").read_bytes())
    expected["losses"] = expected["losses"][-len(after["losses"]) :]
    print("equal", *[part for part in after if after[part] == expected[part]], len(after["losses"]))


for _name in LOOPS:
    for _phase in (straight, begun, resumed):
        globals()[f"{_name}_{_phase.__name__}"] = partial(_phase, _name)
