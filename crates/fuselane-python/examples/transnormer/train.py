"""Trains a small linear-attention model on a text file, with the operators of fuselane.

    python train.py              # about a minute on two cores
    python train.py --compare    # the same with plain PyTorch beside it: both curves, both times
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from model import FUSED, PLAIN, Config, Operators, TransNormer
from plot import Curve, write_plot
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT = b"The "


class Text:
    """A text as bytes: the last tenth is for validation, the rest for training."""

    def __init__(self, path: Path, length: int) -> None:
        symbols = torch.tensor(list(path.read_bytes()))
        border = len(symbols) * 9 // 10
        self.train, self.validation = symbols[:border], symbols[border:]
        self.length = length
        if len(self.validation) <= length:
            need = 10 * (length + 1)
            raise ValueError(f"{path} has {len(symbols)} bytes, expected at least {need}")

    def batch(self, count: int, random: torch.Generator) -> Tensor:
        """Random pieces, each one byte longer than what the model sees: its targets."""
        starts = torch.randint(len(self.train) - self.length, (count,), generator=random)
        return torch.stack([self.train[i : i + self.length + 1] for i in starts])

    def validation_pieces(self) -> Tensor:
        """All of the validation text but its end, in pieces like those of a batch."""
        return self.validation.unfold(0, self.length + 1, self.length)


def loss_of(model: TransNormer, pieces: Tensor) -> Tensor:
    """The mean of -ln p of the true next byte."""
    logits, _ = model(pieces[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


class Run:
    """One model, its optimizer, and the losses and seconds of each step so far."""

    def __init__(self, ops: Operators, config: Config, seed: int, steps: int, rate: float) -> None:
        self.name, self.steps, self.rate = ops.name, steps, rate
        torch.manual_seed(seed)  # the same parameters, whatever the operators
        self.model = TransNormer(config, ops)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def rate_at(self, step: int) -> float:
        """Rises over the first steps, then falls along a cosine to a tenth."""
        warmup = min(20, max(self.steps // 10, 1))
        if step < warmup:
            return self.rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def step(self, pieces: Tensor) -> None:
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate_at(len(self.losses))
        loss = loss_of(self.model, pieces)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.item()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(value)

    @torch.no_grad()
    def bits_per_byte(self, text: Text) -> float:
        """The validation loss."""
        return loss_of(self.model, text.validation_pieces()).item() / math.log(2)

    @torch.no_grad()
    def sample(self, count: int, seed: int, temperature: float = 0.6) -> str:
        """So many bytes of new text; each costs the same, as the state does not grow."""
        random = torch.Generator().manual_seed(seed)
        written = [*PROMPT]
        logits, state = self.model(torch.tensor([written]))
        for _ in range(count):
            chances = torch.softmax(logits[0, -1] / temperature, 0)
            written.append(int(torch.multinomial(chances, 1, generator=random)))
            logits, state = self.model(torch.tensor([written[-1:]]), state)
        return bytes(written).decode(errors="replace")


class Progress:
    """A bar on stderr, or nothing where that is not a terminal."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self.steps, self.tokens = steps, tokens_per_step
        self.shown = sys.stderr.isatty()
        self.start = time.perf_counter()

    def show(self, step: int, losses: list[float]) -> None:
        if not self.shown:
            return
        passed = time.perf_counter() - self.start
        full = 20 * step // self.steps
        line = (
            f"[{'#' * full}{'.' * (20 - full)}] {step}/{self.steps}  "
            f"loss {', '.join(f'{x:.3f}' for x in losses)}  "
            f"{self.tokens * step / passed:,.0f} tokens/s  "
            f"{passed / step * (self.steps - step):.0f} s left"
        )
        columns = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r{line[:columns]}\x1b[K")  # and clears the rest of the line
        sys.stderr.flush()

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\n")


def train(runs: list[Run], text: Text, steps: int, batch: int, seed: int) -> bool:
    """Trains all runs on the same batches. Says whether it came to the end: Ctrl-C stops it.

    Runs take turns, step by step, so that whatever else the machine does slows all of them alike.
    """
    random = torch.Generator().manual_seed(seed)
    progress = Progress(steps, len(runs) * batch * text.length)
    try:
        for step in range(1, steps + 1):
            pieces = text.batch(batch, random)
            for run in runs:
                run.step(pieces)
            progress.show(step, [run.losses[-1] for run in runs])
    except KeyboardInterrupt:
        return False
    finally:
        progress.close()
    return True


def report(runs: list[Run], text: Text, seed: int) -> None:
    """Prints where each run ended, and what the first one writes."""
    print("             training loss   validation   median time")
    print("             (last 20)       (bits/byte)  per step")
    for run in runs:
        last = statistics.fmean(run.losses[-20:])
        bits = run.bits_per_byte(text)
        milliseconds = 1e3 * statistics.median(run.seconds)
        print(f"{run.name:<12} {last:<15.4f} {bits:<12.4f} {milliseconds:.1f} ms")
    if len(runs) == 2:
        ratio = statistics.median(b / a for a, b in zip(runs[0].seconds, runs[1].seconds))
        print(f"A step of {runs[1].name} takes {ratio:.2f} times as long as one of {runs[0].name}.")
    print(f"\nA sample of {runs[0].name}:\n\n{runs[0].sample(300, seed)}\n")


def positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least 1")
    return number


def parser() -> argparse.ArgumentParser:
    here = Path(__file__).parent
    p = argparse.ArgumentParser(
        description="Trains a small linear-attention model on a text file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--steps", type=positive, default=400, help="optimizer steps")
    p.add_argument("--batch", type=positive, default=8, help="pieces of text in a step")
    p.add_argument("--length", type=positive, default=256, help="bytes in a piece")
    p.add_argument("--layers", type=positive, default=4, help="blocks of the model")
    p.add_argument("--width", type=positive, default=128, help="features of a token")
    p.add_argument("--heads", type=positive, default=4, help="heads of the attention")
    p.add_argument("--no-decay", action="store_true", help="heads never forget")
    p.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    p.add_argument("--dtype", choices=DTYPES, default="float32", help="of the activations")
    which = p.add_mutually_exclusive_group()
    which.add_argument("--unfused", action="store_true", help="use plain PyTorch operators")
    which.add_argument("--compare", action="store_true", help="train with both, side by side")
    p.add_argument("--seed", type=int, default=0, help="of parameters, batches and the sample")
    p.add_argument("--data", type=Path, default=here / "corpus.txt", help="the text")
    p.add_argument("--out", type=Path, default=Path("loss.svg"), help="the plot of the loss")
    return p


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.width % options.heads:
        parser().error(f"--heads is {options.heads}, expected a divisor of --width {options.width}")
    if not options.out.parent.is_dir():
        parser().error(f"--out: there is no folder {options.out.parent}")
    try:
        text = Text(options.data, options.length)
    except (OSError, ValueError) as error:
        parser().error(f"--data: {error}")

    config = Config(
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        decay=not options.no_decay,
        dtype=DTYPES[options.dtype],
    )
    sets = [FUSED, PLAIN] if options.compare else [PLAIN] if options.unfused else [FUSED]
    runs = [Run(ops, config, options.seed, options.steps, options.rate) for ops in sets]
    count = sum(p.numel() for p in runs[0].model.parameters())
    print(f"{count:,} parameters, {len(text.train):,} bytes to train on, {options.dtype}")

    finished = train(runs, text, options.steps, options.batch, options.seed)
    reached = min(len(run.losses) for run in runs)
    if not finished:
        print(f"Stopped after {reached} of {options.steps} steps.")
    if reached:
        report(runs, text, options.seed)
        write_plot(options.out, [Curve(run.name, run.losses) for run in runs])
        print(f"The loss is drawn in {options.out}.")
    return 0 if finished else 130


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
