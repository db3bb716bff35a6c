"""The loop that trains every net, in PyTorch: from samples to the weights of the best epoch.

The nets have the paper's shapes; the recipe differs. The loss is the error of the logarithm, so that 10 % count the same at
0.1 and at 100 ms (with the paper's squared error in ms, the few slowest sets decide). The learning rate falls as a cosine.
Weights decay, most in the compute net, which helps on unseen tables. What is validated and kept is a running mean of the weights,
because a single step's weights are off by up to 3 % in one direction. docs/cost-model.md has the figures.

Every few seconds the state goes into a checkpoint, if there is one. A killed run continues from it and ends with the same
weights.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from neuroshard.costmodel.protocol import Floats, Ints
from neuroshard.costmodel.report import Fit
from neuroshard.pretrain.checkpoint import NONE, Checkpoint
from neuroshard.pretrain.labels import CLOCK_MS
from neuroshard.progress import progress

LEARNING_RATE: Final = 5e-3
PATIENCE: Final = 0.4  # share of all epochs without a better validation error, after which training stops
LARGEST_BATCH: Final = 512  # as in the paper; with few cases smaller, so that an epoch has STEPS_AN_EPOCH steps
STEPS_AN_EPOCH: Final = 20
MOST_EPOCHS: Final = 300
FEWEST_EPOCHS: Final = 30
ENOUGH_STEPS: Final = 12_000  # 100,000 cases take 200 steps an epoch, so 60 epochs
SMOOTHED_STEPS: Final = 50  # length of the running mean of the weights
OUTLIER: Final = 0.1  # log error above which the loss is linear, so that disturbed labels do not dominate


class Net(nn.Module):
    """A net that predicts (members, kinds, values). `extra_loss` is a term that its last prediction adds to the loss.

    The first kind is the target. The other kinds are auxiliary targets in training, which together weigh as much as the first.
    """

    extra_loss: Tensor | float = 0.0


class Samples(Protocol):
    """Cases as tensors. Labels are in units of `unit_ms`."""

    unit_ms: float

    def inputs(self, cases: Tensor) -> tuple[Tensor, ...]:
        """The net's inputs for these cases."""

    def measured(self, cases: Tensor) -> Tensor:
        """The labels of these cases, in units: (kinds, values)."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train. `epochs` None: as many as the cases need."""

    epochs: int | None = None
    weight_decay: float = 0.0
    learning_rate: float = LEARNING_RATE


def fit_net(
    what: str,
    net: Net,
    samples: Samples,
    places: tuple[Ints, Ints],
    recipe: Recipe,
    generator: torch.Generator,
    checkpoint: Checkpoint = NONE,
) -> Fit:
    """Train `net` in place; it ends with the weights of the best epoch. `places` are the training and the validation cases.

    Each member of the ensemble learns independently; the best epoch is that of their mean. The weights that are validated are a
    running mean over the last steps.
    """
    cases, held_out = (torch.from_numpy(some) for some in places)
    batch = min(max(len(cases) // STEPS_AN_EPOCH, 8), LARGEST_BATCH)
    steps = math.ceil(len(cases) / batch)
    epochs = recipe.epochs or min(max(ENOUGH_STEPS // steps, FEWEST_EPOCHS), MOST_EPOCHS)
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
    )
    state = checkpoint.resume(net, optimizer, generator)
    step = state.epoch * steps

    with progress(what, total=epochs, unit="epochs") as bar:
        bar.advance(state.epoch, f"error {math.expm1(min(state.best, 100)):.1%}" if state.epoch else "")
        while state.epoch < epochs and state.epoch - state.best_epoch <= PATIENCE * epochs:
            trained = torch.zeros((), dtype=torch.float64)
            for chosen in torch.split(cases[torch.randperm(len(cases), generator=generator)], batch):
                off = _log_errors(net(*samples.inputs(chosen)), samples, chosen)
                losses = functional.smooth_l1_loss(off, torch.zeros_like(off), beta=OUTLIER, reduction="none")
                loss = losses[:, 0].mean() + net.extra_loss
                if losses.shape[1] > 1:
                    loss = loss + losses[:, 1:].mean()
                optimizer.zero_grad()
                (loss * len(off)).backward()  # type: ignore[no-untyped-call]
                falling = (1 + math.cos(math.pi * step / (epochs * steps))) / 2
                optimizer.param_groups[0]["lr"] = recipe.learning_rate * falling
                optimizer.step()
                step += 1
                for name, weight in net.state_dict().items():
                    state.mean_net[name].lerp_(weight, 1 / min(step, SMOOTHED_STEPS))
                trained += off[:, 0].detach().abs().mean() * len(chosen)

            state.epoch += 1
            with torch.no_grad():
                mean = functional_call(net, state.mean_net, samples.inputs(held_out)).mean(0)
                error = float(_log_errors(mean, samples, held_out)[0].abs().mean())
            state.errors.append((_shortened(float(trained) / len(cases)), _shortened(error)))
            if error < state.best:
                state.keep(error)
            checkpoint.save(state, net, optimizer, generator)
            bar.advance(1, f"error {math.expm1(state.best):.1%}")

    net.load_state_dict(state.best_net)
    return Fit(
        train_cases=len(cases),
        valid_cases=len(held_out),
        epochs=state.epoch,
        best_epoch=state.best_epoch,
        train_errors=tuple(train for train, _ in state.errors),
        valid_errors=tuple(valid for _, valid in state.errors),
    )


def rows_of(counts: Tensor, starts: Tensor, cases: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of some cases, where case i has rows[starts[i] : starts[i] + counts[i]]: which of the cases each is of, and its
    place; both (N,)."""
    counts = counts[cases]
    places = torch.repeat_interleave(torch.arange(len(cases)), counts)
    within = torch.arange(len(places)) - (counts.cumsum(0) - counts)[places]
    return places, starts[cases][places] + within


def as_floats(tensor: Tensor) -> Floats:
    values: Floats = tensor.detach().double().numpy()
    return values


def _shortened(error: float) -> float:
    """Four digits, more than a curve shows: model.json holds hundreds of these."""
    return float(f"{error:.4g}")


def _log_errors(predicted: Tensor, samples: Samples, cases: Tensor) -> Tensor:
    """log(predicted / measured) of the cases: (…, kinds, values)."""
    floor = CLOCK_MS / samples.unit_ms
    return torch.log((predicted + floor) / (samples.measured(cases) + floor))


def kept_positive(x: Tensor, floor: float) -> Tensor:
    """`x` above `floor`, below it an exponential that joins smoothly: positive, and its slope never vanishes in training."""
    return torch.where(x > floor, x, floor * torch.exp(torch.clamp((x - floor) / floor, -30.0, 0.0)))


def uniform(*shape: int, fan_in: int, generator: torch.Generator) -> nn.Parameter:
    """A parameter initialized like torch's Linear layers, but from our generator."""
    return nn.Parameter((torch.rand(*shape, generator=generator) * 2 - 1) * fan_in**-0.5)


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: these nets are too small for two, and the order of sums is then the same on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
