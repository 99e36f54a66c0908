"""Small tokenizers with chat templates in the style of models that people train, made without a network.

Run by tests, and by ``make_trl_samples.py`` where TRL is installed and this project is not.
"""

# ruff: noqa: E501 - templates
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- set start = 0 %}{%- if messages[0]['role'] == 'system' %}"
    "{%- set system = messages[0]['content'] %}{%- set start = 1 %}{%- endif %}{%- for message in messages[start:] %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{{- '[INST] ' }}{%- if system is defined and loop.first %}"
    "{{- system + '\\n\\n' }}{%- endif %}{{- message['content'] + ' [/INST]' }}"
    "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
MARKED = {
    "chatml": CHATML.replace(
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}",
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.role == 'assistant' %}{% generation %}{%- if message.content %}{{- message.content }}{%- endif %}"
        "{%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
        "{%- endfor %}{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}{%- continue %}{%- endif %}",
    ),
    "llama3": LLAMA3.replace(
        "message['content'] | trim + '<|eot_id|>' }}",
        "'' }}{%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'] | trim + '<|eot_id|>' }}"
        "{% endgeneration %}{%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}",
    ),
    "gemma": GEMMA.replace(
        "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}",
        "{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}{% generation %}"
        "{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{% else %}"
        "{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}",
    ),
    "mistral": MISTRAL.replace(
        "{{- ' ' + message['content'] + eos_token }}",
        "{% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}",
    ),
}
"""The same with marks around what the assistant generates; they render the same text."""
SPECIAL = {
    "chatml": {"bos_token": None, "eos_token": "<|im_end|>", "more": ["<|im_start|>"]},
    "llama3": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "more": ["<|start_header_id|>", "<|end_header_id|>"],
    },
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "more": ["<start_of_turn>", "<end_of_turn>"]},
    "mistral": {"bos_token": "<s>", "eos_token": "</s>", "more": ["[INST]", "[/INST]"]},
}
WORDS = (
    *("red", "green", "blue", "one", "two", "three", "what", "is", "the", "of", "a", "sum", "colour", "say"),
    *("name", "again", "yes", "no", "maybe", "zwölf", "Größe", "猫", "🙂"),
)
CORPUS = [" ".join(WORDS[i % len(WORDS)] for i in range(n, n + 17)) for n in range(60)]


def write_tokenizer(folder: Path, style: str, *, marked: bool = False) -> Path:
    """A folder with a byte-level BPE tokenizer trained here, and that style's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = SPECIAL[style]
    named = [special["bos_token"]] if special["bos_token"] else []
    tokens = [*named, special["eos_token"], *special["more"]]
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    if named:
        made.post_processor = processors.TemplateProcessing(
            single=f"{named[0]} $A", special_tokens=[(named[0], made.token_to_id(named[0]))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special["eos_token"],
        "pad_token": special["eos_token"],
        "additional_special_tokens": special["more"],
        **({"bos_token": special["bos_token"]} if named else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((MARKED if marked else TEMPLATES)[style])
    return folder
