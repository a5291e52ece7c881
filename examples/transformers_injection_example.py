"""The minimal integration: put the kernels into a language model, check, generate, time, take them out again.

python transformers_injection_example.py                            random weights: Llama 3 8B on a GPU, else a tiny one
python transformers_injection_example.py --model Qwen/Qwen3-0.6B    real weights
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

# Without this line the kernels come from the Hub.
if (Path(__file__).resolve().parent.parent / "build").is_dir():
    os.environ.setdefault("LOCAL_KERNELS", f"org/ltx-kernels={Path(__file__).resolve().parent.parent}")

from kernels import get_kernel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
TINY = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}


def load(name: str | None) -> PreTrainedModel:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=DTYPE).to(DEVICE).eval()
    torch.manual_seed(0)
    sizes = LLAMA_3_8B if DEVICE == "cuda" else TINY
    config = LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=32000, bos_token_id=None, eos_token_id=None)
    torch.set_default_dtype(DTYPE)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def prompt(name: str | None, vocab_size: int, length: int = 64) -> torch.Tensor:
    if name is not None:
        ids = AutoTokenizer.from_pretrained(name)("The fastest kernel is the one", return_tensors="pt").input_ids
    else:
        ids = torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    return ids.to(DEVICE)


def seconds(function, repeats: int = 5) -> float:
    """Median of a few calls, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="a repository or folder of a language model")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate")
    args = parser.parse_args()

    model = load(args.model)
    ids = prompt(args.model, model.config.vocab_size)

    @torch.no_grad()
    def logits() -> torch.Tensor:
        return model(ids).logits

    def generate() -> torch.Tensor:
        mask = torch.ones_like(ids)
        length = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens}
        return model.generate(ids, attention_mask=mask, do_sample=False, **length)

    expected, stock_tokens = logits(), generate()
    stock = {"prefill": seconds(logits), "generate": seconds(generate, 3)}

    # The integration: two lines.
    kernels = get_kernel("org/ltx-kernels", version=1)
    report = kernels.inject_optimized_kernels(model)

    print(report)
    result, tokens = logits(), generate()
    difference = ((result - expected).float().norm() / expected.float().norm()).item()
    same = (tokens == stock_tokens).float().mean().item()
    print(f"\nrelative difference of the logits {difference:.1e}, {same:.0%} of the tokens are the same")
    # In bfloat16 each of the two rounds in its own places, and greedy choices between near equals part ways.
    assert difference < (1e-1 if DTYPE is torch.bfloat16 else 1e-4)
    assert DTYPE is torch.bfloat16 or torch.equal(tokens, stock_tokens)

    for what, function, repeats in (("prefill", logits, 5), ("generate", generate, 3)):
        injected = seconds(function, repeats)
        print(
            f"{what}: stock {1e3 * stock[what]:.1f} ms, injected {1e3 * injected:.1f} ms, {stock[what] / injected:.2f}x"
        )

    kernels.remove_optimized_kernels(model)
    assert torch.equal(logits(), expected) or DEVICE == "cuda"
    print("removed: the stock model again")


if __name__ == "__main__":
    main()
