"""Measures the step time of a small Llama, as it is and patched, in eager mode and compiled.

All variants run in turns in one process, so that what else the machine does meets all of them
alike; medians are reported.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from statistics import median
from typing import Any, Callable

import torch

import fuselane
from fuselane.transformers import _require_transformers, patch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fuselane.transformers",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, default=512, help="features; heads have 64 each")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens that there are")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of weights")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each variant")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as PyTorch takes")
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor time, for a machine that others use as well (with --threads 1)",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled variants out")
    return parser.parse_args()


def model_of(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(options.hidden // 64, 1)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=options.length,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype)


def variants_of(base: Any, compiled: bool) -> dict[str, Any]:
    def plain() -> Any:
        return copy.deepcopy(base)

    variants = {"eager": plain(), "patched": patch(plain())}
    if compiled:
        variants["compiled"] = torch.compile(plain())
        variants["patched+compiled"] = torch.compile(patch(plain()))
    return variants


def forward_of(model: Any, ids: Any) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return model(ids).logits

    return forward


def step_of(model: Any, ids: Any) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def milliseconds(
    calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The median time of each call, all in turns."""
    for _ in range(2):  # the first compiles
        results = [call() for call in calls.values()]
    for result in results[1:]:  # no use in timing what is wrong
        torch.testing.assert_close(result.float(), results[0].float(), rtol=0.05, atol=0.05)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append((clock() - start) * 1e3)
    return {name: median(times[name]) for name in calls}


def main() -> None:
    options = arguments()
    _require_transformers()
    import transformers

    transformers.logging.set_verbosity_error()
    if options.threads:
        torch.set_num_threads(options.threads)
        fuselane.set_num_threads(options.threads)
    print(
        f"Llama: {options.layers} layers, {options.hidden} features, {options.batch} sequences of "
        f"{options.length} tokens; torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} threads"
    )
    print(f"median milliseconds ({options.clock}), and how many times faster than eager\n")
    names = ["eager", "patched"] + ([] if options.no_compile else ["compiled", "patched+compiled"])
    print(f"{'dtype':<10}{'pass':<14}" + "".join(f"{name:>20}" for name in names), flush=True)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    ids = torch.randint(0, options.vocab, (options.batch, options.length))
    for name in options.dtypes:
        variants = variants_of(model_of(options, getattr(torch, name)), not options.no_compile)
        for what, call_of in (("forward", forward_of), ("training step", step_of)):
            torch._dynamo.reset()
            calls = {variant: call_of(model, ids) for variant, model in variants.items()}
            times = milliseconds(calls, options.repeats, clock)
            cells = [f"{times[n]:.1f} ({times['eager'] / times[n]:.2f})" for n in names]
            print(f"{name:<10}{what:<14}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
            del calls
        del variants
        gc.collect()


if __name__ == "__main__":
    main()
