"""DDP: torchrun --nproc-per-node 2 examples/ddp.py RUN. Stop it whenever you like; started again it goes on."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptspec

# BatchNorm's statistics differ between ranks; DDP broadcasts those of rank 0, so those are the ones to keep.
STATISTICS = ["*.running_*", "*.num_batches_tracked"]


class Samples:
    """A source of data that remembers where it is: anything with state_dict and load_state_dict can be in a state."""

    seen = 0

    def next(self, n: int) -> torch.Tensor:
        self.seen += n
        return torch.randn(n, 16)  # from torch's generator, whose state is saved too

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def main(run: str, steps: int = 100, every: int = 10) -> None:
    dist.init_process_group("gloo")  # "nccl" and .cuda() on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    samples = Samples()
    torch.manual_seed(1 + dist.get_rank())  # from here on every rank draws its own
    loop = {"optimizer": optimizer, "scheduler": scheduler, "samples": samples, "rng": ckptspec.RNG(), "step": 0}
    state = {"model": ckptspec.Replicated(model, only=STATISTICS), **loop}
    if ckptspec.latest(run) is not None:
        ckptspec.load(run, into=state)
    while state["step"] < steps:
        loss = model(samples.next(8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state["step"] += 1
        if state["step"] % every == 0:
            ckptspec.save(run, state, step=state["step"])
            print(f"rank {dist.get_rank()} step {state['step']} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
