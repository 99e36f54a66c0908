"""Records what TRL's SFTTrainer makes of some records: ``trl_samples.json``, for ``test_as_trl.py``.

Run in the project's folder, with a Python that has torch, trl, transformers and datasets:

    python -m tests.workload.datasets.make_trl_samples

Of each kind the first samples are kept as they are, of the others a digest. Templates with
``{% generation %}`` marks, which render the same, tell TRL what the assistant says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tests.workload.datasets.chat_tokenizers import SPECIAL, WORDS, write_tokenizer

SAMPLES = 50
CONTEXT = 64
TOOLS_CONTEXT = 224
TOOL = {
    "type": "function",
    "function": {"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def chat(rng: random.Random, style: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": words(rng, 4)}] if style != "gemma" and rng.random() < 0.4 else []
    turns = []
    for _ in range(rng.randint(1, 3)):
        turns += [
            {"role": "user", "content": words(rng, 6)},
            {"role": "assistant", "content": words(rng, 8) + rng.choice(["", "", "\nyes", " no "])},
        ]
    return [*system, *turns]


def records(kind: str, style: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{kind} {style} {seed}")
    found: list[dict[str, Any]] = []
    for _ in range(SAMPLES):
        if kind == "messages":
            found.append({"messages": chat(rng, style)})
        elif kind == "tools":
            call = {"type": "function", "function": {"name": "sum", "arguments": {"of": words(rng, 2)}}}
            told = [
                {"role": "user", "content": words(rng, 5)},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": words(rng, 2)},
                {"role": "assistant", "content": words(rng, 5)},
            ]
            found.append({"messages": told, "tools": [TOOL]})
        elif kind == "conversations":
            names = {"system": "system", "user": "human", "assistant": "gpt"}
            turns = chat(rng, style)
            found.append(
                {"conversations": [{"from": names[t["role"]], "value": t["content"]} for t in turns]}
            )
        elif kind == "prompt":
            found.append({"prompt": words(rng, 9), "completion": " " + words(rng, 9)})
        elif kind == "prompt chats":
            *before, last = chat(rng, style)
            found.append({"prompt": before, "completion": [last]})
        elif kind == "text":
            found.append({"text": words(rng, 60)})
        elif kind == "alpaca":
            more = rng.choice(["", words(rng, 4)])
            found.append({"instruction": words(rng, 6), "input": more, "output": words(rng, 8)})
        elif kind == "segments":
            pieces = [{"text": words(rng, 5) + " ", "label": bool(i % 2)} for i in range(rng.randint(2, 5))]
            found.append({"segments": pieces})
    return found


KINDS = ("messages", "tools", "conversations", "prompt", "prompt chats", "text", "alpaca", "segments")


def main() -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        cases = []
        for style in SPECIAL:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(write_tokenizer(Path(folder) / style, style, marked=True))
            )
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=400,
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                )
            )
            for kind in KINDS:
                if kind == "tools" and style != "chatml":
                    continue
                given = records(kind, style, 0)
                context = TOOLS_CONTEXT if kind == "tools" else CONTEXT
                rows, options = for_trl(kind, given, tokenizer)
                trainer = SFTTrainer(
                    model=model,
                    args=SFTConfig(
                        output_dir=folder,
                        max_length=context,
                        shuffle_dataset=False,
                        report_to=[],
                        use_cpu=True,
                        bf16=False,
                        packing=False,
                        **options,
                    ),
                    train_dataset=Dataset.from_list(rows)
                    if kind != "tools"
                    else Dataset.from_list([{**row, "tools": json.dumps(row["tools"])} for row in rows]),
                    processing_class=tokenizer,
                )
                made = trainer.train_dataset
                samples = [(row["input_ids"], [label != -100 for label in row["labels"]]) for row in made]
                cases.append({"style": style, "kind": kind, "context": context, **summary(samples)})
                print(style, kind, len(samples))
        versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
        path = Path(__file__).with_name("trl_samples.json")
        text = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
        path.write_text(f'{{"versions":{json.dumps(versions)},"cases":[\n{text}\n]}}\n')


def summary(samples: list[tuple[list[int], list[bool]]]) -> dict[str, Any]:
    """A summary of samples; the first token is no target, whatever TRL calls it: nothing predicts it."""
    lines = [[ids, "".join(".x"[one] for one in [False, *learnt[1:]])] for ids, learnt in samples]
    text = json.dumps(lines, separators=(",", ":"))
    return {
        "samples": len(lines),
        "tokens": sum(len(ids) for ids, _ in lines),
        "learnt": sum(mask.count("x") for _, mask in lines),
        "first": lines[:2],
        "each": [hashlib.sha256(json.dumps(line).encode()).hexdigest()[:8] for line in lines],
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def for_trl(
    kind: str, given: list[dict[str, Any]], tokenizer: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The records as TRL takes them, and its options: it has no Alpaca, no segments and no ``human``."""
    if kind == "alpaca":
        rows = []
        for one in given:
            asked = f"{one['instruction']}\n\n{one['input']}" if one["input"] else one["instruction"]
            rows.append(
                {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": one["output"]},
                    ]
                }
            )
        return rows, {"assistant_only_loss": True}
    if kind == "segments":  # as axolotl's input_output does it: each piece by itself
        rows = []
        for one in given:
            ids: list[int] = []
            mask: list[int] = []
            for piece in one["segments"]:
                made = tokenizer(piece["text"], add_special_tokens=False)["input_ids"]
                ids += made
                mask += [int(piece["label"])] * len(made)
            rows.append({"input_ids": ids, "completion_mask": mask})
        return rows, {"completion_only_loss": True}
    if kind == "conversations":
        roles = {"system": "system", "human": "user", "gpt": "assistant"}
        turns = [
            [{"role": roles[t["from"]], "content": t["value"]} for t in one["conversations"]] for one in given
        ]
        return [{"messages": one} for one in turns], {"assistant_only_loss": True}
    if kind in ("messages", "tools"):
        return given, {"assistant_only_loss": True}
    return given, {"completion_only_loss": True} if kind != "text" else {}


if __name__ == "__main__":
    main()
